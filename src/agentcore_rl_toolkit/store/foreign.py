"""S3 keys that obstore has no words for: ``a//b``, ``a/``, control characters. boto3 takes every key.

S3 allows nearly any key, and the published agent writes ``exp//uuid.json`` for an empty input id. obstore cannot name such a key,
and a single one makes its whole listing fail. This is the way round it: slower, and used only where such a key was met.

Listings ask S3 for percent-encoded keys, because XML has no form for most control characters. boto3 signs the request; its own
parser, which takes 70 ms for 1,000 keys, is left out.
"""

from __future__ import annotations

import threading
from datetime import datetime
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from ..errors import ObjectExistsError, ObjectNotFoundError, StoreError, StorePermissionError
from .base import ObjectInfo, check_size
from .retry import TransientStoreError

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 20.0
SIGNED_FOR_S = 300


class ForeignKeys:
    """The operations of a store on one bucket. Blocks; thread-safe. Keys and prefixes are taken as they are.

    Raises (each method): ObjectNotFoundError, StorePermissionError, StoreError; TransientStoreError where another try may help.
    """

    def __init__(self, bucket: str, *, region: str, endpoint_url: str | None) -> None:
        self._bucket, self._region, self._endpoint_url = bucket, region, endpoint_url
        self._lock = threading.Lock()
        self._made: tuple[Any, Any] | None = None

    def list(self, prefix: str, after: str | None) -> list[ObjectInfo]:
        """Every object whose key starts with `prefix`, behind `after` when it is given."""
        client, http = self._clients()
        found: list[ObjectInfo] = []
        asked: dict[str, Any] = {"Bucket": self._bucket, "Prefix": prefix, "EncodingType": "url"}
        if after is not None:
            asked["StartAfter"] = after
        while True:
            page = self._page(client, http, asked, prefix)
            found += _objects(page)
            token = _text(page, "NextContinuationToken")
            if _text(page, "IsTruncated") != "true" or not token:
                return found
            asked["ContinuationToken"] = token

    def head(self, key: str) -> ObjectInfo:
        """Size and age of an object."""
        answer = self._ask("head_object", key)
        return ObjectInfo(
            key=key, size=answer["ContentLength"], last_modified=answer["LastModified"], etag=answer.get("ETag")
        )

    def get(self, key: str, max_bytes: int | None) -> bytes:
        """Content of an object. Raises: ObjectTooLargeError."""
        answer = self._ask("get_object", key)
        with answer["Body"] as body:
            check_size(key, f"s3://{self._bucket}", answer["ContentLength"], max_bytes)
            try:
                return bytes(body.read())
            except Exception as e:  # botocore and urllib3 raise errors of many families while a body is read
                raise TransientStoreError(f"{key!r} in {self._bucket}: {e}", key=key) from e

    def put(self, key: str, body: bytes, create_only: bool, content_type: str) -> None:
        """Write an object. Raises: ObjectExistsError with `create_only`."""
        only_new = {"IfNoneMatch": "*"} if create_only else {}
        self._ask("put_object", key, Body=body, ContentType=content_type, **only_new)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._ask("delete_object", key)

    def _ask(self, operation: str, key: str, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        client, _ = self._clients()
        try:
            return getattr(client, operation)(Bucket=self._bucket, Key=key, **arguments)
        except ClientError as e:
            status = e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            raise self._error(key, status, e.response.get("Error", {}).get("Code", "")) from e
        except BotoCoreError as e:
            raise TransientStoreError(f"{key!r} in {self._bucket}: {e}", key=key) from e

    def _page(self, client: Any, http: Any, asked: dict[str, Any], prefix: str) -> ElementTree.Element:
        from botocore.awsrequest import AWSRequest
        from botocore.exceptions import BotoCoreError

        try:
            url = client.generate_presigned_url("list_objects_v2", Params=asked, ExpiresIn=SIGNED_FOR_S)
            answer = http.send(AWSRequest(method="GET", url=url).prepare())
            body = answer.content
        except BotoCoreError as e:
            raise TransientStoreError(f"listing {prefix!r} in {self._bucket}: {e}", key=prefix) from e
        try:
            page = ElementTree.fromstring(body)
        except ElementTree.ParseError as e:
            page, broken = None, e
        if answer.status_code != 200:
            raise self._error(prefix, answer.status_code, "" if page is None else _text(page, "Code") or "")
        if page is None:
            raise TransientStoreError(f"listing {prefix!r} in {self._bucket}: no XML: {broken}", key=prefix)
        return page

    def _error(self, key: str, status: int, code: str) -> StoreError:
        where, why = f"{key!r} in s3://{self._bucket}", code or f"status {status}"
        if code == "NoSuchBucket":
            return StoreError(f"s3://{self._bucket} does not exist: create the bucket or correct its name", key=key)
        if status == 412:
            return ObjectExistsError(f"{where} exists", key=key)
        if status == 404:
            return ObjectNotFoundError(f"no object {where}", key=key)
        if status in (401, 403):
            return StorePermissionError(f"no access to {where}: {why}", key=key)
        if 400 <= status < 500 and status not in (408, 409, 425, 429):
            return StoreError(f"{where}: {why}", key=key)
        return TransientStoreError(f"{where}: {why}", key=key)

    def _clients(self) -> tuple[Any, Any]:
        with self._lock:
            if self._made is None:
                import boto3
                from botocore.config import Config
                from botocore.httpsession import URLLib3Session

                config = Config(
                    signature_version="s3v4",
                    s3={"addressing_style": "path"},
                    retries={"total_max_attempts": 1},
                    connect_timeout=CONNECT_TIMEOUT_S,
                    read_timeout=READ_TIMEOUT_S,
                )
                client = boto3.Session().client(
                    "s3", region_name=self._region, endpoint_url=self._endpoint_url, config=config
                )
                self._made = client, URLLib3Session(timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S))
            return self._made


def _objects(page: ElementTree.Element) -> list[ObjectInfo]:
    encoded = _text(page, "EncodingType") == "url"  # a server that does not know the parameter sends keys as they are
    found = []
    for line in page:
        if _name(line) == "Contents":
            fields = {_name(field): field.text or "" for field in line}
            key = fields["Key"]
            found.append(
                ObjectInfo(
                    key=unquote_plus(key) if encoded else key,
                    size=int(fields.get("Size") or 0),
                    last_modified=datetime.fromisoformat(fields["LastModified"]),
                    etag=fields.get("ETag"),
                )
            )
    return found


def _text(page: ElementTree.Element, name: str) -> str | None:
    return next((field.text or "" for field in page if _name(field) == name), None)


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]
