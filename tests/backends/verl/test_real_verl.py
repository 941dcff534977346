"""verl 0.9 itself on CPU: our loop in its AgentLoop worker, our manager on real Ray and TransferQueue.

Needs an environment with verl: this one, `.venvs/verl` (docs/backends/verl.md has the commands), or VERL_PYTHON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.advantages import grpo
from agentcore_rl_toolkit.backends.collect import Group, collect
from agentcore_rl_toolkit.backends.recorded import recorded_episodes, requests_for
from agentcore_rl_toolkit.backends.replay import Replay
from agentcore_rl_toolkit.backends.verl.convert import to_verl

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).parent / "real_run.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def verl_python() -> str:
    if importlib.util.find_spec("verl"):
        return sys.executable
    for path in (os.environ.get("VERL_PYTHON"), str(ROOT / ".venvs/verl/bin/python")):
        if path and Path(path).exists():
            return path
    pytest.skip("no environment with verl 0.9.x (about 1.9 GB): see docs/backends/verl.md, or set VERL_PYTHON")


def run(case: str, folder: Path) -> dict[str, Any]:
    out = folder / "result.json"
    done = subprocess.run(
        [verl_python(), "-W", "ignore", str(SCRIPT), case, str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    loaded: dict[str, Any] = json.loads(out.read_text())
    return loaded


def groups_of(n: int) -> list[Group]:
    episodes = recorded_episodes(n)
    replay = Replay(episodes)
    return collect(requests_for(episodes), client=replay.client, gateway=replay.gateway)


def test_verls_worker_runs_our_loop_and_gets_the_sampled_tokens(tmp_path: Path) -> None:
    result = run("worker", tmp_path)
    rollouts = [r for g in groups_of(64) for r in g.rollouts]
    for rollout, outputs in zip(rollouts, result["outputs"], strict=True):
        wanted = to_verl(rollout, prompt_length=256, response_length=256)
        assert len(outputs) == len(wanted)
        for got, want in zip(outputs, wanted, strict=True):
            for name in ("prompt_ids", "response_ids", "response_mask", "reward_score", "num_turns"):
                assert got[name] == want[name]
            assert got["response_logprobs"] == pytest.approx(want["response_logprobs"])
            assert got["extra_fields"]["min_global_steps"] == want["extra_fields"]["min_global_steps"]
    payload = result["invoked"]
    rollout_block = payload.pop("_rollout")
    assert payload == {"prompt": "task 0", "answer": "0"}
    assert rollout_block["sampling_params"] == {"temperature": 0.7, "top_p": 1.0}
    assert set(result["tensors"]) >= {"prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"}
    assert result["reward_on_last_token"] == rollouts[0].reward


def test_the_v1_manager_writes_rows_and_final_tags_and_masked_rollouts_move_no_advantage(tmp_path: Path) -> None:
    result = run("manager", tmp_path)
    assert result["returned_s"] < 5  # generate_sequences must not wait for rollouts
    assert result["status"] == {"0": "finished", "1": "finished", "2": "finished", "3": "failure"}
    rows = result["rows"]
    seen = 0
    for g, group in enumerate(groups_of(24)):
        advantages_G = grpo(group.rewards)
        for rollout, advantage in zip(group.rollouts, advantages_G, strict=True):
            outputs = to_verl(rollout, prompt_length=256, response_length=256)
            found = [k for k in rows if k.startswith(f"{g}_{rollout.index}_")]
            assert len(found) == len(outputs)
            for index, output in enumerate(outputs):
                i = rows[f"{g}_{rollout.index}_{index}"]
                mask = output["response_mask"]
                assert result["input_ids"][i] == output["prompt_ids"] + output["response_ids"]
                assert result["response_mask"][i] == mask
                assert result["logprobs"][i] == pytest.approx(output["response_logprobs"], abs=1e-6)
                assert result["advantages"][i] == pytest.approx(advantage, abs=1e-4)
                tag = result["tags"][i]
                assert tag["seq_len"] == len(result["input_ids"][i])
                assert tag["min_global_steps"] == output["extra_fields"]["min_global_steps"]
                seen += 1
    assert seen == len(rows) == len(result["tags"])
