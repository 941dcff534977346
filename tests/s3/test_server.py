"""The endpoint as a process: durable, one per directory, bounded in memory, well behaved as a command."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from .cases import MIB, begin, finish, keys_of, refused, upload_parts
from .conftest import Server, client_for

SERVE = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "s3", "serve"]


def test_objects_and_uploads_survive_a_killed_server(start_server: Callable[..., Server]) -> None:
    server = start_server("--bucket", "keep")
    client = client_for(server.url)
    client.put_object(Bucket="keep", Key="a/é", Body=b"x" * 100, Metadata={"k": "v"}, ContentType="text/x")
    client.put_object(Bucket="keep", Key="gone", Body=b"x")
    client.delete_object(Bucket="keep", Key="gone")
    client.put_object(Bucket="keep", Key="large", Body=b"y" * (3 * MIB))
    upload = begin(client, "keep", "m", ChecksumAlgorithm="CRC32")
    parts = upload_parts(client, "keep", "m", upload, b"a" * 5 * MIB, ChecksumAlgorithm="CRC32")
    listed = client.list_objects_v2(Bucket="keep")["Contents"]
    server.kill()
    client.close()

    client = client_for(start_server(directory=server.directory).url)
    assert client.list_objects_v2(Bucket="keep")["Contents"] == listed
    got = client.get_object(Bucket="keep", Key="a/é")
    assert (got["Body"].read(), got["Metadata"], got["ContentType"]) == (b"x" * 100, {"k": "v"}, "text/x")
    assert client.get_object(Bucket="keep", Key="large")["Body"].read() == b"y" * (3 * MIB)
    finish(client, "keep", "m", upload, parts)
    assert client.head_object(Bucket="keep", Key="m")["ContentLength"] == 5 * MIB
    client.close()


@pytest.mark.threat(
    who="another user of this machine",
    tries="list, read, write or delete objects of a store that demands no signature, through loopback",
    stopped_by="the kernel says whose the connection is: only this user and root need no signature",
    leaves="sessions of this user may use all of a store that stands alone; elsewhere than on Linux the loopback passes",
)
def test_another_user_gets_nothing_without_a_signature(
    start_server: Callable[..., Server], as_another_user: Callable[..., str]
) -> None:
    server = start_server("--bucket", "keep")
    with urllib.request.urlopen(server.url, timeout=60) as answer:
        assert answer.status == 200
    refusal = as_another_user(server.url)
    assert refusal.startswith("403")
    assert "other users" in refusal
    server.stop()
    opened = start_server("--callers", "any", directory=server.directory)
    assert as_another_user(opened.url) == "200"


def test_a_put_cut_off_by_a_kill_leaves_the_old_object(start_server: Callable[..., Server]) -> None:
    server = start_server("--bucket", "keep")
    client = client_for(server.url)
    client.put_object(Bucket="keep", Key="k", Body=b"old")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        head = f"PUT /keep/k HTTP/1.1\r\nHost: {host}\r\nContent-Length: {10 * MIB}\r\n\r\n"
        raw.sendall(head.encode() + b"n" * (6 * MIB))
        deadline = time.monotonic() + 60
        while not any((server.directory / ".new").iterdir()):
            assert time.monotonic() < deadline, "no file was begun"
            time.sleep(0.02)
        server.kill()
    client.close()
    client = client_for(start_server(directory=server.directory).url)
    assert client.get_object(Bucket="keep", Key="k")["Body"].read() == b"old"
    assert not list((server.directory / ".new").iterdir())
    client.close()


def test_a_client_that_goes_away_leaves_nothing(server: Server, bucket: str, s3: Any) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    url = s3.generate_presigned_url("put_object", Params={"Bucket": bucket, "Key": "half"})
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        head = (
            f"PUT {url.removeprefix(server.url)} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {10 * MIB}\r\n\r\n"
        )
        raw.sendall(head.encode() + b"n" * (3 * MIB))
        _until(lambda: any((server.directory / ".new").iterdir()))
    _until(lambda: not any((server.directory / ".new").iterdir()))
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_of_many_create_only_puts_wins(bucket: str, s3: Any) -> None:
    def attempt(n: int) -> str:
        return refused(lambda: s3.put_object(Bucket=bucket, Key="k", Body=b"%d" % n, IfNoneMatch="*"))[0]

    with ThreadPoolExecutor(10) as pool:
        outcomes = list(pool.map(attempt, range(40)))
    assert sorted(set(outcomes)) == ["PreconditionFailed", "accepted"]
    assert outcomes.count("accepted") == 1
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"%d" % outcomes.index("accepted")


def test_readers_see_whole_objects_while_they_are_replaced(bucket: str, s3: Any) -> None:
    bodies = [bytes([65 + i]) * (300_000 + i) for i in range(4)]
    s3.put_object(Bucket=bucket, Key="k", Body=bodies[0])

    def write(n: int) -> None:
        s3.put_object(Bucket=bucket, Key="k", Body=bodies[n % 4])

    def read(_: int) -> bool:
        return s3.get_object(Bucket=bucket, Key="k")["Body"].read() in bodies

    with ThreadPoolExecutor(8) as pool:
        writes = pool.map(write, range(60))
        assert all(pool.map(read, range(60)))
        list(writes)


def test_large_bodies_are_not_held_in_memory(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server("--bucket", "big")
    client = client_for(server.url)
    process = psutil.Process(server.process.pid)
    client.put_object(Bucket="big", Key="warm", Body=b"x" * (2 * MIB))
    before = process.memory_info().rss
    file = tmp_path / "body"
    digest = hashlib.md5()
    with file.open("wb") as f:
        for i in range(120):
            piece = bytes([i]) * MIB
            digest.update(piece)
            f.write(piece)
    with file.open("rb") as f:
        assert client.put_object(Bucket="big", Key="k", Body=f)["ETag"] == f'"{digest.hexdigest()}"'
    with file.open("rb") as f:
        client.upload_fileobj(f, "big", "parts")  # s3transfer: parallel parts
    read = hashlib.md5()
    for piece in client.get_object(Bucket="big", Key="parts")["Body"].iter_chunks(MIB):
        read.update(piece)
    assert read.hexdigest() == digest.hexdigest()
    client.copy_object(Bucket="big", Key="copy", CopySource={"Bucket": "big", "Key": "k"})
    assert client.head_object(Bucket="big", Key="copy")["ContentLength"] == 120 * MIB
    assert process.memory_info().rss - before < 60 * MIB
    client.close()


def test_ten_thousand_keys_are_listed_completely(start_server: Callable[..., Server]) -> None:
    server = start_server("--bucket", "many")
    pytest.importorskip("obstore")
    import obstore
    from obstore.store import S3Store

    store = _store(S3Store, server.url, "many")
    names = [f"exp/{i % 100:03}/{i:06}.json" for i in range(10_000)]

    async def fill() -> None:
        import asyncio

        gate = asyncio.Semaphore(64)

        async def one(name: str) -> None:
            async with gate:
                await obstore.put_async(store, name, b"{}")

        await asyncio.gather(*(one(n) for n in names))

    import asyncio

    asyncio.run(fill())
    found = [m["path"] for batch in obstore.list(store, "exp/") for m in batch]
    assert found == sorted(names)
    # and the same after a restart
    server.stop()
    again = _store(S3Store, start_server(directory=server.directory).url, "many")
    assert [m["path"] for batch in obstore.list(again, "exp/", offset=sorted(names)[9_990]) for m in batch] == sorted(
        names
    )[9_991:]


def _store(kind: Any, url: str, bucket: str) -> Any:
    return kind(
        bucket,
        endpoint=url,
        region="us-east-1",
        access_key_id="any",
        secret_access_key="any",
        client_options={"allow_http": True},
    )


def test_obstore_with_signatures_conditions_and_multipart(server: Server, bucket: str) -> None:
    pytest.importorskip("obstore")
    import obstore
    from obstore.exceptions import AlreadyExistsError
    from obstore.store import S3Store

    from .conftest import ACCESS, SECRET

    store = S3Store(
        bucket,
        endpoint=server.url,
        region="us-east-1",
        access_key_id=ACCESS,
        secret_access_key=SECRET,
        client_options={"allow_http": True},
    )
    obstore.put(store, "a b/é+1", b"one", mode="create", attributes={"Content-Type": "text/x"})
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a b/é+1", b"two", mode="create")
    got = obstore.get(store, "a b/é+1")
    assert bytes(got.bytes()) == b"one"
    assert got.attributes["Content-Type"] == "text/x"
    big = os.urandom(11 * MIB)
    obstore.put(store, "big", io.BytesIO(big), chunk_size=5 * MIB, use_multipart=True)
    assert bytes(obstore.get_range(store, "big", start=5 * MIB - 3, end=5 * MIB + 3)) == big[5 * MIB - 3 : 5 * MIB + 3]
    assert bytes(obstore.get(store, "big").bytes()) == big
    obstore.copy(store, "big", "copy")
    assert obstore.head(store, "copy")["size"] == len(big)
    listed = obstore.list_with_delimiter(store)
    assert [m["path"] for m in listed["objects"]] == ["big", "copy"]
    assert list(listed["common_prefixes"]) == ["a b"]
    obstore.delete(store, ["big", "copy"])
    with pytest.raises(FileNotFoundError):
        obstore.head(store, "big")


def test_buckets_appear_on_first_write_when_asked(start_server: Callable[..., Server]) -> None:
    client = client_for(start_server("--auto-create").url)
    assert refused(lambda: client.get_object(Bucket="new-one", Key="k")) == ("NoSuchBucket", 404)
    client.put_object(Bucket="new-one", Key="k", Body=b"x")
    assert keys_of(client.list_objects_v2(Bucket="new-one")) == ["k"]
    client.close()


def test_with_fsync_objects_are_whole_too(start_server: Callable[..., Server]) -> None:
    client = client_for(start_server("--fsync", "--bucket", "sync").url)
    for size in (0, 10, 3 * MIB):
        client.put_object(Bucket="sync", Key=str(size), Body=b"x" * size)
        assert client.get_object(Bucket="sync", Key=str(size))["Body"].read() == b"x" * size
    client.copy_object(Bucket="sync", Key="c", CopySource={"Bucket": "sync", "Key": "10"})
    assert client.head_object(Bucket="sync", Key="c")["ContentLength"] == 10
    client.close()


def test_a_second_server_for_the_directory_is_refused(start_server: Callable[..., Server]) -> None:
    server = start_server()
    done = subprocess.run([*SERVE, "--dir", str(server.directory)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "already served by another process" in done.stderr


def test_a_taken_port_is_named(server: Server, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    done = subprocess.run([*SERVE, "--dir", str(tmp_path), "--port", port], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert f"port {port}" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_with_success(start_server: Callable[..., Server], number: int) -> None:
    server = start_server()
    server.process.send_signal(number)
    assert server.process.wait(timeout=20) == 0


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ready = tmp_path / "ready"
    command = [*SERVE, "--dir", str(tmp_path / "d"), "--ready-file", str(ready), "--parent-pid", str(parent.pid)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _until(ready.exists)
        parent.kill()
        parent.wait(timeout=10)
        assert child.wait(timeout=20) == 0
    finally:
        parent.kill()
        child.kill()
        child.wait(timeout=10)


def test_a_refused_request_does_not_spoil_the_connection(bucket: str, s3: Any) -> None:
    for _ in range(3):
        assert (
            refused(lambda: s3.put_object(Bucket=bucket, Key="k" * 1025, Body=b"x" * 100_000))[0] == "KeyTooLongError"
        )
        s3.put_object(Bucket=bucket, Key="fine", Body=b"y")
        assert (
            refused(lambda: s3.put_object(Bucket=bucket + "-no", Key="k", Body=b"x" * 5_000_000))[0] == "NoSuchBucket"
        )
        assert s3.get_object(Bucket=bucket, Key="fine")["Body"].read() == b"y"


def test_what_is_not_served_is_refused_not_mistaken(bucket: str, s3: Any) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    for call in (
        lambda: s3.get_object_tagging(Bucket=bucket, Key="k"),
        lambda: s3.put_object_acl(Bucket=bucket, Key="k", ACL="private"),
        lambda: s3.get_bucket_policy(Bucket=bucket),
        lambda: s3.put_object(Bucket=bucket, Key="k", Body=b"y", Tagging="a=b"),
        lambda: s3.put_object(
            Bucket=bucket, Key="k", Body=b"y", SSECustomerKey="k" * 32, SSECustomerAlgorithm="AES256"
        ),
        lambda: s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"}),
        lambda: s3.get_object(Bucket=bucket, Key="k", VersionId="abc"),
    ):
        assert refused(call) == ("NotImplemented", 501)
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"x"


def test_documents_with_entities_are_refused(server: Server, bucket: str, s3: Any) -> None:
    from .wire.test_signatures import send, signed

    url = f"{server.url}/{bucket}?delete"
    bomb = b'<!DOCTYPE d [<!ENTITY a "aaaa">]><Delete><Object><Key>&a;</Key></Object></Delete>'
    status, body = send(url, "POST", bomb, signed("POST", url, bomb, {}))
    assert status == 400
    assert b"MalformedXML" in body


def test_told_to_stop_the_moment_it_says_where_it_is_it_stops(tmp_path: Path) -> None:
    code = (
        "import signal, sys, pathlib\n"
        "from agentcore_rl_toolkit.s3 import S3Config\n"
        "from agentcore_rl_toolkit.s3.server import serve\n"
        "stop = lambda text: signal.raise_signal(signal.SIGTERM)\n"
        "serve(S3Config(root=pathlib.Path(sys.argv[1])), announce=stop)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "objects")], timeout=60).returncode == 0
