"""S3 over boto3, for processes that were forked after obstore was used, and for agents with their own client.

boto3 costs ten times the CPU of obstore. A forked child (a worker of a DataLoader, of `multiprocessing`) makes few requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

from ..aws_errors import Fate, Fault, look_up
from ..errors import ObjectExistsError, ObjectNotFoundError, StoreError, StorePermissionError
from .base import ObjectInfo, ObjectStore, TransientStoreError, check_size

EXPIRED_AT_HEAD = "400"  # S3's reply to a HEAD with an expired token has no body, and so no code
_WRONG_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed")


def error_of(url: str, key: str | None, fault: Fault, text: str) -> StoreError:
    """Return the error of a store for a fault of S3. ``text`` is the client library's own."""
    where, about = url if key is None else f"{key!r} in {url}", {"key": key, "code": fault.code}
    if fault.code == "NoSuchBucket":
        return StoreError(f"{url} does not exist: create the bucket or correct its name", permanent=True, **about)
    if fault.code in _WRONG_REGION:
        return StoreError(f"{url} is in another region; set AWS_REGION to the bucket's region", permanent=True, **about)
    if fault.credentials or fault.code == EXPIRED_AT_HEAD:
        fault = dataclasses.replace(fault, fate=Fate.TRANSIENT)
        text = f"the AWS credentials have expired, or this machine's clock is wrong ({fault.code})"
    elif fault.status == 404:
        return ObjectNotFoundError(f"no object {where}", key=key)
    elif fault.status == 412:
        return ObjectExistsError(f"{where} exists", key=key)
    elif fault.fate is Fate.FINAL and fault.status in (401, 403):
        return StorePermissionError(f"no access to {where}: {fault.code}", **about)
    if fault.fate is Fate.FINAL or fault.status == 501:  # 501: the store has no conditional writes
        return StoreError(f"{where}: {text}", permanent=True, **about)
    return TransientStoreError(f"{where}: {text}", ambiguous=fault.fate is Fate.UNCERTAIN, key=key)


class BotoStore(ObjectStore):
    """A bucket behind a boto3 S3 client."""

    def __init__(self, url: str, client: Any, bucket: str, prefix: str) -> None:
        super().__init__(url)
        self._client, self._bucket, self._prefix = client, bucket, prefix
        self.refused = False  # S3 refused the client's credentials

    async def _put(self, key: str, body: bytes, create_only: bool, durable: bool) -> None:
        condition = {"IfNoneMatch": "*"} if create_only else {}
        await self._call(key, "put_object", Body=body, ContentType="application/json", **condition)

    async def _get(self, key: str, max_bytes: int | None) -> bytes:
        answer = await self._call(key, "get_object")
        with contextlib.closing(answer["Body"]) as body:
            if max_bytes is not None:
                check_size(key, self.url, answer["ContentLength"], max_bytes)
            try:
                return bytes(await asyncio.to_thread(body.read))
            except Exception as e:
                raise self._error(key, e) from e

    async def _head(self, key: str) -> ObjectInfo:
        return _info(key, await self._call(key, "head_object"), "ContentLength")

    async def _list(self, prefix: str) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []
        more: dict[str, str] = {}
        while True:
            page = await self._call(None, "list_objects_v2", Prefix=self._prefix + prefix, **more)
            found += [_info(item["Key"][len(self._prefix) :], item, "Size") for item in page.get("Contents", ())]
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def _delete(self, key: str) -> None:
        await self._call(key, "delete_object")

    async def _call(self, key: str | None, operation: str, **arguments: Any) -> Any:
        if key is not None:
            arguments["Key"] = self._prefix + key
        try:
            return await asyncio.to_thread(getattr(self._client, operation), Bucket=self._bucket, **arguments)
        except Exception as e:
            raise self._error(key, e) from e

    def _error(self, key: str | None, e: Exception) -> StoreError:
        fault = look_up(e) or Fault(fate=Fate.UNCERTAIN, code=type(e).__name__)  # a client of another make
        self.refused = self.refused or fault.credentials or fault.code == EXPIRED_AT_HEAD
        return error_of(self.url, key, fault, str(e))


class PutOnlyStore(BotoStore):
    """A bucket behind the agent's own boto3-like client. As in the published toolkit, it gets one `put_object` per record."""

    async def _put(self, key: str, body: bytes, create_only: bool, durable: bool) -> None:
        await super()._put(key, body, False, durable)


def _info(key: str, facts: dict[str, Any], size: str) -> ObjectInfo:
    return ObjectInfo(key=key, size=facts[size], last_modified=facts["LastModified"], etag=facts.get("ETag"))
