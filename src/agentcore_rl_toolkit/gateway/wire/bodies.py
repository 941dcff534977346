"""Parse large request bodies in a helper process.

A thread does not help against one decoder call that holds the interpreter's lock: 60 MB stop the event loop for seconds. So a
body over `LARGE_BYTES` goes to a process of its own, which is started for the first such body and ends when it was idle for a
while, so that its memory is free again. The messages come back one by one, and the event loop runs between them.

The wire between the two processes: a length, a MessagePack head, and as many bytes as the head's ``sizes`` sum up to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from ...messages.wire import DIALECTS, ModelRequest, RequestError
from ...messages.wire.fields import HALF_SURROGATE
from ...messages.wire.fields import read_body as read_json

LARGE_BYTES = 4 * 2**20  # decoding as much takes some 20 ms
DEADLINE_S = 60.0  # for one body, with the wait for those before it
IDLE_S = 60.0

_HEAD = struct.Struct("<I")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _too_large(what: str, limit_bytes: int) -> RequestError:
    return RequestError(f"{what} is larger than {limit_bytes} bytes", kind="too_large")


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A request in canonical form, and the JSON of each of its messages."""

    request: ModelRequest
    texts: list[bytes]


class BodyParser:
    """Parses large bodies, one at a time, in a helper process.

    Raises: RequestError. Its kind is "timeout" when the deadline passes, "internal" when the helper ends on the way.
    """

    def __init__(self, *, deadline_s: float = DEADLINE_S, idle_s: float = IDLE_S) -> None:
        self._deadline_s = deadline_s
        self._idle_s = idle_s
        self._turn = asyncio.Lock()
        self._helper: asyncio.subprocess.Process | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ended: list[asyncio.subprocess.Process] = []

    @property
    def pid(self) -> int | None:
        """The helper's process id. None: there is no helper."""
        return self._helper.pid if self._helper is not None else None

    async def fields(self, body: bytes) -> tuple[dict[str, msgspec.Raw], int]:
        """Return the members of a JSON object, undecoded, and the number of half surrogates that were replaced."""
        head, pieces = await self._ask({"job": "fields"}, body)
        return dict(zip(head["names"], map(msgspec.Raw, pieces), strict=True)), head["halves"]

    async def parse(
        self, body: bytes, dialect: str, recorded: Mapping[str, dict[str, Any]] | None = None
    ) -> ParsedBody:
        """Parse a request. ``recorded`` are the session's replies to which an `item_reference` may refer."""
        job = {"job": "parse", "dialect": dialect, "recorded": dict(recorded or {})}
        _, (about, *texts) = await self._ask(job, body)
        request = msgspec.msgpack.decode(about, type=ModelRequest)
        since_pause = 0
        for at, text in enumerate(texts):
            if len(text) > LARGE_BYTES:
                raise _too_large(f"messages[{at}]", LARGE_BYTES)
            request.messages.append(msgspec.json.decode(text))
            since_pause += len(text)
            if since_pause > LARGE_BYTES // 16:
                since_pause = 0
                await asyncio.sleep(0)
        return ParsedBody(request, texts)

    async def close(self) -> None:
        """End the helper, and wait for all that ended before."""
        if self._idle is not None:
            self._idle.cancel()
        self._kill()
        await asyncio.gather(*(helper.communicate() for helper in self._ended))

    async def _ask(self, job: dict[str, Any], body: bytes) -> tuple[dict[str, Any], list[bytes]]:
        try:
            async with asyncio.timeout(self._deadline_s), self._turn:
                if self._idle is not None:
                    self._idle.cancel()
                try:
                    answer = await self._exchange({**job, "sizes": [len(body)]}, body)
                except BaseException:  # the next answer on this pipe would be this one
                    self._kill()
                    raise
                self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._kill)
        except TimeoutError as e:
            why = f"parsing {len(body)} bytes took more than {self._deadline_s:g} s; try again, or send less"
            raise RequestError(why, kind="timeout") from e
        except (asyncio.IncompleteReadError, ConnectionError) as e:
            raise RequestError("the process that parses large bodies ended; try again", kind="internal") from e
        if "error" in answer[0]:
            raise RequestError(**answer[0]["error"])
        return answer

    async def _exchange(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], list[bytes]]:
        if self._helper is None:
            package = __name__.partition(".")[0]
            self._helper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", f"from {package}.gateway.wire.bodies import main; main()"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # an interrupt from the keyboard is for the gateway
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        reader, writer = self._helper.stdout, self._helper.stdin
        assert reader is not None
        assert writer is not None
        writer.writelines([_framed(head), body])
        await writer.drain()
        answer = msgspec.msgpack.decode(await reader.readexactly(*_HEAD.unpack(await reader.readexactly(_HEAD.size))))
        return answer, [await reader.readexactly(size) for size in answer["sizes"]]

    def _kill(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            with contextlib.suppress(ProcessLookupError):
                helper.kill()
            self._ended = [each for each in self._ended if each.returncode is None] + [helper]


def _framed(head: dict[str, Any]) -> bytes:
    data = msgspec.msgpack.encode(head)
    return _HEAD.pack(len(data)) + data


# -- the helper


def main() -> None:
    """Serve jobs from stdin until it ends, which it does with the gateway."""
    for head, body in _jobs(sys.stdin.buffer):
        try:
            answer, pieces = _done(head, body)
        except RequestError as e:
            error = {"message": e.message, "kind": e.kind, "param": e.param, "code": e.code, "status": e.status}
            answer, pieces = {"error": error}, []
        answer["sizes"] = list(map(len, pieces))
        for piece in (_framed(answer), *pieces):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def _jobs(stream: BinaryIO) -> Iterator[tuple[dict[str, Any], bytes]]:
    while len(length := stream.read(_HEAD.size)) == _HEAD.size:
        head = msgspec.msgpack.decode(stream.read(*_HEAD.unpack(length)))
        yield head, stream.read(head["sizes"][0])


def _done(head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    if head["job"] == "fields":
        fields, halves = read_json(body, _fields.decode)
        if not body.isascii():
            read_json(body, msgspec.json.decode)  # bytes that are not UTF-8
        return {"names": list(fields), "halves": halves}, [bytes(raw) for raw in fields.values()]
    dialect = DIALECTS[head["dialect"]].with_recorded(head["recorded"].get)
    data, halves = read_json(body, msgspec.json.decode)
    request = dialect.parse_request(data)
    if halves:
        request.left_out[HALF_SURROGATE] = halves
    messages, request.messages = request.messages, []
    return {}, [msgspec.msgpack.encode(request), *map(msgspec.json.encode, messages)]
