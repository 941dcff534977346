"""Records through the agent's own S3 client: ``app.s3_client = boto3.client("s3", ...)``.

Agents written for the published toolkit replace this attribute to use other credentials or another endpoint. Such a client gets
one `put_object` per record, as there; heartbeats and create-only writes need a store URL.
"""

from __future__ import annotations

from typing import Any

from ..errors import StoreError
from ..store import ObjectInfo
from ..store.boto import BotoStore


class S3ClientStore(BotoStore):
    """A bucket behind a boto3-like client; it can put records and read them back."""

    def __init__(self, client: Any, bucket: str) -> None:
        super().__init__(f"s3://{bucket}", client, bucket, "")

    async def _put(self, key: str, body: bytes, create_only: bool, durable: bool) -> None:
        await self._call(key, "put_object", Body=body, ContentType="application/json")

    async def _list(self, prefix: str) -> list[ObjectInfo]:
        raise StoreError("a bucket behind the agent's own S3 client cannot be listed", permanent=True)
