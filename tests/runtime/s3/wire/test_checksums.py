"""Checksums against published check values, in whole and in pieces."""

from __future__ import annotations

import random
import zlib

import pytest

from agentcore_rl_toolkit.runtime.s3.wire import checksums
from agentcore_rl_toolkit.runtime.s3.wire.checksums import LaneCrc
from agentcore_rl_toolkit.runtime.s3.wire.errors import S3Error

# The "check" values of the CRC catalogue, for b"123456789"; the SHA digests of the empty string.
KNOWN = {"CRC32": 0xCBF43926, "CRC32C": 0xE3069283, "CRC64NVME": 0xAE8B14860A799888}


@pytest.mark.parametrize("algorithm", KNOWN)
def test_check_values(algorithm: str) -> None:
    checksum = checksums.new(algorithm)
    checksum.update(b"1234")
    checksum.update(b"56789")
    assert int.from_bytes(checksum.digest(), "big") == KNOWN[algorithm]


@pytest.mark.parametrize("size", [0, 1, 511, 512 * 256 - 1, 512 * 256, 512 * 256 + 7, 512 * 300 + 100])
def test_lanes_agree_with_zlib_for_its_polynomial(size: int) -> None:
    data = random.Random(size).randbytes(size)
    lanes = LaneCrc(0xEDB88320, 32)
    assert lanes(data) == zlib.crc32(data)
    assert lanes(data[100:], lanes(data[:100])) == zlib.crc32(data)


@pytest.mark.parametrize(("polynomial", "bits"), [(0x82F63B78, 32), (0x9A6C9329AC4BC9B5, 64)])
def test_lanes_agree_with_the_plain_way(polynomial: int, bits: int) -> None:
    data = random.Random(bits).randbytes(512 * 256 * 2 + 33)
    crc = LaneCrc(polynomial, bits)
    piecewise = 0
    for start in range(0, len(data), 1000):
        piecewise = crc(data[start : start + 1000], piecewise)
    assert crc(data) == piecewise


@pytest.mark.parametrize("value", ["", "AAAA", "not base64!", "AAAAAAAA"])
def test_a_value_that_is_no_digest_is_refused(value: str) -> None:
    with pytest.raises(S3Error):
        checksums.decode("CRC32", value)
