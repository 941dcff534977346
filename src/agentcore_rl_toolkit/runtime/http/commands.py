"""InvokeAgentRuntimeCommand: run a shell command in a session's environment, output as an event stream."""

from __future__ import annotations

import asyncio
import codecs
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..._parsing import parse_json
from ..api import eventstream
from ..sessions.command_output import CommandOutput
from ..sessions.session import Session, is_over
from ..wire import SESSION_HEADER, invalid
from .responses import Send, as_wire_error

Emit = Callable[[Any], Awaitable[None]]
MAX_COMMAND_CHARS = 65_536
MAX_TIMEOUT_S, DEFAULT_TIMEOUT_S = 3_600, 300
CHUNK_BYTES = 64_000  # AWS: 64 KB a chunk
PLATFORM_ERROR = -1  # AWS's exit code where the command is not to blame
_numbers = itertools.count(1)
SESSION_END_S = 0.2
_STREAMS = {b"o": "stdout", b"e": "stderr"}


def parse_command(body: bytes) -> tuple[str, int]:
    """Command and timeout of a request body. Raises: WireError 400."""
    try:
        request = parse_json(body)
        command, timeout = request["command"], request.get("timeout", DEFAULT_TIMEOUT_S)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise invalid("The body must be a JSON object with 'command'", reason="CannotParse") from None
    if not isinstance(command, str) or not 1 <= len(command) <= MAX_COMMAND_CHARS:
        raise invalid(f"command must have 1 to {MAX_COMMAND_CHARS} characters", field="command")
    if "\0" in command or any("\ud800" <= c <= "\udfff" for c in command):
        raise invalid("command must not contain null characters or halves of surrogate pairs", field="command")
    if not isinstance(timeout, int) or isinstance(timeout, bool) or not 1 <= timeout <= MAX_TIMEOUT_S:
        raise invalid(f"timeout must be 1 to {MAX_TIMEOUT_S} seconds", field="timeout")
    return command, timeout


async def run_command(
    session: Session, command: str, timeout_s: float, send: Send, more_headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Run the command beside the session's server, in the same confinement; it ends with the session.

    A caller that goes away does not end it. What goes wrong once the reply has begun ends it as an exception event.
    """
    headers = [(b"content-type", eventstream.CONTENT_TYPE), (SESSION_HEADER, session.id.encode()), *more_headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def emit(payload: Any) -> None:
        await send({"type": "http.response.body", "body": eventstream.event(payload), "more_body": True})

    try:
        await _run(session, command, timeout_s, emit)
        last = b""
    except Exception as e:
        error = as_wire_error(e)
        last = eventstream.exception(error.code[0].lower() + error.code[1:], error.message)
    await send({"type": "http.response.body", "body": last})


async def _run(session: Session, command: str, timeout_s: float, emit: Emit) -> None:
    number = next(_numbers)
    path = f"{session.socket_path}{number}"

    async def copy(stream: bytes, reader: asyncio.StreamReader) -> None:
        name = _STREAMS.get(stream)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may come in two pieces
        while name is not None:
            data = await reader.read(CHUNK_BYTES)
            text = decoder.decode(data, final=not data)
            if text:
                await emit({"contentDelta": {name: text}})
            if not data:
                break

    await emit({"contentStart": {}})
    status = "COMPLETED"
    async with CommandOutput(path, copy) as output:
        process = session.process.command(str(number), command, path)
        try:
            async with asyncio.timeout(timeout_s):
                code = await asyncio.shield(process.ended)
        except TimeoutError:
            status = "TIMED_OUT"
            process.kill()
            code = await process.ended
        await output.rest()
        if process.error is not None:
            await emit({"contentDelta": {"stderr": f"the command could not be started: {process.error}\n"}})
        exit_code = code if code >= -1 else 128 - code  # a signal, as a shell reports it
        if exit_code > 128 and status == "COMPLETED" and await _ended(session):
            await emit({"contentDelta": {"stderr": f"the session ended while the command ran: {session.state}\n"}})
            exit_code = PLATFORM_ERROR
        await emit({"contentStop": {"exitCode": exit_code, "status": status}})


async def _ended(session: Session) -> bool:
    """Whether the session is over. What it ran is killed before its own end is known."""
    if not is_over(session):
        await asyncio.wait([session.process.ended], timeout=SESSION_END_S)
        await asyncio.sleep(0)
    return is_over(session)
