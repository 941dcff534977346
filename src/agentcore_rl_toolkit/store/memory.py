"""Objects in this process's memory, shared by all stores of one URL: for tests and small local runs."""

from __future__ import annotations

import asyncio
import os
import threading
import time

from ..errors import ObjectExistsError, ObjectNotFoundError
from .base import ObjectInfo, ObjectStore, check_size, utc

_spaces: dict[str, dict[str, tuple[bytes, float]]] = {}
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class MemoryStore(ObjectStore):
    """``memory://name``: all stores of one name in this process have the same objects. A forked child has a copy of them."""

    def __init__(self, url: str, name: str, prefix: str) -> None:
        super().__init__(url)
        self._prefix = prefix
        with _lock:
            self._objects = _spaces.setdefault(name, {})

    async def _put(self, key: str, body: bytes, create_only: bool, durable: bool) -> None:
        await asyncio.sleep(0)  # other tasks run in between, as with the other stores
        with _lock:
            if create_only and self._prefix + key in self._objects:
                raise ObjectExistsError(f"{key!r} exists in {self.url}", key=key)
            self._objects[self._prefix + key] = (bytes(body), time.time())

    async def _get(self, key: str, max_bytes: int | None) -> bytes:
        body, _ = await self._find(key)
        check_size(key, self.url, len(body), max_bytes)
        return body

    async def _head(self, key: str) -> ObjectInfo:
        return _info(key, await self._find(key))

    async def _find(self, key: str) -> tuple[bytes, float]:
        await asyncio.sleep(0)
        with _lock:
            entry = self._objects.get(self._prefix + key)
        if entry is None:
            raise ObjectNotFoundError(f"no object {key!r} in {self.url}", key=key)
        return entry

    async def _list(self, prefix: str) -> list[ObjectInfo]:
        await asyncio.sleep(0)
        start, cut = self._prefix + prefix, len(self._prefix)
        with _lock:
            found = sorted((key[cut:], entry) for key, entry in self._objects.items() if key.startswith(start))
        return [_info(key, entry) for key, entry in found]

    async def _delete(self, key: str) -> None:
        await asyncio.sleep(0)
        with _lock:
            self._objects.pop(self._prefix + key, None)


def _info(key: str, entry: tuple[bytes, float]) -> ObjectInfo:
    body, at_s = entry
    return ObjectInfo(key=key, size=len(body), last_modified=utc(at_s), etag=f'"{at_s}-{len(body)}"')
