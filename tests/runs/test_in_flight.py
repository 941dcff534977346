"""The file that says which rollouts are in flight."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.runs.in_flight import IN_FLIGHT, in_flight, read_in_flight
from serving import wait_for


def test_what_cannot_be_asked_once_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules[in_flight.__module__], "EVERY_S", 0.01)
    asked: list[int] = []

    def rollouts() -> list[dict[str, Any]]:
        asked.append(1)
        if len(asked) < 4:
            raise RuntimeError("dictionary changed size during iteration")
        return [{"session_id": "s", "stage_s": 1.0}]

    with in_flight(tmp_path, rollouts):
        found = wait_for(lambda: read_in_flight(tmp_path))
    assert (found["count"], found["rollouts"][0]["session_id"]) == (1, "s")
    warned = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert sum("could not be brought up to date" in message for message in warned) == 1
    assert not (tmp_path / IN_FLIGHT).exists()
