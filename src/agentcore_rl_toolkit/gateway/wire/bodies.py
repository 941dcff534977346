"""Parse large request bodies in another process.

A thread does not help against one decoder call that holds the interpreter's lock: 60 MB stop the event loop for seconds. So a
body over `LARGE_BYTES` goes to a process of its own. It starts in a fraction of a second, and its memory is free again when it
ends. The messages come back one by one, and the event loop runs between them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ...messages.wire import DIALECTS, ModelRequest, RequestError
from ...messages.wire.fields import HALF_SURROGATE
from ...messages.wire.fields import read_body as read_json

LARGE_BYTES = 4 * 2**20  # decoding as much takes some 20 ms
DEADLINE_S = 60.0  # for one body, with the wait for those before it

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A request in canonical form, and the JSON of each of its messages."""

    request: ModelRequest
    texts: list[bytes]


class BodyParser:
    """Parses large bodies, one at a time.

    Raises: RequestError. Its kind is "timeout" when the deadline passes, "internal" when the other process breaks.
    """

    def __init__(self, *, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._turn = asyncio.Lock()

    async def fields(self, body: bytes) -> tuple[dict[str, msgspec.Raw], int]:
        """Return the members of a JSON object, undecoded, and the number of half surrogates that were replaced."""
        halves, *members = await self._run({}, body)
        names, texts = members[::2], members[1::2]
        return {name.decode(): msgspec.Raw(text) for name, text in zip(names, texts, strict=True)}, int(halves)

    async def parse(
        self, body: bytes, dialect: str, recorded: Mapping[str, dict[str, Any]] | None = None
    ) -> ParsedBody:
        """Parse a request. ``recorded`` are the session's replies to which an `item_reference` may refer."""
        about, *texts = await self._run({"dialect": dialect, "recorded": dict(recorded or {})}, body)
        request = msgspec.msgpack.decode(about, type=ModelRequest)
        since_pause = 0
        for at, text in enumerate(texts):
            if len(text) > LARGE_BYTES:
                raise RequestError(f"messages[{at}] is larger than {LARGE_BYTES} bytes", kind="too_large")
            request.messages.append(msgspec.json.decode(text))
            since_pause += len(text)
            if since_pause > LARGE_BYTES // 16:
                since_pause = 0
                await asyncio.sleep(0)
        return ParsedBody(request, texts)

    async def _run(self, job: dict[str, Any], body: bytes) -> list[bytes]:
        try:
            async with asyncio.timeout(self._deadline_s), self._turn:
                output = await _output_of(msgspec.msgpack.encode([job, body]))
        except TimeoutError as e:
            why = f"parsing {len(body)} bytes took more than {self._deadline_s:g} s; try again, or send less"
            raise RequestError(why, kind="timeout") from e
        try:
            error, pieces = msgspec.msgpack.decode(output)
        except msgspec.DecodeError as e:
            raise RequestError("the process that parses large bodies ended; try again", kind="internal") from e
        if error is not None:
            raise RequestError(**error)
        return list(pieces)


async def _output_of(job: bytes) -> bytes:
    """Run `main` in another process."""
    package = __name__.partition(".")[0]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", f"from {package}.gateway.wire.bodies import main; main()"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # an interrupt from the keyboard is for the gateway
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        return (await process.communicate(job))[0]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# -- the other process


def main() -> None:
    """Do the job that comes on stdin, and write an error or the result to stdout."""
    job, body = msgspec.msgpack.decode(sys.stdin.buffer.read())
    error, pieces = None, []
    try:
        pieces = _parsed(body, **job) if job else _members(body)
    except RequestError as e:
        error = {"message": e.message, "kind": e.kind, "param": e.param, "code": e.code, "status": e.status}
    sys.stdout.buffer.write(msgspec.msgpack.encode([error, pieces]))


def _members(body: bytes) -> list[bytes]:
    fields, halves = read_json(body, _fields.decode)
    if not body.isascii():
        read_json(body, msgspec.json.decode)  # bytes that are not UTF-8
    return [b"%d" % halves, *(piece for name, text in fields.items() for piece in (name.encode(), bytes(text)))]


def _parsed(body: bytes, dialect: str, recorded: dict[str, Any]) -> list[bytes]:
    data, halves = read_json(body, msgspec.json.decode)
    request = DIALECTS[dialect].with_recorded(recorded.get).parse_request(data)
    if halves:
        request.left_out[HALF_SURROGATE] = halves
    messages, request.messages = request.messages, []
    return [msgspec.msgpack.encode(request), *map(msgspec.json.encode, messages)]
