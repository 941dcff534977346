"""Server-sent events as their specification has them: bytes in any slices -> events."""

from __future__ import annotations

from typing import NamedTuple

from agentcore_rl_toolkit.errors import UpstreamError

MAX_EVENT_BYTES = 64 * 2**20  # the last event of a Responses stream repeats the whole answer; beyond this it is a fault


class Event(NamedTuple):
    """One event. ``name`` is empty when the stream gave none; ``data`` is the joined data lines."""

    name: str
    data: bytes


DONE = b"[DONE]"


class SSEParser:
    """Incremental parser of an event stream.

    Lines may end in LF, CR LF or CR; a byte order mark at the start and comments are skipped; an event without data is
    dropped, as the specification wants.
    """

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._buffer = bytearray()
        self._limit = max_event_bytes
        self._started = False
        self._last_cr = False
        self._scanned = 0

    def feed(self, data: bytes) -> list[Event]:
        """The events that ``data`` completes. Raises: UpstreamError when one event grows beyond the limit."""
        if not data:
            return []
        if b"\r" in data or self._last_cr:
            data = self._unify(data)
        buffer = self._buffer
        buffer += data
        if not self._started and not self._skip_mark():
            return []
        events: list[Event] = []
        start = 0
        # A separator may straddle two slices: look again from one byte before the new data.
        end = buffer.find(b"\n\n", max(0, self._scanned - 1))
        while end >= 0:
            event = _event(bytes(buffer[start:end]))
            if event is not None:
                events.append(event)
            start = end + 2
            while buffer[start : start + 1] == b"\n":
                start += 1
            end = buffer.find(b"\n\n", start)
        if start:
            del buffer[:start]
        self._scanned = len(buffer)
        if len(buffer) > self._limit:
            raise UpstreamError(f"an event of the stream is longer than {self._limit} bytes")
        return events

    def finish(self) -> list[Event]:
        """What an abrupt end leaves: servers that forget the last blank line are common enough to be heard."""
        if not self._started:
            self._started = True
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._scanned = 0
        event = _event(rest)
        return [event] if event is not None else []

    def _unify(self, data: bytes) -> bytes:
        """CR LF and CR to LF; a CR at the very end is remembered, its LF may come with the next slice."""
        if self._last_cr and data.startswith(b"\n"):
            data = data[1:]
        self._last_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _skip_mark(self) -> bool:
        mark = b"\xef\xbb\xbf"
        head = bytes(self._buffer[:3])
        if len(head) < 3 and mark.startswith(head):
            return False
        if head == mark:
            del self._buffer[:3]
        self._started = True
        return True


def _event(block: bytes) -> Event | None:
    if block.startswith(b"data: ") and b"\n" not in block:  # nearly every event of an OpenAI stream
        return Event("", block[6:])
    name = ""
    data: list[bytes] = []
    for line in block.split(b"\n"):
        if not line or line.startswith(b":"):
            continue
        field, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
    return Event(name, b"\n".join(data)) if data else None
