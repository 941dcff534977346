"""Splits the bytes of a stream into server-sent events, without decoding them."""

from __future__ import annotations

DONE = b"[DONE]"


class EventReader:
    """Bytes of a stream in any slices -> its whole events. ``rest`` is the beginning of the next event."""

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each complete event, except comments and the end of the stream."""
        return [found for _, found in self.events(data) if found is not None and found != DONE]

    def events(self, data: bytes) -> list[tuple[bytes, bytes | None]]:
        """Return the lines and the data of each complete event. The data of a comment is None. Line ends become newlines."""
        if self.rest or not data.endswith(b"\n\n"):
            data = self._whole(data)
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        events = data.split(b"\n\n")
        single = b"data: {" if data.count(b"\n") == 2 * len(events) - 2 else ()  # the beginning of an event of one line
        return [(lines, lines[6:] if lines.startswith(single) else _data(lines)) for lines in events if lines]

    def _whole(self, data: bytes) -> bytes:
        """Take the whole events out of ``rest`` and new bytes."""
        rest, start = self.rest, max(0, len(self.rest) - 3)
        rest += data
        end = max(rest.rfind(b"\n\n", start) + 2, rest.rfind(b"\n\r\n", start) + 3)
        if end < 3:
            return b""
        whole = bytes(rest[:end])
        del rest[:end]
        return whole


def _data(lines: bytes) -> bytes | None:
    found = [line[5:].removeprefix(b" ") for line in lines.split(b"\n") if line.startswith(b"data:")]
    if not found:
        return None
    data = b"\n".join(found)
    return DONE if data.strip() == DONE else data
