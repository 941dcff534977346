"""Interactive shells in sessions: `/runtimes/{arn}/ws/shells`, frames of one channel byte and a payload.

Theory of operation. A shell is a command beside the session's agent that keeps a terminal; it belongs to its session under the
caller's shell id. One caller at a time is attached: a second one takes over, and the first is closed with 4000. When a caller
goes away the shell stays, and the last 256 KB of what it shows wait for the next one. It ends by itself, with a close frame of
its caller, an hour after its start, or with the session.

Source: bedrock-agentcore 1.25, runtime.shell.protocol (v5.channel.k8s.io): channels 0 input, 1 output, 3 status, 4 size,
5 heartbeat, 255 close; AWS's quotas of 10 shells a session and an hour each.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import re
import shlex
import struct
import weakref
from pathlib import Path
from typing import Any

from ..._parsing import parse_json
from ..sessions.session import Session
from ..wire import SESSION_HEADER, WireError, invalid
from . import shell_relay
from .protocol import Receive, Send

INPUT, OUTPUT, STATUS, SIZE, HEARTBEAT, CLOSE = 0, 1, 3, 4, 5, 255
MAX_FRAME_BYTES = 64 * 1024
KEPT_BYTES = 256 * 1024  # of output nobody was there to see
MAX_SHELLS = 10
MAX_SHELL_S = 3_600.0
START_S = 10.0
KICKED = 4000
_SHELL_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,127}")
_numbers = itertools.count(1)


@functools.cache
def _program() -> str:
    return Path(shell_relay.__file__).read_text()


def check_shell_id(shell_id: str) -> str:
    """Raises: WireError 400."""
    if not _SHELL_ID.fullmatch(shell_id):
        raise invalid("shellId must be 1 to 128 letters, digits, - and _, first one no sign", field="shellId")
    return shell_id


class Shell:
    """One terminal. ``ended`` gets its exit status."""

    def __init__(self, session: Session, shell_id: str) -> None:
        self.session = session
        self.id = shell_id
        self.command: Any = None
        self._path = f"{session.socket_path}t{next(_numbers)}"
        self._kept = bytearray()
        self._writer: asyncio.StreamWriter | None = None
        self._joined_by: set[bytes] = set()
        self._opened = asyncio.Event()
        self._drained = asyncio.Event()
        self._send: Send | None = None
        self._limit: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Start it. Raises: WireError 424 when it does not come up."""
        server = await asyncio.start_unix_server(self._joined, self._path)
        text = f"exec {shlex.quote(str(self.session.agent.python))} -c {shlex.quote(_program())}"
        try:
            self.command = self.session.process.command(f"t{next(_numbers)}", text, self._path)
            opened = asyncio.ensure_future(self._opened.wait())
            await asyncio.wait((opened, self.command.ended), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                opened.cancel()
                self.command.kill()
                raise WireError("RuntimeClientError", "The shell did not start.", localDetail=self.command.error)
        finally:
            server.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        self._limit = asyncio.get_running_loop().call_later(MAX_SHELL_S, self.command.kill)

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = await reader.read(1)
        self._joined_by.add(name)
        if self._joined_by >= {b"o", b"e"}:  # both: the socket is closed once it is open
            self._opened.set()
        if name != b"o":  # its standard error has nothing to say
            while await reader.read(4096):
                continue
            writer.close()
            return
        self._writer = writer
        try:
            while data := await reader.read(MAX_FRAME_BYTES // 2):
                await self._show(data)
        except ConnectionError:
            return
        finally:
            self._drained.set()
            writer.close()

    async def _show(self, data: bytes) -> None:
        if self._send is not None:
            await self._send({"type": "websocket.send", "bytes": bytes([OUTPUT]) + data})
            return
        self._kept += data
        del self._kept[:-KEPT_BYTES]

    @property
    def over(self) -> bool:
        return self.command is None or bool(self.command.ended.done())

    def _tell(self, kind: bytes, data: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(kind + struct.pack(">I", len(data)) + data)

    async def attach(self, receive: Receive, send: Send, *, reconnected: bool) -> None:
        """Serve one caller until it goes, another one comes, or the shell ends."""
        if self._send is not None:
            earlier, self._send = self._send, None
            await earlier({"type": "websocket.close", "code": KICKED, "reason": "kicked by new connection"})
        await send({"type": "websocket.accept", "headers": [(SESSION_HEADER, self.session.id.encode())]})
        await _status(send, {"metadata": {"shellId": self.id, "reconnected": reconnected}, "status": "Success"})
        kept, self._kept = bytes(self._kept), bytearray()
        for start in range(0, len(kept), MAX_FRAME_BYTES // 2):
            part = kept[start : start + MAX_FRAME_BYTES // 2]
            await send({"type": "websocket.send", "bytes": bytes([OUTPUT]) + part})
        self._send = send
        listening = asyncio.create_task(self._listen(receive, send))
        ended = asyncio.ensure_future(asyncio.shield(self.command.ended))
        try:
            await asyncio.wait((listening, ended), return_when=asyncio.FIRST_COMPLETED)
            if self._send is send and self.command.ended.done():
                await self._say_end(send)
        finally:
            for task in (listening, ended):
                task.cancel()
            await asyncio.gather(listening, ended, return_exceptions=True)
            if self._send is send:
                self._send = None

    async def _say_end(self, send: Send) -> None:
        if self._limit is not None:
            self._limit.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):  # what it showed last
                await self._drained.wait()
        self._send = None
        code = self.command.ended.result()
        code = code if code >= 0 else 128 - code
        if self.session.over:
            await send({"type": "websocket.send", "bytes": bytes([CLOSE])})
        elif code == 0:
            await _status(send, {"metadata": {}, "status": "Success"})
        else:
            causes = [{"reason": "ExitCode", "message": str(code)}]
            causes += [{"reason": "Signal", "message": str(code - 128)}] if code > 128 else []
            message = f"command terminated with exit code {code}"
            failure = {"reason": "NonZeroExitCode", "message": message, "details": {"causes": causes}}
            await _status(send, {"metadata": {}, "status": "Failure", **failure})
        await send({"type": "websocket.close", "code": 1000})

    async def _listen(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            data = message.get("bytes") or b""
            if len(data) > MAX_FRAME_BYTES:
                await send({"type": "websocket.close", "code": 1009})
                return
            match data[:1]:
                case b"\x00":
                    self._tell(b"i", data[1:])
                case b"\x04":
                    with contextlib.suppress(ValueError, KeyError, TypeError, struct.error):
                        size = parse_json(data[1:])
                        self._tell(b"r", struct.pack("HHHH", size["height"], size["width"], 0, 0))
                case b"\x05":
                    await send({"type": "websocket.send", "bytes": bytes([HEARTBEAT])})
                case b"\xff":
                    self.command.kill()


class Shells:
    """The shells of all sessions."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Session, dict[str, Shell]] = weakref.WeakKeyDictionary()

    async def serve(self, session: Session, shell_id: str, receive: Receive, send: Send) -> None:
        """Attach a caller to the shell of this id; a new one when there is none.

        Raises: WireError 400 where shells cannot be, 402 above ten of a session, 424 when it does not start.
        """
        if hasattr(session.process, "dial"):
            raise invalid("Shells are not supported in sessions on the nodes of a cluster.")
        shells = self._of.setdefault(session, {})
        for gone in [name for name, shell in shells.items() if shell.over]:
            del shells[gone]
        shell = shells.get(shell_id)
        reconnected = shell is not None
        if shell is None:
            if len(shells) >= MAX_SHELLS:
                raise WireError("ServiceQuotaExceededException", f"{MAX_SHELLS} shells of a session are the limit")
            shell = Shell(session, shell_id)
            await shell.open()
            shells[shell_id] = shell
        await shell.attach(receive, send, reconnected=reconnected)


async def _status(send: Send, content: dict[str, Any]) -> None:
    status = json.dumps({"kind": "Status", "apiVersion": "v1", **content}).encode()
    await send({"type": "websocket.send", "bytes": bytes([STATUS]) + status})
