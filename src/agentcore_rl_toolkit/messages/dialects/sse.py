"""Server-sent events as bytes.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations


def encode_event(data: bytes, name: str = "") -> bytes:
    """One event as bytes. ``data`` is JSON, so it has no line ends in it."""
    if name:
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
    return b"data: " + data + b"\n\n"
