"""A request as S3 sees it, out of an ASGI scope, and an answer on its way back."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

from .errors import S3Error
from .signatures import Signed

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_KEY_BYTES = 1024
MAX_METADATA_BYTES = 2048
MAX_DOCUMENT_BYTES = 2 * 2**20  # 10,000 parts or 1,000 keys of 1,024 bytes fit; the OOM guard for XML bodies


class ClientGoneError(Exception):
    """The client went away before the end of its request; there is nobody to answer."""


class Request:
    """Method, bucket, key, parameters and headers. ``key`` is empty for requests on a bucket, ``bucket`` on the service.

    Raises: S3Error InvalidURI or KeyTooLongError.
    """

    def __init__(self, scope: Mapping[str, Any], receive: Receive, mount: str = "") -> None:
        self.method: str = scope["method"]
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        self.raw_path = raw.decode("latin-1")
        query = scope.get("query_string", b"").decode("latin-1")
        pairs = parse_qsl(query, keep_blank_values=True) if query else []
        self.query = dict(reversed(pairs))
        self.headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            text = value.decode("latin-1")
            key = name.decode("latin-1")
            self.headers[key] = f"{self.headers[key]},{text}" if key in self.headers else text
        self.signed = Signed(method=self.method, raw_path=self.raw_path, query=pairs, headers=self.headers, mount=mount)
        path = self.raw_path.removeprefix(mount) if mount else self.raw_path
        bucket, _, raw_key = path.removeprefix("/").partition("/")
        try:
            self.bucket = unquote_to_bytes(bucket).decode()
            self.key = unquote_to_bytes(raw_key).decode() if raw_key else ""
        except UnicodeDecodeError:
            raise S3Error("InvalidURI") from None
        if len(raw_key) > MAX_KEY_BYTES and len(self.key.encode()) > MAX_KEY_BYTES:
            raise S3Error("KeyTooLongError", Size=str(len(self.key.encode())), MaxSizeAllowed=str(MAX_KEY_BYTES))
        self._receive = receive
        self.body_read = False

    def adopt_query_headers(self) -> None:
        """Presigning moves ``x-amz-`` headers into the query; once the signature is checked they count as headers."""
        for name, value in self.query.items():
            lowered = name.lower()
            if lowered.startswith("x-amz-") or lowered in ("content-md5", "content-type"):
                self.headers.setdefault(lowered, value)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes as they come. Raises: ClientGoneError."""
        while not self.body_read:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            self.body_read = not message.get("more_body", False)
            if body := message.get("body", b""):
                yield body

    async def drain(self) -> bool:
        """Read what is left of a body that is not wanted, if that is short. Returns: whether the connection may be used on."""
        left = self.headers.get("content-length", "0" if "transfer-encoding" not in self.headers else "")
        if not left.isdecimal() or int(left) > MAX_DOCUMENT_BYTES:
            return self.body_read
        async for _ in self.chunks():
            continue
        return True

    def user_headers(self) -> dict[str, str]:
        """The headers that are kept with an object and given back with it. Raises: S3Error MetadataTooLarge."""
        kept = {n: v for n, v in self.headers.items() if n in KEPT_HEADERS or n.startswith("x-amz-meta-")}
        if sum(len(n) - 11 + len(v) for n, v in kept.items() if n.startswith("x-amz-meta-")) > MAX_METADATA_BYTES:
            raise S3Error("MetadataTooLarge", MaxSizeAllowed=str(MAX_METADATA_BYTES))
        encoding = kept.pop("content-encoding", None)
        if encoding is not None:
            real = [part.strip() for part in encoding.split(",") if part.strip() != "aws-chunked"]
            if real:
                kept["content-encoding"] = ",".join(real)
        kept.setdefault("content-type", "binary/octet-stream")
        return kept


KEPT_HEADERS = frozenset(
    [
        "content-type",
        "content-encoding",
        "content-language",
        "content-disposition",
        "cache-control",
        "expires",
        "x-amz-website-redirect-location",
        "x-amz-storage-class",
        "x-amz-server-side-encryption",
    ]
)


@dataclass(kw_only=True)
class Answer:
    """Status, headers and either ``body`` or ``length`` bytes of the file ``fd`` from ``offset`` on."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    fd: int | None = None
    offset: int = 0
    length: int = 0

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def xml_answer(body: bytes) -> Answer:
    return Answer(headers={"content-type": "application/xml"}, body=body)
