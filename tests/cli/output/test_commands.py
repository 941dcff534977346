"""Commands and paths that are printed to be typed again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentcore_rl_toolkit.cli.output.commands import nearby, program


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an environment in it, where PATH leads to nothing."""
    for name in ("python", "agentcore-rl"):
        file = tmp_path / ".venv" / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_program_is_named_as_the_shell_that_reads_it_finds_it(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = clone / ".venv" / "bin"
    assert (program(), program("python")) == (".venv/bin/agentcore-rl", ".venv/bin/python")
    assert program("absent") == "absent"
    monkeypatch.chdir(own)
    assert program() == "./agentcore-rl"
    monkeypatch.chdir(clone / "..")
    assert program() == str(Path(clone.name) / ".venv/bin/agentcore-rl")
    monkeypatch.setenv("PATH", str(own))  # activated
    assert program() == "agentcore-rl"
    (clone / "link").symlink_to(own)
    monkeypatch.setenv("PATH", str(clone / "link"))
    assert program() == "agentcore-rl"
    other = clone / "other"
    other.mkdir()
    (other / "agentcore-rl").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{other}:{own}")  # of another environment
    assert program().endswith(".venv/bin/agentcore-rl")


def test_a_path_is_short_where_it_can_be_and_one_word_of_a_shell(clone: Path) -> None:
    assert nearby(clone / "runs" / "shop-1") == "runs/shop-1"
    assert nearby(clone / "my runs" / "a") == "'my runs/a'"
    assert nearby(Path("/elsewhere/run")) == "/elsewhere/run"
