"""A session's log."""

from __future__ import annotations

from pathlib import Path

from agentcore_rl_toolkit.runtime.launcher.session_log import KeptLogs, log_tail, read_log


def test_a_log_is_read_from_an_offset_or_its_end(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"0123456789")
    assert read_log(tmp_path / "log", 4, 3) == b"456"
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


def test_agents_that_print_without_end_do_not_fill_the_disk(tmp_path: Path) -> None:
    kept = KeptLogs(100, 1_000)
    for name in "abcd":
        (tmp_path / name).write_bytes(bytes(2_000 if name == "d" else 400))
        kept.keep(tmp_path / name)
        kept.keep(tmp_path / "absent")
        assert sum(1 for _ in tmp_path.iterdir()) == {"a": 1, "b": 2, "c": 2, "d": 1}[name]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]  # the last one stays, whatever its size
