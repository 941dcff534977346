"""A body on its way to disk: decoded, measured, hashed, verified; small ones in memory, large ones through a file."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import os

from .disk import PIECE_BYTES, Disk, StoredObject, discard_file, pieces, write_all
from .wire import checksums
from .wire.chunked import ChunkedDecoder
from .wire.errors import S3Error
from .wire.request import Request

_HEADER_ROOM = 1024  # for what is known only in the end: etag, size, time, checksums
MAX_PUT_BYTES = 5 * 2**30


class Incoming:
    """One PUT body. Use: ``await receive(request)``, then ``await store(stored)`` gives the finished file's name."""

    def __init__(self, disk: Disk, draft: StoredObject) -> None:
        self._disk = disk
        self._room = len(draft.to_line()) + _HEADER_ROOM
        self._file = ""
        self._fd = -1
        self._pieces: list[bytes] = []
        self._pending = 0
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._sha256 = hashlib.sha256()
        self._hash_sha256 = False
        self._sums: dict[str, checksums.Checksum] = {}
        self.size = 0

    @property
    def md5(self) -> bytes:
        return self._md5.digest()

    @property
    def checksums(self) -> dict[str, str]:
        return {a: checksums.encode(c.digest()) for a, c in self._sums.items()}

    async def receive(self, request: Request, default_algorithm: str | None = None) -> None:
        """Read the whole body and hold it against every digest the request names.

        Raises: S3Error BadDigest, InvalidDigest, IncompleteBody, XAmzContentSHA256Mismatch, EntityTooLarge.
        """
        headers = request.headers
        expected = _expected(headers, default_algorithm)
        self._sums = {a: checksums.new(a) for a in expected}
        content_sha256 = headers.get("x-amz-content-sha256", "")
        self._hash_sha256 = len(content_sha256) == 64
        decoder = _decoder(request, content_sha256)
        async for data in request.chunks():
            payload = data if decoder is None else decoder.feed(data)
            self._pieces.append(payload)
            self._pending += len(payload)
            self.size += len(payload)
            if self.size > MAX_PUT_BYTES:
                raise S3Error("EntityTooLarge", MaxSizeAllowed=str(MAX_PUT_BYTES))
            if self._pending >= PIECE_BYTES:
                await asyncio.to_thread(self._spill)
        if decoder is not None:
            _end(decoder, request, expected)
        self._hash()
        declared = headers.get("x-amz-decoded-content-length") if decoder else headers.get("content-length")
        if declared is not None and declared != str(self.size):
            raise S3Error("IncompleteBody")
        self._verify(headers, expected, content_sha256)

    @classmethod
    async def document(cls, disk: Disk, request: Request) -> bytes:
        """A short body as it is, verified in the same way."""
        incoming = cls(disk, StoredObject(key="", etag="", size=0, modified_s=0.0))
        await incoming.receive(request)
        return b"".join(incoming._pieces)

    def take_file(self, fd: int, offset: int, length: int, algorithm: str | None) -> None:
        """Take ``length`` bytes of another file as the body. Blocks."""
        self._sums = {algorithm: checksums.new(algorithm)} if algorithm else {}
        for piece in pieces(fd, offset, length):
            self._pieces.append(piece)
            self._pending += len(piece)
            self.size += len(piece)
            if self._pending >= PIECE_BYTES:
                self._spill()
        self._hash()

    def _verify(self, headers: dict[str, str], expected: dict[str, str | None], content_sha256: str) -> None:
        md5 = headers.get("content-md5")
        if md5 is not None:
            try:
                wanted = base64.b64decode(md5, validate=True)
            except (binascii.Error, ValueError):
                wanted = b""
            if len(wanted) != 16:
                raise S3Error("InvalidDigest", **{"Content-MD5": md5})
            if wanted != self.md5:
                raise S3Error("BadDigest", "The Content-MD5 you specified did not match what we received.")
        if self._hash_sha256 and not hmac.compare_digest(self._sha256.hexdigest(), content_sha256):
            raise S3Error("XAmzContentSHA256Mismatch")
        for algorithm, value in expected.items():
            if value is not None and checksums.decode(algorithm, value) != self._sums[algorithm].digest():
                raise S3Error("BadDigest", f"The {algorithm} you specified did not match the calculated checksum.")

    def _hash(self) -> None:
        for piece in self._pieces:
            self._md5.update(piece)
            if self._hash_sha256:
                self._sha256.update(piece)
            for checksum in self._sums.values():
                checksum.update(piece)

    def _spill(self) -> None:
        if self._fd < 0:
            self._file = self._disk.new_file()
            self._fd = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.lseek(self._fd, self._room, os.SEEK_SET)
        self._pieces = [b"".join(self._pieces)]
        self._hash()
        write_all(self._fd, self._pieces[0])
        self._pieces.clear()
        self._pending = 0

    async def store(self, stored: StoredObject) -> str:
        """Finish the file: what is known first, then the bytes. Returns: its name."""
        if self._fd < 0 and not self._disk.fsync:
            self._finish(stored)
        else:
            await asyncio.to_thread(self._finish, stored)
        return self._file

    def _finish(self, stored: StoredObject) -> None:
        body = b"".join(self._pieces)
        self._pieces.clear()
        if self._fd < 0:
            self._file = self._disk.new_file()
            self._fd = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            line = stored.to_line()
            write_all(self._fd, line + body)
        else:
            write_all(self._fd, body)
            line = stored.to_line(self._room)
            if len(line) > self._room:
                raise S3Error("InternalError")
            os.pwrite(self._fd, line, 0)
        stored.body_offset = len(line)
        if self._disk.fsync:
            os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1

    def placed(self) -> None:
        """Tell that the file was moved to where it belongs."""
        self._file = ""

    def discard(self) -> None:
        """Drop what was written, unless it was placed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._file:
            discard_file(self._file)


def _expected(headers: dict[str, str], default_algorithm: str | None) -> dict[str, str | None]:
    """Algorithms to compute, with the value from the headers (None: in the trailers, or only wanted for the record)."""
    expected: dict[str, str | None] = {a: headers[h] for h, a in checksums.HEADER.items() if h in headers}
    for algorithm, value in expected.items():
        checksums.decode(algorithm, value or "")
    for name in headers.get("x-amz-trailer", "").lower().split(","):
        if name.strip() in checksums.HEADER:
            expected.setdefault(checksums.HEADER[name.strip()], None)
    if len(expected) > 1:
        raise S3Error(
            "InvalidRequest", "Expecting a single x-amz-checksum- header. Multiple checksum Types are not allowed."
        )
    if not expected and headers.get("x-amz-sdk-checksum-algorithm"):
        raise S3Error(
            "InvalidRequest",
            "x-amz-sdk-checksum-algorithm specified, but no corresponding x-amz-checksum-* or x-amz-trailer headers were found.",
        )
    if not expected and default_algorithm is not None:
        expected[default_algorithm] = None
    return expected


def _decoder(request: Request, content_sha256: str) -> ChunkedDecoder | None:
    encodings = {e.strip() for e in request.headers.get("content-encoding", "").split(",")}
    if "aws-chunked" not in encodings and not content_sha256.startswith("STREAMING-"):
        return None
    if content_sha256.startswith("STREAMING-AWS4"):
        raise S3Error("NotImplemented", "Bodies whose chunks are signed are not implemented.")
    return ChunkedDecoder()


def _end(decoder: ChunkedDecoder, request: Request, expected: dict[str, str | None]) -> None:
    decoder.end()
    for name in request.headers.get("x-amz-trailer", "").lower().split(","):
        name = name.strip()
        if name and name not in decoder.trailers:
            raise S3Error("InvalidRequest", f"The trailing header {name} was announced and did not come.")
        if name in checksums.HEADER:
            expected[checksums.HEADER[name]] = decoder.trailers[name]
