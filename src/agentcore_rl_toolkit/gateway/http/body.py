"""Long bodies, read and compared without copies.

A late turn of a session is half a megabyte of history in, the same out, and as many token ids back; each copy of that
is a tenth of a millisecond. A body of declared length is therefore read into the memory where it stays, and what is cut
out of it is a view. `_room.c` does what Python cannot; without it (no compiler, or ``AGENTCORE_RL_PURE=1``) a body is
copied once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

__all__ = ["Bytes", "LongBody", "begins", "kept"]

Bytes = bytes | memoryview
AT_ONCE = 8 * 2**20  # memory taken for what a peer has only announced


class _Room:
    """What `_room.Room` is, in Python."""

    def __init__(self, size: int) -> None:
        self._memory = bytearray(size)
        self._view = memoryview(self._memory)

    def filled(self, count: int) -> int:
        self._view = self._view[count:]
        return len(self._view)

    def add(self, data: Bytes) -> int:
        self._view[: len(data)] = data
        return self.filled(len(data))

    def view(self) -> memoryview:
        return self._view

    def take(self) -> bytes:
        if self._view:
            raise ValueError("the room is not full")
        return bytes(self._memory)


def _begins(text: Bytes, part: Bytes, start: int) -> bool:
    return bytes(text[start : start + len(part)]) == part


if TYPE_CHECKING:
    from ._room import Room, begins
else:
    try:
        if os.environ.get("AGENTCORE_RL_PURE"):
            raise ImportError("left out by AGENTCORE_RL_PURE")
        from ._room import Room, begins
    except ImportError:
        Room, begins = _Room, _begins


class LongBody:
    """A body of ``length`` bytes, of which those in ``begun`` came with the head. ``left``: bytes still to come, not 0."""

    __slots__ = ("_room", "left")

    def __init__(self, length: int, begun: Iterable[bytes]) -> None:
        self.left = length
        self._room = Room(min(length, AT_ONCE))
        for piece in begun:
            self._room.add(piece)
            self.left -= len(piece)

    def space(self) -> memoryview:
        """Where to write what comes next; never empty."""
        return self._room.view() if isinstance(self._room, _Room) else memoryview(self._room)

    def filled(self, count: int) -> bytes | None:
        """So many bytes were written. Returns the next piece of the body, if it is whole now: all of it, up to 8 MiB."""
        self.left -= count
        if self._room.filled(count):
            return None
        piece = self._room.take()
        if self.left:
            self._room = Room(min(self.left, AT_ONCE))
        return piece


def kept(text: Bytes) -> Bytes:
    """The same to be held for long: a view only if it is most of what it keeps in memory."""
    if isinstance(text, memoryview) and 4 * text.nbytes < 3 * memoryview(text.obj).nbytes:
        return bytes(text)
    return text
