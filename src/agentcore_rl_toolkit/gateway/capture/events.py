"""The events of a stream, as far as they have come. None of them is decoded here."""

from __future__ import annotations

from . import scan


class EventReader:
    """Bytes of a stream in any slices -> the data of each event that is whole."""

    def __init__(self) -> None:
        self._carry: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        return events_of(gather(self._carry, data))


def events_of(text: bytes) -> list[bytes]:
    """The data of each event: any line ending, comments, several data lines; an unfinished last event is left out."""
    events: list[bytes] = []
    data: list[bytes] = []
    for line in text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            event = b"\n".join(data)
            data = []
            if event.strip() != b"[DONE]":
                events.append(event)
    return events


def are_events(text: bytes) -> bool:
    """Whether events that came whole are what a reply is made of: JSON objects, comments and the end."""
    return all(event.lstrip()[:1] == b"{" for event in events_of(text))


def event_end(events: bytes, at: int) -> int:
    """Where the event that byte `at` belongs to ends."""
    places = events.find(b"\n\n", at), events.find(b"\n\r\n", at)
    return min((at + size for at, size in zip(places, (2, 3), strict=True) if at >= 0), default=len(events))


def gather(carry: list[bytes], data: bytes) -> bytes:
    """The events that are whole with these bytes; what goes on in the next read stays in ``carry``. It is of no use to
    anybody before that.
    """
    if carry:
        if not _ends_event(carry, data):
            carry.append(data)
            return b""
        data = b"".join((*carry, data))
        carry.clear()
    size = scan.whole_events(data, len(data))
    if size < len(data):
        carry.append(data[size:])
        data = data[:size]
    return data


def _ends_event(carry: list[bytes], data: bytes) -> bool:
    """Whether the event that lies in ``carry`` is whole with these bytes."""
    if scan.whole_events(data, len(data)):
        return True
    seam = b"".join(part[-3:] for part in carry[-3:])[-3:] + data[:3]
    return scan.whole_events(seam, len(seam)) > 0
