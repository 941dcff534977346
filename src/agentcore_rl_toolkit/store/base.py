"""The interface of all stores: five operations, async and sync, with deadlines and one retry loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from .._portal import Portal
from ..contract import check_parts
from ..errors import AgentCoreRLError, ConfigError, ContractError, ObjectExistsError, ObjectTooLargeError, StoreError

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 60.0

_portal = Portal("agentcore-rl-store")  # one loop per process, under every store's sync methods


class TransientStoreError(StoreError):
    """A fault that may pass. ``ambiguous``: the store may have done the work although no reply came."""

    ambiguous = True


def backoff_s(failures: int, *, first_s: float = 0.1, most_s: float = 5.0) -> float:
    """Return the seconds to wait after failed attempts: doubled by each, up to ``most_s``, and up to a half shorter by chance."""
    return float(min(most_s, first_s * 2.0 ** min(failures - 1, 30))) * (1.0 - jitter() / 2)


def jitter() -> float:
    """Return a fraction in [0, 1) from the operating system. Sessions restored from one snapshot share the state of `random`."""
    return int.from_bytes(os.urandom(4)) / 2**32


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """An object of a listing.

    Units: ``size`` in bytes, ``last_modified`` an aware UTC datetime by the store's own clock.
    """

    key: str
    size: int
    last_modified: datetime
    etag: str | None = None


class ObjectStore(ABC):
    """Objects under keys. Open one with `open_store`. Safe to use from any thread and any event loop.

    Every operation ends within ``timeout_s`` (default 60 s, ``None`` means no limit, ``0`` means one try) and repeats transient
    faults until then. Nothing is opened before the first operation.

    Raises: ObjectNotFoundError, ObjectExistsError, StorePermissionError, StoreError; ConfigError on an unusable key.
    """

    attempt_s = 20.0  # limit of one attempt, without the time for a body
    bytes_per_s = 1e6

    def __init__(self, url: str) -> None:
        self.url = url

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    # -- what a store implements: one try each, and TransientStoreError for a fault that may pass

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

    def _limit_s(self, body_bytes: float) -> float:
        return self.attempt_s + body_bytes / self.bytes_per_s

    def _here(self) -> ObjectStore:
        """Return the store that implements these in this process."""
        return self

    def check_writable(self, key: str) -> None:
        """Check that an object can have this key. Raises: ConfigError."""
        check_key(key)

    # -- the public methods

    async def put_async(
        self,
        key: str,
        body: bytes,
        *,
        create_only: bool = False,
        durable: bool = True,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Write an object. A reader never sees a part of it.

        Args:
            create_only: refuse to replace an object. A try whose reply was lost and that did succeed counts as success.
            durable: survive a power cut (a directory is fsynced). False is enough for heartbeats.

        Raises: ObjectExistsError with `create_only`.
        """
        check_key(key)
        unsure = False

        async def attempt() -> None:
            nonlocal unsure
            try:
                await self._here()._put(key, body, create_only, durable)
            except ObjectExistsError:
                # The object may be our own (the reply was lost) or another writer's. Only its content shows which.
                if unsure:
                    with contextlib.suppress(ObjectTooLargeError):
                        if await self._here()._get(key, len(body)) == body:
                            return
                raise
            except BaseException as e:  # also this try's own deadline
                unsure = unsure or getattr(e, "ambiguous", True)
                raise

        await self._until_deadline("put", key, attempt, timeout_s, len(body))

    async def get_async(
        self, key: str, *, max_bytes: int | None = None, timeout_s: float | None = DEFAULT_TIMEOUT_S
    ) -> bytes:
        """Return the content of an object. With `max_bytes`, refuse a larger one without reading it.

        Raises: ObjectNotFoundError; ObjectTooLargeError.
        """
        check_key(key)
        return await self._until_deadline("get", key, lambda: self._here()._get(key, max_bytes), timeout_s, 100_000_000)

    async def head_async(self, key: str, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> ObjectInfo:
        """Return size and age of an object. Raises: ObjectNotFoundError."""
        check_key(key)
        return await self._until_deadline("head", key, lambda: self._here()._head(key), timeout_s, 0)

    async def list_async(self, prefix: str = "", *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> list[ObjectInfo]:
        """List every object whose key starts with `prefix`, sorted by key.

        A prefix that ends in ``/`` is fast. Any other one lists the folder that holds it and filters.

        Raises: ConfigError if an object has a key that no store of ours writes.
        """
        return await self._until_deadline("list", prefix, lambda: self._here()._list(prefix), timeout_s, math.inf)

    async def delete_async(self, key: str, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Remove an object. A missing one is no error."""
        check_key(key)
        await self._until_deadline("delete", key, lambda: self._here()._delete(key), timeout_s, 0)

    async def _until_deadline(
        self, verb: str, key: str, attempt: Callable[[], Awaitable[T]], timeout_s: float | None, body_bytes: float
    ) -> T:
        started_s = time.monotonic()
        limit_s = float("inf") if timeout_s is None else timeout_s
        failures = 0
        fault: BaseException | None = None
        while True:
            # The first try gets a second even with timeout_s=0, which means one try.
            left_s = max(limit_s - (time.monotonic() - started_s), 0.0 if failures else 1.0)
            try:
                async with asyncio.timeout(min(self._limit_s(body_bytes), left_s)):
                    return await attempt()
            except BaseException as e:
                # Anything unknown may pass, too: a panic of Rust code, which is no `Exception`, or no thread for the work.
                known = isinstance(e, AgentCoreRLError) and not isinstance(e, TransientStoreError)
                if known or isinstance(e, (asyncio.CancelledError, KeyboardInterrupt, SystemExit)):
                    raise
                fault = fault if fault is not None and isinstance(e, TimeoutError) else e
            failures += 1
            delay_s = backoff_s(failures)
            spent_s = time.monotonic() - started_s
            if spent_s + delay_s >= limit_s:
                raise StoreError(
                    f"{verb} of {key!r} in {self.url} did not succeed within {spent_s:.1f} s ({failures} attempts); "
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
    """Return the key unchanged. Raises: ConfigError when it is empty, too long, not Unicode, or could leave its folder."""
    try:
        return check_parts(key, "object key")
    except ContractError as e:
        raise ConfigError(str(e)) from e


def check_size(key: str, url: str, size: int, max_bytes: int | None) -> None:
    """Check the size of an object. Raises: ObjectTooLargeError when there is a limit and the size is above it."""
    if max_bytes is not None and size > max_bytes:
        raise ObjectTooLargeError(f"{key!r} in {url} has {size} bytes, more than the {max_bytes} it may have", key=key)


def utc(seconds: float) -> datetime:
    """Convert unix seconds to an aware datetime."""
    return datetime.fromtimestamp(seconds, UTC)
