"""Rehearses a model call in the template, so that what client libraries build at their first call is there before the fork.

openai's client leaves much to that call: validators of its types, resolved annotations, tables of the HTTP library below. Every
session would build them again, each for itself. So the template makes two calls, against a server of its own on a unix socket.
No request leaves the process, no object of the agent takes part, and what the calls return is dropped. Where the agent has
replaced a part of the library there is no rehearsal, so that it sees no call that is not its own. The rehearsal is tried in a
throw-away fork first: where it fails, hangs or leaves a thread behind, the template does without.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import tempfile
import types
from typing import Any

from ..launcher import linux
from .warm import works_in_a_fork

DEADLINE_S = 10.0
_PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
_TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": _PARAMETERS}}]
_CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
_CHAT: dict[str, Any] = {"id": "r", "created": 0, "model": "m"}
_MESSAGES: list[Any] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "t"}]},
    {"role": "user", "content": "u"},
]


def _chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    return {**_CHAT, "object": "chat.completion.chunk", "choices": [choice]}


_CHUNKS = [
    _chunk({"role": "assistant", "content": ""}),
    _chunk({"content": "a"}),
    _chunk({"tool_calls": [{"index": 0, **_CALL}]}),
    _chunk({}, "tool_calls"),
    {**_CHAT, "object": "chat.completion.chunk", "choices": [], "usage": _USAGE},
]
_STREAM = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in _CHUNKS) + "data: [DONE]\n\n"
_MESSAGE = {"role": "assistant", "content": "a", "tool_calls": [_CALL], "refusal": None}
_REPLY = {
    **_CHAT,
    "object": "chat.completion",
    "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "tool_calls", "logprobs": None}],
    "usage": _USAGE,
}


def rehearse() -> bool:
    """Make the calls, if the agent has loaded the library and they are safe to make. Returns: whether they were made."""
    if "openai" not in sys.modules or not works_in_a_fork(_run):
        return False
    _run()
    linux.without_threads(DEADLINE_S)  # those that the probe saw end
    return True


def _run() -> None:
    """Raises: whatever the libraries raise; TimeoutError."""
    import httpx
    import openai
    from openai.resources.chat.completions import AsyncCompletions

    _check_own(openai, AsyncCompletions.create, openai.AsyncOpenAI.__init__, openai.AsyncOpenAI.post)
    _check_own(httpx, httpx.AsyncClient.__init__, httpx.AsyncClient.send, httpx.AsyncHTTPTransport.handle_async_request)
    quiet_before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    loop = asyncio.SelectorEventLoop()  # never set as the current one: the agent's code finds asyncio as it left it
    try:
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
            loop.run_until_complete(asyncio.wait_for(_call(os.path.join(folder, "s")), DEADLINE_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())  # and with it the thread that the client asked for
    finally:
        loop.close()
        logging.disable(quiet_before)


def _check_own(package: types.ModuleType, *functions: Any) -> None:
    """Raises: RuntimeError where a function is not the package's own, but somebody's around it."""
    folder = os.path.join(os.path.dirname(str(package.__file__)), "")
    for function in functions:
        if type(function) is not types.FunctionType or not function.__code__.co_filename.startswith(folder):
            raise RuntimeError(f"{function!r} is not {package.__name__}'s own")


async def _call(path: str) -> None:
    import httpx
    import openai

    answering: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.ensure_future(_answer(reader, writer)))

    server = await asyncio.start_unix_server(accept, path)
    client = openai.AsyncOpenAI(
        api_key="none",
        base_url="http://127.0.0.1/v1",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), trust_env=False),
    )
    chat: dict[str, Any] = {"model": "m", "messages": _MESSAGES, "max_tokens": 1, "temperature": 1.0, "tools": _TOOLS}
    async with server, client:
        stream = await client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
        async for _ in stream:
            pass
        await client.chat.completions.create(**chat)
    await asyncio.gather(*answering)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """HTTP/1.1, as far as the client's two requests need it."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            streams = json.loads(await reader.readexactly(length)).get("stream", False)
            kind, body = ("text/event-stream", _STREAM) if streams else ("application/json", json.dumps(_REPLY))
            writer.write(
                f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
            )
            await writer.drain()
    writer.close()
