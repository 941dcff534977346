"""InvokeAgentRuntimeCommand: run a shell command in a session's environment, output as an event stream."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from . import eventstream
from .sessions import Session
from .wire import SESSION_HEADER, invalid

Send = Callable[[dict[str, Any]], Awaitable[None]]
MAX_COMMAND_CHARS = 65_536
MAX_TIMEOUT_S, DEFAULT_TIMEOUT_S = 3_600, 300
CHUNK_BYTES = 64_000  # AWS: 64 KB a chunk


def parse_command(body: bytes) -> tuple[str, int]:
    """Command and timeout of a request body. Raises: WireError 400."""
    try:
        request = json.loads(body)
        command, timeout = request["command"], request.get("timeout", DEFAULT_TIMEOUT_S)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise invalid("The body must be a JSON object with 'command'", reason="CannotParse") from None
    if not isinstance(command, str) or not 1 <= len(command) <= MAX_COMMAND_CHARS:
        raise invalid(f"command must have 1 to {MAX_COMMAND_CHARS} characters", field="command")
    if not isinstance(timeout, int) or isinstance(timeout, bool) or not 1 <= timeout <= MAX_TIMEOUT_S:
        raise invalid(f"timeout must be 1 to {MAX_TIMEOUT_S} seconds", field="timeout")
    return command, timeout


async def run_command(session: Session, command: str, timeout_s: float, env: Mapping[str, str], send: Send) -> None:
    """Run the command beside the session's server: same folder, same environment, ended with the session."""
    process = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-c",
        command,
        cwd=session.directory,
        env={**env, "HOME": str(session.directory), "TMPDIR": str(session.directory / "tmp")},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    session.commands.add(process.pid)
    headers = [(b"content-type", eventstream.CONTENT_TYPE), (SESSION_HEADER, session.id.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def emit(payload: Any) -> None:
        await send({"type": "http.response.body", "body": eventstream.event(payload), "more_body": True})

    async def pump(name: str, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(CHUNK_BYTES):
            await emit({"contentDelta": {name: data.decode(errors="replace")}})

    assert process.stdout is not None
    assert process.stderr is not None
    status = "COMPLETED"
    try:
        await emit({"contentStart": {}})
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(pump("stdout", process.stdout), pump("stderr", process.stderr))
                exit_code = await process.wait()
        except TimeoutError:
            status = "TIMED_OUT"
            kill_group(process.pid)
            exit_code = await process.wait()
        await emit({"contentStop": {"exitCode": exit_code, "status": status}})
        await send({"type": "http.response.body", "body": b""})
    finally:
        if process.returncode is None:
            kill_group(process.pid)
            await process.wait()
        session.commands.discard(process.pid)


def kill_group(pid: int) -> None:
    """SIGKILL a command's process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
