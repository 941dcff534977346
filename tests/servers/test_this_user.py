"""Servers whose clients have no key answer this user and root only."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from agentcore_rl_toolkit.backends.verl.bridge import Bridge


@pytest.fixture
def server() -> Iterator[tuple[str, str]]:
    """Its address, and what one reads there."""
    with contextlib.closing(Bridge(object())) as bridge:
        yield bridge.open(), "/health"


def test_another_user_gets_nothing(server: tuple[str, str], as_another_user: Callable[..., str]) -> None:
    url = "".join(server)
    with urllib.request.urlopen(url, timeout=60) as reply:
        assert reply.status == 200
    refusal = as_another_user(url)
    assert refusal.startswith("403")
    assert "not open to other users of this machine" in refusal
