"""Keys that S3 can hold and obstore has no words for: control characters, empty parts. Here they are read through boto3.

Whoever can write to a bucket can leave such a key in it, and a single one makes its whole listing fail. This is the way round
it: slower, and used only where such a key was met.
"""

from __future__ import annotations

import threading
from typing import Any

from ..errors import ObjectExistsError, ObjectNotFoundError, StoreError, StorePermissionError
from .base import ObjectInfo, check_size
from .retry import TransientStoreError

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 20.0


class ForeignKeys:
    """The operations of a store on one bucket. Blocks; thread-safe. Keys and prefixes are taken as they are.

    Raises (each method): ObjectNotFoundError, StorePermissionError, StoreError; TransientStoreError where another try may help.
    """

    def __init__(self, bucket: str, *, region: str, endpoint_url: str | None) -> None:
        self._bucket, self._region, self._endpoint_url = bucket, region, endpoint_url
        self._lock = threading.Lock()
        self._made: Any = None

    def list(self, prefix: str, after: str | None) -> list[ObjectInfo]:
        """Every object whose key starts with `prefix`, behind `after` when it is given."""
        found: list[ObjectInfo] = []
        asked: dict[str, Any] = {"Prefix": prefix} if after is None else {"Prefix": prefix, "StartAfter": after}
        while True:
            page = self._ask("list_objects_v2", prefix, **asked)
            found += [_info(item["Key"], item, item["Size"]) for item in page.get("Contents", ())]
            if not page.get("IsTruncated"):
                return found
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def head(self, key: str) -> ObjectInfo:
        """Size and age of an object."""
        answer = self._ask("head_object", key, Key=key)
        return _info(key, answer, answer["ContentLength"])

    def get(self, key: str, max_bytes: int | None) -> bytes:
        """Content of an object. Raises: ObjectTooLargeError."""
        answer = self._ask("get_object", key, Key=key)
        with answer["Body"] as body:
            check_size(key, f"s3://{self._bucket}", answer["ContentLength"], max_bytes)
            try:
                return bytes(body.read())
            except Exception as e:  # botocore and urllib3 raise errors of many families while a body is read
                raise TransientStoreError(f"{key!r} in {self._bucket}: {e}", key=key) from e

    def put(self, key: str, body: bytes, create_only: bool, content_type: str) -> None:
        """Write an object. Raises: ObjectExistsError with `create_only`."""
        only_new = {"IfNoneMatch": "*"} if create_only else {}
        self._ask("put_object", key, Key=key, Body=body, ContentType=content_type, **only_new)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._ask("delete_object", key, Key=key)

    def _ask(self, operation: str, key: str, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client(), operation)(Bucket=self._bucket, **arguments)
        except ClientError as e:
            status = e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            raise self._error(key, status, e.response.get("Error", {}).get("Code", "")) from e
        except BotoCoreError as e:
            raise TransientStoreError(f"{key!r} in {self._bucket}: {e}", key=key) from e

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

    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                import boto3
                from botocore.config import Config

                config = Config(
                    s3={"addressing_style": "path"},
                    retries={"total_max_attempts": 1},
                    connect_timeout=CONNECT_TIMEOUT_S,
                    read_timeout=READ_TIMEOUT_S,
                )
                self._made = boto3.Session().client(
                    "s3", region_name=self._region, endpoint_url=self._endpoint_url, config=config
                )
            return self._made


def _info(key: str, answer: Any, size: int) -> ObjectInfo:
    return ObjectInfo(key=key, size=size, last_modified=answer["LastModified"], etag=answer.get("ETag"))
