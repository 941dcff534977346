"""Splits the bytes of a stream into events, without decoding them."""

from __future__ import annotations

DONE = b"[DONE]"


class EventReader:
    """Bytes of a stream in any slices -> the data of each event that is whole."""

    def __init__(self) -> None:
        self._carry: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        return [found for _, found in split(gather(self._carry, data)) if found not in (None, DONE)]


def split(block: bytes) -> list[tuple[bytes | None, bytes | None]]:
    """Whole events, each as its lines and as its data. No lines: they are the data's alone; no data: it is a comment.

    Any line ending is taken and becomes a newline.
    """
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if block[:6] == b"data: ":
        found = block[6:-2].split(b"\n\ndata: ")
        if block.count(b"\n") == 2 * len(found):  # so these are all there are
            return [(None, data) for data in found]
    return [(lines, _data(lines)) for lines in block.split(b"\n\n") if lines]


def _data(lines: bytes) -> bytes | None:
    found = [line[5:].removeprefix(b" ") for line in lines.split(b"\n") if line.startswith(b"data:")]
    if not found:
        return None
    data = b"\n".join(found)
    return DONE if data.strip() == DONE else data


def gather(carry: list[bytes], data: bytes) -> bytes:
    """The events that are whole with these bytes; what goes on in the next read stays in ``carry``."""
    if carry:
        if not _ends_event(carry, data):
            carry.append(data)
            return b""
        data = b"".join((*carry, data))
        carry.clear()
    if data[-2:] == b"\n\n":
        return data
    size = _whole(data)
    if size < len(data):
        carry.append(data[size:])
        data = data[:size]
    return data


def _whole(data: bytes) -> int:
    """Where the last event that is whole ends."""
    places = data.rfind(b"\n\n"), data.rfind(b"\n\r\n")
    return max(place + size if place >= 0 else 0 for place, size in zip(places, (2, 3), strict=True))


def _ends_event(carry: list[bytes], data: bytes) -> bool:
    """Whether the event that lies in ``carry`` is whole with these bytes."""
    if _whole(data):
        return True
    seam = b"".join(part[-3:] for part in carry[-3:])[-3:] + data[:3]
    return _whole(seam) > 0
