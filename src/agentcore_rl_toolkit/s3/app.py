"""The S3 endpoint as an ASGI application over a directory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import buckets, objects
from .access import Access, Scope
from .disk import Bucket, Disk, pieces
from .incoming import Incoming
from .multipart import Uploads
from .wire import xml
from .wire.errors import S3Error
from .wire.request import MAX_DOCUMENT_BYTES, Answer, ClientGoneError, Receive, Request, Send, xml_answer
from .wire.signatures import claimed_key, verify

log = logging.getLogger(__name__)

_READ_ON_LOOP = 2**18  # a body up to this size is read at once; longer ones piece by piece in a thread
# Parameters that select another operation than the plain one; those not served are refused, never mistaken for it.
_SUBRESOURCES = frozenset(
    [
        "accelerate",
        "acl",
        "analytics",
        "attributes",
        "cors",
        "encryption",
        "intelligent-tiering",
        "inventory",
        "legal-hold",
        "lifecycle",
        "logging",
        "metrics",
        "notification",
        "object-lock",
        "ownershipControls",
        "policy",
        "policyStatus",
        "publicAccessBlock",
        "replication",
        "requestPayment",
        "restore",
        "retention",
        "select",
        "session",
        "tagging",
        "torrent",
        "versions",
        "website",
        "versionId",
        "renameObject",
        "metadataTable",
    ]
)
_SSE_C = "x-amz-server-side-encryption-customer-algorithm"


@dataclass(frozen=True, kw_only=True)
class S3Config:
    """``credentials`` (access key -> secret key): requests must be signed with one of them; empty accepts any request.

    ``auto_create`` makes a bucket on first write. ``fsync`` makes writes survive a power failure. ``mount`` is the path prefix
    under which the application is mounted, without a trailing slash.
    """

    root: Path
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    auto_create: bool = False
    fsync: bool = False
    region: str = "us-east-1"
    mount: str = ""


class S3App:
    """ASGI 3 application. Owns its directory until `close`.

    With ``access``, requests that are signed with none of the configuration's credentials are judged by it.

    Raises: ConfigError when another server holds the directory.
    """

    def __init__(self, config: S3Config, *, access: Access | None = None) -> None:
        self.config = config
        self.access = access
        self.disk = Disk(config.root, fsync=config.fsync)
        self.uploads = Uploads(self.disk)
        self._numbers = itertools.count(1)
        self._start = os.urandom(4).hex().upper()

    def ensure_buckets(self, names: Iterable[str]) -> None:
        """Create the buckets that are not there yet. Raises: ConfigError on a name that S3 would not take."""
        for name in names:
            try:
                buckets.check_name(name)
            except S3Error as e:
                raise ConfigError(f"{name!r} is not a bucket name: {e.message}") from None
            if name not in self.disk.buckets:
                self.disk.create_bucket(name)

    def close(self) -> None:
        """Release the directory."""
        self.disk.close()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"the S3 endpoint serves HTTP, not {scope['type']}")
        request_id = f"{self._start}{next(self._numbers):08X}"
        request: Request | None = None
        try:
            request = Request(scope, receive, self.config.mount)
            answer = await self._answer(request, scope)
        except ClientGoneError:
            return
        except S3Error as e:
            answer = _error(e, scope, request_id)
        except Exception:
            log.exception("S3 request %s %s failed", scope["method"], scope["path"])
            answer = _error(S3Error("InternalError"), scope, request_id)
        with contextlib.suppress(ClientGoneError):
            if request is None or not (request.body_read or await request.drain()):
                answer.headers["connection"] = "close"  # the rest of the body would be read as the next request
            await _reply(answer, request_id, scope["method"], send)

    async def _authenticate(self, request: Request, asgi_scope: Mapping[str, Any]) -> Scope | None:
        """Who calls: None may do everything."""
        key = claimed_key(request.signed)
        if self.access is None or key in self.config.credentials:
            verify(request.signed, self.config.credentials, time.time())
            return None
        limits = await self.access.scope(asgi_scope, key)
        verify(request.signed, self.access.secrets_of(key), time.time())
        return limits

    async def _answer(self, request: Request, asgi_scope: Mapping[str, Any]) -> Answer:
        limits = await self._authenticate(request, asgi_scope)
        request.adopt_query_headers()
        if _SSE_C in request.headers:
            raise S3Error("NotImplemented", "Encryption with customer keys is not implemented.", Header=_SSE_C)
        refused = _SUBRESOURCES & request.query.keys()
        if refused and not (refused == {"versionId"} and request.query["versionId"] == "null"):
            raise S3Error("NotImplemented", f"The {sorted(refused)[0]} subresource is not implemented.")
        if limits is not None:
            limits.check(request)
        if not request.bucket:
            if request.method != "GET":
                raise S3Error("MethodNotAllowed", Method=request.method, ResourceType="SERVICE")
            return buckets.list_buckets(self.disk, request)
        if not request.key:
            return await self._on_bucket(request)
        return await self._on_object(request)

    def _bucket(self, request: Request, *, writing: bool = False) -> Bucket:
        bucket = self.disk.buckets.get(request.bucket)
        if bucket is None:
            if not (writing and self.config.auto_create):
                raise S3Error("NoSuchBucket", BucketName=request.bucket)
            buckets.check_name(request.bucket)
            bucket = self.disk.create_bucket(request.bucket)
        return bucket

    async def _on_bucket(self, request: Request) -> Answer:
        method, query = request.method, request.query
        if method == "PUT":
            if "versioning" in query:
                raise S3Error("NotImplemented", "Versioning is not implemented.")
            return buckets.create(self.disk, request, await self._document(request), self.config.region)
        bucket = self._bucket(request)
        if method == "HEAD":
            return Answer(headers={"x-amz-bucket-region": self.config.region})
        if method == "DELETE":
            return buckets.delete(self.disk, self.uploads, bucket)
        if method == "POST" and "delete" in query:
            return buckets.delete_objects(self.disk, bucket, await self._document(request))
        if method != "GET":
            raise S3Error("MethodNotAllowed", Method=method, ResourceType="BUCKET")
        if "location" in query:
            region = "" if self.config.region == "us-east-1" else self.config.region
            body = f'{xml.HEADER}<LocationConstraint xmlns="{xml.NAMESPACE}">{region}</LocationConstraint>'
            return xml_answer(body.encode())
        if "versioning" in query:
            return xml_answer(xml.document("VersioningConfiguration", []))
        if "uploads" in query:
            return buckets.list_uploads(self.uploads, bucket, request)
        return buckets.list_objects(bucket, request)

    async def _on_object(self, request: Request) -> Answer:
        method, query = request.method, request.query
        if method in ("GET", "HEAD"):
            bucket = self._bucket(request)
            if method == "GET" and "uploadId" in query:
                return self.uploads.list_parts(request)
            return objects.read(self.disk, bucket, request)
        if method == "PUT":
            bucket = self._bucket(request, writing=True)
            copying = "x-amz-copy-source" in request.headers
            if "uploadId" in query:
                return await (self.uploads.copy_part(request) if copying else self.uploads.put_part(request))
            if "x-amz-tagging" in request.headers:
                raise S3Error("NotImplemented", "Object tags are not implemented.", Header="x-amz-tagging")
            return await (objects.copy if copying else objects.put)(self.disk, bucket, request)
        if method == "DELETE":
            bucket = self._bucket(request)
            return self.uploads.abort(request) if "uploadId" in query else objects.delete(self.disk, bucket, request)
        if method == "POST" and "uploads" in query:
            self._bucket(request, writing=True)
            return self.uploads.create(request)
        if method == "POST" and "uploadId" in query:
            return await self.uploads.complete(self._bucket(request), request, await self._document(request))
        raise S3Error("MethodNotAllowed", Method=method, ResourceType="OBJECT")

    async def _document(self, request: Request) -> bytes:
        """A short body, verified like an object's."""
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_DOCUMENT_BYTES:
            raise S3Error("MalformedXML")
        return await Incoming.document(self.disk, request)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _error(e: S3Error, scope: Mapping[str, Any], request_id: str) -> Answer:
    if scope["method"] == "HEAD":
        return Answer(status=e.status, headers={"content-type": "application/xml"})
    parts = [xml.element("Code", e.code), xml.element("Message", e.message)]
    parts += [xml.element(name, value) for name, value in e.detail.items()]
    parts += [
        xml.element("Resource", scope["path"]),
        xml.element("RequestId", request_id),
        xml.element("HostId", "agentcore-rl"),
    ]
    headers = {"content-type": "application/xml"}
    if e.status == 416:
        headers["content-range"] = f"bytes */{e.detail.get('ActualObjectSize', '*')}"
    return Answer(status=e.status, headers=headers, body=f"{xml.HEADER}<Error>{''.join(parts)}</Error>".encode())


async def _reply(answer: Answer, request_id: str, method: str, send: Send) -> None:
    headers = answer.headers
    if "content-length" not in headers and answer.status not in (204, 304):
        headers["content-length"] = str(len(answer.body))
    lines = [(n.encode("latin-1"), v.encode("latin-1", "replace")) for n, v in headers.items()]
    lines.append((b"x-amz-request-id", request_id.encode()))
    try:
        await send({"type": "http.response.start", "status": answer.status, "headers": lines})
        if answer.fd is None or method == "HEAD":
            await send({"type": "http.response.body", "body": b"" if method == "HEAD" else answer.body})
        elif answer.length <= _READ_ON_LOOP:
            await send({"type": "http.response.body", "body": os.pread(answer.fd, answer.length, answer.offset)})
        else:
            await _send_file(answer.fd, answer.offset, answer.length, send)
    finally:
        answer.close()


async def _send_file(fd: int, offset: int, length: int, send: Send) -> None:
    reading = pieces(fd, offset, length)
    while length:
        piece = await asyncio.to_thread(next, reading)
        length -= len(piece)
        await send({"type": "http.response.body", "body": piece, "more_body": length > 0})
