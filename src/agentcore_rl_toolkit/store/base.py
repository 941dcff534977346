"""The interface of all stores: five operations, async with a sync face, with deadlines and retries built in."""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from .._portal import Portal
from ..errors import ConfigError, ObjectExistsError, ObjectTooLargeError, StoreError
from .retry import RetryPolicy, TransientStoreError, jitter

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 60.0
MAX_KEY_BYTES = 1024  # S3's limit; the other stores follow it so that a run can move between them

_NO_PART = frozenset({"", ".", ".."})
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_portal = Portal("agentcore-rl-store")  # one loop per process, under every store's sync face


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """One object as a listing shows it.

    Units: ``size`` in bytes, ``last_modified`` an aware UTC datetime by the store's own clock.
    """

    key: str
    size: int
    last_modified: datetime
    etag: str | None = None


class ObjectStore(ABC):
    """Objects under keys. Open one with `open_store`; safe to use from any thread and any event loop.

    Every operation ends within ``timeout_s`` (default 60 s, ``None`` means no limit, ``0`` means one try) and repeats transient
    faults until then. Nothing is opened before the first operation.

    Raises: ObjectNotFoundError, ObjectExistsError, StorePermissionError, StoreError; ConfigError on an unusable key.
    """

    url: str

    def __init__(self, url: str, *, retry: RetryPolicy | None = None) -> None:
        self.url = url
        self.retry = retry or RetryPolicy()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    # -- what a store implements: one try each, mapped errors, TransientStoreError where another try may help

    @abstractmethod
    async def _put(self, key: str, body: bytes, create_only: bool, durable: bool) -> None: ...
    @abstractmethod
    async def _get(self, key: str, max_bytes: int | None) -> bytes: ...
    @abstractmethod
    async def _head(self, key: str) -> ObjectInfo: ...
    @abstractmethod
    async def _list(self, prefix: str) -> list[ObjectInfo]: ...
    @abstractmethod
    async def _delete(self, key: str) -> None: ...

    def check_writable(self, key: str) -> str:
        """Return the key unchanged if an object can be written under it. Raises: ConfigError."""
        return check_key(key)

    # -- the public face

    async def put_async(
        self,
        key: str,
        body: bytes,
        *,
        create_only: bool = False,
        durable: bool = True,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Write an object whole or not at all; a reader never sees a part of it.

        Args:
            create_only: refuse to replace an object. A try whose answer was lost and that did succeed counts as success.
            durable: survive a power cut (a directory is fsynced). False is enough for heartbeats.

        Raises: ObjectExistsError with `create_only`.
        """
        check_key(key)
        unsure = False

        async def attempt() -> None:
            nonlocal unsure
            try:
                await self._put(key, body, create_only, durable)
            except TransientStoreError as e:
                unsure = unsure or e.ambiguous
                raise
            except asyncio.CancelledError:  # this try's own deadline
                unsure = True
                raise
            except ObjectExistsError:
                # The object may be our own (the answer was lost) or another writer's. Only its content tells.
                if not unsure or not await self._holds(key, body):
                    raise

        await self._until_deadline("put", key, attempt, timeout_s, len(body))

    async def get_async(
        self, key: str, *, max_bytes: int | None = None, timeout_s: float | None = DEFAULT_TIMEOUT_S
    ) -> bytes:
        """Content of an object.

        Args:
            max_bytes: refuse a larger object without reading it.

        Raises: ObjectNotFoundError; ObjectTooLargeError with `max_bytes`.
        """
        check_key(key)
        return await self._until_deadline("get", key, lambda: self._get(key, max_bytes), timeout_s, 100_000_000)

    async def _holds(self, key: str, body: bytes) -> bool:
        try:
            return await self._get(key, len(body)) == body
        except ObjectTooLargeError:
            return False

    async def head_async(self, key: str, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> ObjectInfo:
        """Size and age of an object. Raises: ObjectNotFoundError."""
        check_key(key)
        return await self._until_deadline("head", key, lambda: self._head(key), timeout_s, 0)

    async def list_async(self, prefix: str = "", *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> list[ObjectInfo]:
        """Every object whose key starts with `prefix`, sorted by key.

        A prefix that ends in ``/`` is the quick form; any other one lists the folder that holds it and filters. What lies there
        and is no object is left out.

        Raises: ConfigError where an object has a key that no store of ours writes.
        """
        return await self._until_deadline("list", prefix, lambda: self._list(prefix), timeout_s, 10_000_000)

    async def delete_async(self, key: str, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Remove an object; a missing one is no error."""
        check_key(key)
        await self._until_deadline("delete", key, lambda: self._delete(key), timeout_s, 0)

    async def _until_deadline(
        self, verb: str, key: str, attempt: Callable[[], Awaitable[T]], timeout_s: float | None, body_bytes: int
    ) -> T:
        policy = self.retry
        started = time.monotonic()
        limit_s = float("inf") if timeout_s is None else timeout_s
        failures = 0
        fault: Exception | None = None
        while True:
            # the first try gets a second even with timeout_s=0, which means "once" and not "never"
            left_s = max(limit_s - (time.monotonic() - started), 0.0 if failures else 1.0)
            try:
                async with asyncio.timeout(min(policy.attempt_limit_s(body_bytes), left_s)):
                    return await attempt()
            except TransientStoreError as e:
                fault = e
            except TimeoutError as e:
                # a try cut short by the end says less than the one before it
                fault = fault if fault is not None and left_s < policy.attempt_s else e
            failures += 1
            delay_s = policy.delay_s(failures, jitter())
            spent_s = time.monotonic() - started
            if spent_s + delay_s >= limit_s:
                raise StoreError(
                    f"{verb} of {key!r} in {self.url} did not succeed within {spent_s:.1f} s ({failures} tries); "
                    f"last fault: {str(fault) or 'no answer in time'}",
                    key=key,
                ) from fault
            await asyncio.sleep(delay_s)

    put = _portal.sync(put_async)
    get = _portal.sync(get_async)
    head = _portal.sync(head_async)
    delete = _portal.sync(delete_async)
    list = _portal.sync(list_async)


def check_key(key: str) -> str:
    """Return the key unchanged. Raises: ConfigError when it is empty, too long, no Unicode, or could leave its folder."""
    if not key or not isinstance(key, str):
        raise ConfigError(f"an object key must be a non-empty string, got {key!r}")
    if len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        raise ConfigError(f"object key of more than {MAX_KEY_BYTES} bytes: {key[:80]!r}...")
    if _CONTROL.search(key) or any(part in _NO_PART for part in key.split("/")):
        raise ConfigError(f"object key {key!r}: no empty part, '.', '..' or control character")
    try:
        key.encode()
    except UnicodeEncodeError as e:
        raise ConfigError(f"object key {key!r} is not Unicode text: {e.reason}") from e
    return key


def check_size(key: str, url: str, size: int, max_bytes: int | None) -> None:
    """Raises: ObjectTooLargeError when there is a limit and the size is above it."""
    if max_bytes is not None and size > max_bytes:
        raise ObjectTooLargeError(f"{key!r} in {url} has {size} bytes, more than the {max_bytes} it may have", key=key)


def utc(seconds: float) -> datetime:
    """Unix seconds as an aware datetime."""
    return datetime.fromtimestamp(seconds, UTC)
