"""What an agent keeps open when it is loaded: forks would share some of it, so its sessions are not forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from serving import Asked, answering

from ..conftest import AGENTS, Server, wait_for

SESSIONS = 8


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """A service that answers the questions of all sessions together: each needs a connection of its own."""
    together = threading.Barrier(SESSIONS)

    def answer(asked: Asked) -> tuple[int, bytes]:
        if asked.path == "/question":
            together.wait(60)
        return 200, asked.body

    with answering(answer) as url:
        yield url


def test_sessions_of_an_agent_that_is_connected_get_their_own_answers(server: Server, service: str) -> None:
    made = server.create(AGENTS / "keeps.py", environmentVariables={"KEEPS": "connection", "URL": service})

    def loaded() -> Any:
        templates = server.view.get("/_local/status")["templates"]
        return next((t for t in templates if t["runtime_id"] == made["agentRuntimeId"]), None)

    template = wait_for(loaded)

    def ask(number: int) -> Any:
        return server.invoke({"number": number}, new_session_id(), arn=made["agentRuntimeArn"])

    with ThreadPoolExecutor(SESSIONS) as pool:
        assert list(pool.map(ask, range(SESSIONS))) == [{"number": number} for number in range(SESSIONS)]
    assert template["start"] == "libraries"
    address = service.removeprefix("http://")
    assert address in template["reason"]
    assert server.output.read_text().count(f"a connection to {address}") == 1
    server.delete(made)


REASONS = {
    "connection of a thread": "a connection to 127.0.0.1:",
    "unix": "a connection to @keeps-",
    "udp": "a socket at 0.0.0.0:",
    "listener": "a socket at 127.0.0.1:",
    "input of a child": "a pipe",
    "socket of a child": "a socket pair",
    "terminal": "/dev/",
    "pool": "threads",
    "new database": "/agent.db.new",
    "database to read": "/agent.db",
    "rows": "/agent.db.rows",
    "file to change": "/agent.db.state",
    "loop": "an event loop",
    "closed connection": "",
    "child": "",
    "database in memory": "",
    "log": "",
    "tracker": "",
    "used loop": "",
}
# Each kind is kept open in a process of its own, as the template is when its agent is loaded.
CHECK = f"""
import json, os, runpy, signal, sys
from agentcore_rl_toolkit.runtime.template.process import CannotForkError, check_forkable
kinds = runpy.run_path({str(AGENTS / "keeps.py")!r})["KINDS"]
for kind in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        kept, reason = kinds[kind](), ""
        try:
            check_forkable(-1)
        except CannotForkError as e:
            reason = str(e)
        print(json.dumps([kind, reason]), flush=True)
        os.killpg(0, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_what_forks_would_share_is_found(service: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *REASONS],
        env={**os.environ, "URL": service, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = dict(map(json.loads, done.stdout.splitlines()))
    assert found.keys() == REASONS.keys(), done.stderr
    for kind, reason in REASONS.items():
        assert (reason in found[kind], bool(reason)) == (True, bool(found[kind])), (kind, found[kind])
