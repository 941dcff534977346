"""Requests of trainers and operators: which session a path names, what is refused, what is counted."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from agentcore_rl_toolkit._servers.keys import key_for
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient
from agentcore_rl_toolkit.gateway.http.client import request, stream
from scripted_engine import Fault, ScriptedEngine

from ..asking import Start, opened, status_of, until
from ..served import Served


async def raw(url: str, head: bytes, body: bytes) -> bytes:
    """The status line that a request gets which no client library would write."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(head + b"\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    async with asyncio.timeout(60):
        line = await reader.readline()
    writer.close()
    return line


async def test_a_session_is_found_however_its_request_names_it(engine: ScriptedEngine, start_gateway: Start) -> None:
    url = (await start_gateway(engine)).url
    client = GatewayClient(url)
    plain = [new_session_id() for _ in range(3)]
    parted = [f"harbor/task-{i}:0/try.{i}" for i in range(3)]
    sessions = await client.create_sessions_async([*plain, *parted])
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    statuses: Counter[bytes] = Counter()
    for session in sessions:
        path = session.base_url.removeprefix(url) + "/chat/completions"
        encoded = "/sessions/" + "".join(f"%{ord(c):02X}" for c in session.session_id) + "/v1/chat/completions"
        for target in (path, encoded):
            head = f"POST {target} HTTP/1.1\r\nauthorization: Bearer {session.api_key}".encode()
            statuses[await raw(url, head, body)] += 1
    assert statuses == {b"HTTP/1.1 200 OK\r\n": 2 * 6}
    found = await client.fetch_async([s.session_id for s in sessions], close=False)
    assert [len(c.turns) for c in found.values()] == [2] * 6
    for bad in ("a//b", "/a", "a/", "a/../b", "v1/a", "a/v1", "a/traces"):
        with pytest.raises(GatewayError, match="session id"):
            await client.create_sessions_async([bad])
    status, metrics = await request("GET", url + "/metrics")
    assert status == 200
    assert b"agentcore_rl_gateway_turns_total 12\n" in metrics
    assert b'agentcore_rl_gateway_upstream_healthy{worker="w0"} 1\n' in metrics


async def test_a_request_that_is_wrong_is_refused_and_opens_nothing(start_gateway: Start) -> None:
    url = (await start_gateway()).url
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("/admin/sessions", {"session_ids": "ab"}),  # opened "a" and "b"
        ("/admin/sessions", {}),
        ("/admin/sessions", {"session_ids": [1]}),
        ("/admin/delete", {"session_ids": "ab"}),
        ("/admin/fetch", {}),
    ]
    for path, body in wrong:
        assert (await request("POST", url + path, body=body))[0] == 400, (path, body)
    deep = b'{"session_ids": ["a"], "settings": {"metadata": {"a": ' + b"[" * 100_000
    assert await raw(url, b"POST /admin/sessions HTTP/1.1", deep) == b"HTTP/1.1 400 Bad Request\r\n"
    listed = await request("GET", url + "/admin/stats")
    assert json.loads(listed[1])["sessions"] == 0


async def test_a_session_that_is_deleted_during_its_fetch_is_fetched_whole(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway, text = await start_gateway(engine), "x" * 2_000_000
    client = GatewayClient(gateway.url)
    [session] = await client.create_sessions_async(["s"])
    for n in range(12):
        assert await status_of(session, f"{n} {text}") == 200
    answer = stream("POST", f"{gateway.url}/admin/fetch", body={"session_ids": ["s"]}, key=None, timeout_s=60)
    await anext(answer)
    assert await client.delete_async(["s"]) == 1
    assert sum([len(chunk) async for chunk in answer]) > 11 * 2_000_000
    await until(lambda: not gateway.store.removing)
    assert await client.fetch_async(["s"]) == {}


async def test_a_fetch_of_large_records_takes_little_memory_and_stops_no_call(tmp_path: Path) -> None:
    """The trainer reads the first bytes and pauses: the gateway answers an agent, and holds a small part of the records."""
    calls, size = 32, 1_000_000
    text = base64.b64encode(bytes(size)).decode()
    experts = Fault(edit=lambda reply: reply["choices"][0].update(routed_experts=text))

    def peak() -> int:
        [line] = [x for x in Path(f"/proc/{gateway.process.pid}/status").read_text().splitlines() if "VmHWM" in x]
        return int(line.split()[1]) * 1024

    async with ScriptedEngine() as engine:
        gateway = Served(tmp_path, engine, "--store", str(tmp_path / "store"))
        try:
            client = GatewayClient(await gateway.start())
            large, other = await client.create_sessions_async([new_session_id() for _ in range(2)])
            engine.faults += [experts] * calls
            for n in range(calls):
                assert await status_of(large, f"w{n}") == 200
            before, asked = peak(), {"session_ids": [large.session_id]}
            key = key_for("gateway", gateway.url, "")
            answer = stream("POST", f"{gateway.url}/admin/fetch", body=asked, key=key, timeout_s=60)
            got = len(await anext(answer))
            assert await status_of(other) == 200
            async for piece in answer:
                got += len(piece)
            assert got > calls * size
            assert peak() - before < calls * size  # not several copies of everything
        finally:
            gateway.kill()


async def test_a_weight_version_that_no_record_can_have_is_refused(gateway: Gateway) -> None:
    for version, status in ((2**63, 400), (2**63 - 1, 200)):
        url = f"{gateway.url}/admin/weight_version"
        assert (await request("POST", url, body={"weight_version": version}))[0] == status
    assert await status_of(await opened(gateway)) == 200
