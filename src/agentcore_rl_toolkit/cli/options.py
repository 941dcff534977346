"""Options that several commands share."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from ..backends.scorer import checked_spec
from ..errors import ConfigError
from ..runtime.wire import parse_environment

if TYPE_CHECKING:
    from ..backends.settings import SettingsGroup

F = TypeVar("F", bound=Callable[..., Any])
G = TypeVar("G", bound="SettingsGroup")

allowed_hosts = click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    envvar="AGENTCORE_RL_ALLOWED_HOSTS",
    help="Another name of this server, such as that of a load balancer. * stands for any part of a name; repeatable "
    "[env: AGENTCORE_RL_ALLOWED_HOSTS, separated by spaces].",
)
_LISTENS = (
    click.option("--parent-pid", type=int, hidden=True),
    click.option(
        "--ready-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Write the URL and the process id into this file, as JSON, when the server is ready.",
    ),
    click.option(
        "--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 selects a free one."
    ),
)
_SERVES = (
    allowed_hosts,
    *_LISTENS,
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
)


ENV_FILE = "env_file"  # key in click's context: the path of --env-file, and its variables as K=V


def read_dotenv(path: Path) -> dict[str, str]:
    """Return the variables of a dotenv file, as they are written, or none without the file."""
    from dotenv import dotenv_values

    found = path.exists() and not path.is_dir()  # it may be a pipe
    text = path.read_text(encoding="utf-8-sig", errors="replace") if found else ""
    stored = dotenv_values(stream=io.StringIO(text), interpolate=False)
    return {name: value for name, value in stored.items() if value is not None}


def _read_env_file(context: click.Context, _: click.Parameter, value: Path | None) -> None:
    """Keep the variables of a dotenv file for --session-env."""
    if value is not None:
        context.meta[ENV_FILE] = (value, [f"{name}={text}" for name, text in read_dotenv(value).items()])


def _session_variables(context: click.Context, _: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the variables of --env-file and --session-env, before a command sets credentials that the shell lacks."""
    parse_environment(given)
    return (*context.meta.get(ENV_FILE, (None, ()))[1], *given)


_PATH = click.Path(resolve_path=True)
_SESSIONS = (
    click.option(
        "--writable",
        multiple=True,
        type=_PATH,
        metavar="DIR",
        help="A folder that sessions share and may write to; repeatable.",
    ),
    click.option(
        "--readable",
        multiple=True,
        type=_PATH,
        metavar="PATH",
        help="A folder or file that sessions may read in addition to the agent's project, even if it is hidden; repeatable.",
    ),
    click.option(
        "--env-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_read_env_file,
        help="A file such as .env with variables for all sessions. Sessions cannot read the file. --session-env overrides it.",
    ),
    click.option(
        "--session-env",
        multiple=True,
        metavar="K=V",
        callback=_session_variables,
        help="A variable for all sessions. K without a value copies it from this shell; repeatable.",
    ),
)
_MODEL_CALLS = (
    click.option(
        "--policy-model",
        "policy_models",
        multiple=True,
        metavar="PATTERN",
        help="The models of the agent that the policy replaces, such as '*claude*'; repeatable. [default: all chat models]",
    ),
    click.option(
        "--model-host",
        "model_hosts",
        multiple=True,
        metavar="HOST",
        help="Another host with a model API. Those of AWS, OpenAI, Azure, Anthropic, and Google are known; repeatable.",
    ),
)
_SCORE = click.option(
    "--score",
    metavar="FILE:FUNCTION",
    callback=lambda _, option, spec: checked_spec(spec),
    help="A function score(payload, answer, reference, trajectory) whose result is the reward.",
)
_JUDGE = (
    click.option(
        "--judge-weight",
        type=click.FloatRange(0, 1, min_open=True),
        help="The judge's share of the reward. [default: 1]",
    ),
    click.option("--judge-model", metavar="NAME", help="The judge's model; its key is AGENTCORE_RL_JUDGE_KEY."),
    click.option("--judge-url", metavar="URL", help="The judge's OpenAI-compatible API, as https://host/v1."),
    click.option(
        "--judge", metavar="FILE", help="File with a rubric. A judge uses it to score the rollouts of each input."
    ),
)


def adding(options: Iterable[Callable[[F], F]]) -> Callable[[F], F]:
    """Return a decorator that adds options to a command, the last of them first."""
    return lambda command: functools.reduce(lambda made, option: option(made), options, command)


with_process = adding(_LISTENS)  # options of a server, for the process that waits for it
with_server = adding(_SERVES)
with_sessions = adding(_SESSIONS)
with_judge = adding(_JUDGE)
with_model_calls = adding(_MODEL_CALLS)
with_agent_as_is = adding((*_MODEL_CALLS, _SCORE))


class SectionedCommand(click.Command):
    """A command whose help lists its options under headings.

    ``sections`` maps a heading to the names of its options, separated by spaces. All other options come last.
    """

    def __init__(self, *args: Any, sections: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {option.name: option.get_help_record(ctx) for option in self.get_params(ctx)}
        for heading, names in self._sections.items():
            with formatter.section(heading):
                formatter.write_dl([record for name in names.split() if (record := records.pop(name)) is not None])
        with formatter.section("Other options"):
            formatter.write_dl([record for record in records.values() if record is not None])


def sandbox_words(
    readable: Iterable[str], writable: Iterable[str], hidden: Iterable[Path | str | None] = ()
) -> list[str]:
    """Return the arguments of `runtime serve` for the same options, and for paths to hide."""
    options = {"readable": readable, "writable": writable, "hidden": filter(None, hidden)}
    return [f"--{name}={path}" for name, paths in options.items() for path in paths]


def as_is_variables(model_hosts: Iterable[str], policy_models: Iterable[str]) -> list[str]:
    """Return the variables of sessions for the options of `with_agent_as_is`, as K=V."""
    given = {"MODEL_HOSTS": ",".join(model_hosts), "POLICY_MODELS": ",".join(policy_models)}
    return [f"AGENTCORE_RL_{name}={value}" for name, value in given.items() if value]


def session_arguments(options: Mapping[str, Any], hidden: Iterable[Path | str | None] = ()) -> dict[str, list[str]]:
    """Return the arguments of `stack.start` for the options of `with_sessions` and `with_agent_as_is`, and paths to hide."""
    variables = as_is_variables(options.get("model_hosts", ()), options.get("policy_models", ()))
    return {
        "session_env": [*options["session_env"], *variables],
        "runtime_options": sandbox_words(options["readable"], options["writable"], hidden),
    }


AGENT = "FILE|MODULE|NAME"  # --agent; NAME is a runtime's in a project of AWS's command `agentcore`
_AGENT_NAMES = "its file, its module, or its name in a project of AWS's command `agentcore`"
AGENT_HELP = f"The agent: {_AGENT_NAMES}"
DEPLOYED_HELP = f"The agent: its ARN, {_AGENT_NAMES}"
UP_AGENT = " [default: that of `agentcore-rl up` in this folder]"

as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
with_force = click.option("--force", is_flag=True, help="Overwrite the file if it exists.")


def new_file(path: Path, *, force: bool) -> Path:
    """Return a path to write to. Raises: ConfigError when it exists, without ``force``."""
    if path.exists() and not force:
        raise ConfigError(f"{path} already exists; --force overwrites it")
    return path


engine_option = click.option(
    "--engine",
    type=click.Choice(["policy", "vllm"]),
    help="The program that runs the model: the built-in engine (policy), or vLLM, which is in .venvs/vllm or in the environment "
    "of the Python AGENTCORE_RL_ENGINE_PYTHON. [default: policy]",
)
settings_option = click.option(
    "--set", "words", multiple=True, metavar="NAME=VALUE", help="Change a setting; repeatable."
)


def shortened(name: str, most: int, joint: str) -> str:
    """Cut a name that is too long, and end it with a digest, so that two long names differ."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name if len(name) <= most else f"{name[: most - 9].rstrip(joint)}{joint}{digest}"


def json_object(text: str, what: str) -> dict[str, Any]:
    """Read a JSON object of the command line. Raises: ConfigError."""
    try:
        value = json.loads(text)
    except ValueError as e:
        raise ConfigError(f"{what} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ConfigError(f'{what} must be a JSON object, such as \'{{"name": "value"}}\'')
    return value


def from_environment(name: str, variable: str) -> Callable[[F], F]:
    """Return a secret's option, which is refused on the command line: the command reads it from the variable."""

    def refuse(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
        if context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE:
            raise ConfigError(
                f"{name} is refused: every user of this machine can see a secret on a command line. Export {variable} "
                "instead"
            )
        return value or None  # the empty string counts as absent

    return click.option(name, envvar=variable, hidden=True, callback=refuse)


def settings_of(words: Sequence[str], cls: type[G]) -> G:
    """Make settings from the NAME=VALUE words of --set. Raises: ConfigError."""
    return cls.from_values(from_words(words, cls), where="--set")


def from_words(pairs: Sequence[str], cls: type[SettingsGroup]) -> dict[str, Any]:
    """Return the values of NAME=VALUE words. Lists have commas between, and null is None. Raises: ConfigError."""
    from ..backends.settings import near

    kinds = cls.kinds()
    values: dict[str, Any] = {}
    for pair in pairs:
        given, sign, text = pair.partition("=")
        name = cls.ALIASES.get(given.replace("-", "_"), given.replace("-", "_"))
        if not sign:
            raise ConfigError(f"--set {pair}: write the setting as NAME=VALUE")
        if name not in kinds:
            raise ConfigError(f"--set {pair}: there is no such setting{near(name, sorted(kinds))}")
        kind = str(kinds[name])
        values[name] = text.split(",") if "tuple[" in kind else text
        if text == "null" or "Mapping[" in kind or not re.search(r"tuple\[|str|Path", kind):
            with contextlib.suppress(ValueError):  # the check of all settings reports any other value
                values[name] = json.loads(text)
    return values
