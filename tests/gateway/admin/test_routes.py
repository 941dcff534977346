"""Requests of trainers and operators: which session a path names, what is refused, what is counted."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

from ..asking import Start


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
    for name in parted:
        for written in (name, name.replace("/", "%2F")):
            status, reply = await request("GET", f"{url}/sessions/{written}/traces")
            assert (status, len(json.loads(reply))) == (200, 2)
            assert {trace["session_id"] for trace in json.loads(reply)} == {name}
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
        ("/sessions/batch_delete", {"session_ids": {"a": 1}}),
        ("/sessions", {"session_id": 1}),
        ("/sessions", {"session_id": 0}),
    ]
    for path, body in wrong:
        assert (await request("POST", url + path, body=body))[0] == 400, (path, body)
    deep = b'{"session_ids": ["a"], "settings": {"metadata": {"a": ' + b"[" * 100_000
    for target, content, line in (
        (b"*", b"", b"HTTP/1.1 404 Not Found\r\n"),
        (b"/admin/sessions", deep, b"HTTP/1.1 400 Bad Request\r\n"),
    ):
        assert await raw(url, b"POST " + target + b" HTTP/1.1", content) == line
    status, _ = await request("POST", url + "/sessions", body={"session_id": "s", "session_ids": 1})
    assert status == 200
    listed = await request("GET", url + "/admin/stats")
    assert json.loads(listed[1])["sessions"] == 1
