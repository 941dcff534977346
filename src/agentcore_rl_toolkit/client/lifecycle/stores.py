"""The stores of a client: each opened once, watched by one watcher for each experiment, read by one reader."""

from __future__ import annotations

import logging

from ...contract import alive_key
from ...errors import AgentCoreRLError
from ...store import ObjectStore, open_store
from ..future import Progress
from ..records.results import ResultReader
from ..records.watcher import LOCAL_COST, LOCAL_INTERVAL_S, REMOTE_COST, REMOTE_INTERVAL_S, Watcher
from ..settings import WatchSettings

logger = logging.getLogger(__name__)

TIDY_S = 10.0


class Stores:
    """Opened stores, watchers and readers, by bucket. Lives on the engine's loop."""

    def __init__(self, bucket: str, store: ObjectStore, settings: WatchSettings) -> None:
        self._settings = settings
        self._opened = {bucket: store}
        self._watchers: dict[tuple[str, str], Watcher] = {}
        self._readers: dict[str, ResultReader] = {}

    @property
    def requests(self) -> int:
        """Requests made to stores so far: listings by page, heads and gets."""
        return sum(w.requests for w in self._watchers.values()) + sum(r.requests for r in self._readers.values())

    def store(self, bucket: str) -> ObjectStore:
        """The opened store. Raises: ConfigError."""
        if bucket not in self._opened:
            self._opened[bucket] = open_store(bucket)
        return self._opened[bucket]

    def reader(self, bucket: str) -> ResultReader:
        """The reader of a store."""
        if bucket not in self._readers:
            limits = self._settings.read_concurrency, self._settings.max_record_bytes
            self._readers[bucket] = ResultReader(self.store(bucket), *limits)
        return self._readers[bucket]

    def watcher(self, progress: Progress) -> Watcher:
        """The watcher of a rollout's experiment."""
        root = progress.root
        if not progress.key.startswith(root):  # an agent with a key layout of its own
            root = progress.key.rpartition("/")[0] + "/"
        store = self.store(progress.bucket)
        if (store.url, root) not in self._watchers:
            local = store.url.startswith(("file:", "memory:"))
            usual_s, cost = (LOCAL_INTERVAL_S, LOCAL_COST) if local else (REMOTE_INTERVAL_S, REMOTE_COST)
            interval_s = usual_s if self._settings.interval_s is None else self._settings.interval_s
            self._watchers[store.url, root] = Watcher(store, root, interval_s=interval_s, cost=cost)
        return self._watchers[store.url, root]

    async def remove_heartbeat(self, bucket: str, key: str) -> None:
        """Delete the heartbeat object of a session that is gone and left no record. At worst it stays: then nothing is harmed."""
        try:
            await self.store(bucket).delete_async(alive_key(key), timeout_s=TIDY_S)
        except AgentCoreRLError as e:
            logger.info("the heartbeat of %s stays in the store: %s", key, e)

    def close(self) -> None:
        """Stop watching."""
        for watcher in self._watchers.values():
            watcher.close()
