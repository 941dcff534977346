"""Servers whose clients have no key answer this user and root only."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from agentcore_rl_toolkit.backends._portal import run_sync
from agentcore_rl_toolkit.backends.verl.bridge import Bridge
from agentcore_rl_toolkit.policy.tinker.listening import Answer, Asked, Listener


async def answer(asked: Asked) -> Answer:
    return Answer()


@pytest.fixture(params=["bridge", "rehearsal"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A server of each kind: its address, and what one reads there."""
    with contextlib.ExitStack() as stack:
        if request.param == "bridge":
            bridge = Bridge(object())
            stack.callback(bridge.close)
            yield bridge.open(), "/health"
        else:
            listener = Listener(answer)
            run_sync(listener.start())
            stack.callback(lambda: run_sync(listener.stop()))
            yield listener.url, "/"


def test_another_user_gets_nothing(server: tuple[str, str], as_another_user: Callable[..., str]) -> None:
    url = "".join(server)
    with urllib.request.urlopen(url, timeout=60) as reply:
        assert reply.status == 200
    refusal = as_another_user(url)
    assert refusal.startswith("403")
    assert "not open to other users of this machine" in refusal
