"""InvokeAgentRuntimeCommand: run a shell command in a session's environment, output as an event stream."""

from __future__ import annotations

import codecs
from typing import Any

from starlette.requests import Request
from starlette.types import Send

from ..._event_stream import CONTENT_TYPE, event, exception
from ..sessions.session import Session
from ..wire import SESSION_HEADER, invalid
from .responses import as_wire_error, object_of

MAX_COMMAND_CHARS = 65_536
MAX_TIMEOUT_S, DEFAULT_TIMEOUT_S = 3_600, 300


def parse_command(request: Request) -> tuple[str, int]:
    """Return command and timeout of a request. Raises: WireError 400."""
    body = object_of(request)
    command, timeout = body.get("command"), body.get("timeout", DEFAULT_TIMEOUT_S)
    if not isinstance(command, str) or "\0" in command or not 1 <= len(command) <= MAX_COMMAND_CHARS:
        raise invalid(f"command must have 1 to {MAX_COMMAND_CHARS} characters, and none of them null", field="command")
    if type(timeout) is not int or not 1 <= timeout <= MAX_TIMEOUT_S:
        raise invalid(f"timeout must be 1 to {MAX_TIMEOUT_S} seconds", field="timeout")
    return command, timeout


async def run_command(session: Session, command: str, timeout_s: float, send: Send) -> None:
    """Run the command in the environment of a session. It ends with the session.

    A caller that disconnects does not end it. An error after the beginning of the response ends it as an exception event.
    """
    headers = [(b"content-type", CONTENT_TYPE.encode()), (SESSION_HEADER, session.id.encode("latin-1"))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def emit(**payload: Any) -> None:
        await send({"type": "http.response.body", "body": event(payload), "more_body": True})

    # A character may come in two pieces.
    decoders = {name: codecs.getincrementaldecoder("utf-8")(errors="replace") for name in ("stdout", "stderr")}

    async def write(name: str, data: bytes) -> None:
        if shown := decoders[name].decode(data, final=not data):
            await emit(contentDelta={name: shown})

    assert session.process is not None
    last = b""
    try:
        await emit(contentStart={})
        end = await session.process.command(command, write, timeout_s)
        if end.error is not None:
            await emit(contentDelta={"stderr": f"the command could not be started: {end.error}\n"})
        exit_code = 128 - end.code if end.code < 0 and end.error is None else end.code  # a signal, as in a shell
        await emit(contentStop={"exitCode": exit_code, "status": "TIMED_OUT" if end.timed_out else "COMPLETED"})
    except Exception as e:
        error = as_wire_error(e)
        last = exception(error.code[0].lower() + error.code[1:], error.message)
    await send({"type": "http.response.body", "body": last})
