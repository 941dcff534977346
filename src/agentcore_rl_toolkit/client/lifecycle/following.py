"""From the accepted invoke to the record: watches the store for it, reads it, and notices sessions that died."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ...contract import Cause, Outcome, Stage, alive_key
from ...errors import AgentCoreRLError, ConfigError, InvalidResultError, RolloutLostError
from ...store import ObjectStore
from ..data_plane.endings import Endings
from ..data_plane.transport import Ending
from ..future import Progress, Verdict
from ..records.results import ResultReader
from ..records.watcher import Waiter, Watcher
from ..settings import WatchSettings
from .flight import AttemptEnded, Flight, NoSignError

logger = logging.getLogger(__name__)

LOCAL_INTERVALS_S = (0.02, 0.25)
REMOTE_INTERVALS_S = (0.5, 1.0)  # two LISTs a second at most: about one request per rollout with a hundred in flight
TIDY_S = 10.0


class Follower:
    """Follows sessions to their records. Lives on the engine's loop.

    When silence means loss. A session whose agent answered the invoke with ``heartbeat_s`` was promised to show life as often;
    its silence counts from the start. Any other session (the published toolkit's, one without heartbeat, one whose answer was
    lost) is judged by its silence only once its own heartbeat was seen. What other sessions do says nothing about it.

    ``on_trouble()`` is called when watching failed in a way nobody foresaw, and goes on; ``on_skipped(n)`` when listings left out
    n more names because they are no objects.
    """

    def __init__(
        self,
        store_for: Callable[[str], ObjectStore],
        settings: WatchSettings,
        endings: Endings,
        on_trouble: Callable[[], object] = lambda: None,
        on_skipped: Callable[[int], object] = lambda n: None,
    ) -> None:
        self._store_for = store_for
        self._settings = settings
        self._endings = endings
        self._on_trouble, self._on_skipped = on_trouble, on_skipped
        self._skipped_before = 0
        self._watchers: dict[tuple[str, str], Watcher] = {}
        self._readers: dict[str, ResultReader] = {}
        self._stores: dict[str, ObjectStore] = {}

    @property
    def skipped(self) -> int:
        """Names that listings of the stores left out so far because they are no objects."""
        return sum(store.skipped.total for store in list(self._stores.values()))

    def _count_skipped(self) -> None:
        more = self.skipped - self._skipped_before
        if more > 0:
            self._skipped_before += more
            self._on_skipped(more)

    @property
    def requests(self) -> int:
        """Requests made to stores so far: listings by page, heads and gets."""
        return sum(w.requests for w in self._watchers.values()) + sum(r.requests for r in self._readers.values())

    def close(self) -> None:
        """Stop watching."""
        self._endings.close()
        for watcher in self._watchers.values():
            watcher.close()

    def reader(self, bucket: str) -> ResultReader:
        """The reader of a store."""
        reader = self._readers.get(bucket)
        if reader is None:
            settings = self._settings
            reader = self._readers[bucket] = ResultReader(
                self._store_for(bucket), settings.read_concurrency, settings.max_record_bytes
            )
        return reader

    async def follow(self, flight: Flight, reply: Mapping[str, Any] | None) -> Verdict:
        """Wait for the record and read it; `reply` is the answer to the invoke, None when it was lost or not ours to see.

        Raises: AttemptEnded when the session is lost, or its record can be nowhere; NoSignError when there is no reply and the
            session does not show itself.
        """
        progress = flight.progress
        heartbeat_s = promised_heartbeat_s(reply)
        try:
            self._store_for(progress.bucket).check_readable(progress.key)
        except ConfigError as e:
            error = InvalidResultError(
                f"no record can be at {progress.key!r} in {progress.bucket!r}: {e}", cause=Cause.INFRASTRUCTURE
            )
            raise AttemptEnded(Outcome.INVALID, error) from e
        watcher = self._watcher(progress)
        waiter = watcher.add(
            progress.key, expects_life=heartbeat_s is not None, silence_s=self._settings.silence_s(heartbeat_s)
        )
        progress.trouble = lambda: watcher.trouble
        reader = self.reader(progress.bucket)

        async def ended(ending: Ending) -> None:
            await watcher.died(waiter, str(ending))

        self._endings.watch(progress.session_id, ended)
        try:
            if reply is None and not (flight.adopted is not None and flight.adopted.accepted):
                await _confirm(flight, watcher, waiter)
                flight.accept()
            while True:
                flight.waiting = (watcher, waiter)
                if flight.notified:
                    watcher.pushed(waiter)
                await waiter.found
                pushed, flight.notified = flight.notified, False
                progress.enter(Stage.RESULT)
                verdict = await reader.read(progress.key, flight.request.deadlines.result_s, flight.expected)
                if verdict is not None:
                    if pushed:
                        watcher.push_was_true()
                    return await self._with_ending(verdict, progress)
                progress.stage = Stage.RUN  # announced, but not there: the store is the truth
                waiter = watcher.missing(waiter)
        except RolloutLostError as e:
            raise AttemptEnded(Outcome.LOST, e) from e
        finally:
            self._endings.forget(progress.session_id)
            watcher.remove(waiter)

    async def _with_ending(self, verdict: Verdict, progress: Progress) -> Verdict:
        """Add to the record of an interrupted agent what interrupted it, where the runtime says so."""
        if verdict.outcome is not Outcome.LOST:
            return verdict
        ending = await self._endings.of(progress.session_id)
        if ending is None:
            return verdict
        error = RolloutLostError(f"{ending}; {verdict.error}", key=progress.key)
        return dataclasses.replace(verdict, error=error)

    async def remove_heartbeat(self, bucket: str, key: str) -> None:
        """Delete the heartbeat object of a session that is gone and left no record. At worst it stays: then nothing is harmed."""
        try:
            await self._store_for(bucket).delete_async(alive_key(key), timeout_s=TIDY_S)
        except AgentCoreRLError as e:
            logger.info("the heartbeat of %s stays in the store: %s", key, e)

    def _watcher(self, progress: Progress) -> Watcher:
        root = progress.root
        if not progress.key.startswith(root):  # an agent with a key layout of its own
            root = progress.key.rpartition("/")[0] + "/"
        store = self._store_for(progress.bucket)
        watcher = self._watchers.get((store.url, root))
        if watcher is None:
            local = store.url.startswith(("file:", "memory:"))
            low_s, high_s = LOCAL_INTERVALS_S if local else REMOTE_INTERVALS_S
            settings = self._settings
            watcher = self._watchers[store.url, root] = Watcher(
                store,
                root,
                local=local,
                min_s=settings.min_interval_s if settings.min_interval_s is not None else low_s,
                max_s=settings.max_interval_s if settings.max_interval_s is not None else high_s,
                push_s=settings.push_interval_s,
                on_trouble=self._on_trouble,
                on_round=self._count_skipped,
            )
            self._stores[store.url] = store
        return watcher


def place_of_record(reply: Mapping[str, Any], asked: str) -> tuple[str, str]:
    """Bucket and key of the record, as the agent's answer names them; `asked` is the bucket that it was asked to use.

    Raises: AttemptEnded when it names files or memory of this machine instead: a session does not choose what is read here.
    """
    bucket, key = str(reply.get("s3_bucket") or asked), str(reply["result_key"])
    if bucket != asked and bucket.lower().startswith(("file:", "memory:")):
        text = (
            f"the agent answered that its record is in {bucket!r}, on this machine, but it was asked to use {asked!r}"
        )
        raise AttemptEnded(Outcome.INVALID, InvalidResultError(text))
    return bucket, key


def promised_heartbeat_s(reply: Mapping[str, Any] | None) -> float | None:
    """The period of the heartbeat that an agent promises in its answer; None when it promises none."""
    value = (reply or {}).get("heartbeat_s")
    return float(value) if isinstance(value, (int, float)) and 0 < value < float("inf") else None


async def _confirm(flight: Flight, watcher: Watcher, waiter: Waiter) -> None:
    """After an invoke of unknown fate: wait until the session shows itself. Raises: NoSignError."""
    deadlines = flight.request.deadlines
    confirm_s = deadlines.confirm_s if flight.server_error is None else deadlines.confirm_error_s
    life = asyncio.ensure_future(waiter.seen_life.wait())
    try:
        either: set[asyncio.Future[Any]] = {life, waiter.found}
        await asyncio.wait(either, timeout=confirm_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        life.cancel()
    if not waiter.seen_life.is_set() and not waiter.found.done():
        await watcher.look_now(waiter)  # a busy client may not have looked since the session began
    if waiter.seen_life.is_set() or waiter.found.done():
        return
    if flight.server_error is None:
        raise NoSignError(
            f"the answer to the invoke was lost, and no heartbeat or record appeared within {confirm_s:g} s; "
            "the session is being stopped"
        )
    raise NoSignError(
        f"the runtime answered the invoke with an error of its own ({flight.server_error}; {flight.server_errors} times), and no "
        f"heartbeat or record appeared within {confirm_s:g} s; the session is being stopped"
    )
