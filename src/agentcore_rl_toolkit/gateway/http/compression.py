"""Compressed request bodies (RFC 9110, 8.4.1)."""

from __future__ import annotations

import gzip
import io
import zlib

from ...messages.errors import RequestError

ACCEPTED = ("gzip", "deflate", "br", "zstd")
_ZSTD_WINDOW = 2**27  # the largest window of zstd's own levels


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Decompress a body to ``limit`` + 1 bytes at most, so that a small body cannot fill the memory.

    A body that ends too early gives a text that ends too early, which is not JSON.
    Raises: RequestError (400) for a damaged body.
    """
    try:
        if encoding == "gzip":
            return gzip.GzipFile(fileobj=io.BytesIO(body)).read(limit + 1)
        if encoding == "deflate":
            return zlib.decompressobj().decompress(body, limit + 1)
        if encoding == "br":
            import brotli

            return bytes(brotli.Decompressor().process(body, output_buffer_limit=limit + 1))
        import zstandard

        frames = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        return frames.stream_reader(body, read_across_frames=True).read(limit + 1)
    except Exception as e:  # each library has its own errors
        raise RequestError(f"the request body is not valid {encoding}: {e}") from e
