"""Servers whose clients have no key answer this user and root only."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends._portal import run_sync
from agentcore_rl_toolkit.backends.verl.bridge import Bridge
from agentcore_rl_toolkit.policy.tinker.listening import Answer, Asked, Listener
from agentcore_rl_toolkit.view import server as view_server

ServeView = Callable[..., AbstractContextManager[str]]


async def answer(asked: Asked) -> Answer:
    return Answer()


@pytest.fixture(params=["view", "bridge", "rehearsal"])
def server(request: pytest.FixtureRequest, tmp_path: Path, serve_view: ServeView) -> Iterator[tuple[str, str]]:
    """A server of each kind: its address, and what one reads there."""
    with contextlib.ExitStack() as stack:
        if request.param == "view":
            yield stack.enter_context(serve_view(tmp_path)), "/api/runs"
        elif request.param == "bridge":
            bridge = Bridge(object())
            stack.callback(bridge.close)
            yield bridge.open(), "/health"
        else:
            listener = Listener(answer)
            run_sync(listener.start())
            stack.callback(lambda: run_sync(listener.stop()))
            yield listener.url, "/"


@pytest.mark.threat(
    who="another user of this machine",
    tries="read runs in the view, sample through verl's bridge, use the Tinker rehearsal, through loopback",
    stopped_by="the kernel says whose the connection is: only this user and root are answered",
    leaves="what runs as this user passes, sessions too; elsewhere than on Linux the loopback passes; a view with `--host`",
)
def test_another_user_gets_nothing(server: tuple[str, str], as_another_user: Callable[..., str]) -> None:
    url = "".join(server)
    with urllib.request.urlopen(url, timeout=60) as reply:
        assert reply.status == 200
    refusal = as_another_user(url)
    assert refusal.startswith("403")
    assert "not open to other users of this machine" in refusal


def test_a_view_may_be_open_to_all(tmp_path: Path, serve_view: ServeView, as_another_user: Callable[..., str]) -> None:
    with serve_view(tmp_path, "--callers", "any") as url:
        assert as_another_user(f"{url}/api/runs") == "200"


@pytest.mark.parametrize(
    ("words", "callers"),
    [
        ((), "user"),
        (("--host", "::1"), "user"),
        (("--host", "0.0.0.0"), "any"),
        (("--host", "0.0.0.0", "--callers", "user"), "user"),
    ],
)
def test_an_address_that_other_machines_reach_is_for_other_callers(
    command_line: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], callers: str
) -> None:
    async def serve(runs: Any, **options: Any) -> None:
        asked.append(options["callers"])

    asked: list[str] = []
    monkeypatch.setattr(view_server, "serve", serve)
    command_line("view", "--no-open", *words)
    assert asked == [callers]
