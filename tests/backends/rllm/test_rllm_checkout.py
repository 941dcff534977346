"""rLLM's own code, from the checkout that RLLM_DIR names, over our client, our gateway and the local runtime."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.policy.word_problems import problems
from agentcore_rl_toolkit.runs import RunReader, TokenSequence
from agentcore_rl_toolkit.runs.folder import status
from serving import serving

from ..math_agent import math_agent

RLLM_DIR = os.environ.get("RLLM_DIR")
pytestmark = [
    pytest.mark.skipif(
        not RLLM_DIR, reason="RLLM_DIR names no rLLM checkout; its calls are checked by signature instead"
    ),
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
HERE = Path(__file__).parent
COMPAT = HERE.parents[2] / "compat" / "rllm_model_gateway" / "src"
WEIGHTS = HERE.parents[2] / "src" / "agentcore_rl_toolkit" / "policy" / "weights"
ROLLOUTS = 6


def driven(python: str, script: str, marker: str, *arguments: str, endpoint: str = "") -> Any:
    """What a script of rLLM's printed behind its marker."""
    done = subprocess.run(
        [python, "-W", "ignore", str(HERE / script), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": f"{RLLM_DIR}{os.pathsep}{COMPAT}",
            "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": endpoint,
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
            "AGENTCORE_RL_GATEWAY_ADMIN_KEY": "for-this-test-only",  # rLLM has the gateway listen on every address
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(text for text in done.stdout.splitlines() if text.startswith(marker + " "))
    return json.loads(line.removeprefix(marker + " "))


@pytest.mark.parametrize("backend", ["tinker", "verl"])
def test_our_overrides_arrive_where_rllm_and_its_trainer_read_them(rllm_python: str, backend: str) -> None:
    found = driven(rllm_python, "compose.py", "CONFIG", backend)
    runtime = found["rllm.remote_runtime"]
    assert (runtime["enabled"], runtime["backend"], runtime["session_timeout"]) == (True, "agentcore", 42)
    assert runtime["agentcore"]["s3_bucket"] == "bucket"
    assert found["rllm.compact_filtering.enable"] is True
    assert (found["rllm.workflow.n_parallel_tasks"], found["rllm.trainer.experiment_name"]) == (17, "mine")
    temperature = 0.7 if backend == "verl" else 1.0
    assert (found["rllm.rollout.n"], found["rllm.rollout.train.temperature"]) == (5, temperature)
    assert (found["data.train_batch_size"], found["data.max_prompt_length"]) == (24, 1111)
    if backend == "tinker":
        assert (found["training.group_size"], found["model.name"]) == (5, "some/model")
    else:
        assert (found["actor_rollout_ref.rollout.n"], found["actor_rollout_ref.rollout.temperature"]) == (5, 0.7)
        assert found["algorithm.adv_estimator"] == "grpo"
        assert found["algorithm.rollout_correction.bypass_mode"] is True
        assert found["trainer.experiment_name"] == "mine"


@pytest.fixture(scope="module")
def rolled(rllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One group of the real math agent through rLLM's engine; one of its rollouts raises."""
    folder = tmp_path_factory.mktemp("rllm")
    records, marks = folder / "records", folder / "marks"
    marks.mkdir()
    words = ("--agent", math_agent(folder), "--store", str(records), "--writable", str(marks))
    (problem,) = problems("train", 1, seed=3)
    with (
        serving(folder, "policy", "serve") as policy,
        serving(folder, "runtime", "serve", *words) as runtime,
    ):
        at = {
            "policy": policy["url"],
            "arn": runtime["agents"]["math"],
            "store": f"file://{records}",
            "n": ROLLOUTS,
            "run": str(folder / "runs" / "rllm"),
            "tokenizer": str(WEIGHTS),
            "payload": {
                "prompt": problem.prompt,
                "answer": problem.answer,
                "fail_marker": str(marks / "one.failed"),
            },
        }
        found = driven(rllm_python, "drive_engine.py", "EPISODES", json.dumps(at), endpoint=runtime["url"])
    assert isinstance(found, dict)
    return {**found, "run": folder / "runs" / "rllm"}


def test_rllm_gets_the_tokens_that_the_policy_sampled(rolled: dict[str, Any]) -> None:
    import torch

    from agentcore_rl_toolkit.policy import load_policy

    model, _ = load_policy()
    good = [e for e in rolled["episodes"] if e["reason"] == "ENV_DONE"]
    assert len(good) == ROLLOUTS - 1
    for episode in good:
        before: list[int] = []
        assert episode["steps"]
        for prompt, response, logprobs, version in episode["steps"]:
            assert prompt[: len(before)] == before  # the whole conversation stays one row in rLLM's merge
            assert version == 0  # the policy server's own word, which goes before what the trainer told the gateway
            with torch.no_grad():
                logits_TV = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
            recomputed_TV = torch.log_softmax(logits_TV, -1)
            for t, (token, recorded) in enumerate(zip(response, logprobs, strict=True)):
                assert float(recomputed_TV[t, token]) == pytest.approx(recorded, abs=1e-3)
            before = prompt + response


def test_the_injected_failure_reaches_rllm_as_an_error_and_compact_filtering_masks_it(rolled: dict[str, Any]) -> None:
    (failed,) = [e for e in rolled["episodes"] if e["reason"] == "ERROR"]
    assert "injected failure" in failed["error"]["error_message"]
    assert "injected failure" in failed["error"]["traceback"]
    assert failed["steps"]  # it had sampled something
    rewards = [e["reward"] for e in rolled["episodes"] if e["reason"] == "ENV_DONE"]
    (masked,) = rolled["groups"]["masked"]
    assert sorted(reward for reward, _ in masked) == sorted(rewards)
    mean = sum(rewards) / len(rewards)
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    for reward, advantages in masked:
        wanted = (reward - mean) / (spread + 1e-6) if spread else 0.0
        assert advantages == pytest.approx([wanted] * len(advantages), rel=1e-4, abs=1e-6)
    (kept,) = rolled["groups"]["kept"]
    assert len(kept) == ROLLOUTS  # what rLLM does without the filter: the failure is a reward of 0


def test_the_runs_folder_has_what_rllm_trained(rolled: dict[str, Any]) -> None:
    episodes = {e["session"]: e for e in rolled["episodes"]}
    with RunReader(rolled["run"]) as run:
        rows = run.rollouts()
        assert {row["session_id"] for row in rows} == episodes.keys()
        assert {(row["phase"], row["step"], row["grp"]) for row in rows} == {("train", 1, "task")}
        assert sorted(row["place"] for row in rows) == list(range(ROLLOUTS))
        (masked,) = rolled["groups"]["masked"]
        trained = [row for row in rows if row["outcome"] == "ok"]
        wanted = sorted((reward, steps[0][0] if isinstance(steps[0], list) else steps[0]) for reward, steps in masked)
        assert sorted((r["reward"], r["advantage"]) for r in trained) == wanted
        (failed,) = (row for row in rows if row["outcome"] != "ok")
        assert (failed["outcome"], failed["cause"], failed["mask_reason"]) == ("agent_error", "agent", "outcome")
        assert failed["advantage"] is None
        for row in trained:
            whole = run.rollout(row["id"])
            assert whole is not None
            assert set(whole["detail"]["stages"]) >= {"start", "run"}
            (sequence,) = (TokenSequence.decoded(s) for s in whole["sequences"])
            steps = episodes[row["session_id"]]["steps"]
            assert list(sequence.ids) == steps[-1][0] + steps[-1][1]
            assert sum(sequence.mask) == sum(len(step[1]) for step in steps)
            assert [m["role"] for m in whole["dialogue"]][:2] == ["system", "user"]
            assert row["turns"] == len(steps)
        assert [e["loss"] for e in run.metrics() if e["event"] == "step"] == [0.25]
        (step,) = run.steps()
    assert (step["rollouts"], step["usable"]) == (ROLLOUTS, ROLLOUTS - 1)
    assert status(rolled["run"]) == "finished"
