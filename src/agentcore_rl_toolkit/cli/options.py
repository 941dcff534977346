"""Options that several commands share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ..errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

allowed_hosts = click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    envvar="AGENTCORE_RL_ALLOWED_HOSTS",
    help="Another name of this server, such as a load balancer's; * for any part of it. Repeatable "
    "[env: AGENTCORE_RL_ALLOWED_HOSTS, separated by blanks].",
)

_PATH = click.Path(resolve_path=True)
sandbox_options = (
    click.option(
        "--readable",
        multiple=True,
        type=_PATH,
        metavar="DIR",
        help="A folder or file that sessions see beside the agent's project; repeatable.",
    ),
    click.option(
        "--writable", multiple=True, type=_PATH, metavar="DIR", help="A folder that sessions may write to; repeatable."
    ),
)


def with_sessions(command: F) -> F:
    """Add to a command what it may give to sessions on this machine: `--session-env` and `sandbox_options`."""
    variable = click.option(
        "--session-env",
        multiple=True,
        metavar="K=V",
        help="A variable of every session; K alone takes this shell's value; repeatable.",
    )
    for option in (*reversed(sandbox_options), variable):
        command = option(command)
    return command


def sandbox_words(readable: Iterable[str], writable: Iterable[str]) -> list[str]:
    """The same options for `runtime serve`."""
    return [f"--readable={path}" for path in readable] + [f"--writable={path}" for path in writable]


def with_judge(command: F) -> F:
    """Add to a command a judge of its rollouts: the fields of `JudgeSettings` that most set."""
    for option in (
        click.option(
            "--judge-weight", type=click.FloatRange(0, 1, min_open=True), help="Its share of the reward. [default: 1]"
        ),
        click.option("--judge-model", metavar="NAME", help="The judge's model; its key is AGENTCORE_RL_JUDGE_KEY."),
        click.option("--judge-url", metavar="URL", help="The judge's OpenAI-compatible API, as https://host/v1."),
        click.option("--judge", metavar="FILE", help="A rubric by which a model scores the rollouts of each input."),
    ):
        command = option(command)
    return command


as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


engine_option = click.option(
    "--engine",
    type=click.Choice(["policy", "vllm"]),
    help="The model's server; vllm: from .venvs/vllm or the Python AGENTCORE_RL_ENGINE_PYTHON. [default: policy]",
)
settings_option = click.option(
    "--set", "words", multiple=True, metavar="NAME=VALUE", help="A setting by its name; repeatable."
)


def from_environment(name: str, variable: str) -> Callable[[F], F]:
    """A secret: an option that is refused, with the variable that the command takes it from."""

    def refuse(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
        if context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE:
            raise ConfigError(
                f"{name} is not taken: a secret on a command line is shown to every user of this machine. Export {variable} "
                "instead"
            )
        return value or None  # the empty string counts as absent

    return click.option(name, envvar=variable, hidden=True, callback=refuse)


def settings_of(words: Sequence[str], cls: type[T]) -> T:
    """A dataclass from the NAME=VALUE words of --set. Raises: ConfigError."""
    from ..backends.settings import from_mapping

    return from_mapping(cls, from_words(words, cls), where="--set")


def from_words(pairs: Sequence[str], cls: Any) -> dict[str, Any]:
    """The settings of NAME=VALUE words for the fields of a dataclass; lists have commas between. Raises: ConfigError."""
    hints = typing.get_type_hints(cls)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        name = name.replace("-", "_")
        if name not in kinds or not sign:
            raise ConfigError(f"{name!r} is no setting, as NAME=VALUE; there are {', '.join(sorted(kinds))}")
        values[name] = text
        parts = {kinds[name], typing.get_origin(kinds[name]), *typing.get_args(kinds[name])}
        if tuple in parts:
            values[name] = text.split(",")
        elif bool in parts:
            values[name] = text in ("1", "true", "yes")
        elif parts & {int, float, Mapping}:
            with contextlib.suppress(ValueError):  # what is neither is named by the check of all settings
                values[name] = json.loads(text)
    return values
