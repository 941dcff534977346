"""Operations on one object: put, get, head, delete, copy."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from email.utils import formatdate
from urllib.parse import unquote

from .conditions import byte_range, check_write, may_read
from .disk import PIECE_BYTES, Bucket, Disk, StoredObject, discard_file, pieces, write_all
from .incoming import MAX_PUT_BYTES, Incoming
from .wire import checksums
from .wire.errors import S3Error
from .wire.request import Answer, Request, xml_answer
from .wire.xml import document, element

_OVERRIDES = {
    f"response-{n}": n
    for n in ("content-type", "content-language", "expires", "cache-control", "content-disposition", "content-encoding")
}


def iso(seconds: float) -> str:
    """A time as S3's documents write it."""
    whole = int(seconds)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{int((seconds - whole) * 1000):03d}Z"


def checksum_headers(stored: StoredObject) -> dict[str, str]:
    out = {f"x-amz-checksum-{a.lower()}": v for a, v in stored.checksums.items()}
    if out:
        out["x-amz-checksum-type"] = stored.checksum_type or "FULL_OBJECT"
    return out


async def put(disk: Disk, bucket: Bucket, request: Request) -> Answer:
    """PutObject."""
    check_write(request.headers, bucket.objects.get(request.key))
    stored = StoredObject(key=request.key, etag="", size=0, modified_s=0.0, headers=request.user_headers())
    incoming = Incoming(disk, stored)
    try:
        await incoming.receive(request)
        stored.etag = incoming.md5.hex()
        stored.size = incoming.size
        stored.checksums = incoming.checksums
        stored.modified_s = time.time()
        file = await incoming.store(stored)
        commit(disk, bucket, request, stored, file)
        incoming.placed()
        await settle(disk, bucket, stored)
    finally:
        incoming.discard()
    return Answer(headers={"etag": f'"{stored.etag}"', **checksum_headers(stored), **encryption(stored)})


def commit(disk: Disk, bucket: Bucket, request: Request, stored: StoredObject, file: str) -> None:
    """Check the write's condition again and make the file the object, in one go."""
    if disk.buckets.get(bucket.name) is not bucket:
        raise S3Error("NoSuchBucket", BucketName=bucket.name)
    check_write(request.headers, bucket.objects.get(stored.key))
    disk.place(bucket, stored, file)


async def settle(disk: Disk, bucket: Bucket, stored: StoredObject) -> None:
    """Where asked for, wait until the object's name is on the medium too; its bytes are already."""
    if disk.fsync:
        await asyncio.to_thread(disk.sync_directory, os.path.dirname(disk.path_of(bucket.name, stored.key)))


def encryption(stored: StoredObject) -> dict[str, str]:
    value = stored.headers.get("x-amz-server-side-encryption")
    return {"x-amz-server-side-encryption": value} if value else {}


def read(disk: Disk, bucket: Bucket, request: Request) -> Answer:
    """GetObject and HeadObject."""
    stored = bucket.objects.get(request.key)
    if stored is None:
        raise S3Error("NoSuchKey", Key=request.key)
    headers = {
        "etag": f'"{stored.etag}"',
        "last-modified": formatdate(stored.modified_s, usegmt=True),
        "accept-ranges": "bytes",
        **{n: v for n, v in stored.headers.items() if n != "x-amz-storage-class" or v != "STANDARD"},
    }
    if not may_read(request.headers, stored):
        return Answer(status=304, headers={n: headers[n] for n in ("etag", "last-modified")})
    for parameter, name in _OVERRIDES.items():
        if parameter in request.query:
            headers[name] = request.query[parameter]
    whole = True
    offset, length = 0, stored.size
    if "partNumber" in request.query:
        offset, length = _part(stored, request.query["partNumber"])
        whole = False
        headers["x-amz-mp-parts-count"] = str(len(stored.part_sizes or [0]))
    elif (selected := byte_range(request.headers.get("range"), stored.size)) is not None:
        offset, length = selected
        whole = False
    if not whole and stored.size:
        headers["content-range"] = f"bytes {offset}-{offset + length - 1}/{stored.size}"
    if request.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED" and (
        (offset, length) == (0, stored.size) or request.method == "HEAD"
    ):
        headers |= checksum_headers(stored)
    headers["content-length"] = str(length)
    answer = Answer(status=200 if whole or not stored.size else 206, headers=headers, length=length)
    if request.method == "GET":
        answer.fd = disk.open_body(bucket, stored)
        answer.offset = stored.body_offset + offset
    return answer


def _part(stored: StoredObject, number: str) -> tuple[int, int]:
    sizes = stored.part_sizes or [stored.size]
    if not number.isdecimal() or not 1 <= int(number) <= 10000:
        raise S3Error("InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive")
    if int(number) > len(sizes):
        raise S3Error("InvalidRange", "The requested partnumber is not satisfiable")
    return sum(sizes[: int(number) - 1]), sizes[int(number) - 1]


def delete(disk: Disk, bucket: Bucket, request: Request) -> Answer:
    """DeleteObject; a key that is not there is fine, unless a condition names it."""
    match = request.headers.get("if-match")
    if match is not None:
        check_write({"if-match": match}, bucket.objects.get(request.key))
    disk.remove(bucket, request.key)
    return Answer(status=204)


def copy_source(disk: Disk, request: Request) -> tuple[Bucket, StoredObject]:
    """The object that ``x-amz-copy-source`` names, its conditions checked."""
    source, _, version = request.headers["x-amz-copy-source"].partition("?versionId=")
    if version and version != "null":
        raise S3Error("NotImplemented", "Versioning is not implemented.")
    name, _, key = unquote(source).removeprefix("/").partition("/")
    if not key:
        raise S3Error("InvalidArgument", "Invalid copy source object key")
    bucket = disk.buckets.get(name)
    if bucket is None:
        raise S3Error("NoSuchBucket", BucketName=name)
    stored = bucket.objects.get(key)
    if stored is None:
        raise S3Error("NoSuchKey", Key=key)
    if not may_read(request.headers, stored, "x-amz-copy-source-"):
        raise S3Error("PreconditionFailed", Condition="x-amz-copy-source-If-None-Match")
    return bucket, stored


async def copy(disk: Disk, bucket: Bucket, request: Request) -> Answer:
    """CopyObject."""
    source_bucket, source = copy_source(disk, request)
    replace = request.headers.get("x-amz-metadata-directive", "COPY").upper() == "REPLACE"
    if source_bucket is bucket and source.key == request.key and not replace:
        raise S3Error(
            "InvalidRequest",
            "This copy request is illegal because it is trying to copy an object to itself without changing the object's "
            "metadata, storage class, website redirect location or encryption attributes.",
        )
    check_write(request.headers, bucket.objects.get(request.key))
    if source.size > MAX_PUT_BYTES:
        raise S3Error(
            "InvalidRequest", "The specified copy source is larger than the maximum allowable size for a copy source"
        )
    stored = StoredObject(
        key=request.key,
        etag=source.etag,
        size=source.size,
        modified_s=time.time(),
        headers=request.user_headers() if replace else dict(source.headers),
        checksums=dict(source.checksums),
        checksum_type=source.checksum_type,
    )
    wanted = request.headers.get("x-amz-checksum-algorithm", "").upper()
    fd = disk.open_body(source_bucket, source)
    file = disk.new_file()
    try:
        if "-" in source.etag or (wanted and wanted not in source.checksums):
            algorithm = wanted or (next(iter(source.checksums), None) if source.checksums else None)
            md5, digest = await asyncio.to_thread(_digest, fd, source.body_offset, source.size, algorithm)
            stored.etag = md5
            stored.checksums = {algorithm: digest} if algorithm and digest else {}
            stored.checksum_type = None
        line = stored.to_line()
        stored.body_offset = len(line)
        ranges = [(fd, source.body_offset, source.size)]
        if source.size <= PIECE_BYTES and not disk.fsync:
            write_file(file, line, ranges, fsync=False)
        else:
            await asyncio.to_thread(write_file, file, line, ranges, fsync=disk.fsync)
        commit(disk, bucket, request, stored, file)
        await settle(disk, bucket, stored)
    finally:
        os.close(fd)
        discard_file(file)
    parts = [element("ETag", f'"{stored.etag}"'), element("LastModified", iso(stored.modified_s))]
    parts += [element(checksums.ELEMENT[a], v) for a, v in stored.checksums.items()]
    return xml_answer(document("CopyObjectResult", parts))


def _digest(fd: int, offset: int, size: int, algorithm: str | None) -> tuple[str, str]:
    md5 = hashlib.md5(usedforsecurity=False)
    other = checksums.new(algorithm) if algorithm else None
    for piece in pieces(fd, offset, size):
        md5.update(piece)
        if other is not None:
            other.update(piece)
    return md5.hexdigest(), checksums.encode(other.digest()) if other is not None else ""


def write_file(file: str, line: bytes, ranges: list[tuple[int, int, int]], *, fsync: bool) -> None:
    """Write ``line`` and then ranges (descriptor, offset, length) of other files, inside the kernel where it can."""
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(out, line)
        for fd, offset, length in ranges:
            _copy_range(fd, offset, length, out)
        if fsync:
            os.fsync(out)
    finally:
        os.close(out)


def _copy_range(fd: int, offset: int, length: int, out: int) -> None:
    while length and hasattr(os, "copy_file_range"):
        try:
            done = os.copy_file_range(fd, out, min(length, 2**30), offset)
        except OSError:  # not every file system can
            break
        if done == 0:
            raise S3Error("InternalError")
        offset, length = offset + done, length - done
    for piece in pieces(fd, offset, length):
        write_all(out, piece)
