"""Opening sessions in several processes: a request that one of them refuses opens none in the others."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, SessionHandle
from agentcore_rl_toolkit.gateway.acceptor import listen
from agentcore_rl_toolkit.gateway.http_client import request
from agentcore_rl_toolkit.gateway.sharding import Shard, inbox, shard_of
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine


def names(process: int, count: int) -> list[str]:
    """Ids of sessions that belong to one of two processes."""
    found: list[str] = []
    while len(found) < count:
        name = new_session_id()
        found += [name] * (shard_of(name.encode(), 2) == process)
    return found


@pytest.fixture
async def served(engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[tuple[GatewayClient, list[int], Path]]:
    """A gateway of two processes, their pids and the store."""
    ready, store = tmp_path / "ready.json", tmp_path / "store"
    line = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "gateway", "serve", "--engine", "vllm", "--workers", "2"]
    line += ["--upstream", engine.url, "--store", str(store), "--ready-file", str(ready), "--max-sessions", "4"]
    line += ["--parent-pid", str(os.getpid())]
    process = await asyncio.to_thread(subprocess.Popen, line, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(60):
            while not ready.exists():
                assert process.poll() is None
                await asyncio.sleep(0.02)
        told = json.loads(ready.read_text())
        yield GatewayClient(told["url"]), told["workers"], store
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 30)


async def known(client: GatewayClient, session_ids: list[str]) -> set[str]:
    return set(await client.fetch_async(session_ids, close=False))


async def ask(session: SessionHandle) -> int:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return (await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key))[0]


async def test_what_one_process_refuses_opens_no_session_in_another_and_changes_none(
    served: tuple[GatewayClient, list[int], Path],
) -> None:
    client, _, _ = served
    [mine], [closed] = names(0, 1), names(1, 1)
    [session] = await client.create_sessions_async([mine], max_turns=1)
    assert await ask(session) == 200
    await client.create_sessions_async([closed])
    await client.close_sessions_async([closed])
    for asked, why in (
        ([*names(0, 2), mine, *names(1, 1), closed], "is closed"),
        ([*names(0, 2), mine, *names(1, 4)], "may be 4"),
        ([*names(0, 2), mine, *names(1, 1), "a//" + names(1, 1)[0], "b//c", "c//d"], "session id"),
    ):
        with pytest.raises(GatewayError, match=why) as told:
            await client.create_sessions_async(asked, max_turns=5)
        assert told.value.status == 400
        assert await known(client, asked) == {mine, closed} & set(asked)
    assert (await client.health_async())["sessions"] == 2
    assert await ask(session) == 429  # its settings are what they were


async def test_what_one_process_cannot_store_is_taken_back_in_the_other(
    served: tuple[GatewayClient, list[int], Path],
) -> None:
    client, pids, store = served
    before, [called] = names(0, 1), names(0, 1)
    _, session = await client.create_sessions_async([*before, called])
    assert await ask(session) == 200
    new = [*names(0, 2), *names(1, 2)]
    segment = store / "shard-1" / "calls-00000001.log"
    unlimited = resource.prlimit(pids[1], resource.RLIMIT_FSIZE)
    resource.prlimit(pids[1], resource.RLIMIT_FSIZE, (segment.stat().st_size + 10, unlimited[1]))
    try:
        with pytest.raises(GatewayError, match="cannot store a session") as told:
            await client.create_sessions_async([*before, called, *new])
        assert told.value.status == 503
        assert await known(client, [*before, called, *new]) == {*before, called}
    finally:
        resource.prlimit(pids[1], resource.RLIMIT_FSIZE, unlimited)
    async with asyncio.timeout(30):
        while (await client.health_async())["status"] != "ok":  # noqa: ASYNC110  (another process)
            await asyncio.sleep(0.05)
    assert await known(client, new) == set()
    await client.create_sessions_async([*before, called, *new])
    assert await known(client, [*before, called, *new]) == {*before, called, *new}


class Other:
    """Process 1 of two, by its private address: what it is asked, and how it answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answer: Callable[[str], bytes | None] = lambda path: b"{}"
        self.held = ""  # the path that is answered when it may go on
        self.go_on = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split()[1].decode()
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        self.asked.append((path, json.loads(await reader.readexactly(length))))
        if path == self.held:
            await self.go_on.wait()
        told = self.answer(path)
        if told is not None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(told), told))
            await writer.drain()
        writer.close()

    async def reached(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.asked) < count:  # noqa: ASYNC110  (a socket at the other end)
                await asyncio.sleep(0.01)


@pytest.fixture
async def beside(tmp_path: Path) -> AsyncIterator[tuple[Gateway, Other]]:
    """Process 0 of two, the other of which the test plays."""
    other = Other()
    playing = await asyncio.start_server(other, "127.0.0.1", 0)
    private = listen("127.0.0.1", 0)
    urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in (private, playing.sockets[0])]
    gateway = Gateway(GatewayConfig(), shard=Shard(0, urls, tmp_path, "KEY", inbox(tmp_path, 0)))
    await gateway.start()
    gateway.start_private(private)
    yield gateway, other
    await gateway.stop(grace_s=0.1)
    playing.close()


async def test_what_was_opened_beside_a_process_that_dies_is_taken_back_in_both(
    beside: tuple[Gateway, Other],
) -> None:
    gateway, other = beside
    other.answer = lambda path: None if path == "/admin/sessions" else b"{}"
    zero, one = names(0, 2), names(1, 2)
    with pytest.raises(GatewayError, match="process 1 of the gateway did not answer") as told:
        await GatewayClient(gateway.url).create_sessions_async([*zero, *one])
    assert told.value.status == 503
    assert not gateway.sessions.by_id
    assert [path.rpartition("/")[2] for path, _ in other.asked] == ["check", "sessions", "take_back"]
    taken = other.asked[-1][1]
    assert taken["session_ids"] == one
    assert taken["since_s"] < taken["until_s"]


async def test_a_session_that_two_requests_name_is_not_taken_back_from_the_one_that_succeeds(
    beside: tuple[Gateway, Other],
) -> None:
    gateway, other = beside
    client = GatewayClient(gateway.url)
    other.answer = lambda path: None if path == "/admin/sessions" else b"{}"
    [zero], [one], free = names(0, 1), names(1, 1), names(0, 3)
    other.held = "/admin/sessions"
    refused = asyncio.ensure_future(client.create_sessions_async([zero, one]))
    await other.reached(2)
    heard = gateway.counters["admin_requests"]
    good = asyncio.ensure_future(client.create_sessions_async([zero]))
    async with asyncio.timeout(30):
        while gateway.counters["admin_requests"] == heard:  # noqa: ASYNC110  (a socket at the other end)
            await asyncio.sleep(0.01)
    for name in free:  # others do not wait
        await client.create_sessions_async([name])
    assert not good.done()
    other.go_on.set()
    with pytest.raises(GatewayError, match="process 1"):
        await refused
    await good
    assert set(gateway.sessions.by_id) == {name.encode() for name in [zero, *free]}


async def test_a_request_whose_client_hangs_up_is_opened_everywhere_all_the_same(
    beside: tuple[Gateway, Other],
) -> None:
    gateway, other = beside
    [zero], [one] = names(0, 1), names(1, 1)
    other.held = "/admin/shared/check"
    asked = asyncio.ensure_future(GatewayClient(gateway.url).create_sessions_async([zero, one]))
    await other.reached(1)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    async with asyncio.timeout(30):
        while gateway.connections - {c for c in gateway.connections if c.private}:  # noqa: ASYNC110  (the hang-up)
            await asyncio.sleep(0.01)
    other.go_on.set()
    await other.reached(2)
    assert other.asked[-1][0] == "/admin/sessions"
    async with asyncio.timeout(30):
        while zero.encode() not in gateway.sessions.by_id:  # noqa: ASYNC110  (another task)
            await asyncio.sleep(0.01)


async def test_what_processes_ask_each_other_nobody_else_may(beside: tuple[Gateway, Other]) -> None:
    gateway, other = beside
    for path in ("check", "take_back"):
        status, _ = await request("POST", f"{gateway.url}/admin/shared/{path}", body={"session_ids": []})
        assert status == 404
    assert not other.asked
