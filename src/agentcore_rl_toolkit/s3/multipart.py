"""Multipart uploads: parts are files under ROOT/.uploads/<upload id>, joined into the object on completion."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from .conditions import byte_range, check_write
from .disk import Bucket, Disk, StoredObject, discard_file, pieces, read_stored
from .incoming import Incoming
from .objects import checksum_headers, commit, copy_source, iso, settle, write_file
from .wire import checksums, xml
from .wire.errors import S3Error
from .wire.request import Answer, Request, xml_answer

MIN_PART_BYTES = 5 * 2**20
MAX_PARTS = 10_000
_FULL_OBJECT_ONLY = frozenset({"CRC64NVME"})
_COMPOSITE_ONLY = frozenset({"SHA1", "SHA256"})


@dataclass(kw_only=True)
class Upload:
    """An upload that was begun and neither completed nor aborted. ``parts`` by number."""

    id: str
    bucket: str
    key: str
    started_s: float
    headers: dict[str, str]
    algorithm: str | None
    checksum_type: str | None
    parts: dict[int, StoredObject] = field(default_factory=dict)

    def elements(self) -> list[str]:
        """What documents name it by."""
        return [xml.element("Bucket", self.bucket), xml.element("Key", self.key), xml.element("UploadId", self.id)]


class Uploads:
    """The uploads under way, kept on disk so that they survive a restart."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._root = disk.root / ".uploads"
        self._by_id: dict[str, Upload] = {}
        for path in self._root.iterdir():
            upload = _load(path)
            if upload is not None and upload.bucket in disk.buckets:
                self._by_id[upload.id] = upload
            else:
                shutil.rmtree(path, ignore_errors=True)

    def in_bucket(self, bucket: str) -> list[Upload]:
        """In the order of a listing: by key, then by start."""
        return sorted((u for u in self._by_id.values() if u.bucket == bucket), key=lambda u: (u.key, u.started_s, u.id))

    def find(self, request: Request) -> Upload:
        """Raises: S3Error NoSuchUpload."""
        upload = self._by_id.get(request.query.get("uploadId", ""))
        if upload is None or (upload.bucket, upload.key) != (request.bucket, request.key):
            raise S3Error("NoSuchUpload", UploadId=request.query.get("uploadId", ""))
        return upload

    def forget_bucket(self, bucket: str) -> None:
        """A bucket was deleted; its uploads go with it."""
        for upload in self.in_bucket(bucket):
            self._drop(upload)

    def _drop(self, upload: Upload) -> None:
        self._by_id.pop(upload.id, None)
        shutil.rmtree(self._root / upload.id, ignore_errors=True)

    def _part_file(self, upload: Upload, number: int) -> str:
        return f"{self._root}/{upload.id}/{number}"

    def create(self, request: Request) -> Answer:
        """CreateMultipartUpload."""
        algorithm = request.headers.get("x-amz-checksum-algorithm", "").upper() or None
        kind = request.headers.get("x-amz-checksum-type", "").upper() or None
        if algorithm is not None:
            if algorithm not in checksums.ALGORITHMS:
                raise S3Error("InvalidRequest", "Checksum algorithm provided is unsupported.")
            kind = kind or ("FULL_OBJECT" if algorithm in _FULL_OBJECT_ONLY else "COMPOSITE")
            if (kind == "COMPOSITE" and algorithm in _FULL_OBJECT_ONLY) or (
                kind == "FULL_OBJECT" and algorithm in _COMPOSITE_ONLY
            ):
                raise S3Error(
                    "InvalidRequest",
                    f"The {kind} checksum type cannot be used with the {algorithm} checksum algorithm.",
                )
        elif kind is not None:
            raise S3Error(
                "InvalidRequest", "The x-amz-checksum-type header can only be used with x-amz-checksum-algorithm."
            )
        upload = Upload(
            id=secrets.token_urlsafe(32),
            bucket=request.bucket,
            key=request.key,
            started_s=time.time(),
            headers=request.user_headers(),
            algorithm=algorithm,
            checksum_type=kind,
        )
        path = self._root / upload.id
        path.mkdir()
        known = {k: v for k, v in vars(upload).items() if k != "parts"}
        draft = path / "upload.tmp"
        draft.write_text(json.dumps(known))
        draft.rename(path / "upload.json")
        self._by_id[upload.id] = upload
        parts = upload.elements()
        answer = xml_answer(xml.document("InitiateMultipartUploadResult", parts))
        if algorithm is not None and kind is not None:
            answer.headers |= {"x-amz-checksum-algorithm": algorithm, "x-amz-checksum-type": kind}
        return answer

    async def put_part(self, request: Request) -> Answer:
        """UploadPart."""
        upload, number = self.find(request), _part_number(request)
        stored = StoredObject(key=str(number), etag="", size=0, modified_s=0.0)
        incoming = Incoming(self._disk, stored)
        try:
            await incoming.receive(request, upload.algorithm)
            stored.etag, stored.size = incoming.md5.hex(), incoming.size
            stored.checksums, stored.modified_s = incoming.checksums, time.time()
            file = await incoming.store(stored)
            self._keep_part(upload, number, stored, file)
        finally:
            incoming.discard()
        return Answer(
            headers={
                "etag": f'"{stored.etag}"',
                **{k: v for k, v in checksum_headers(stored).items() if "type" not in k},
            }
        )

    def _keep_part(self, upload: Upload, number: int, stored: StoredObject, file: str) -> None:
        if upload.id not in self._by_id:  # aborted or completed while the part came in
            raise S3Error("NoSuchUpload", UploadId=upload.id)
        os.rename(file, self._part_file(upload, number))
        upload.parts[number] = stored

    async def copy_part(self, request: Request) -> Answer:
        """UploadPartCopy."""
        upload, number = self.find(request), _part_number(request)
        bucket, source = copy_source(self._disk, request)
        selected = byte_range(request.headers.get("x-amz-copy-source-range"), source.size)
        offset, length = selected if selected is not None else (0, source.size)
        stored = StoredObject(key=str(number), etag="", size=length, modified_s=time.time())
        fd = self._disk.open_body(bucket, source)
        incoming = Incoming(self._disk, stored)
        try:
            await asyncio.to_thread(incoming.take_file, fd, source.body_offset + offset, length, upload.algorithm)
            stored.etag, stored.checksums = incoming.md5.hex(), incoming.checksums
            file = await incoming.store(stored)
            self._keep_part(upload, number, stored, file)
        finally:
            os.close(fd)
            incoming.discard()
        parts = [xml.element("ETag", f'"{stored.etag}"'), xml.element("LastModified", iso(stored.modified_s))]
        parts += [xml.element(checksums.ELEMENT[a], v) for a, v in stored.checksums.items()]
        return xml_answer(xml.document("CopyPartResult", parts))

    def abort(self, request: Request) -> Answer:
        """AbortMultipartUpload."""
        self._drop(self.find(request))
        return Answer(status=204)

    async def complete(self, bucket: Bucket, request: Request, body: bytes) -> Answer:
        """CompleteMultipartUpload: check the named parts, join them, make them the object."""
        upload = self.find(request)
        chosen = self._chosen(upload, body)
        check_write(request.headers, bucket.objects.get(upload.key))
        sizes = [part.size for _, part in chosen]
        declared = request.headers.get("x-amz-mp-object-size")
        if declared is not None and declared != str(sum(sizes)):
            raise S3Error("InvalidRequest", "The provided x-amz-mp-object-size does not match what was uploaded.")
        digests = hashlib.md5(b"".join(bytes.fromhex(part.etag) for _, part in chosen), usedforsecurity=False)
        stored = StoredObject(
            key=upload.key,
            etag=f"{digests.hexdigest()}-{len(chosen)}",
            size=sum(sizes),
            modified_s=time.time(),
            headers=upload.headers,
            checksum_type=upload.checksum_type,
            part_sizes=sizes,
        )
        file = self._disk.new_file()
        del self._by_id[upload.id]  # no part is added and nobody else completes it while it is being joined
        done = False
        try:
            await asyncio.to_thread(self._join, upload, chosen, stored, file)
            self._check_whole(upload, request, stored)
            commit(self._disk, bucket, request, stored, file)
            done = True
            await settle(self._disk, bucket, stored)
        finally:
            if done:
                shutil.rmtree(self._root / upload.id, ignore_errors=True)
            else:
                self._by_id[upload.id] = upload
                discard_file(file)
        parts = [
            xml.element("Location", f"http://{request.headers.get('host', '')}{request.raw_path}"),
            xml.element("Bucket", upload.bucket),
            xml.element("Key", upload.key),
            xml.element("ETag", f'"{stored.etag}"'),
        ]
        parts += [xml.element(checksums.ELEMENT[a], v) for a, v in stored.checksums.items()]
        if stored.checksums:
            parts.append(xml.element("ChecksumType", stored.checksum_type))
        return xml_answer(xml.document("CompleteMultipartUploadResult", parts))

    def _chosen(self, upload: Upload, body: bytes) -> list[tuple[int, StoredObject]]:
        chosen: list[tuple[int, StoredObject]] = []
        for node in xml.parse(body, "CompleteMultipartUpload").iter("Part"):
            number, etag = node.findtext("PartNumber", ""), node.findtext("ETag", "").strip().strip('"')
            if not number.strip().isdecimal():
                raise S3Error("MalformedXML")
            if chosen and int(number) <= chosen[-1][0]:
                raise S3Error("InvalidPartOrder", UploadId=upload.id)
            part = upload.parts.get(int(number))
            if part is None or part.etag != etag:
                raise S3Error("InvalidPart", UploadId=upload.id, PartNumber=number, ETag=etag)
            for algorithm, name in checksums.ELEMENT.items():
                value = node.findtext(name)
                if value is not None and part.checksums.get(algorithm) != value:
                    raise S3Error("InvalidPart", UploadId=upload.id, PartNumber=number, ETag=etag)
            chosen.append((int(number), part))
        if not chosen:
            raise S3Error("MalformedXML")
        for number_, part in chosen[:-1]:
            if part.size < MIN_PART_BYTES:
                sizes = {"MinSizeAllowed": str(MIN_PART_BYTES), "ProposedSize": str(part.size)}
                raise S3Error("EntityTooSmall", **sizes, PartNumber=str(number_), ETag=part.etag)
        return chosen

    def _join(self, upload: Upload, chosen: list[tuple[int, StoredObject]], stored: StoredObject, file: str) -> None:
        fds: list[int] = []
        try:
            for number, _ in chosen:
                fds.append(os.open(self._part_file(upload, number), os.O_RDONLY | os.O_CLOEXEC))
            ranges = [(fd, part.body_offset, part.size) for fd, (_, part) in zip(fds, chosen, strict=True)]
            if upload.algorithm is not None:
                stored.checksums = {upload.algorithm: _whole_checksum(upload, chosen, ranges)}
            line = stored.to_line()
            stored.body_offset = len(line)
            write_file(file, line, ranges, fsync=self._disk.fsync)
        finally:
            for fd in fds:
                os.close(fd)

    def _check_whole(self, upload: Upload, request: Request, stored: StoredObject) -> None:
        for header, algorithm in checksums.HEADER.items():
            value = request.headers.get(header)
            if value is not None and stored.checksums.get(algorithm, value) != value:
                raise S3Error("BadDigest", f"The {algorithm} you specified did not match the calculated checksum.")

    def list_parts(self, request: Request) -> Answer:
        """ListParts."""
        upload = self.find(request)
        limit = _number(request, "max-parts", 1000)
        after = _number(request, "part-number-marker", 0)
        numbers = sorted(n for n in upload.parts if n > after)
        shown = numbers[: min(limit, 1000)]
        parts = upload.elements()
        parts += [xml.element("PartNumberMarker", after), xml.element("MaxParts", limit)]
        parts.append(xml.element("NextPartNumberMarker", shown[-1] if shown else 0))
        parts.append(xml.element("IsTruncated", "true" if len(shown) < len(numbers) else "false"))
        parts.append(xml.element("StorageClass", "STANDARD"))
        if upload.algorithm is not None:
            parts += [
                xml.element("ChecksumAlgorithm", upload.algorithm),
                xml.element("ChecksumType", upload.checksum_type),
            ]
        for number in shown:
            part = upload.parts[number]
            inner = [xml.element("PartNumber", number), xml.element("LastModified", iso(part.modified_s))]
            inner += [xml.element("ETag", f'"{part.etag}"'), xml.element("Size", part.size)]
            inner += [xml.element(checksums.ELEMENT[a], v) for a, v in part.checksums.items()]
            parts.append(f"<Part>{''.join(inner)}</Part>")
        return xml_answer(xml.document("ListPartsResult", parts))


def _whole_checksum(upload: Upload, chosen: list[tuple[int, StoredObject]], ranges: list[tuple[int, int, int]]) -> str:
    algorithm = upload.algorithm or ""
    checksum = checksums.new(algorithm)
    if upload.checksum_type == "COMPOSITE":
        for _, part in chosen:
            checksum.update(base64.b64decode(part.checksums[algorithm]))
        return f"{checksums.encode(checksum.digest())}-{len(chosen)}"
    for fd, offset, length in ranges:
        for piece in pieces(fd, offset, length):
            checksum.update(piece)
    return checksums.encode(checksum.digest())


def _part_number(request: Request) -> int:
    number = request.query.get("partNumber", "")
    if not number.isdecimal() or not 1 <= int(number) <= MAX_PARTS:
        raise S3Error("InvalidArgument", f"Part number must be an integer between 1 and {MAX_PARTS}, inclusive")
    return int(number)


def _number(request: Request, name: str, default: int) -> int:
    text = request.query.get(name) or str(default)
    if not text.isdecimal():
        raise S3Error("InvalidArgument", f"Provided {name} not an integer or within integer range", ArgumentName=name)
    return int(text)


def _load(path: Path) -> Upload | None:
    try:
        if not stat.S_ISREG(os.lstat(path / "upload.json").st_mode):
            return None
        upload = Upload(**json.loads((path / "upload.json").read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    for file in path.iterdir():
        if file.name.isdecimal():
            stored = read_stored(str(file))
            if stored is not None:
                upload.parts[int(file.name)] = stored
    return upload
