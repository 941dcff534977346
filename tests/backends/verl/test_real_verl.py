"""verl 0.9 itself on CPU: our loop in its AgentLoop worker, our manager on real Ray and TransferQueue.

Needs an environment with verl: this one, `.venvs/verl` (docs/backends/verl.md has the commands), or VERL_PYTHON.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.advantages import grpo
from agentcore_rl_toolkit.backends.collect import Group, collect
from agentcore_rl_toolkit.backends.recorded import recorded_episodes, requests_for
from agentcore_rl_toolkit.backends.replay import Replay
from agentcore_rl_toolkit.backends.verl.convert import to_verl
from agentcore_rl_toolkit.policy.arithmetic import problems

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


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two prompts of four rollouts each, for training and for validation; one rollout of each prompt fails once."""
    python = verl_python()
    folder = tmp_path_factory.mktemp("verl")
    (folder / "records").mkdir()
    agent = Path(__file__).parents[1] / "fails_once.py"
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": p.prompt, "answer": p.answer, "fail_marker": str(folder / "records" / f"{i}.failed")})
            + "\n"
            for i, p in enumerate(problems("train", 2, seed=5))
        )
    )
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "disabled",
        "AWS_ACCESS_KEY_ID": "local",
        "AWS_SECRET_ACCESS_KEY": "local",
        "PYTHONPATH": str(SCRIPT.parent),
    }
    command = ["runtime", "serve", "--agent", f"math={agent}", "--writable", str(folder / "records")]
    ready = folder / "runtime.json"
    command += ["--ready-file", str(ready), "--parent-pid", str(os.getpid())]
    with (folder / "runtime.log").open("wb") as log:
        runtime = subprocess.Popen([sys.executable, "-m", "agentcore_rl_toolkit.cli", *command], stdout=log, stderr=log)
    try:
        give_up_s = time.monotonic() + 90
        while not ready.exists():
            assert runtime.poll() is None, (folder / "runtime.log").read_text()[-2000:]
            assert time.monotonic() < give_up_s
            time.sleep(0.05)
        served = json.loads(ready.read_text())
        place = {
            "policy": str(ROOT / "src/agentcore_rl_toolkit/policy/weights"),
            "rows": str(rows),
            "agentcore": {
                "agent_runtime_arn": served["agents"]["math"],
                "s3_bucket": f"file://{folder / 'records'}",
                "exp_id": "real-verl",
                "endpoint_url": served["url"],
                "model_id": "policy",
                "gateway_host": "127.0.0.1",
                "gateway_port": 0,
                "reqs_per_sec": 200,
                "max_rollout_time": 120,
            },
        }
        (folder / "place.json").write_text(json.dumps(place))
        done = subprocess.run(
            [
                python,
                "-W",
                "ignore",
                str(SCRIPT.with_name("real_rollouts.py")),
                str(folder / "place.json"),
                str(folder / "out.json"),
            ],
            capture_output=True,
            text=True,
            timeout=380,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    finally:
        runtime.terminate()
        runtime.wait(timeout=30)
    loaded: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return loaded


@pytest.mark.parametrize("partition", ["train", "val"])
def test_every_row_is_what_verls_server_sampled(rollouts: dict[str, Any], partition: str) -> None:
    found, sampled = rollouts[partition], rollouts["sampled"]
    assert found["keys"]
    for tokens, mask, logprobs in zip(
        found["input_ids"], found["response_mask"], found["rollout_log_probs"], strict=True
    ):
        start = at = len(tokens) - len(mask)
        while at < len(tokens):
            if not mask[at - start]:
                at += 1
                continue
            here = [
                g
                for g in sampled
                if g["ids"] and g["prompt"] == tokens[:at] and g["ids"] == tokens[at : at + len(g["ids"])]
            ]
            assert any(logprobs[at - start :][: len(g["ids"])] == pytest.approx(g["logprobs"], abs=1e-6) for g in here)
            at += len(here[0]["ids"])


def test_rollouts_outlive_an_update_of_the_weights_and_say_so(rollouts: dict[str, Any]) -> None:
    train = rollouts["train"]
    assert train["cut"] >= 1
    spans = {(tag["min_global_steps"], tag["max_global_steps"]) for tag in train["tags"]}
    assert spans <= {(4, 4), (4, 5), (5, 5)}
    assert (4, 5) in spans
    assert all(tag["global_steps"] == 5 for tag in train["tags"])


def test_a_failed_rollout_has_no_row_and_its_prompt_still_finishes(rollouts: dict[str, Any]) -> None:
    train, val = rollouts["train"], rollouts["val"]
    assert set(train["status"].values()) == {"finished"}
    sessions = [{key.rsplit("_", 2)[1] for key in train["keys"] if key.startswith(uid)} for uid in train["status"]]
    assert [len(s) for s in sessions] == [3, 3]  # one of four failed
    assert len(val["keys"]) == 2  # val_kwargs.n is 1
    assert {tag["min_global_steps"] for tag in val["tags"]} == {5}


def test_verls_loss_takes_a_step_on_the_rows_and_finds_them_on_policy(rollouts: dict[str, Any]) -> None:
    loss = rollouts["loss"]
    assert loss["furthest"] < 1e-3  # the logprobs in the rows are those of the tokens they stand at
    assert abs(loss["kl"]) < 1e-3
    assert math.isfinite(loss["loss"])
    assert loss["gradient"] > 0
