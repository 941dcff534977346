"""What others put into a store beside the records: odd keys on S3, links, FIFOs, circles and deep trees in a directory."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit.errors import ConfigError, ObjectNotFoundError, ObjectTooLargeError, StoreError
from agentcore_rl_toolkit.store import ObjectStore, open_store

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


async def test_a_listing_over_a_key_that_obstore_cannot_name_says_so(s3: Any) -> None:
    store = open_store(BUCKET)
    for key in ("e/i/s.json", "f/i/s.json", "f//u.json"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=b"{}")
    assert [item.key for item in await store.list_async("e/")] == ["e/i/s.json"]
    with pytest.raises(ConfigError, match="f//u"):  # the watcher looks at single keys then
        await store.list_async("f/")
    assert (await store.head_async("f/i/s.json")).size == 2


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/store")


def keys(store: ObjectStore, prefix: str = "e/") -> list[str]:
    return [item.key for item in store.list(prefix)]


def fill(store: ObjectStore, root: Path) -> Path:
    store.put("e/i/s.json", b"{}")
    return root / "store" / "e"


def test_nothing_in_a_directory_hides_the_records_beside_it(store: ObjectStore, tmp_path: Path) -> None:
    e = fill(store, tmp_path)
    descend(e, "d", 1100)  # more than Python's recursion limit
    descend(e, "long" * 40, 30)  # its path is longer than the kernel takes
    (e / "round").symlink_to(e)
    (e / "i" / "up").symlink_to("..")
    (tmp_path / "secret").write_text("{}")
    (e / "i" / "link.json").symlink_to(tmp_path / "secret")
    os.mkfifo(e / "i" / "fifo.json")
    (e / "i" / "folder.json").mkdir()
    (e / os.fsdecode(b"\xff.json")).write_text("{}")
    (e / "a\x1b[2J.json").write_text("{}")
    (e / "i" / f".tmp-{16 * '0'}").write_text("{}")
    (e / "closed").mkdir(mode=0)
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(e / "i" / "socket.json"))
    assert keys(store) == ["e/i/s.json"]
    for name in ("link", "fifo", "folder", "socket"):
        for read in (store.get, store.head):
            with pytest.raises((ObjectNotFoundError, StoreError)):
                read(f"e/i/{name}.json", timeout_s=30)
    subprocess.run(["rm", "-rf", str(e)], check=True, timeout=60)  # pytest's own removal is recursive


def descend(folder: Path, name: str, depth: int) -> None:
    """Make nested folders of this name, with an object in the last one."""
    above = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=above)
        below = os.open(name, os.O_RDONLY, dir_fd=above)
        os.close(above)
        above = below
    os.close(os.open("r.json", os.O_CREAT | os.O_WRONLY, dir_fd=above))
    os.close(above)


@pytest.mark.parametrize("prefix", ["../", "e/../../", "e//", "./"])
def test_a_prefix_cannot_leave_the_store(store: ObjectStore, tmp_path: Path, prefix: str) -> None:
    fill(store, tmp_path)
    (tmp_path / "beside.json").write_text("{}")
    assert keys(store, prefix) == []


@pytest.mark.parametrize("kind", ["file", "memory", "s3", "boto3"])
def test_an_object_above_the_limit_is_not_read(
    kind: str, tmp_path: Path, aws_env: None, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_endpoint)
    monkeypatch.setattr("agentcore_rl_toolkit.store.remote._used_in", {-1} if kind == "boto3" else set())
    url = {"file": f"file://{tmp_path}", "memory": "memory://limit"}.get(kind, BUCKET)
    if url == BUCKET:
        boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1").create_bucket(Bucket=BUCKET)
    store = open_store(url)
    store.put("e/k", b"x" * 1001)
    assert store.get("e/k", max_bytes=1001) == store.get("e/k") == b"x" * 1001
    with pytest.raises(ObjectTooLargeError, match="1001 bytes, more than the 1000"):
        store.get("e/k", max_bytes=1000)
