"""Records through the agent's own S3 client: ``app.s3_client = boto3.client("s3", ...)``.

Agents written for the published toolkit replace this attribute to use other credentials or another endpoint. Such a client gets
one `put_object` per record, as there; heartbeats and create-only writes need a store URL.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ..errors import ObjectNotFoundError, ObjectTooLargeError, StoreError
from ..store import ObjectInfo, ObjectStore
from ..store.base import check_size
from ..store.retry import TransientStoreError

_FINAL = {"AccessDenied", "NoSuchBucket", "InvalidAccessKeyId", "SignatureDoesNotMatch", "EntityTooLarge"}


class S3ClientStore(ObjectStore):
    """A bucket behind a boto3-like client; it can put records and read them back."""

    def __init__(self, client: Any, bucket: str) -> None:
        super().__init__(f"s3://{bucket}")
        self._client, self._bucket = client, bucket

    async def _put(self, key: str, body: bytes, create_only: bool, durable: bool) -> None:
        await self._call(key, "put_object", Body=body, ContentType="application/json")

    async def _get(self, key: str, max_bytes: int | None) -> bytes:
        answer = await self._call(key, "get_object")
        if max_bytes is not None:
            try:
                check_size(key, self.url, answer["ContentLength"], max_bytes)
            except ObjectTooLargeError:
                answer["Body"].close()
                raise
        return bytes(await asyncio.to_thread(answer["Body"].read))

    async def _head(self, key: str) -> ObjectInfo:
        answer = await self._call(key, "head_object")
        return ObjectInfo(
            key=key, size=answer["ContentLength"], last_modified=answer["LastModified"], etag=answer.get("ETag")
        )

    async def _list(self, prefix: str) -> list[ObjectInfo]:
        raise StoreError("a bucket behind the agent's own S3 client cannot be listed")

    async def _delete(self, key: str) -> None:
        await self._call(key, "delete_object")

    async def _call(self, key: str, operation: str, **arguments: Any) -> Any:
        call = getattr(self._client, operation)
        try:
            return await asyncio.to_thread(call, Bucket=self._bucket, Key=key, **arguments)
        except Exception as e:  # clients of any make; botocore's errors carry their code in `response`
            response = getattr(e, "response", None)
            code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
            if code in ("NoSuchKey", "404"):
                raise ObjectNotFoundError(f"no object {key!r} in {self.url}", key=key) from e
            if code in _FINAL:
                raise StoreError(f"{key!r} in {self.url}: {e}", key=key) from e
            raise TransientStoreError(f"{key!r} in {self.url}: {e}", key=key) from e
