"""What an agent keeps open when it is loaded: forks would share some of it, so its sessions are not forked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


def keeper(server: Server, service: str, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """An agent that keeps this open, and how its template starts sessions."""
    made = server.create(AGENTS / "keeps.py", environmentVariables={"KEEPS": kind, "URL": service})

    def loaded() -> Any:
        templates = server.view.get("/_local/status")["templates"]
        return next((t for t in templates if t["runtime_id"] == made["agentRuntimeId"]), None)

    return made, wait_for(loaded)


def test_sessions_of_an_agent_that_is_connected_get_their_own_answers(server: Server, service: str) -> None:
    made, template = keeper(server, service, "connection")

    def ask(number: int) -> Any:
        return server.invoke({"number": number}, new_session_id(), arn=made["agentRuntimeArn"])

    with ThreadPoolExecutor(SESSIONS) as pool:
        assert list(pool.map(ask, range(SESSIONS))) == [{"number": number} for number in range(SESSIONS)]
    assert template["start"] == "libraries"
    address = service.removeprefix("http://")
    assert address in template["reason"]
    assert server.output.read_text().count(f"a connection to {address}") == 1
    server.delete(made)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("connection of a thread", "a connection to 127.0.0.1:"),
        ("unix", "a connection to @keeps-"),
        ("udp", "a socket at 0.0.0.0:"),
        ("listener", "a socket at 127.0.0.1:"),
        ("input of a child", "a pipe"),
        ("socket of a child", "a socket pair"),
        ("terminal", "/dev/"),
        ("pool", "threads"),
        ("new database", "/agent.db.new"),
        ("database to read", "/agent.db"),
        ("rows", "/agent.db.rows"),
        ("file to change", "/agent.db.state"),
        ("loop", "an event loop"),
        ("closed connection", None),
        ("child", None),
        ("database in memory", None),
        ("log", None),
        ("tracker", None),
        ("used loop", None),
    ],
)
def test_what_forks_would_share_is_found(server: Server, service: str, kind: str, reason: str | None) -> None:
    made, template = keeper(server, service, kind)
    assert template["start"] == ("fork" if reason is None else "libraries")
    assert (reason or "") in (template["reason"] or "")
    server.delete(made)
