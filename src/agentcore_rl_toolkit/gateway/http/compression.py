"""Compressed request bodies (RFC 9110, 8.4.1): gzip and deflate, and zstd if the package ``zstandard`` is installed."""

from __future__ import annotations

import gzip
import io
import zlib
from importlib.util import find_spec

from ...messages.errors import RequestError

ACCEPTED = ("gzip", "deflate", "zstd") if find_spec("zstandard") else ("gzip", "deflate")
_ZSTD_WINDOW = 2**27  # the largest window of zstd's own levels
_NAMES = {"x-gzip": "gzip"}


def encoding_of(header: str | None) -> str:
    """Return the content encoding of a request, empty for none. Raises: RequestError (415) for one that is not accepted."""
    name = (header or "").strip().lower()
    name = _NAMES.get(name, name)
    if name in ("", "identity"):
        return ""
    if name not in ACCEPTED:
        why = f"the content-encoding {name[:40]!r} is not accepted; send one of {', '.join(ACCEPTED)}, or no content-encoding"
        raise RequestError(why, status=415)
    return name


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Decompress a body to ``limit`` + 1 bytes at most, so that a small body cannot fill the memory.

    Raises: RequestError (400) for a body that is damaged or incomplete.
    """
    try:
        if encoding == "gzip":
            return gzip.GzipFile(fileobj=io.BytesIO(body)).read(limit + 1)
        if encoding == "deflate":
            reader = zlib.decompressobj()
            data = reader.decompress(body, limit + 1)
            if not reader.eof and len(data) <= limit:
                raise EOFError("it ends too early")
            return data
        return _zstd(body, limit)
    except (OSError, EOFError, zlib.error) as e:
        raise RequestError(f"the request body is not valid {encoding}: {e}") from e


def _zstd(body: bytes, limit: int) -> bytes:
    """Decompress zstd. Many frames state their size, and need as much memory as they state."""
    import zstandard

    try:
        if zstandard.frame_content_size(body) > limit:
            return bytes(limit + 1)
        frames = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        return frames.stream_reader(body, read_across_frames=True).read(limit + 1)
    except zstandard.ZstdError as e:
        raise EOFError(str(e)) from e
