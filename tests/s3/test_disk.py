"""What others leave in the directory of an S3 endpoint keeps it neither from starting nor from its objects."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from agentcore_rl_toolkit.s3.disk import Disk, StoredObject
from agentcore_rl_toolkit.s3.multipart import Uploads


def put(disk: Disk, bucket: str, key: str, body: bytes = b"{}") -> Path:
    file = disk.new_file()
    stored = StoredObject(key=key, etag="x", size=len(body), modified_s=time.time())
    Path(file).write_bytes(stored.to_line() + body)
    disk.place(disk.buckets[bucket], stored, file)
    return Path(disk.path_of(bucket, key))


def line(**known: object) -> bytes:
    return json.dumps({"key": "k", "etag": "x", "size": 0, "modified": 1.0, **known}).encode() + b"\n"


CONTENTS = {
    "nothing": b"",
    "words": b"somebody's notes\n",
    "deep": b'{"key":' + b"[" * 100_000 + b"\n",
    "key of no kind": line(key=["a"]),
    "size of no kind": line(size="many"),
    "a list": b"[]\n",
    "of another name": line(),
}


@pytest.mark.parametrize(
    "what", ["fifo", "socket", "folder", "link", "round", "device", "endless line", "closed", *CONTENTS]
)
def test_what_is_no_object_is_left_out_and_said(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path / "data")
    disk.create_bucket("records")
    beside = put(disk, "records", "exp/i/s.json")
    disk.close()
    strange = beside.with_name("0" * 40)
    if what == "fifo":
        os.mkfifo(strange)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as s:
            monkeypatch.chdir(strange.parent)  # its path may be too long for a socket
            s.bind(strange.name)
    elif what == "folder":
        strange.mkdir()
    elif what == "link":
        (tmp_path / "secret").write_bytes(line())
        strange.symlink_to(tmp_path / "secret")
    elif what == "round":
        strange.symlink_to(strange)
    elif what == "device":
        strange.symlink_to("/dev/zero")
    elif what == "endless line":
        strange.touch()
        os.truncate(strange, 2**40)
    elif what == "closed":
        if os.geteuid() == 0:
            pytest.skip("root may read everything")
        strange.write_bytes(line())
        strange.chmod(0)
    else:
        strange.write_bytes(CONTENTS[what])
    disk = Disk(tmp_path / "data")
    try:
        assert list(disk.buckets["records"].keys) == ["exp/i/s.json"]
        os.close(disk.open_body(disk.buckets["records"], disk.buckets["records"].objects["exp/i/s.json"]))
    finally:
        disk.close()
    assert "1 things" in caplog.text
    assert str(strange) in caplog.text


def test_what_lies_in_its_own_folders_keeps_no_server_from_starting(tmp_path: Path) -> None:
    root = tmp_path / "data"
    Disk(root).close()
    (root / ".new" / "folder" / "deeper").mkdir(parents=True)
    (root / ".new" / "link").symlink_to(tmp_path)
    os.mkfifo(root / ".new" / "pipe")
    for name in ("fifo", "deep", "folder"):
        (root / ".uploads" / name).mkdir()
    os.mkfifo(root / ".uploads" / "fifo" / "upload.json")
    (root / ".uploads" / "deep" / "upload.json").write_text("[" * 100_000)
    (root / ".uploads" / "folder" / "upload.json").mkdir()
    (root / ".uploads" / "file").write_text("")
    (root / "outside").symlink_to(tmp_path)
    (tmp_path / ".bucket").touch()
    disk = Disk(root)
    try:
        assert disk.buckets == {}
        assert Uploads(disk).in_bucket("records") == []
        assert list((root / ".new").iterdir()) == []
    finally:
        disk.close()
    assert (tmp_path / ".bucket").exists()
    shutil.rmtree(root)
