"""What most tests of the gateway do: open a session, ask in it as agents do, wait, read what was recorded, be its engine."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anthropic
import boto3
import botocore.loaders
import botocore.session
import openai
import pytest

import agentcore_rl_toolkit
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionCapture, SessionHandle
from agentcore_rl_toolkit.gateway.http.client import request
from scripted_engine import ScriptedEngine

MODEL = Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights"
USER: Any = [{"role": "user", "content": "hello there"}]
Start = Callable[..., Awaitable[Gateway]]  # of the fixture `start_gateway`
LOADER = botocore.loaders.create_loader()  # shared, because it takes 80 ms to read the models of a service
TLS = {"verify": ssl.create_default_context()}  # for Google's client, which would make three of 30 ms each


async def opened(gateway: Gateway, **settings: Any) -> SessionHandle:
    return (await GatewayClient(gateway.url).create_sessions_async([new_session_id()], **settings))[0]


async def captured(where: Gateway | GatewayClient, session: SessionHandle, *, close: bool = True) -> SessionCapture:
    return (await GatewayClient(where.url).fetch_async([session.session_id], close=close))[session.session_id]


def gpt(session: SessionHandle) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)


def claude(session: SessionHandle) -> anthropic.AsyncAnthropic:
    url = session.base_url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=url, api_key=session.api_key, max_retries=0)


def boto(**keys: str) -> boto3.Session:
    """A session of Amazon's library, with keys or the environment's."""
    made = botocore.session.get_session()
    made.register_component("data_loader", LOADER)
    return boto3.Session(botocore_session=made, **keys)


async def ask(session: SessionHandle, *texts: str, **more: Any) -> tuple[int, bytes]:
    """Status and body of a chat call: its messages are these texts, of user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts or ["hi"])]
    body = {"model": "m", "messages": messages, **more}
    return await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key, timeout_s=60)


async def status_of(session: SessionHandle, *texts: str, **more: Any) -> int:
    return (await ask(session, *texts, **more))[0]


async def message_of(session: SessionHandle, messages: list[Any], **more: Any) -> dict[str, Any]:
    """The reply's message, as an agent puts it into its history."""
    status, reply = await ask(session, messages=messages, **more)
    assert status == 200, reply
    return dict(json.loads(reply)["choices"][0]["message"])


async def attempt(session: SessionHandle, *, retry: int = 0, key: str | None = None, **more: Any) -> str:
    """The text that one attempt of OpenAI's client is answered with, on a connection of its own."""
    headers = {"x-stainless-retry-count": str(retry)} | ({"idempotency-key": key} if key else {})
    body = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], **more}
    async with gpt(session) as llm:
        reply = await llm.chat.completions.create(**body, extra_headers=headers)
        return str(reply.choices[0].message.content)


async def until(reached: Callable[[], Any], within_s: float = 60.0) -> None:
    """Wait for what has no event: it is at the other end of a socket, or the gateway's clock does it."""
    async with asyncio.timeout(within_s):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def hang_up(engine: ScriptedEngine, session: SessionHandle, *, stream: bool) -> None:
    """Ask, and close the connection: in the middle of the stream, or while the reply is awaited."""
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}
    async with gpt(session) as llm:
        if stream:
            reply = await llm.chat.completions.create(**asked, stream=True)
            async for _ in reply:
                break
            await reply.close()
            return
        call = asyncio.ensure_future(llm.chat.completions.create(**asked))
        await until(lambda: engine.calls)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


async def asked(
    session: SessionHandle,
    *,
    headers: dict[str, str] | None = None,
    version: str = "1.1",
    limit: int = 2**16,
    reads: bool = True,
    **fields: Any,
) -> tuple[Any, Any]:
    """Send a call and leave its reply to the test: the two ends of its connection, which takes not much more than
    twice ``limit`` bytes that nobody reads. With ``reads`` False what comes stays with the system.
    """
    place, _, route = session.base_url.removeprefix("http://").partition("/")
    host, _, port = place.partition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * limit)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
    if not reads:
        writer.transport.pause_reading()
    body = json.dumps({"model": "m", "messages": USER, **fields}).encode()
    reply = {
        "host": place,
        "authorization": f"Bearer {session.api_key}",
        **(headers or {}),
        "content-length": len(body),
    }
    head = f"POST /{route}/chat/completions HTTP/{version}\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in reply.items()
    )
    writer.write(head.encode() + b"\r\n" + body)
    await writer.drain()
    return reader, writer


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def asked_by(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of the next request of a connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
    return head, await reader.readexactly(int(length or 0))


@asynccontextmanager
async def talking(talk: Talk, **options: Any) -> AsyncIterator[str]:
    """A server that does this with each of its connections, and then hangs up."""
    writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await talk(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, **options)
    try:
        yield f"{'https' if 'ssl' in options else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0.01)
