"""WebSockets through the runtime, with the client library a user would take."""

from __future__ import annotations

from urllib.parse import quote

import pytest
import websockets
from websockets.asyncio.client import connect

from .conftest import Server

SESSION = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"


def address(server: Server, query: str = "") -> str:
    return f"{server.url.replace('http', 'ws')}/runtimes/{quote(server.arn, safe='')}/ws{query}"


async def test_messages_go_both_ways_within_the_session(server: Server, session_id: str) -> None:
    async with connect(address(server), additional_headers={SESSION: session_id}) as ws:
        assert ws.response.headers[SESSION] == session_id
        for word in ("one", "two"):
            await ws.send(word)
            assert await ws.recv() == f"{session_id}: {word}"
        assert server.session(session_id)["state"] == "active"
        await ws.send("bye")
        with pytest.raises(websockets.ConnectionClosedOK):
            await ws.recv()


async def test_session_id_may_come_in_the_query(server: Server, session_id: str) -> None:
    async with connect(address(server, f"?{SESSION}={session_id}")) as ws:
        await ws.send("hi")
        assert await ws.recv() == f"{session_id}: hi"


@pytest.mark.parametrize(("query", "status"), [("?qualifier=nowhere", 404), (f"?{SESSION}=short", 400)])
async def test_refusals_carry_the_http_status(server: Server, query: str, status: int) -> None:
    with pytest.raises(websockets.InvalidStatus) as error:
        async with connect(address(server, query)):
            raise AssertionError("it was accepted")
    assert error.value.response.status_code == status
