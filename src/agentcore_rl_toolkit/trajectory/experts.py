"""Arrays of expert routing as engines give them: numpy's file format, or bare int32.

Source of the format: numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import array
import ast
import struct
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import CaptureError

MAGIC = b"\x93NUMPY"
# numpy's names for the kinds of whole numbers -> those of `array`
_KINDS = {"i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q"}


def shape_of(data: bytes) -> tuple[int, ...] | None:
    """The array's shape, None for bare int32. Raises: CaptureError when it begins like a file and is none."""
    return _header(data)[0] if data.startswith(MAGIC) else None


def int32_of(data: bytes) -> bytes:
    """The numbers as little-endian int32, in C order. Raises: CaptureError on anything but whole numbers in that order."""
    if not data.startswith(MAGIC):
        return data
    _, kind, begin = _header(data)
    if kind == "<i4":
        return data[begin:]
    code = _KINDS.get(kind[1:])
    if code is None or kind[0] not in "<|":
        raise CaptureError(f"expert routing of type {kind!r} is not read; engines give little-endian whole numbers")
    numbers = array.array(code)
    try:
        numbers.frombytes(data[begin:])
        if sys.byteorder == "big":
            numbers.byteswap()
        return pack(numbers)
    except (ValueError, OverflowError, struct.error) as e:
        raise CaptureError(f"expert routing cannot be read as int32: {e}") from e


def pack(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}i", *numbers)


def _header(data: bytes) -> tuple[tuple[int, ...], str, int]:
    """Shape, kind and the place of the first number."""
    try:
        wide = data[6] > 1
        (size,) = struct.unpack_from("<I" if wide else "<H", data, 8)
        begin = (12 if wide else 10) + size
        header: dict[str, Any] = ast.literal_eval(data[begin - size : begin].decode("latin-1").strip())
        shape, kind, fortran = header["shape"], header["descr"], header["fortran_order"]
    except (IndexError, struct.error, SyntaxError, ValueError, KeyError, TypeError) as e:
        raise CaptureError(f"expert routing is no array file: {e}") from e
    if fortran or not isinstance(kind, str) or not all(isinstance(n, int) for n in shape):
        raise CaptureError("expert routing must be a plain array in C order")
    return tuple(shape), kind, begin
