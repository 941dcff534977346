"""The proofs of `examples/signals`, one seed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "signals" / "run.py"


@pytest.mark.system
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_student_reaches_its_teacher_in_half_the_rollouts_and_turns_are_no_worse_than_episodes(
    tmp_path: Path,
) -> None:
    subprocess.run([sys.executable, SCRIPT, "--seeds", "0", "--out", tmp_path], check=True, timeout=1700)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    found = {row["method"]: row for row in rows}
    assert found["grpo"]["rollouts"] == 960  # as in the README: 12 steps, not the quickstart's number
    assert found["distill"]["rollouts"] <= found["grpo"]["rollouts"] / 2
    assert found["distill"]["after"] >= 0.85
    assert found["sft"]["after"] >= found["sft"]["before"] + 0.15
    assert (
        found["turn"]["after"] >= found["episode"]["after"] - 0.1
    )  # two samples of 128; three seeds are in the README
