"""The command line itself: help, version, missing extras."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import click
import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit._installation import install_command
from agentcore_rl_toolkit._servers import process
from agentcore_rl_toolkit.cli import main
from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.errors import ConfigError, LocalRuntimeError

from ..conftest import CommandLine


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-W", "ignore", "-c", code] if code else [sys.executable, "-m", "agentcore_rl_toolkit"]
    return subprocess.run([*argv, *arguments], capture_output=True, text=True, timeout=300)


def test_version_is_a_command_and_an_option_and_the_package_runs_as_a_module() -> None:
    installed = version("agentcore-rl-toolkit")
    done = run("version")
    assert (done.returncode, done.stdout.strip()) == (0, installed)
    assert CliRunner().invoke(cli, ["--version"]).output.strip() == installed


def options(command: click.Command, context: click.Context) -> int:
    """How many options a command and those below it have."""
    own = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    names = command.list_commands(context) if isinstance(command, click.Group) else []
    children = [command.get_command(context, name) for name in names]  # type: ignore[attr-defined]
    return len(own) + sum(options(child, click.Context(child, parent=context)) for child in children)


def test_the_commands_are_few_enough_to_know() -> None:
    help_text = CliRunner().invoke(cli, ["--help"]).output
    for name in ("quickstart", "init", "up", "invoke", "eval", "train", "deploy", "view", "runs", "doctor"):
        assert name in help_text
    assert "agentcore-rl quickstart" in help_text
    assert options(cli, click.Context(cli)) <= MOST_OPTIONS


MOST_OPTIONS = 300


@pytest.mark.parametrize(("arguments", "module", "extra"), [(["quickstart"], "rich", "local")])
def test_a_missing_extra_is_answered_with_the_install_command(arguments: list[str], module: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv = ['agentcore-rl', *{arguments!r}];"
        "from agentcore_rl_toolkit.cli.main import main; main()"
    )
    done = run(code=code)
    assert done.returncode == 2, done.stderr
    assert install_command(extra) in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_trainer_needs_is_importable_from_the_top() -> None:
    code = (
        "from agentcore_rl_toolkit import RolloutClient, Deadlines, GatewayClient, errors;"
        "import agentcore_rl_toolkit as top, inspect;"
        "classes = [n for n, c in vars(errors).items() if inspect.isclass(c) and c.__module__ == errors.__name__];"
        "assert classes and all(getattr(top, n) is getattr(errors, n) for n in classes), classes"
    )
    done = run(code=code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("error", "code"), [(ConfigError, 2), (LocalRuntimeError, 1)])
def test_what_broke_and_what_was_asked_wrongly_have_codes_of_their_own(
    error: type[Exception], code: int, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise error("why")

    monkeypatch.setattr(main.version, "callback", fails)
    done = command_line("version")
    assert (done.returncode, done.stderr) == (code, "error: why\n")


def test_ctrl_c_ends_any_command_with_130(monkeypatch: pytest.MonkeyPatch, command_line: CommandLine) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.metadata.version", interrupted)
    assert command_line("version").returncode == 130
    monkeypatch.delattr(process, "terminated_as_interrupted")  # a module that is still loading
    monkeypatch.setattr(process, "__getattr__", interrupted, raising=False)
    assert command_line("version").returncode == 130
