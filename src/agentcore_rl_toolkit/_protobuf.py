"""The wire format of protocol buffers, as far as Tinker's messages use it: fields in, fields out, no schema.

Source: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Iterator
from typing import Any

from .errors import CaptureError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_SIZES = {FIXED64: 8, FIXED32: 4}
_DOUBLE = struct.Struct("<d")


def read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of every field in order: an int of a varint, the raw bytes of anything else.

    Raises: CaptureError when the message ends inside a field or uses groups.
    """
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in _SIZES:
            size = _SIZES[kind]
        else:
            raise CaptureError(f"field {number} has wire type {kind}, which no message here uses")
        if at + size > end:
            raise CaptureError(f"the message ends inside field {number}")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise CaptureError("the message ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def varint(value: int) -> bytes:
    """A number; negative ones take ten bytes, as two's complement of 64 bits."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number_field(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value)


def bytes_field(number: int, value: bytes | str) -> bytes:
    """A string, raw bytes, or a message that is encoded already."""
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def double_field(number: int, value: float) -> bytes:
    return varint(number << 3 | FIXED64) + _DOUBLE.pack(value)


def double_of(data: bytes) -> float:
    """The value of a double field as `read_fields` gives it."""
    return float(_DOUBLE.unpack(data)[0])


def unpack(kind: str, data: bytes) -> list[Any]:
    """Little-endian numbers: "i" int32, "q" int64, "f" float32. Raises: CaptureError on a part of one."""
    values = array.array(kind)
    if len(data) % values.itemsize:
        raise CaptureError(f"{len(data)} bytes are not whole numbers of {values.itemsize} bytes")
    values.frombytes(data)
    if sys.byteorder == "big":  # pragma: no cover
        values.byteswap()
    return values.tolist()


def pack(kind: str, values: list[Any]) -> bytes:
    """The inverse of `unpack`."""
    packed = array.array(kind, values)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tobytes()
