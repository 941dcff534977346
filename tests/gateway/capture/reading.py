"""Reads whole replies and streams, as the tests of the capture do."""

from __future__ import annotations

from agentcore_rl_toolkit.gateway.capture.record import Captured
from agentcore_rl_toolkit.gateway.capture.reply import ReplyReader


def read_stream(pieces: list[bytes], *, entries: bool = False) -> Captured:
    """The reply of a stream that comes in these pieces."""
    reader = ReplyReader(entries=entries, relayed=True)
    for piece in pieces:
        reader.feed(piece)
    return reader.captured()


def read_reply(body: bytes, *, entries: bool = False) -> Captured:
    """A reply that is not streamed."""
    reader = ReplyReader(entries=entries)
    reader.read(body)
    return reader.captured()
