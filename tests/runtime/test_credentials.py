"""Secrets of a runtime: in no process list, in no file that others can read, and in no session."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .conftest import AGENTS, Server

BARE = AGENTS / "bare.py"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_state_files_are_this_users_alone(start_server: Callable[..., Server], tmp_path: Path) -> None:
    state = tmp_path / "state"
    old = os.umask(0)
    try:
        server = start_server("--state-dir", str(state), agent=BARE)
    finally:
        os.umask(old)
    view = server.view
    arn = view.deploy(BARE, "other", {"SECRET": "s3cret"})
    assert arn
    server.invoke({})
    root = Path(json.loads((state / "server.json").read_text())["root"])
    for file in (state / "server.json", root / "server.json"):
        assert mode_of(file) == 0o600, file
    for folder in (state, root, state / "logs", state / "sessions", *(state / "logs").glob("*/")):
        assert mode_of(folder) & 0o077 == 0, folder


def test_a_variable_may_be_named_without_its_value(start_server: Callable[..., Server], monkeypatch: Any) -> None:
    """So that the secret of a variable is on no command line."""
    monkeypatch.setenv("KEY_OF_THE_MODEL", "from here")
    server = start_server("--session-env", "KEY_OF_THE_MODEL", "--session-env", "AWS_REGION=eu-west-1", agent=BARE)
    env = server.invoke({"do": "where"})["env"]
    assert env["KEY_OF_THE_MODEL"] == "from here"
    assert (env["AWS_REGION"], env["AWS_DEFAULT_REGION"]) == ("eu-west-1", "eu-west-1")  # boto3 reads the second
    done = subprocess.run(
        [sys.executable, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve", "--session-env", "NO_SUCH_VARIABLE"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "NO_SUCH_VARIABLE" in done.stderr
