"""What others put into a store beside the records: odd keys on S3, links, FIFOs, circles and deep trees in a directory."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit.errors import ObjectExistsError, ObjectNotFoundError, ObjectTooLargeError, UnlistableError
from agentcore_rl_toolkit.store import ObjectStore, local_files, open_store

FOREIGN = ["e//u.json", "e/a\tb/u.json", "e/nul\0x/u.json", "e/\x7f/u.json", "e/i//s.json", "e/ü\x1b[2J/+ %41.json"]
UNREADABLE = ["e/./u.json", "e/i/../u.json"]
BUCKET = "foreign-names"


@pytest.fixture
def s3(s3_endpoint: str, aws_env: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A boto3 client of an empty bucket; stores opened here read the same one."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_endpoint)
    client = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1")
    if not [b for b in client.list_buckets()["Buckets"] if b["Name"] == BUCKET]:
        client.create_bucket(Bucket=BUCKET)
    yield client
    for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=item["Key"])
    client.close()


@pytest.mark.parametrize("foreign", [*FOREIGN, *UNREADABLE])
@pytest.mark.parametrize("prefix", ["", "team/a"])
async def test_one_foreign_key_hides_no_record(s3: Any, foreign: str, prefix: str) -> None:
    below = f"{prefix}/" if prefix else ""
    for key in ["e/i/s.json", "e/i2/t.json", foreign, "f/other.json"]:
        s3.put_object(Bucket=BUCKET, Key=below + key, Body=b"{}")
    store = open_store(f"s3://{BUCKET}/{prefix}")
    for _ in range(2):  # met, then known
        listed = await store.list_async("e/")
        expected = {"e/i/s.json", "e/i2/t.json"} | ({foreign} if foreign not in UNREADABLE else set())
        assert [item.key for item in listed] == sorted(expected)
        assert all(item.size == 2 and abs(item.last_modified_s - time.time()) < 60 for item in listed)
    assert [item.key for item in await store.list_async("e/", "e/i/s.json")] == sorted(
        key for key in expected if key > "e/i/s.json"
    )
    assert store.skipped.total == (1 if foreign in UNREADABLE else 0)
    narrow = open_store(f"s3://{BUCKET}/{prefix}")
    assert [item.key for item in await narrow.list_async("e/i2/")] == ["e/i2/t.json"]


@pytest.mark.parametrize("foreign", FOREIGN)
async def test_an_object_under_a_foreign_key_can_be_read(s3: Any, foreign: str) -> None:
    store = open_store(BUCKET)
    with pytest.raises(ObjectNotFoundError):
        await store.get_async(foreign)
    with pytest.raises(ObjectNotFoundError):
        await store.head_async(foreign)
    s3.put_object(Bucket=BUCKET, Key=foreign, Body=foreign.encode() * 3)
    assert await store.get_async(foreign) == foreign.encode() * 3
    head = await store.head_async(foreign)
    assert (head.key, head.size) == (foreign, 3 * len(foreign.encode()))
    with pytest.raises(ObjectTooLargeError):
        await store.get_async(foreign, max_bytes=8)
    assert [item.etag for item in await store.list_async(foreign[:-1])] == [head.etag]


@pytest.mark.parametrize("key", ["e/a\tb/s.json", "e/\x1b[2J/s.json"])
async def test_a_key_with_control_characters_is_written_and_removed(s3: Any, key: str) -> None:
    store = open_store(BUCKET)
    await store.put_async(key, b"1", create_only=True)
    with pytest.raises(ObjectExistsError):
        await store.put_async(key, b"2", create_only=True)
    await store.put_async(key, b"3")
    assert await store.get_async(key) == b"3"
    assert s3.head_object(Bucket=BUCKET, Key=key)["ContentType"] == "application/json"
    assert [item.key for item in await store.list_async("e/")] == [key]
    await store.delete_async(key)
    with pytest.raises(ObjectNotFoundError):
        await store.get_async(key)


# moto takes ten CPU seconds for so many objects; test_remote.py has its pages, and the tests above its foreign keys.
@pytest.mark.nightly
async def test_a_listing_with_a_foreign_key_goes_over_many_pages(s3: Any) -> None:
    store = open_store(BUCKET)
    keys = [f"e/i/{n:04}.json" for n in range(1200)]
    await asyncio.gather(*(store.put_async(key, b"") for key in keys))
    s3.put_object(Bucket=BUCKET, Key="e/i//last.json", Body=b"")
    assert [item.key for item in await store.list_async("e/i/")] == sorted([*keys, "e/i//last.json"])
    deleted = [{"Key": key} for key in keys]
    for start in (0, 1000):
        s3.delete_objects(Bucket=BUCKET, Delete={"Objects": deleted[start : start + 1000]})


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/store")


def keys(store: ObjectStore, prefix: str = "e/") -> list[str]:
    return [item.key for item in store.list(prefix)]


def fill(store: ObjectStore, root: Path) -> Path:
    store.put("e/i/s.json", b"{}")
    return root / "store" / "e"


@pytest.mark.parametrize(
    "what",
    ["deep", "circle", "link", "fifo", "socket", "device", "no permission", "not unicode", "control", "folder", "long"],
)
def test_nothing_in_a_directory_hides_the_records_beside_it(
    store: ObjectStore, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    e = fill(store, tmp_path)
    skipped = 1
    if what == "deep":
        descend = os.open(e, os.O_RDONLY)
        for _ in range(3000):
            os.mkdir("d", dir_fd=descend)
            deeper = os.open("d", os.O_RDONLY, dir_fd=descend)
            os.close(descend)
            descend = deeper
        os.close(os.open("r.json", os.O_CREAT | os.O_WRONLY, dir_fd=descend))
        os.close(descend)
    elif what == "circle":
        (e / "round").symlink_to(e)
        (e / "i" / "up").symlink_to("..")
        skipped = 2
    elif what == "link":
        (tmp_path / "secret").write_text("{}")
        (e / "i" / "t.json").symlink_to(tmp_path / "secret")
    elif what == "fifo":
        os.mkfifo(e / "i" / "t.json")
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(str(e / "i" / "t.json"))
    elif what == "device":
        if os.geteuid() != 0:
            pytest.skip("only root can make a device")
        try:
            os.mknod(e / "i" / "t.json", 0o20666, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("devices cannot be made here")
    elif what == "no permission":
        if os.geteuid() == 0:
            pytest.skip("root may read everything")
        (e / "closed").mkdir(mode=0)
    elif what == "not unicode":
        (e / os.fsdecode(b"\xff.json")).write_text("{}")
    elif what == "control":
        (e / "a\x1b[2J.json").write_text("{}")  # a store would have written %1B
    elif what == "folder":
        (e / "i" / "t.json").mkdir()
        skipped = 0
    elif what == "long":
        names = ["n" * 250] * 5
        folder = e.joinpath(*names)
        folder.mkdir(parents=True)
        (folder / "s.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert keys(store) == ["e/i/s.json"]
    assert store.skipped.total == skipped
    assert len(caplog.records) == min(skipped, 1)  # once per kind, however often it is met
    assert "\x1b" not in caplog.text
    if what in ("link", "fifo", "socket", "device", "folder"):
        began_s = time.monotonic()
        for read in (store.get, store.head):
            with pytest.raises(ObjectNotFoundError):
                read("e/i/t.json")
        assert time.monotonic() - began_s < 30
    if what == "deep":
        remove_deep(e / "d")


def remove_deep(path: Path) -> None:
    """pytest's own removal is recursive."""
    subprocess.run(["rm", "-rf", str(path)], check=True, timeout=60)
    shutil.rmtree(path, ignore_errors=True)


def test_a_fifo_under_many_keys_blocks_no_thread(store: ObjectStore, tmp_path: Path) -> None:
    e = fill(store, tmp_path)
    for n in range(20):  # more than the store has threads
        os.mkfifo(e / "i" / f"f{n}.json")
        with pytest.raises(ObjectNotFoundError):
            store.get(f"e/i/f{n}.json", timeout_s=30)
    assert store.get("e/i/s.json", timeout_s=30) == b"{}"


def test_a_link_above_an_object_is_not_followed(store: ObjectStore, tmp_path: Path) -> None:
    e = fill(store, tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "s.json").write_text("{}")
    (e / "linked").symlink_to(outside)
    assert keys(store, "e/linked/") == []
    for read in (store.get, store.head):
        with pytest.raises(ObjectNotFoundError):
            read("e/linked/s.json")


def test_the_directory_of_the_store_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "real")
    store = open_store(f"file://{tmp_path}/store")
    fill(store, tmp_path)
    assert keys(store) == ["e/i/s.json"]
    assert store.get("e/i/s.json") == b"{}"


@pytest.mark.parametrize("prefix", ["../", "e/../../", "e//", "./"])
def test_a_prefix_cannot_leave_the_store(store: ObjectStore, tmp_path: Path, prefix: str) -> None:
    fill(store, tmp_path)
    (tmp_path / "beside.json").write_text("{}")
    assert keys(store, prefix) == []


def test_a_listing_has_a_bound_of_names(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, tmp_path)
    monkeypatch.setattr(local_files, "MAX_NAMES", 100)
    for n in range(101):
        (tmp_path / "store" / "e" / f"x{n}").write_text("")
    with pytest.raises(UnlistableError, match="more than 100 names"):
        store.list("e/")
    assert keys(store, "e/i/") == ["e/i/s.json"]


def test_listings_leave_no_file_open(store: ObjectStore, tmp_path: Path) -> None:
    e = fill(store, tmp_path)
    (e / "a" / "b" / "c").mkdir(parents=True)
    (e / "round").symlink_to(e)
    store.list("e/")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        store.list("")
        store.get("e/i/s.json")
        with pytest.raises(ObjectNotFoundError):
            store.get("e/round/i/s.json")
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("kind", ["file", "memory", "s3"])
def test_an_object_above_the_limit_is_not_read(
    kind: str, tmp_path: Path, aws_env: None, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_endpoint)
    url = {"file": f"file://{tmp_path}", "memory": "memory://limit", "s3": BUCKET}[kind]
    if kind == "s3":
        boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1").create_bucket(Bucket=BUCKET)
    store = open_store(url)
    store.put("e/k", b"x" * 1001)
    assert store.get("e/k", max_bytes=1001) == b"x" * 1001
    with pytest.raises(ObjectTooLargeError, match="1001 bytes, more than the 1000"):
        store.get("e/k", max_bytes=1000)


def test_a_huge_sparse_file_costs_no_memory(store: ObjectStore, tmp_path: Path) -> None:
    e = fill(store, tmp_path)
    with open(e / "i" / "huge.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ObjectTooLargeError):
        store.get("e/i/huge.json", max_bytes=256_000_000)
