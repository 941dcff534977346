"""AWS's event stream encoding, which botocore only decodes.

Source: https://smithy.io/2.0/aws/amazon-eventstream.html
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

CONTENT_TYPE = "application/vnd.amazon.eventstream"
_STRING = 7  # header value type


def event(payload: Any, event_type: str = "chunk") -> bytes:
    """Return an event; botocore yields it as ``{event_type: payload}``."""
    return _encode(payload, event_type=event_type, content_type="application/json", message_type="event")


def exception(code: str, message: str) -> bytes:
    """Return a modelled exception inside the stream; botocore raises it as EventStreamError."""
    payload = {"message": message}
    return _encode(payload, exception_type=code, content_type="application/json", message_type="exception")


def _encode(payload: Any, **headers: str) -> bytes:
    """Encode a message: its lengths with their checksum, the headers, the JSON payload, and a checksum of everything.

    Header names are given with ``_`` for ``-`` and get their leading colon here.
    """
    block = b""
    for name, value in headers.items():
        key, text = f":{name.replace('_', '-')}".encode(), value.encode()
        block += bytes([len(key)]) + key + bytes([_STRING]) + struct.pack(">H", len(text)) + text
    body = json.dumps(payload).encode()
    prelude = struct.pack(">II", 16 + len(block) + len(body), len(block))
    message = prelude + struct.pack(">I", zlib.crc32(prelude)) + block + body
    return message + struct.pack(">I", zlib.crc32(message))
