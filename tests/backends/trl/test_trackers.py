"""`agentcore-rl train` in an environment with trackers and peft: stopped, resumed, and recorded by three trackers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentcore_rl_toolkit.cli.init import write
from agentcore_rl_toolkit.runs import Query, RunReader
from serving import wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]
DEADLINE_S = 240.0
STEPS = 3  # two of them warm the learning rate up
# What a tracker has of a run, read back with its own library: {metric: {step: value}}.
READ_BACK = """
import json, sys
from pathlib import Path
run = Path(sys.argv[1])
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
board = EventAccumulator(str(run / "tensorboard"))
board.Reload()
scalars = {tag: {e.step: e.value for e in board.Scalars(tag)} for tag in board.Tags()["scalars"]}
import os
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=(run / "mlflow").as_uri())
found = client.get_run((run / "mlflow_run_id").read_text().strip())
history = {n: {m.step: m.value for m in client.get_metric_history(found.info.run_id, n)} for n in found.data.metrics}
print(json.dumps({"tensorboard": scalars, "mlflow": history}))
"""


@dataclass(frozen=True)
class Trained:
    run: Path
    events: list[dict[str, Any]]
    stopped: tuple[int, str]
    resumed: tuple[int, str]
    trackers: dict[str, Any]


def events_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def trained(trl_python: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run of adapters at temperature 0.7 that was stopped after its first step, and gone on with by the printed command."""
    folder = tmp_path_factory.mktemp("work")
    write(folder / "shop", "plain")
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "OMP_NUM_THREADS": "1",
    }
    command = [trl_python, "-W", "ignore", "-m", "agentcore_rl_toolkit"]
    options = "--agent shop/agent.py --data shop/train.jsonl --set held_out=0.01 --groups 4 --rollouts 8 --out run"
    options += ' --set lora_rank=4 --set sampling_params={"temperature":0.7}'
    trackers = "--set tracker=tensorboard,mlflow,wandb"
    run = folder / "run"
    process = subprocess.Popen(
        [*command, "train", *options.split(), *trackers.split(), "--steps", str(STEPS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
    try:
        wait_for((run / "state.json").exists, within_s=DEADLINE_S, process=process)
        process.send_signal(signal.SIGINT)
        stopped = process.communicate(timeout=300)[0]
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    [line] = [line.split() for line in stopped.splitlines() if "agentcore-rl train --resume" in line] or [[]]
    again = subprocess.run(
        [*command, *line[1:]], capture_output=True, text=True, timeout=DEADLINE_S, cwd=folder, env=environment
    )
    completed = subprocess.run(
        [trl_python, "-W", "ignore", "-c", READ_BACK, str(run)], capture_output=True, text=True, timeout=300
    )
    assert completed.returncode == 0, completed.stderr
    return Trained(
        run,
        events_of(run),
        (process.returncode, stopped),
        (again.returncode, again.stdout + again.stderr),
        json.loads(completed.stdout),
    )


def test_ctrl_c_is_130_and_the_printed_command_finishes_the_run(trained: Trained) -> None:
    assert trained.stopped[0] == 130, trained.stopped[1]
    assert trained.resumed[0] == 0, trained.resumed[1]
    assert [e.get("step", e.get("when")) for e in trained.events] == ["before", *range(STEPS), "after"]
    assert "held out, before" not in trained.resumed[1]  # it went on, not anew


def test_a_resumed_run_is_whole(trained: Trained) -> None:
    summary = json.loads((trained.run / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["usable_tokens"] == summary["sampled_tokens"]
    assert summary["logprob_gap_max"] < 1e-3  # the trainer's model gives the recorded logprobs, also after the resume
    assert summary["held_out_reward_before"] is not None
    with RunReader(trained.run) as kept:
        steps = {(s["phase"], s["step"]): s for s in kept.steps()}
        assert set(steps) == {("before", 0), ("after", STEPS), *(("train", n) for n in range(STEPS))}
        assert {steps["train", n]["rollouts"] for n in range(STEPS)} == {32}  # nothing twice, whatever was repeated
        rollouts = list(kept.rollouts(Query(phase="train", usable=True)))
        assert all(r["advantage"] is not None for r in rollouts)
        [first, *others] = [r for r in rollouts if r["advantage"]]  # groups of equal rewards are not trained
        for trained_on in (first, *others):
            [sequence] = kept.rollout(trained_on["id"])["sequences"]
            assert len(sequence["trainer_logprobs"]) == len(sequence["ids"])
            # After an update of the same step the difference is what the update did, no gap.
            assert sequence["updates"] or trained_on["gap_max"] < 1e-3
        assert kept.rollout(first["id"])["dialogue"]
    rates = [e["learning_rate"] for e in trained.events if e["event"] == "step"]
    assert rates[-1] < rates[-2]  # the schedule went on as well
    assert load_file(trained.run / "policy" / "model.safetensors")
    kept = torch.load(max(trained.run.glob("checkpoint-*.pt")), weights_only=True)["model"]
    assert all("lora_" in name for name in kept), "the frozen base is in the model's own folder"


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow"])
def test_a_tracker_has_the_numbers_of_the_run(trained: Trained, tracker: str) -> None:
    found = trained.trackers[tracker]
    steps = {e["step"] + 1: e for e in trained.events if e["event"] == "step"}
    for ours, theirs in (("loss", "train/loss"), ("learning_rate", "train/learning_rate"), ("reward", "train/reward")):
        # A step whose groups all have equal rewards trains nothing: it has no loss.
        expected = {str(n): e[ours] for n, e in steps.items() if e[ours] is not None}
        assert found[theirs] == pytest.approx(expected, rel=1e-5), theirs
    held_out = {str(0 if e["when"] == "before" else STEPS): e["reward"] for e in trained.events if "when" in e}
    assert found["eval/reward"] == pytest.approx(held_out)
