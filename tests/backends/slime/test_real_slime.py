"""slime itself on a CPU: its parser, RolloutManager, router and rollout functions over real sessions of the math agent.

Needs SLIME_DIR and MEGATRON_DIR (checkouts) and an environment with slime's imports, `.venvs/slime` or SLIME_PYTHON:
docs/status.md says how they are made.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.advantages import grpo
from agentcore_rl_toolkit.policy.word_problems import Split, problems
from agentcore_rl_toolkit.runs import Query, RunReader
from serving import serving

from ..math_agent import math_agent
from .sampled import Line, read_journal, turns_of

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
SLIME_DIR, MEGATRON_DIR = os.environ.get("SLIME_DIR"), os.environ.get("MEGATRON_DIR")
SLIME_PYTHON = os.environ.get("SLIME_PYTHON", str(ROOT / ".venvs/slime/bin/python"))
POLICY = ROOT / "src/agentcore_rl_toolkit/policy/weights"
pytestmark = [
    pytest.mark.skipif(
        not (SLIME_DIR and MEGATRON_DIR and Path(SLIME_PYTHON).exists()),
        reason="slime itself needs SLIME_DIR, MEGATRON_DIR and .venvs/slime (docs/status.md)",
    ),
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
PROMPTS, SAMPLES = 2, 4


def slime_environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{MEGATRON_DIR}:{SLIME_DIR}",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "SLIME_HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "AWS_ACCESS_KEY_ID": "local",
        "AWS_SECRET_ACCESS_KEY": "local",
    }


def rows(folder: Path, name: str, n: int, split: Split, failing: int) -> Path:
    """Problems for `fails_once.py`: one session of each of the first `failing` problems raises."""
    path = folder / f"{name}.jsonl"
    found = problems(split, n, seed=5)
    marker = [folder / "marks" / f"{name}-{i}.failed" for i in range(n)]
    for done in marker[failing:]:
        done.touch()
    path.write_text(
        "".join(
            json.dumps({"prompt": p.prompt, "answer": p.answer, "fail_marker": str(m)}) + "\n"
            for p, m in zip(found, marker, strict=True)
        )
    )
    return path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("slime")
    (folder / "marks").mkdir()
    journal = folder / "engine.jsonl"
    with contextlib.ExitStack() as stack:
        # Slow enough a token that calls are cut off in the middle, and not only before their first one.
        pace = ("--journal", str(journal), "--delay", "0.05", "--pace", "0.004")
        program = (sys.executable, str(HERE / "sglang_server.py"))
        engine = stack.enter_context(serving(folder, *pace, program=program))
        local = ("--agent", math_agent(folder), "--store", str(folder / "records"), "--writable", str(folder / "marks"))
        runtime = stack.enter_context(serving(folder, "runtime", "serve", *local))
        place = {
            "engine": engine["url"],
            "runner": {
                "exp_id": "real-slime",
                "agent_runtime_arn": runtime["agents"]["math"],
                "s3_bucket": f"file://{folder / 'records'}",
                "endpoint_url": runtime["url"],
                "model_dir": str(POLICY),
                "model_id": "policy",
                "model_type": "qwen3-0.6B",
                "data_path": str(rows(folder, "train", 12, "train", 12)),
                "eval_data_path": str(rows(folder, "held-out", 3, "held_out", 1)),
                "n_samples_per_eval_prompt": 2,
                "slime_dir": SLIME_DIR,
                "megatron_dir": MEGATRON_DIR,
                "run_dir": str(folder / "runs"),
                "num_gpus": 1,
                "tp_size": 1,
                "rollout_gpus_per_engine": 1,
                "rollout_batch_size": PROMPTS,
                "n_samples_per_prompt": SAMPLES,
                "rollout_max_response_len": 64,
                "gateway_host": "127.0.0.1",
                "gateway_port": 0,
                "acr_timeout": 120,
                "acr_tps_limit": 200,
                "max_concurrent": 16,
            },
        }
        (folder / "place.json").write_text(json.dumps(place))
        done = subprocess.run(
            [
                SLIME_PYTHON,
                "-W",
                "ignore",
                str(HERE / "real_steps.py"),
                str(folder / "place.json"),
                str(folder / "out.json"),
            ],
            capture_output=True,
            text=True,
            timeout=500,
            cwd=folder,
            env=slime_environment(),
            check=False,
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    made: dict[str, Any] = json.loads((folder / "out.json").read_text())
    made["sampled"] = read_journal(journal)
    return made


def test_slimes_own_loss_has_the_gradient_of_the_documented_formula() -> None:
    done = subprocess.run(
        [SLIME_PYTHON, str(HERE / "real_loss.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env=slime_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx({"plain": 0, "tis": 0}, abs=1e-6)


STEPS = ("step0", "step1", "fully_async")


def test_the_runs_folder_has_what_slime_trained(
    found: dict[str, Any], is_what_the_docs_say: Callable[[Path, str], None]
) -> None:
    is_what_the_docs_say(Path(found["run"]), "slime")
    with RunReader(Path(found["run"])) as run:
        for number, name in enumerate(STEPS):
            rows = {row["session_id"]: row for row in run.rollouts(Query(phase="train", step=number))}
            samples = {sample["session"]: sample for sample in found[name]["samples"]}
            assert rows.keys() == samples.keys()
            for session, sample in samples.items():
                assert (rows[session]["gap_max"] is None) == sample["removed"]
                assert sample["removed"] or rows[session]["gap_max"] == pytest.approx(0.125, abs=1e-5)
                assert (run.rollout(rows[session]["id"]) or {})["dialogue"]
        assert {s["rollouts"] for s in run.steps() if s["phase"] == "eval"} == {6}


def test_slimes_parser_hands_the_settings_to_the_rollout_process(found: dict[str, Any]) -> None:
    assert found["args"]["exp_id"] == "real-slime"
    assert found["args"]["rollout_timeout_s"] == 120, "given by its published name, acr_timeout"
    assert found["args"]["gateway_host"] == "127.0.0.1"


@pytest.mark.parametrize("name", STEPS)
def test_every_sample_is_what_the_engine_sampled(found: dict[str, Any], name: str) -> None:
    samples = found[name]["samples"]
    assert len(samples) == PROMPTS * SAMPLES
    for sample in samples:
        turns = turns_of(sample, found["sampled"])
        assert bool(turns) is not sample["removed"]
        assert sample["status"] == ("failed" if sample["removed"] else "completed")


def test_no_generation_is_trained_twice(found: dict[str, Any]) -> None:
    """Equal answers to equal prompts are several generations; there are never more of them in samples than were made."""

    def key(line: Line) -> tuple[tuple[int, ...], ...]:
        return tuple(line["prompt"]), tuple(line["ids"])

    made = Counter(key(line) for line in found["sampled"] if line["finish"] != "abort")
    trained = Counter(key(t) for name in STEPS for s in found[name]["samples"] for t in turns_of(s, found["sampled"]))
    assert trained
    assert not trained - made


def failures(samples: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The samples removed for the failure that `fails_once.py` injects, and all that are removed.

    What else fails is an agent whose answer ran into the token limit; the policy samples, so that happens now and then.
    """
    removed = [s for s in samples if s["removed"]]
    assert [s["outcome"] for s in removed] == ["agent_error"] * len(removed)
    injected = [s for s in removed if "injected failure" in s["error"]]
    assert all("maximum token limit" in s["error"] for s in removed if s not in injected)
    return injected, removed


def test_failed_rollouts_are_masked_and_move_no_statistic(found: dict[str, Any]) -> None:
    step = found["step0"]
    injected, removed = failures(step["samples"])
    assert len({s["group"] for s in injected}) == len(injected) == PROMPTS
    train = step["train"]
    for group in {s["group"] for s in step["samples"]}:
        members = [i for i, s in enumerate(step["samples"]) if s["group"] == group]
        rewards = [None if step["samples"][i]["removed"] else step["samples"][i]["reward"] for i in members]
        wanted = [0.0 if a is None else a for a in grpo(rewards)]
        assert [train["rewards"][i] for i in members] == pytest.approx(wanted, abs=1e-4)
        for i in members:
            assert sum(train["loss_masks"][i]) == train["rollout_mask_sums"][i]
            assert (train["rollout_mask_sums"][i] == 0) == step["samples"][i]["removed"]
    assert step["metrics"]["agentcore/masked"] == len(removed)


def test_slimes_schedule_gives_every_sample_to_one_rank(found: dict[str, Any]) -> None:
    for name in STEPS:
        assert sorted(i for rank in found[name]["split"] for i in rank) == list(range(PROMPTS * SAMPLES))


def test_groups_of_an_aborted_step_go_to_slimes_buffer_and_are_finished_in_the_next(found: dict[str, Any]) -> None:
    buffered = {int(index): status for index, status in found["step0"]["buffered"].items()}
    again = {s["index"]: s for s in found["step1"]["samples"]}
    # Whole groups. slime drops one that finishes together with the last it needs; the next step then takes a new one.
    assert buffered
    assert len(buffered) == SAMPLES * len({index // SAMPLES for index in buffered})
    assert buffered.keys() <= again.keys()
    assert not buffered.keys() & {s["index"] for s in found["step0"]["samples"]}
    injected, _ = failures(list(again.values()))
    # What failed or was aborted is run again, under the weights of now; what was complete is kept.
    for index, was in buffered.items():
        sample = again[index]
        assert was != "completed" or not sample["removed"]
        assert sample["removed"] or sample["weight_versions"] == (["0"] if was == "completed" else ["7"])
    assert set(buffered.values()) != {"completed"}
    assert any(was != "completed" and not again[index]["removed"] for index, was in buffered.items())
    assert len({s["group"] for s in injected}) == len(injected)  # a problem's one, if the first step had none


def test_a_rollout_cut_by_the_engine_is_run_again_when_fully_asynchronous(found: dict[str, Any]) -> None:
    assert found["fully_async"]["cut"] >= 1
    assert not any(s["removed"] and s["outcome"] == "lost" for s in found["fully_async"]["samples"])


def test_an_evaluation_leaves_prompts_with_masked_rollouts_out_of_its_mean(found: dict[str, Any]) -> None:
    evaluation = found["eval"]
    samples = evaluation["samples"]["held-out"]
    assert samples  # of six
    assert len(samples) % 2 == 0
    assert not any(s["removed"] for s in samples)
    assert evaluation["logged"]["eval/held-out"] == pytest.approx(sum(s["reward"] for s in samples) / len(samples))
    assert evaluation["logged"]["agentcore/eval/held-out/masked"] >= 1
    assert "eval/held-out-pass@2" in evaluation["logged"]


def test_slime_trains_a_step_in_which_only_some_rollouts_fork(found: dict[str, Any]) -> None:
    step = found["forked"]
    samples = step["samples"]
    assert len({s["rollout_id"] for s in samples}) == PROMPTS * SAMPLES
    assert len(samples) > PROMPTS * SAMPLES
    assert 2 <= step["metrics"]["agentcore/forked"] <= PROMPTS * SAMPLES / 2
    assert step["metrics"]["agentcore/masked"] >= 1
    # slime averages the samples of one rollout as one: they share its id, its reward and the count of its tokens.
    for rollout in {s["rollout_id"] for s in samples}:
        members = [i for i, s in enumerate(samples) if s["rollout_id"] == rollout]
        tokens = sum(sum(samples[i]["loss_mask"]) for i in members)
        assert {step["train"]["rollout_mask_sums"][i] for i in members} == {tokens}
        assert len({step["train"]["rewards"][i] for i in members}) == 1
    assert sorted(i for rank in step["split"] for i in rank) == list(range(len(samples)))


def test_slime_and_megatron_accept_the_command_of_every_mode(tmp_path: Path) -> None:
    assert SLIME_DIR
    assert MEGATRON_DIR
    done = subprocess.run(
        [SLIME_PYTHON, "-W", "ignore", str(HERE / "parse_commands.py"), SLIME_DIR, MEGATRON_DIR],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=slime_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().splitlines()[-1] == "accepted: sync async fully_async routing none"
