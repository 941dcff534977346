"""A session's log."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.runtime.launcher import session_log
from agentcore_rl_toolkit.runtime.launcher.session_log import CUT, MAX_BYTES, KeptLogs, log_tail, read_log, shorten

from ..conftest import Server, wait_for


def test_a_log_is_read_from_an_offset_or_its_end(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"0123456789")
    assert read_log(tmp_path / "log", 0, 3) == b"012"
    assert read_log(tmp_path / "log", 4, 3) == b"456"
    assert read_log(tmp_path / "log", -1, 100) == b"9"
    assert read_log(tmp_path / "log", -3, 100) == b"789"
    assert read_log(tmp_path / "log", -300, 100) == b"0123456789"
    assert read_log(tmp_path / "log", 300, 100) == b""
    assert log_tail(tmp_path / "absent") == ""


def test_the_oldest_logs_go_first(tmp_path: Path) -> None:
    kept = KeptLogs(2)
    for name in "abac":  # the second session of the id `a` has its log
        (tmp_path / name).write_text(name)
        kept.keep(tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "c"]


def test_a_session_that_prints_without_end_keeps_the_beginning_and_the_end_of_its_log_and_its_followers(
    server: Server, session_id: str
) -> None:
    server.invoke({"do": "print", "text": "the beginning"}, session_id)
    server.invoke({"do": "print", "text": "x", "times": MAX_BYTES + 1}, session_id)
    following, shown = server.view.log(session_id, follow=True), ""
    while "xx\n" not in shown:
        shown = shown[-2:] + next(following)
    session = server.session(session_id)
    assert session is not None
    log = Path(session["log"])
    wait_for(lambda: log.stat().st_size < MAX_BYTES)
    server.invoke({"do": "print", "text": "the end"}, session_id)
    text = log.read_bytes()
    assert len(text) < MAX_BYTES * 0.6
    assert text.index(b"the beginning") < text.index(CUT) < text.index(b"the end")
    shown = ""
    while "the end" not in shown:
        shown += next(following)
    assert "the beginning" not in shown  # only the new end follows


def test_output_that_arrives_while_a_log_is_shortened_is_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(io.FileIO):
        reads = 0

        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            self.reads += 1
            if self.reads == 1:
                with log.open("ab") as session:
                    session.write(b"late")
            return data

    def opened(path: Path, mode: str, buffering: int, opener: Any) -> io.FileIO:
        return Slow(str(path), mode, opener=opener)

    log = tmp_path / "log"
    log.write_bytes(b"x" * (MAX_BYTES + 1))
    monkeypatch.setattr(session_log, "open", opened, raising=False)
    shorten(log)
    assert log.read_bytes() == b"x" * 2**23 + CUT + b"x" * 2**23 + b"late"
    assert b"32 MiB" in CUT


def test_a_file_outside_that_a_log_is_a_link_to_is_not_shortened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", MAX_BYTES + 1)
    (tmp_path / "log").symlink_to(tmp_path / "file")
    (tmp_path / "full").touch()
    os.truncate(tmp_path / "full", MAX_BYTES)
    shorten(tmp_path / "absent", tmp_path / "log", tmp_path / "full")
    assert [(tmp_path / name).stat().st_size for name in ("file", "full")] == [MAX_BYTES + 1, MAX_BYTES]


def test_agents_that_print_without_end_do_not_fill_the_disk(tmp_path: Path) -> None:
    kept = KeptLogs(100, 1_000)
    for name in "abcd":
        (tmp_path / name).write_bytes(bytes(2_000 if name == "d" else 500))
        kept.keep(tmp_path / name)
        kept.keep(tmp_path / "absent")
        assert sum(1 for _ in tmp_path.iterdir()) == {"a": 1, "b": 2, "c": 2, "d": 1}[name]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]  # the last one stays, whatever its size


def test_four_gibibytes_of_logs_are_kept(tmp_path: Path) -> None:
    kept = KeptLogs()
    for name, size in (("a", 2**31), ("b", 2**31), ("c", 1)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)  # the disk has none of it
        kept.keep(tmp_path / name)
        assert (tmp_path / "a").exists() == (name != "c")
    assert (tmp_path / "b").exists()
