"""The aws-chunked decoder at every boundary, and on broken input."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.s3.wire.chunked import ChunkedDecoder
from agentcore_rl_toolkit.s3.wire.errors import S3Error

WIRE = (
    b"5\r\nhello\r\na;chunk-signature=00\r\n, chunks\r\n\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\nx-other: y \r\n\r\n"
)
PAYLOAD = b"hello, chunks\r\n"


@pytest.mark.parametrize("size", range(1, len(WIRE) + 1))
def test_any_cut_gives_the_same_payload(size: int) -> None:
    decoder = ChunkedDecoder()
    out = b"".join(decoder.feed(WIRE[i : i + size]) for i in range(0, len(WIRE), size))
    decoder.end()
    assert out == PAYLOAD
    assert decoder.trailers == {"x-amz-checksum-crc32": "AAAAAA==", "x-other": "y"}


@pytest.mark.parametrize("length", range(len(WIRE) - 2))
def test_a_body_that_ends_early_is_incomplete(length: int) -> None:
    decoder = ChunkedDecoder()
    decoder.feed(WIRE[:length])
    with pytest.raises(S3Error) as caught:
        decoder.end()
    assert caught.value.code == "IncompleteBody"


@pytest.mark.parametrize(
    "wire",
    [b"zz\r\n", b"-5\r\nhello\r\n", b"5\r\nhello!\r\n", b"\r\n", b"0\r\nno value\r\n", WIRE + b"more\r\n", b"1" * 5000],
)
def test_broken_framing_is_refused(wire: bytes) -> None:
    with pytest.raises(S3Error) as caught:
        ChunkedDecoder().feed(wire)
    assert caught.value.code == "InvalidRequest"
