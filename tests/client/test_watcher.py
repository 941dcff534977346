"""How the store is looked at: which way, how often, and what silence means."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.client.watcher import LOCAL_COST, REMOTE_COST, LookCost, Watcher
from agentcore_rl_toolkit.contract import alive_key
from agentcore_rl_toolkit.errors import (
    ConfigError,
    ObjectNotFoundError,
    RolloutLostError,
    StoreError,
    StorePermissionError,
)
from agentcore_rl_toolkit.store import ObjectInfo, ObjectStore, open_store


def watcher(store: Any, *, cost: LookCost = LOCAL_COST, **options: Any) -> Watcher:
    return Watcher(store, "e/", cost=cost, **{"interval_s": 0.01, **options})


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}")


@pytest.mark.parametrize(
    ("inputs", "lines", "cost", "lists"),
    [
        (100, 0, REMOTE_COST, ["e/"]),  # a young experiment
        (2, 50_000, REMOTE_COST, ["e/i0/", "e/i1/"]),  # an old one with few inputs in flight
        (48, 1200, LOCAL_COST, sorted(f"e/i{n}/" for n in range(48))),  # as many inputs as pages
        (49, 1200, LOCAL_COST, ["e/"]),
        (2, 0, REMOTE_COST, ["e/"]),
        (1, 0, REMOTE_COST, ["e/i0/"]),
    ],
)
async def test_a_round_lists_the_experiment_or_each_input_whichever_is_fewer_requests(
    inputs: int, lines: int, cost: LookCost, lists: list[str]
) -> None:
    seen: list[str] = []

    class Store:
        url = "s3://b"

        async def list_async(self, prefix: str, *, timeout_s: float | None) -> list[Any]:
            seen.append(prefix)
            return []

    w = watcher(Store(), cost=cost, interval_s=60.0)
    w._lines = lines
    for n in range(inputs):
        w.add(f"e/i{n}/s.json", expects_life=False, silence_s=9.0)
    while len(seen) < len(lists):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert seen == lists
    assert w.requests == len(lists)
    w.close()


async def test_an_experiment_that_takes_too_long_to_list_is_listed_by_input(store: ObjectStore) -> None:
    """A store that needs 0.15 s per page lists 100,000 records in 15 s, and every round failed."""

    seen: list[str] = []

    class Slow(FlakyStore):
        async def list_async(self, prefix: str = "", *, timeout_s: float | None = None) -> Any:
            seen.append(prefix)
            if prefix == "e/":
                raise StoreError("did not succeed within 15 s")
            return await super().list_async(prefix, timeout_s=timeout_s)

    w = watcher(Slow(store))
    waiters = [w.add(f"e/i{n}/s.json", expects_life=False, silence_s=9.0) for n in range(3)]
    await store.put_async("e/i1/s.json", b"{}")
    assert await asyncio.wait_for(waiters[1].found, 10) is True
    assert seen[:3] == ["e/", "e/", "e/i0/"]
    w.close()


async def test_session_that_falls_silent_is_lost(store: ObjectStore) -> None:
    w = watcher(store)
    waiter = w.add("e/i/s.json", expects_life=False, silence_s=1.2)
    for _ in range(8):
        await store.put_async(alive_key("e/i/s.json"), b"{}")
        await asyncio.sleep(0.2)
    assert not waiter.found.done()
    silence = r"^no sign of life for \d\d? s and no record: the session died, or the agent stopped running"
    with pytest.raises(RolloutLostError, match=silence) as caught:
        await asyncio.wait_for(waiter.found, 30)
    assert caught.value.key == "e/i/s.json"


async def test_a_session_without_heartbeats_is_not_lost_because_its_neighbour_shows_life(store: ObjectStore) -> None:
    w = watcher(store)
    silent = w.add("e/i/silent.json", expects_life=False, silence_s=0.3)
    lively = w.add("e/i/lively.json", expects_life=False, silence_s=0.3)
    await store.put_async(alive_key("e/i/lively.json"), b"{}")
    with pytest.raises(RolloutLostError):  # it was seen alive, so its own silence counts
        await asyncio.wait_for(lively.found, 60)
    began_s = time.monotonic()
    while time.monotonic() - began_s < 1.0:
        await asyncio.sleep(0.05)
        assert not silent.found.done()
    await store.put_async("e/i/silent.json", b"{}")
    assert await asyncio.wait_for(silent.found, 60) is True


class FlakyStore:
    """A real store that fails on demand."""

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.error, self.url = store, None, store.url
        self.lists = self.heads = 0
        self.denied: set[str] = set()
        self.broken: dict[str, BaseException] = {}

    error: BaseException | None

    async def list_async(self, prefix: str = "", *, timeout_s: float | None = None) -> Any:
        self.lists += 1
        if self.error is not None:
            raise self.error
        if prefix in self.broken:
            raise self.broken[prefix]
        return await self.store.list_async(prefix)

    async def head_async(self, key: str, *, timeout_s: float | None = None) -> Any:
        self.heads += 1
        if key in self.broken:
            raise self.broken[key]
        if key in self.denied:
            raise StorePermissionError("403", key=key)
        return await self.store.head_async(key)


@pytest.mark.parametrize("error", [StoreError("503"), StorePermissionError("403")], ids=repr)
async def test_sessions_are_not_lost_while_the_store_cannot_be_read(
    store: ObjectStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: StoreError
) -> None:
    monkeypatch.setattr("agentcore_rl_toolkit.client.watcher.backoff_s", lambda failures, **_: 0.05)
    flaky = FlakyStore(store)
    w = watcher(flaky)
    waiter = w.add("e/i/s.json", expects_life=True, silence_s=0.3)
    await store.put_async(alive_key("e/i/s.json"), b"{}")
    await asyncio.wait_for(waiter.seen_life.wait(), 30)
    flaky.error = error
    if isinstance(error, StorePermissionError):
        flaky.denied = {"e/i/s.json", alive_key("e/i/s.json")}
    while w._failures < 12:  # noqa: ASYNC110  # this takes longer than the silence that means loss
        await asyncio.sleep(0.01)
    assert not waiter.found.done()
    assert [r.getMessage() for r in caplog.records if "in a row" in r.getMessage() and r.levelname == "WARNING"] == [
        f"listing the results under e/ failed ({n} in a row): {error}" for n in (1, 10)
    ]
    assert type(w.trouble) is type(error)
    assert not any(record.exc_info for record in caplog.records)
    flaky.error, flaky.denied = None, set()
    await store.put_async("e/i/s.json", b"{}")
    assert await asyncio.wait_for(waiter.found, 30) is True
    while w.trouble is not None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_session_is_not_lost_because_the_machine_had_no_time_for_anybody(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither looked the client, nor could the session write."""
    ahead_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
    monkeypatch.setattr("agentcore_rl_toolkit.client.watcher.time", clock)
    flaky = FlakyStore(store)
    w = watcher(flaky)
    await store.put_async(alive_key("e/i/s.json"), b"{}")
    waiter = w.add("e/i/s.json", expects_life=True, silence_s=60.0)
    await asyncio.wait_for(waiter.seen_life.wait(), 30)
    ahead_s = 100.0  # the process stood still for so long
    looks = flaky.lists
    while flaky.lists < looks + 3:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert not waiter.found.done()
    while not waiter.found.done():  # its silence counts all the same
        ahead_s, looks = ahead_s + 0.9, flaky.lists
        while flaky.lists == looks and not waiter.found.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert isinstance(waiter.found.exception(), RolloutLostError)


async def test_a_heartbeat_that_the_listing_did_not_show_yet_is_looked_for_before_a_session_is_lost(
    store: ObjectStore,
) -> None:
    class Stale(FlakyStore):
        async def list_async(self, prefix: str = "", **_: Any) -> Any:
            self.lists += 1
            return []

    stale = Stale(store)
    w = watcher(stale, interval_s=1.05)  # rounds are rare
    waiter = w.add("e/i/s.json", expects_life=True, silence_s=0.5)
    await store.put_async(alive_key("e/i/s.json"), b"{}")
    await asyncio.wait_for(waiter.seen_life.wait(), 30)
    assert stale.heads >= 2  # the record, then the heartbeat
    with pytest.raises(RolloutLostError):
        await asyncio.wait_for(waiter.found, 30)


async def test_a_session_that_shows_life_is_not_lost_where_missing_records_are_denied(store: ObjectStore) -> None:
    """S3 answers 403 for a missing key to callers that may not list; the heartbeat beside it is there."""
    flaky = FlakyStore(store)
    flaky.error = StorePermissionError("403")
    w = watcher(flaky)
    flaky.denied = {"e/i/s.json"}
    waiter = w.add("e/i/s.json", expects_life=True, silence_s=1.0)
    for _ in range(2):
        waiter.seen_life.clear()
        await store.put_async(alive_key("e/i/s.json"), b"{}")
        await asyncio.wait_for(waiter.seen_life.wait(), 30)
    assert not waiter.found.done()
    with pytest.raises(RolloutLostError):  # and then it falls silent
        await asyncio.wait_for(waiter.found, 30)


async def test_a_listing_that_fails_in_a_way_nobody_foresaw_blinds_nobody(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    flaky, trouble = FlakyStore(store), ValueError("a key of another form")
    flaky.error = trouble
    w = watcher(flaky)
    waiter = w.add("e/i/s.json", expects_life=False, silence_s=9.0)
    while not flaky.heads:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await store.put_async("e/i/s.json", b"{}")
    assert await asyncio.wait_for(waiter.found, 60) is True
    assert repr(trouble) in caplog.text
    w.close()


@pytest.mark.parametrize("kind", ["listing", "key"])
@pytest.mark.parametrize("trouble", [ConfigError("a//b"), StoreError("EIO")], ids=repr)
async def test_trouble_with_one_input_neither_hides_its_neighbours_nor_keeps_the_lost_from_being_lost(
    store: ObjectStore, kind: str, trouble: Exception
) -> None:
    flaky = FlakyStore(store)
    w = watcher(flaky)
    w._lines = 50_000  # inputs are listed one by one
    if kind == "key":
        w._keys_until_s = math.inf
    bad = w.add("e/bad/s.json", expects_life=True, silence_s=0.2)
    good = w.add("e/good/s.json", expects_life=False, silence_s=9.0)
    lost = w.add("e/lost/s.json", expects_life=True, silence_s=0.2)
    flaky.broken = {"e/bad/": trouble, "e/bad/s.json": trouble}
    with pytest.raises(RolloutLostError):
        await asyncio.wait_for(lost.found, 60)
    await store.put_async("e/good/s.json", b"{}")
    assert await asyncio.wait_for(good.found, 60) is True
    assert not bad.found.done()  # nobody could look at it
    if kind == "listing" and isinstance(trouble, StoreError):
        began_s, heads, flaky.lists, flaky.broken = time.monotonic(), flaky.heads, 0, {"e/bad/s.json": trouble}
        while flaky.lists < 25:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert flaky.heads - heads <= 2 + 2 * (time.monotonic() - began_s)  # silence is judged twice a second
    flaky.broken = {}
    await store.put_async("e/bad/s.json", b"{}")
    assert await asyncio.wait_for(bad.found, 60) is True
    w.close()


async def test_a_look_at_one_object_after_a_listing_is_no_sign_of_life(store: ObjectStore) -> None:
    """S3 tells the time of an object to the millisecond in listings and to the second elsewhere."""

    class Rounded(FlakyStore):
        async def head_async(self, key: str, *, timeout_s: float | None = None) -> Any:
            found = await super().head_async(key)
            return dataclasses.replace(found, last_modified=found.last_modified.replace(microsecond=0))

    w = watcher(Rounded(store))
    waiter = w.add("e/i/s.json", expects_life=False, silence_s=1.0)
    await store.put_async(alive_key("e/i/s.json"), b"{}")
    await asyncio.wait_for(waiter.seen_life.wait(), 30)

    async def change_the_way() -> None:
        while True:
            w._keys_until_s = 0.0 if w._keys_until_s else math.inf
            await asyncio.sleep(0.1)

    changing = asyncio.create_task(change_the_way())
    with pytest.raises(RolloutLostError):
        await asyncio.wait_for(waiter.found, 60)
    changing.cancel()


class ManyRecords:
    """A store with old records, which counts requests by kind and takes time for each."""

    url = "s3://b"

    def __init__(self, records: int) -> None:
        now = datetime.datetime.now(datetime.UTC)
        self.found = [ObjectInfo(key=f"e/old{n}/s.json", size=1, last_modified=now) for n in range(records)]
        self.pages = self.heads = 0
        self.listed: list[str] = []

    async def list_async(self, prefix: str, *, timeout_s: float | None) -> list[ObjectInfo]:
        whole = prefix == "e/"
        self.listed.append(prefix)
        self.pages += max(1, len(self.found) // 1000) if whole else 1
        return self.found if whole else []

    async def head_async(self, key: str, *, timeout_s: float | None) -> ObjectInfo:
        self.heads += 1
        await asyncio.sleep(0.02)
        raise ObjectNotFoundError(key)


async def test_looking_stays_within_four_listings_a_second() -> None:
    async def look(records: int, inputs: int) -> None:
        store = ManyRecords(records)
        w = Watcher(store, "e/")  # type: ignore[arg-type]  # only what a watcher calls
        for n in range(inputs):
            w.add(f"e/i{n}/s.json", expects_life=False, silence_s=9.0)
        began_s = time.monotonic()
        await asyncio.sleep(3.0)
        first = min(max(1, records // 1000), inputs)
        assert 2 <= store.pages <= 4 * (time.monotonic() - began_s) + 2 * first
        w.close()

    await asyncio.gather(look(5_000, 256), look(5_000, 3), look(0, 256))


async def test_an_old_experiment_is_listed_once_and_then_each_input() -> None:
    store = ManyRecords(5_000)
    w = Watcher(store, "e/")  # type: ignore[arg-type]  # only what a watcher calls
    for n in range(3):
        w.add(f"e/i{n}/s.json", expects_life=False, silence_s=9.0)
    while len(store.listed) < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert store.listed[:4] == ["e/", "e/i0/", "e/i1/", "e/i2/"]
    assert w.requests == 5 + 3  # a page has 1000 lines
    w.close()


async def test_an_input_that_is_finished_is_not_listed_again(store: ObjectStore) -> None:
    seen: list[str] = []

    class Seen(FlakyStore):
        async def list_async(self, prefix: str = "", **options: Any) -> Any:
            seen.append(prefix)
            return await super().list_async(prefix, **options)

    w = watcher(Seen(store))
    w._lines = 50_000  # inputs are listed one by one
    done, other = (w.add(f"e/{name}/s.json", expects_life=False, silence_s=9.0) for name in ("done", "other"))
    await store.put_async("e/done/s.json", b"{}")
    await asyncio.wait_for(done.found, 30)
    seen.clear()
    began_s = time.monotonic()
    while len(seen) < 20:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert time.monotonic() - began_s < 8  # the pause between two rounds is 0.01 s
    assert set(seen) == {"e/other/"}
    assert not other.found.done()
    w.close()


@pytest.mark.parametrize(
    ("records", "inputs", "by_key", "interval_s", "requests", "pause_s"),
    [
        (2_001, 4, False, 0.0, 3, 3 * 0.25),
        (0, 4, False, 0.0, 1, 0.25),
        (0, 4, True, 0.0, 8, 8 * 0.02),  # a record and a heartbeat each
        (0, 4, True, 9.0, 8, 9.0),
    ],
)
async def test_the_pause_after_a_round_follows_its_requests(
    records: int, inputs: int, by_key: bool, interval_s: float, requests: int, pause_s: float
) -> None:
    w = Watcher(ManyRecords(records), "e/", interval_s=interval_s)  # type: ignore[arg-type]  # only what a watcher calls
    for n in range(inputs):
        w.add(f"e/i{n}/s.json", expects_life=False, silence_s=9.0)
    w.close()
    w._keys_until_s = math.inf if by_key else -math.inf
    assert await w._try_round(time.monotonic(), False) == pytest.approx(pause_s)
    assert w.requests == requests


async def test_a_thousand_silent_sessions_are_lost_within_seconds_of_their_limit() -> None:
    w = Watcher(ManyRecords(100_000), "e/")  # type: ignore[arg-type]  # a round comes every 25 s
    waiters = [w.add(f"e/i{n}/s.json", expects_life=True, silence_s=1.0) for n in range(1000)]
    began_s = time.monotonic()
    await asyncio.wait([waiter.found for waiter in waiters], timeout=30)
    assert all(isinstance(waiter.found.exception(), RolloutLostError) for waiter in waiters)
    assert time.monotonic() - began_s < 1.0 + 5.0


async def test_a_permanent_error_of_the_store_ends_its_rollouts(store: ObjectStore) -> None:
    flaky = FlakyStore(store)
    flaky.error = StoreError("there is no such bucket", permanent=True, code="NoSuchBucket")
    w = watcher(flaky)
    waiters = [w.add(f"e/{n}/s.json", expects_life=False, silence_s=9.0) for n in range(2)]
    await asyncio.wait([waiter.found for waiter in waiters], timeout=30)
    errors = [waiter.found.exception() for waiter in waiters]
    assert [str(error) for error in errors] == ["there is no such bucket"] * 2
    assert errors[0] is not errors[1]  # each gets the ids of its rollout


async def test_a_runtime_that_does_not_reply_delays_no_round(store: ObjectStore) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def endings(sessions: Sequence[str]) -> dict[str, str]:
        asked.set()
        go_on.wait(60)
        return {}

    w = watcher(store, endings=endings)
    waiter = w.add("e/i/s.json", "s", expects_life=False, silence_s=9.0)
    await asyncio.to_thread(asked.wait, 30)
    await store.put_async("e/i/s.json", b"{}")
    assert await asyncio.wait_for(waiter.found, 30) is True
    go_on.set()
    w.close()


async def test_a_pause_of_the_process_between_two_rare_rounds_is_no_silence(store: ObjectStore) -> None:
    await store.put_async("e/i/s.alive", b"1")
    w = watcher(store, cost=LookCost(interval_s=0.01, page=1, list_s=60.0, head_s=0.0))
    waiter = w.add("e/i/s.json", expects_life=True, silence_s=2.0)
    await asyncio.wait_for(waiter.seen_life.wait(), 60)
    time.sleep(4.0)  # noqa: ASYNC251  # the process was stopped, and its agents with it
    await asyncio.sleep(1.0)
    assert not waiter.found.done()
    w.close()
