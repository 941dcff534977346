"""The TRL example as a person runs it: real agent, runtime, gateway, policy server and trainer, one small batch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE = EXAMPLES / "trl_math" / "train.py"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_batch_trains_on_exactly_the_sampled_tokens_and_masks_what_failed(trl_python: str, tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    shutil.copytree(EXAMPLES / "strands_math_agent", agent)
    source = (agent / "arithmetic_app.py").read_text()
    here = '    rollout = payload["_rollout"]\n'
    assert source.count(here) == 1
    # half of the training rollouts raise; the evaluations, whose input ids begin with a name, do not
    fails = '    if rollout["input_id"][0].isdigit() and sum(map(ord, rollout["base_url"])) % 2:\n'
    fails += '        raise RuntimeError("injected failure")\n'
    (agent / "arithmetic_app.py").write_text(source.replace(here, here + fails))
    command = [trl_python, "-W", "ignore", str(EXAMPLE), "--batches", "1", "--problems", "2", "--held-out", "2"]
    command += ["--agent", str(agent / "arithmetic_app.py")]
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
    assert 0 < summary["masked"] < 16
    assert "nan" not in done.stdout
