"""InvokeAgentRuntimeCommand: run a shell command in a session's environment, output as an event stream."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Send

from ..._event_stream import CONTENT_TYPE, event, exception
from ..._parsing import parse_json
from ..sessions.session import Session
from ..wire import SESSION_HEADER, invalid
from .responses import as_wire_error

Emit = Callable[[Any], Awaitable[None]]
MAX_COMMAND_CHARS = 65_536
MAX_TIMEOUT_S, DEFAULT_TIMEOUT_S = 3_600, 300
PLATFORM_ERROR = -1  # AWS's exit code for a failure of the platform
SESSION_END_S = 0.2


def parse_command(body: bytes) -> tuple[str, int]:
    """Return command and timeout of a request body. Raises: WireError 400."""
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


async def run_command(session: Session, command: str, timeout_s: float, send: Send) -> None:
    """Run the command in the environment of a session. It ends with the session.

    A caller that disconnects does not end it. An error after the beginning of the response ends it as an exception event.
    """
    headers = [(b"content-type", CONTENT_TYPE.encode()), (SESSION_HEADER, session.id.encode("latin-1"))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def emit(payload: Any) -> None:
        await send({"type": "http.response.body", "body": event(payload), "more_body": True})

    try:
        await _run(session, command, timeout_s, emit)
        last = b""
    except Exception as e:
        error = as_wire_error(e)
        last = exception(error.code[0].lower() + error.code[1:], error.message)
    await send({"type": "http.response.body", "body": last})


async def _run(session: Session, text: str, timeout_s: float, emit: Emit) -> None:
    # A character may come in two pieces.
    decoders = {name: codecs.getincrementaldecoder("utf-8")(errors="replace") for name in ("stdout", "stderr")}

    async def write(name: str, data: bytes) -> None:
        shown = decoders[name].decode(data, final=not data)
        if shown:
            await emit({"contentDelta": {name: shown}})

    assert session.process is not None
    await emit({"contentStart": {}})
    end = await session.process.command(text, write, timeout_s)
    if end.error is not None:
        await emit({"contentDelta": {"stderr": f"the command could not be started: {end.error}\n"}})
    exit_code = end.code if end.code >= -1 else 128 - end.code  # a signal, as a shell reports it
    if exit_code > 128 and not end.timed_out and await _ended(session):
        await emit({"contentDelta": {"stderr": f"the session ended while the command ran: {session.state}\n"}})
        exit_code = PLATFORM_ERROR
    await emit({"contentStop": {"exitCode": exit_code, "status": "TIMED_OUT" if end.timed_out else "COMPLETED"}})


async def _ended(session: Session) -> bool:
    """Return True if the session is over. Its command is killed before its own end is known."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(session.closed.wait(), SESSION_END_S)
    return session.closed.is_set()
