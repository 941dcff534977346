"""Secrets of a runtime: in no process list, in no file that others can read, and in no session."""

from __future__ import annotations

import gc
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentcore_rl_toolkit.cli.main import main
from agentcore_rl_toolkit.runtime import roots

from .conftest import AGENTS, Server

BARE = AGENTS / "bare.py"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return the error of a runtime that these options keep from starting."""

    def serve(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["agentcore-rl", "runtime", "serve", *options])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        gc.collect()  # a socket that was left open is a warning
        return capsys.readouterr().err

    return serve


def test_files_are_this_users_alone_and_a_taken_port_or_state_folder_is_named(
    start_server: Callable[..., Server], refused: Callable[..., str], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    old = os.umask(0)
    try:
        server = start_server("--state-dir", str(state), agent=BARE)
    finally:
        os.umask(old)
    assert server.view.deploy(BARE, "other", {"SECRET": "s3cret"})
    server.invoke({})
    root = Path(json.loads((state / "server.json").read_text())["root"])
    for file in (state / "server.json", root / "server.json"):
        assert mode_of(file) == 0o600, file
    for folder in (root.parent, state, root, state / "logs", state / "sessions", *(state / "logs").glob("*/")):
        assert mode_of(folder) & 0o077 == 0, folder
    port = server.url.rpartition(":")[2]
    assert f"port {port}" in refused("--port", port)
    assert "in use by another runtime" in refused("--state-dir", str(state))
    assert any(s["url"] == server.url for s in roots.live_servers())


def test_a_variable_may_be_named_without_its_value(
    start_server: Callable[..., Server], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the secret of a variable is on no command line."""
    monkeypatch.setenv("KEY_OF_THE_MODEL", "from here")
    server = start_server("--session-env", "KEY_OF_THE_MODEL", "--session-env", "AWS_REGION=eu-west-1", agent=BARE)
    env = server.invoke({"do": "where"})["env"]
    assert env["KEY_OF_THE_MODEL"] == "from here"
    assert (env["AWS_REGION"], env["AWS_DEFAULT_REGION"]) == ("eu-west-1", "eu-west-1")  # boto3 reads the second
    assert "NO_SUCH_VARIABLE" in refused("--session-env", "NO_SUCH_VARIABLE")
