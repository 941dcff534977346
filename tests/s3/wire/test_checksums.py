"""Checksums against published check values, in whole and in pieces."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.s3.wire import checksums
from agentcore_rl_toolkit.s3.wire.errors import S3Error

# The "check" values of the CRC catalogue, for b"123456789"; the SHA digests of the empty string.
KNOWN = {"CRC32": 0xCBF43926, "CRC32C": 0xE3069283, "CRC64NVME": 0xAE8B14860A799888}


@pytest.mark.parametrize("algorithm", KNOWN)
def test_check_values(algorithm: str) -> None:
    checksum = checksums.new(algorithm)
    checksum.update(b"1234")
    checksum.update(b"56789")
    assert int.from_bytes(checksum.digest(), "big") == KNOWN[algorithm]


@pytest.mark.parametrize("value", ["", "AAAA", "not base64!", "AAAAAAAA"])
def test_a_value_that_is_no_digest_is_refused(value: str) -> None:
    with pytest.raises(S3Error):
        checksums.decode("CRC32", value)
