"""Small cases of what random bodies found: requests sent ahead, servers that answer 200 and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import Fault, ScriptedEngine

Start = Callable[..., Awaitable[Gateway]]
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
USER = {"role": "user", "content": "w11"}


def written(session: SessionHandle, body: dict[str, Any], *more: str) -> tuple[bytes, bytes]:
    """Head and body of a call."""
    data = json.dumps(body).encode()
    path = "/" + session.base_url.split("/", 3)[3]
    lines = [
        f"POST {path}/chat/completions HTTP/1.1",
        "host: localhost",
        f"authorization: Bearer {session.api_key}",
        *more,
    ]
    return "\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode(), data


@pytest.mark.parametrize("size", [10, 300_000])
async def test_a_client_that_sends_ahead_is_not_told_to_go_on_in_the_middle_of_a_reply(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle, size: int
) -> None:
    engine.token_s = 0.02
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))
    async with asyncio.timeout(30):
        writer.writelines(written(session, {"model": "m", "messages": [USER], "stream": True}))
        reply = await reader.readuntil(b"\r\n\r\n")
        message = {"role": "user", "content": "x" * size}
        head, body = written(session, {"model": "m", "messages": [message]}, "expect: 100-continue")
        writer.write(head)
        reply += await reader.readuntil(b"0\r\n\r\n")
        assert reply.count(b"HTTP/1.1") == 1
        assert await reader.readexactly(len(CONTINUE)) == CONTINUE
        writer.write(body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()
    assert engine.calls[-1].body["messages"] == [message]


async def test_an_error_of_a_plain_endpoint_has_its_own_status_although_it_came_with_200(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine, engine="openai")
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    body = b'{"error":{"message":"no provider has room","code":429}}'
    engine.faults.append(Fault(body=body))
    asked = {"model": "m", "messages": [USER]}
    status, reply = await request("POST", session.base_url + "/chat/completions", body=asked, key=session.api_key)
    assert (status, json.loads(reply)["error"]["message"]) == (429, "no provider has room")
