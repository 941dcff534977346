"""A session's log: read as what it is, and kept to a size while its writer goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentcore_rl_toolkit.runtime.launcher.session_log import log_bytes, log_tail, read_log, shorten


def test_a_long_log_keeps_its_end_and_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as writer:
        for number in range(2_000):
            writer.write(b"line %d\n" % number)
        before = log_bytes(path)
        assert shorten(path, before) == 0
        cut = shorten(path, 4_000)
        assert 0 < cut < before
        writer.write(b"and on\n")
    lines = path.read_text().splitlines()
    assert lines[0] == f"[{cut} bytes of this log were cut out: a session's log is kept to 4000 bytes]"
    assert lines[-2:] == ["line 1999", "and on"]
    assert all(line.startswith("line ") for line in lines[1:-1])  # none of them in part
    assert log_bytes(path) < 1_300


@pytest.mark.threat(
    who="a session",
    tries="have the runtime read another file, or wait for ever, by a link or a pipe in its log's place",
    stopped_by="logs are opened without following links or waiting, and read only when they are files",
    leaves="",
)
def test_what_is_no_file_is_not_read_as_a_log(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cr3t" * 1_000)
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "absent", "."):
        assert read_log(tmp_path / name, 0, 100) == b""
        assert log_tail(tmp_path / name) == ""
        assert shorten(tmp_path / name, 10) == 0
    assert (tmp_path / "secret").read_text() == "s3cr3t" * 1_000


def test_a_log_is_read_from_an_offset_or_its_end(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"0123456789")
    assert read_log(tmp_path / "log", 4, 3) == b"456"
    assert read_log(tmp_path / "log", -3, 100) == b"789"
    assert read_log(tmp_path / "log", -300, 100) == b"0123456789"
    assert read_log(tmp_path / "log", 300, 100) == b""


def test_what_is_written_while_a_log_is_cut_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "log", os.pread
    path.write_bytes(b"x" * 99 + b"\n" + b"y" * 9_899 + b"\n")
    late = [b"the last line\n", b"and one more\n"]

    def read_slowly(fd: int, size: int, offset: int) -> bytes:
        found = read(fd, size, offset)
        if late:  # as where the machine has much to do: the session runs between two calls of this
            with path.open("ab") as writer:
                writer.write(late.pop(0))
        return found

    monkeypatch.setattr(os, "pread", read_slowly)
    assert shorten(path, 1_000) > 0
    assert path.read_bytes().endswith(b"the last line\nand one more\n")
