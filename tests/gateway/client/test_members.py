"""Which gateway gets a session, and how several are named."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import ConfigError, GatewayError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.client.client import OneGateway


def client_of(*gateways: OneGateway) -> GatewayClient:
    client = GatewayClient([gateway.url for gateway in gateways])
    client._all = gateways
    return client


class Scripted(OneGateway):
    """A gateway that keeps its sessions in a set. ``lost``: it does what it is asked for, and its answer is lost."""

    def __init__(self, url: str) -> None:
        super().__init__(url, public_url=url, admin_key=None, timeout_s=1.0)
        self.has: set[str] = set()
        self.lost = False

    async def call(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        names = [] if body is None else body["session_ids"]
        if path == "/admin/sessions":
            self.has.update(names)
        elif path == "/admin/delete":
            self.has.difference_update(names)
        if self.lost:
            raise GatewayError("no answer in time")
        return {"sessions": [{"session_id": name, "api_key": ""} for name in names], "deleted": len(names)}


async def test_sessions_that_went_to_another_gateway_do_not_stay_open_where_the_answer_was_lost() -> None:
    first, second = Scripted("http://one"), Scripted("http://two")
    these = client_of(first, second)
    first.lost = True
    made = await these.create_sessions_async(["a", "b", "c"])
    assert {handle.gateway for handle in made} == {second.url}
    first.lost = False
    await these.away_async()  # it answers again
    assert (first.has, second.has) == (set(), {"a", "b", "c"})


async def test_a_session_that_is_still_to_be_deleted_is_not_deleted_once_it_is_open_again() -> None:
    only = Scripted("http://one")
    only.away_since_s, only.look_at_s = time.monotonic(), float("inf")
    only.undeleted, only.has = {"a", "b"}, {"a", "b"}
    await client_of(only).create_sessions_async(["a"])
    assert (only.has, only.undeleted, only.away_since_s) == ({"a"}, set(), None)


async def test_a_session_that_is_deleted_while_its_gateway_catches_up_does_not_stay_open() -> None:
    first, second = Scripted("http://one"), Scripted("http://two")
    these = client_of(first, second)
    first.has, first.undeleted, first.away_since_s = {"a", "b"}, {"a"}, time.monotonic()
    deleting, may_end = asyncio.Event(), asyncio.Event()
    delete = first.delete

    async def slow(session_ids: Sequence[str]) -> int:
        deleting.set()
        await may_end.wait()
        return await delete(session_ids)

    first.delete = slow  # type: ignore[method-assign]
    catching_up = asyncio.create_task(these.away_async())
    await deleting.wait()
    await these.delete_async(["b"])
    may_end.set()
    await catching_up
    assert (first.has, first.undeleted) == (set(), set())


def test_urls_come_as_a_list_or_with_commas_and_each_once() -> None:
    assert GatewayClient("http://a/, http://b").urls == ("http://a", "http://b")
    assert GatewayClient(["http://a", "http://b/"]).url == "http://a,http://b"
    assert GatewayClient("http://a").public_urls == ("http://a",)
    assert GatewayClient("http://a,http://b", public_url=["http://c", "http://d"]).public_urls == (
        "http://c",
        "http://d",
    )
    for url in ("", [], "http://a,", ["http://a", "http://a/"]):
        with pytest.raises(ConfigError):
            GatewayClient(url)
    with pytest.raises(ConfigError, match="2 gateways and 1 public"):
        GatewayClient("http://a,http://b", public_url="http://c")
