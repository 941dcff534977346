"""The five additional checksums of S3, incrementally. CRC32C and CRC64NVME use ``awscrt`` where it is installed.

Source: Amazon S3 User Guide, "Checking object integrity"; CRC-64/NVME polynomial from the NVM Express specification.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import importlib
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from .errors import S3Error

ALGORITHMS = ("CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256")
HEADER = {f"x-amz-checksum-{a.lower()}": a for a in ALGORITHMS}
ELEMENT = {a: f"Checksum{a}" for a in ALGORITHMS}
_SIZE = {"CRC32": 4, "CRC32C": 4, "CRC64NVME": 8, "SHA1": 20, "SHA256": 32}
_POLYNOMIAL = {"CRC32C": (0x82F63B78, 32), "CRC64NVME": (0x9A6C9329AC4BC9B5, 64)}


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
    if algorithm in _POLYNOMIAL:
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
        native: Any = importlib.import_module("awscrt.checksums")
    except ImportError:
        return LaneCrc(*_POLYNOMIAL[algorithm])
    function = native.crc32c if algorithm == "CRC32C" else native.crc64nvme
    return lambda data, value: int(function(data, value))


class LaneCrc:
    """A reflected CRC with the standard library only: ``function(data, previous) -> value``.

    Byte by byte, Python does about 10 MB/s. Long inputs are cut into lanes of equal length whose registers advance together:
    one register byte of all lanes is one ``bytes`` object, the table look-up is ``bytes.translate`` and the sum is an XOR of big
    integers, all at C speed. The lanes' results are then joined, a CRC being linear: appending n zero bytes is a matrix.
    """

    LANE_BYTES = 512
    LEAST_LANES = 256

    def __init__(self, polynomial: int, bits: int) -> None:
        self._bytes = bits // 8
        self._mask = (1 << bits) - 1
        table = []
        for byte in range(256):
            for _ in range(8):
                byte = byte >> 1 ^ (polynomial if byte & 1 else 0)
            table.append(byte)
        self._table = table
        # Byte k of every table entry, for `bytes.translate`.
        self._planes = [bytes(entry >> 8 * k & 255 for entry in table) for k in range(self._bytes)]
        self._append_lane = self._shift_tables(self.LANE_BYTES)

    def __call__(self, data: bytes, previous: int = 0) -> int:
        register = previous ^ self._mask
        lanes = len(data) // self.LANE_BYTES
        start = 0
        if lanes >= self.LEAST_LANES:
            start = lanes * self.LANE_BYTES
            register = self._long(data[:start], lanes, register)
        table = self._table
        for byte in memoryview(data)[start:]:
            register = table[(register ^ byte) & 255] ^ register >> 8
        return register ^ self._mask

    def _long(self, data: bytes, lanes: int, register: int) -> int:
        planes = [0] * self._bytes
        for position in range(self.LANE_BYTES):
            index = int.from_bytes(data[position :: self.LANE_BYTES], "little") ^ planes[0]
            looked_up = index.to_bytes(lanes, "little")
            for k in range(self._bytes - 1):
                planes[k] = planes[k + 1] ^ int.from_bytes(looked_up.translate(self._planes[k]), "little")
            planes[-1] = int.from_bytes(looked_up.translate(self._planes[-1]), "little")
        columns = [plane.to_bytes(lanes, "little") for plane in planes]
        shift = self._append_lane
        for parts in zip(*columns, strict=True):
            joined = 0
            for k, byte in enumerate(register.to_bytes(self._bytes, "little")):
                joined ^= shift[k][byte]
            register = joined ^ int.from_bytes(bytes(parts), "little")
        return register

    def _shift_tables(self, zero_bytes: int) -> list[list[int]]:
        """For each register byte position, what its 256 values become after ``zero_bytes`` zero bytes."""
        columns = []
        for bit in range(self._bytes * 8):
            register = 1 << bit
            for _ in range(zero_bytes):
                register = self._table[register & 255] ^ register >> 8
            columns.append(register)
        tables = []
        for k in range(self._bytes):
            table = [0] * 256
            for value in range(1, 256):
                low = value & -value
                table[value] = table[value ^ low] ^ columns[8 * k + low.bit_length() - 1]
            tables.append(table)
        return tables
