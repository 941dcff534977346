"""The command line itself: help, version, missing extras."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from agentcore_rl_toolkit._installation import install_command

COMMANDS = ("quickstart", "runtime", "gateway", "policy", "eval", "train", "s3")


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-W", "ignore", "-c", code] if code else [sys.executable, "-m", "agentcore_rl_toolkit.cli"]
    return subprocess.run([*argv, *arguments], capture_output=True, text=True, timeout=60)


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
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 5


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
