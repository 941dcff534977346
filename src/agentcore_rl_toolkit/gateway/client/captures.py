"""Reads the recorded calls of sessions from the answer to a bulk fetch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import GatewayError
from ...trajectory import Turn
from ..capture.record import CallRecord, FetchedHead, decode
from ..capture.turns import expand


@dataclass(frozen=True, kw_only=True)
class SessionCapture:
    """Everything recorded of one session. ``dialogue`` is for people; ``turns`` are for training.

    ``errors`` lists the calls that did not become turns, each with ``status`` (error, partial, aborted, invalid,
    refused), ``http_status``, ``type``, ``field`` (of a refused request), ``message``, ``started_s``, ``finished_s``.
    ``train`` is the session's rule of what trains, if it has one.
    """

    session_id: str
    turns: list[Turn] = field(repr=False)
    dialogue: list[dict[str, Any]] = field(repr=False)
    errors: list[dict[str, Any]] = field(repr=False)
    closed: bool = False
    created_s: float | None = None
    train: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    records: list[CallRecord] = field(default_factory=list, repr=False)


_head = msgspec.msgpack.Decoder(FetchedHead)


async def read_captures(chunks: AsyncIterator[bytes], count: int) -> AsyncIterator[SessionCapture]:
    """Yield the sessions that the gateway knows, of ``count`` sessions. Raises: GatewayError if the response breaks off."""
    frames = _frames(chunks)
    for _ in range(count):
        head = _head.decode(await anext(frames))
        records = [await anext(frames) for _ in range(head.records)]
        if not head.known:
            continue
        whole = expand([decode(record) for record in records])
        yield SessionCapture(
            session_id=head.session_id,
            turns=whole.turns,
            dialogue=whole.dialogue,
            errors=whole.errors,
            closed=head.closed,
            created_s=head.created_s,
            train=head.train,
            metadata=head.metadata,
            records=whole.records,
        )


async def _frames(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the length-prefixed frames of a byte stream. Raises: GatewayError when it has ended."""
    buffer = bytearray()
    async for chunk in chunks:
        buffer += chunk
        start = 0
        while len(buffer) >= (end := start + 4 + int.from_bytes(buffer[start : start + 4], "little")):
            yield bytes(buffer[start + 4 : end])
            start = end
        del buffer[:start]
    raise GatewayError("the gateway's answer ended early")
