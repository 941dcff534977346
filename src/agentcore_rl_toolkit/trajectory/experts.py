"""Arrays of expert routing as engines give them: numpy's file format, or bare int32."""

from __future__ import annotations

import io

from ..errors import CaptureError

MAGIC = b"\x93NUMPY"


def read(data: bytes) -> tuple[tuple[int, ...] | None, bytes]:
    """Return the array's shape, None for bare int32, and its numbers as little-endian int32 in C order.

    Raises: CaptureError when it begins like a file and is none, or holds anything but whole numbers.
    """
    if not data.startswith(MAGIC):
        return None, data
    import numpy as np

    try:
        found = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError) as e:
        raise CaptureError(f"expert routing is no array file: {e}") from e
    numbers = found.astype("<i4", copy=False)
    if found.dtype.kind not in "iu" or not np.array_equal(numbers, found):
        raise CaptureError(f"expert routing of type {found.dtype} cannot be read as int32")
    return found.shape, numbers.tobytes()
