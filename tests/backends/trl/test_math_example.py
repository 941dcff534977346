"""The TRL example as a person runs it: real agent, runtime, gateway, policy server and trainer, one small batch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_math" / "train.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_batch_trains_on_exactly_the_sampled_tokens(trl_python: str, tmp_path: Path) -> None:
    command = [trl_python, "-W", "ignore", str(EXAMPLE), "--batches", "1", "--problems", "2", "--held-out", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["held_out_before"]["outcomes"] == {"ok": 2}
    assert summary["held_out_after"]["outcomes"] == {"ok": 2}
    assert summary["rewards"][0] is not None
    assert summary["logprob_gap_max"] < 1e-3  # the trainer's model gives the recorded logprobs
    assert summary["trained_token_share"] is not None
