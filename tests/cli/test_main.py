"""The command line itself: help, version, missing extras."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit import errors
from agentcore_rl_toolkit._installation import install_command
from agentcore_rl_toolkit.cli.main import cli

COMMANDS = ("quickstart", "runtime", "gateway", "policy", "eval", "train")


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-W", "ignore", "-c", code] if code else [sys.executable, "-m", "agentcore_rl_toolkit.cli"]
    return subprocess.run([*argv, *arguments], capture_output=True, text=True, timeout=300)


def test_version_prints_the_installed_version() -> None:
    done = run("version")
    assert (done.returncode, done.stdout.strip()) == (0, version("agentcore-rl-toolkit"))


def test_help_names_every_command_and_where_to_start() -> None:
    done = run("--help")
    assert done.returncode == 0
    for name in COMMANDS:
        assert name in done.stdout
    assert "agentcore-rl quickstart" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_text(name: str) -> None:
    done = CliRunner().invoke(cli, [name, "--help"])
    assert done.exit_code == 0, done.output
    assert len(done.output.splitlines()) > 5


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (["policy", "serve"], "torch", "policy"),
        (["quickstart"], "rich", "local"),
        (["gateway", "serve"], "msgspec", "gateway"),
    ],
)
def test_a_missing_extra_is_answered_with_the_install_command(arguments: list[str], module: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv = ['agentcore-rl', *{arguments!r}];"
        "from agentcore_rl_toolkit.cli.main import main; main()"
    )
    done = run(code=code)
    assert done.returncode == 2, done.stderr
    assert install_command(extra) in done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_is_an_option_and_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "agentcore_rl_toolkit", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, version("agentcore-rl-toolkit"))


def test_a_command_that_is_misspelt_is_answered_with_the_one_that_was_meant() -> None:
    done = CliRunner().invoke(cli, ["trian", "--agent", "agent.py"])
    assert done.exit_code == 2
    assert "No such command 'trian'. Did you mean 'train'?" in done.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_and_completes_options_of_commands(shell: str) -> None:
    script = run("completion", shell)
    assert script.returncode == 0
    assert "agentcore-rl" in script.stdout
    if shell != "fish":  # fish hands over the words in another way
        words = {"COMP_WORDS": "agentcore-rl gateway serve --upstr", "COMP_CWORD": "3"}
        env = {**os.environ, **words, "_AGENTCORE_RL_COMPLETE": f"{shell}_complete"}
        command = [sys.executable, "-m", "agentcore_rl_toolkit"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
        assert "--upstream" in done.stdout


def test_what_a_trainer_needs_is_importable_from_the_top() -> None:
    code = (
        "from agentcore_rl_toolkit import RolloutClient, Deadlines, GatewayClient, errors;"
        "import agentcore_rl_toolkit as top, inspect;"
        "classes = [n for n, c in vars(errors).items() if inspect.isclass(c) and c.__module__ == errors.__name__];"
        "assert classes and all(getattr(top, n) is getattr(errors, n) for n in classes), classes"
    )
    done = run(code=code)
    assert done.returncode == 0, done.stderr


def test_every_error_is_on_the_page_of_errors() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    for name, value in vars(errors).items():
        if isinstance(value, type) and value.__module__ == errors.__name__:
            assert f"`{name}`" in page


@pytest.mark.parametrize(("error", "code"), [("ConfigError", 2), ("LocalRuntimeError", 1)])
def test_what_broke_and_what_was_asked_wrongly_have_codes_of_their_own(error: str, code: int) -> None:
    broken = (
        "import sys; sys.argv = ['agentcore-rl', 'version']; from agentcore_rl_toolkit import errors;"
        "from agentcore_rl_toolkit.cli import main\n"
        f"def fails(): raise errors.{error}('why')\n"
        "main.version.callback = fails; main.main()"
    )
    done = run(code=broken)
    assert (done.returncode, done.stderr) == (code, "error: why\n")
