"""What every store promises, checked on each of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcore_rl_toolkit.errors import ConfigError, ObjectExistsError, ObjectNotFoundError, StoreError
from agentcore_rl_toolkit.store import ObjectStore, backoff_s, open_store


async def test_a_put_replaces_unless_create_only(store: ObjectStore) -> None:
    await store.put_async("a/k", b"1")
    await store.put_async("a/k", b"2")
    with pytest.raises(ObjectExistsError) as caught:
        await store.put_async("a/k", b"3", create_only=True)
    assert caught.value.key == "a/k"
    assert await store.get_async("a/k") == b"2"


async def test_of_many_creators_exactly_one_wins(store: ObjectStore) -> None:
    puts = [store.put_async("race", str(i).encode(), create_only=True) for i in range(16)]
    results = await asyncio.gather(*puts, return_exceptions=True)
    winners = [i for i, r in enumerate(results) if r is None]
    assert len(winners) == 1
    assert all(isinstance(r, ObjectExistsError) for i, r in enumerate(results) if i not in winners)
    assert await store.get_async("race") == str(winners[0]).encode()


class PanicException(BaseException):
    """What Rust code raises in place of an error, as obstore does."""


@pytest.mark.parametrize("fault", [PanicException("a panic"), RuntimeError("can't start new thread")])
async def test_an_unknown_exception_is_a_fault_that_may_pass(
    store: ObjectStore, fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats, the record, and the search for records would end at it, and the rollout would never end."""
    put, faults = type(store)._put, [fault] * 2

    async def broken(*arguments: Any) -> None:
        await put(*arguments)
        if faults:
            raise faults.pop()

    monkeypatch.setattr(type(store), "_put", broken)
    await store.put_async("e/k", b"1", create_only=True)  # its first try has written it
    faults += [fault] * 1000
    with pytest.raises(StoreError, match=str(fault)):
        await store.put_async("e/k", b"1", timeout_s=0.3)


async def test_missing_objects_are_named(store: ObjectStore) -> None:
    for operation in (store.get_async, store.head_async):
        with pytest.raises(ObjectNotFoundError, match="none/here") as caught:
            await operation("none/here")
        assert caught.value.key == "none/here"
    with pytest.raises(KeyError):
        await store.get_async("none/here")


async def test_head_and_list_agree(store: ObjectStore) -> None:
    before = datetime.now(UTC) - timedelta(seconds=2)  # S3 rounds to seconds
    await store.put_async("e/i/s.json", b"12345")
    head = await store.head_async("e/i/s.json")
    (listed,) = await store.list_async("e/")
    assert head == listed
    assert (head.key, head.size) == ("e/i/s.json", 5)
    assert head.last_modified.tzinfo is not None
    assert before <= head.last_modified <= datetime.now(UTC) + timedelta(seconds=2)
    assert head.etag


UNUSUAL = [
    "7",
    "é日\U0001f600",
    "\"quotes' and `more`",
    "100%",
    "a%20b",
    "%",
    "a?b",
    "a#b",
    "a&b=c",
    "back\\slash",
    "*<>|~^{}[]",
    " blanks ",
    ".tmp-x",
    "...",
    "\u202eturned",
    "\x85",
    "x" * 240 + "..",
]


async def test_any_text_is_a_key_and_stays_itself(store: ObjectStore) -> None:
    for part in UNUSUAL:
        key = f"exp/{part}/{part}.json"[-1000:] if len(part) < 150 else f"exp/{part}.json"
        await store.put_async(key, b"1", create_only=True)
        with pytest.raises(ObjectExistsError):
            await store.put_async(key, b"2", create_only=True)
        await store.put_async(key, b"12")
        assert await store.get_async(key) == b"12"
        head = await store.head_async(key)
        assert (head.key, head.size) == (key, 2)
        assert [o.key for o in await store.list_async(f"exp/{part}")] == [key]
        assert [o.key for o in await store.list_async("exp/")] == [key]
        await store.delete_async(key)
        with pytest.raises(ObjectNotFoundError):
            await store.get_async(key)


KEYS = ["a/b", "a/b-1", "a/b/c.json", "a/b/d.json", "a/bc/x", "a.b", "b/a", "Z"]


async def test_a_prefix_is_a_string_prefix(store: ObjectStore) -> None:
    keys = [k for k in KEYS if k != "a/b"]  # as a file it would be in the way of a/b/c.json
    for key in keys:
        await store.put_async(key, b"")
    for prefix in ["", "a", "a/", "a/b", "a/b/", "a/b/c", "a/b/c.json", "b", "none", "none/", "a/none/"]:
        expected = sorted(k for k in keys if k.startswith(prefix))
        assert [o.key for o in await store.list_async(prefix)] == expected, prefix


async def test_a_key_that_could_escape_is_refused_before_anything_happens(store: ObjectStore) -> None:
    bad: list[Any] = [
        "",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "a/../b",
        "a/./b",
        "a\0b",
        "a\tb",
        "del\x7f",
        "\ud800",
        "k" * 1025,
    ]
    for key in bad:
        for call in (store.put_async(key, b""), store.delete_async(key), store.get_async(key), store.head_async(key)):
            with pytest.raises(ConfigError):
                await call


async def test_the_sync_face_works_inside_a_running_loop(store: ObjectStore) -> None:
    store.put("s/k", b"1", create_only=True)
    assert store.get("s/k") == b"1"
    assert store.head("s/k").size == 1
    assert [o.key for o in store.list("s/")] == ["s/k"]
    store.delete("s/k")
    assert store.list("s/") == []


def test_one_store_serves_many_threads_and_loops(store: ObjectStore) -> None:
    def sync_user(i: int) -> None:
        store.put(f"t/{i}", str(i).encode())
        assert store.get(f"t/{i}") == str(i).encode()

    def async_user(i: int) -> None:
        async def use() -> None:
            await store.put_async(f"t/{i}", str(i).encode())
            assert await store.get_async(f"t/{i}") == str(i).encode()

        asyncio.run(use())

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: (sync_user if i % 2 else async_user)(i), range(24)))
    assert len(store.list("t/")) == 24


async def test_a_reader_never_sees_half_an_object(store: ObjectStore) -> None:
    bodies = [bytes([i]) * 300_000 for i in range(8)]
    await store.put_async("k", bodies[0])
    stop = threading.Event()

    async def write() -> None:
        for body in bodies * 2:
            await store.put_async("k", body)
        stop.set()

    async def read() -> int:
        reads = 0
        while not stop.is_set():
            assert await store.get_async("k") in bodies
            reads += 1
        return reads

    _, reads = await asyncio.gather(write(), read())
    assert reads > 0


segment = st.text(st.sampled_from("abZ0-_.=+ :@,é日%\\\x85"), min_size=1, max_size=6).filter(
    lambda s: s not in (".", "..")
)
key_strategy = st.lists(segment, min_size=1, max_size=4).map("/".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(key_strategy, max_size=12, unique=True), key_strategy)
async def test_a_directory_lists_what_memory_lists(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], prefix: str
) -> None:
    folders = {k.rpartition("/")[0] + "/" for k in keys if "/" in k}
    free = [k for k in keys if not any(f.startswith(k + "/") for f in folders)]  # files cannot be folders as well
    root = tmp_path_factory.mktemp("model")
    file, memory = open_store(f"file://{root}"), open_store(f"memory://{root}")
    for store in (file, memory):
        for key in free:
            await store.put_async(key, key.encode(), durable=False)
    for p in ("", prefix, prefix[: len(prefix) // 2]):
        listed = [o.key for o in await file.list_async(p)]
        assert listed == [o.key for o in await memory.list_async(p)] == sorted(k for k in free if k.startswith(p))


def test_pauses_grow_to_their_longest_and_are_up_to_a_half_shorter() -> None:
    longest_s = [min(20.0, 0.5 * 2 ** min(failures, 10)) for failures in range(10_000)]
    shares = [backoff_s(n, first_s=0.5, most_s=20.0) / most_s for n, most_s in enumerate(longest_s, 1)]
    assert 0.5 < min(shares) < 0.55
    assert 0.95 < max(shares) <= 1.0
