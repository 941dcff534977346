"""Compressed request bodies (RFC 9110, 8.4.1)."""

from __future__ import annotations

import gzip
import io
import zlib
from importlib.util import find_spec

from ...messages.errors import RequestError

# An environment of an older version may lack the packages of the last two.
_PACKAGES = {"br": "brotli", "zstd": "zstandard"}
ACCEPTED = ("gzip", "deflate", *(name for name, package in _PACKAGES.items() if find_spec(package)))
_ZSTD_WINDOW = 2**27  # the largest window of zstd's own levels
_ZSTD_PIECE = 256  # bytes that are decompressed at once; four bytes can become 128 KiB
_NAMES = {"x-gzip": "gzip"}


def encoding_of(header: str) -> str:
    """Return the content encoding of a request, empty for none. Raises: RequestError (415) for one that is not accepted."""
    name = header.strip().lower()
    name = _NAMES.get(name, name)
    if name in ("", "identity"):
        return ""
    if name not in ACCEPTED:
        why = f"the content-encoding {name[:40]!r} is not accepted; send one of {', '.join(ACCEPTED)}, or no content-encoding"
        raise RequestError(why, status=415)
    return name


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Decompress a body to about ``limit`` + 1 bytes at most, so that a small body cannot fill the memory.

    Raises: RequestError (400) for a body that is damaged or incomplete.
    """
    try:
        if not body:
            raise EOFError("it is empty")
        if encoding == "gzip":
            return gzip.GzipFile(fileobj=io.BytesIO(body)).read(limit + 1)
        if encoding == "deflate":
            reader = zlib.decompressobj()
            data = reader.decompress(body, limit + 1)
            if len(data) <= limit and (not reader.eof or reader.unused_data):
                raise EOFError("there is more behind its end" if reader.eof else "it ends too early")
            return data
        return _brotli(body, limit) if encoding == "br" else _zstd(body, limit)
    except (OSError, EOFError, zlib.error) as e:
        raise RequestError(f"the request body is not valid {encoding}: {e}") from e


def _brotli(body: bytes, limit: int) -> bytes:
    import brotli

    reader = brotli.Decompressor()
    try:
        data = reader.process(body, output_buffer_limit=limit + 1)
        while len(data) <= limit and not reader.is_finished():
            more = reader.process(b"", output_buffer_limit=limit + 1)
            if not more and reader.can_accept_more_data():
                raise EOFError("it ends too early")
            data += more
    except brotli.error as e:
        raise EOFError(str(e)) from e
    return bytes(data)


def _zstd(body: bytes, limit: int) -> bytes:
    """Decompress zstd. Many frames state their size, and need as much memory as they state."""
    import zstandard

    try:
        if zstandard.frame_content_size(body) > limit:
            return bytes(limit + 1)
        frames = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        frame, data, at = frames.decompressobj(), bytearray(), 0
        while at < len(body) and len(data) <= limit:
            if frame.eof:
                frame = frames.decompressobj()
            piece = body[at : at + _ZSTD_PIECE]
            data += frame.decompress(piece)
            at += len(piece) - len(frame.unused_data)
        if len(data) <= limit and not frame.eof:
            raise EOFError("it ends too early")
        return bytes(data)
    except zstandard.ZstdError as e:
        raise EOFError(str(e)) from e
