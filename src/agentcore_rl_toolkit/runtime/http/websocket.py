"""Bridge a caller's WebSocket to the session's ``/ws``."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import websockets
from websockets import Subprotocol
from websockets.asyncio.client import ClientConnection, connect, unix_connect

from ..sessions.connection import UpstreamLostError
from ..sessions.session import Session
from ..wire import REQUEST_ID_HEADER, SESSION_HEADER, Headers, forwarded_headers, invalid
from .protocol import Receive, Send

MAX_FRAME_BYTES = 64 * 1024  # AWS's quota
_IN_QUERY = re.compile(rb"x-amzn-bedrock-agentcore-runtime-[a-z0-9-]+")


def with_query(headers: Headers, query: Mapping[str, str]) -> Headers:
    """A handshake's headers and those that its address carries, as presigned ones do: what has no header of its own name.

    Raises: WireError 400 for a value that no header can have.
    """
    given = {k for k, _ in headers}
    more = []
    for name, value in query.items():
        key = name.lower().encode(errors="replace")
        if key not in given and _IN_QUERY.fullmatch(key):
            if not (value.isascii() and value.isprintable()):
                raise invalid(f"{name} must be printable ASCII", field=name)
            more.append((key, value.encode()))
    return [*headers, *more]


async def bridge(
    session: Session, headers: Headers, request_id: str, subprotocols: Sequence[str], receive: Receive, send: Send
) -> None:
    """Relay messages both ways until one side closes. The caller's handshake is answered only once the agent's is.

    Raises: OSError, websockets.InvalidHandshake when the agent takes no WebSocket.
    """
    sent = forwarded_headers(headers, session.agent.header_allowlist)
    sent += [(SESSION_HEADER, session.id.encode()), (REQUEST_ID_HEADER, request_id.encode())]
    options: dict[str, Any] = {
        "additional_headers": [(k.decode("latin-1"), v.decode("latin-1")) for k, v in sent if k != b"content-type"],
        "compression": None,
        "max_size": MAX_FRAME_BYTES,
        "ping_interval": None,
        "open_timeout": 30,
        "subprotocols": [Subprotocol(name) for name in subprotocols] or None,
    }
    dial = getattr(session.process, "dial", None)
    if dial is None:
        connection = unix_connect(session.socket_path, uri="ws://localhost/ws", **options)
    else:  # its node is another machine
        try:
            connection = connect("ws://localhost/ws", sock=await dial(), **options)
        except UpstreamLostError as e:
            raise ConnectionError(str(e)) from e
    async with connection as agent:
        accepted: dict[str, Any] = {"type": "websocket.accept", "headers": [(SESSION_HEADER, session.id.encode())]}
        await send({**accepted, "subprotocol": agent.subprotocol})
        tasks = [asyncio.create_task(_to_agent(agent, receive)), asyncio.create_task(_to_caller(agent, send))]
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _to_agent(agent: ClientConnection, receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            await agent.close(message.get("code") or 1000)
            return
        if message["type"] == "websocket.receive":
            text, data = message.get("text"), message.get("bytes")
            content = text if text is not None else data or b""
            if len(content) > MAX_FRAME_BYTES:
                await agent.close(1009)
                return
            try:
                await agent.send(content)
            except websockets.ConnectionClosed:
                return


async def _to_caller(agent: ClientConnection, send: Send) -> None:
    try:
        async for message in agent:
            if isinstance(message, str):
                await send({"type": "websocket.send", "text": message})
            else:
                await send({"type": "websocket.send", "bytes": message})
        code = agent.close_code
    except websockets.ConnectionClosed as e:
        code = e.rcvd.code if e.rcvd is not None else 1011
    if code in (None, 1005, 1006):
        code = 1000 if code == 1005 else 1011
    await send({"type": "websocket.close", "code": code})
