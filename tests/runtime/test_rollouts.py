"""Rollouts through the whole stack, also with the runtime killed under them: `benchmarks/rollouts.py`, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rollouts.py"


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.skipif(sys.platform != "linux", reason="what is left over is counted by /proc")
def test_no_rollout_is_lost_and_nothing_is_left_also_when_the_runtime_is_killed(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--rollouts", "12", "--at-once", "6", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=420)
    found = json.loads(report.read_text()) if report.exists() else {"checks": [], "rows": []}
    assert [c for c in found["checks"] if not c["ok"]] == [], done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    undisturbed, killed = found["rows"]
    assert (undisturbed["ok"], undisturbed["retried"], killed["ok"]) == (12, 0, 12)
    assert killed["killed with the runtime"] >= 1
    assert killed["sessions used"] > 12  # those the kill hit were started again
