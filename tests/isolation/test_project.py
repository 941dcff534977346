"""The files of a project that a session finds in its own folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcore_rl_toolkit.isolation import project


def test_entries_beyond_the_limit_are_left_out_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(project, "MAX_LINKS", 2)
    source, session = tmp_path / "source", tmp_path / "session"
    for folder in (source, session):
        folder.mkdir()
    for name in ("a.py", "b.txt", "c.txt"):
        (source / name).write_text(name)
    project.link_files([str(source)], str(session))
    assert sorted(path.name for path in session.iterdir()) == ["a.py", "b.txt"]
    assert "has 3 entries; sessions find the first 2" in capsys.readouterr().err
