"""The five additional checksums of S3, incrementally.

Source: Amazon S3 User Guide, "Checking object integrity".
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import zlib
from collections.abc import Callable
from typing import Protocol

from ..._installation import missing_extra
from .errors import S3Error

ALGORITHMS = ("CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256")
HEADER = {f"x-amz-checksum-{a.lower()}": a for a in ALGORITHMS}
ELEMENT = {a: f"Checksum{a}" for a in ALGORITHMS}
_SIZE = {"CRC32": 4, "CRC32C": 4, "CRC64NVME": 8, "SHA1": 20, "SHA256": 32}


class Checksum(Protocol):
    """Takes bytes, gives a digest: what `hashlib` objects and `_Crc` have in common."""

    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...


class _Crc:
    def __init__(self, function: Callable[[bytes, int], int], size: int) -> None:
        self._function, self._size, self._value = function, size, 0

    def update(self, data: bytes, /) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size, "big")


def new(algorithm: str) -> Checksum:
    """A running checksum. Raises: S3Error InvalidRequest for an unknown algorithm."""
    if algorithm == "SHA1":
        return hashlib.sha1(usedforsecurity=False)
    if algorithm == "SHA256":
        return hashlib.sha256()
    if algorithm == "CRC32":
        return _Crc(zlib.crc32, 4)
    if algorithm in ALGORITHMS:
        return _Crc(_crc_function(algorithm), _SIZE[algorithm])
    raise S3Error("InvalidRequest", "Checksum algorithm provided is unsupported.")


def encode(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def decode(algorithm: str, value: str) -> bytes:
    """The digest in a header. Raises: S3Error InvalidRequest when it is not one of this algorithm."""
    try:
        digest = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        digest = b""
    if len(digest) != _SIZE[algorithm]:
        raise S3Error("InvalidRequest", f"Value for x-amz-checksum-{algorithm.lower()} header is invalid.")
    return digest


@functools.cache
def _crc_function(algorithm: str) -> Callable[[bytes, int], int]:
    try:
        import anycrc
    except ImportError as e:
        raise missing_extra(f"checksums of the kind {algorithm} need anycrc", "runtime") from e
    model = anycrc.Model("CRC32-ISCSI" if algorithm == "CRC32C" else "CRC64-NVME")
    function: Callable[[bytes, int], int] = model.calc
    return function
