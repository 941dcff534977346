"""What a recording keeps of a trainer's log, and of a run that is resumed."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.groups import CollectedRollout, Group, GroupRequest, trained_temperature
from agentcore_rl_toolkit.backends.collection.recording import open_recording, step_numbers
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.errors import AgentError, ConfigError
from agentcore_rl_toolkit.runs import Rollout, RunReader


def test_a_loss_that_is_no_number_is_kept_under_the_name_of_all_trainers() -> None:
    found = step_numbers({"actor/pg_loss": math.nan, "actor/grad_norm": math.inf, "words": "x", "lr": 1e-6})
    assert math.isnan(found["loss"])
    assert found["grad_norm"] == math.inf
    assert found["lr"] == 1e-6
    assert "words" not in found


@pytest.mark.parametrize(
    ("done", "steps", "left"),
    [
        (0, 3, []),
        (2, 3, ["eval 2", "train 0", "train 1"]),
        (3, 3, ["eval 2", "train 0", "train 1", "train 2"]),
        (
            3,
            5,
            ["eval 2", "eval 3", "train 0", "train 1", "train 2"],
        ),  # the evaluation at the end of the first three steps
    ],
)
def test_a_resumed_run_forgets_what_it_repeats_and_keeps_the_evaluation_of_its_checkpoint(
    tmp_path: Path, done: int, steps: int, left: list[str]
) -> None:
    with open_recording(tmp_path, {}) as recording:
        for n, (phase, step) in enumerate([("train", 0), ("train", 1), ("eval", 2), ("train", 2), ("after", 3)]):
            recording.run.rollout(Rollout(session_id=str(n), phase=phase, step=step, group="g", outcome="ok"))
            when = "after" if phase == "after" else f"step-{step}"
            facts = {"step": step} if phase == "train" else {"when": when, "version": step}
            recording.run.event("step" if phase == "train" else "evaluated", facts)
        recording.resumed(done, steps)
    with RunReader(tmp_path) as run:
        assert sorted(f"{row['phase']} {row['step']}" for row in run.rollouts()) == left
        events = [e["when"] if "when" in e else f"train {e['step']}" for e in run.metrics()]
        assert sorted(name.replace("step-", "eval ") for name in events) == left


def test_a_resumed_run_keeps_its_metrics_if_the_disk_is_full(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_recording(tmp_path, {}) as recording:
        for step in range(3):
            recording.run.event("step", {"step": step, "text": "x" * 600_000})
        recording.run.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                recording.resumed(2, 3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with RunReader(tmp_path) as run:
        assert [event["step"] for event in run.metrics()] == [0, 1, 2]


@pytest.mark.parametrize("temperature", [0, -1.0, math.inf, math.nan, "hot", None])
def test_a_temperature_at_which_nothing_can_be_trained_is_refused(temperature: Any) -> None:
    with pytest.raises(ConfigError, match="cannot train at temperature"):
        trained_temperature({"temperature": temperature})
    assert trained_temperature({"temperature": 0.5}) == 0.5
    assert trained_temperature(None) == trained_temperature({}) == 1.0


def test_a_run_shows_which_rollouts_were_longer_than_the_trainers_limit(tmp_path: Path) -> None:
    short = CollectedRollout(session_id="short", input_id="i", index=0, outcome=Outcome.OK)
    rollouts = [short, replace(short, session_id="long", mask_reason="too_long")]
    group = Group(input_id="i", rollouts=rollouts, request=GroupRequest(input_id="i", payload={}))
    with open_recording(str(tmp_path), {}) as recording:
        for rollout in group.rollouts:
            name = rollout.session_id
            recording.run.rollout(Rollout(session_id=name, phase="train", step=0, group="g", outcome="ok"))
        recording.masked([group])
    with RunReader(tmp_path) as run:
        shown = {row["session_id"]: row["mask_reason"] for row in run.rollouts()}
    assert shown == {"short": None, "long": "too_long"}


def test_a_failed_rollout_is_kept_with_the_end_of_its_sessions_log(tmp_path: Path) -> None:
    def log(session_id: str) -> str:
        if session_id == "unknown":
            raise OSError("no logs")
        return "" if session_id == "silent" else "x" * 20_000 + "y"

    ended = CollectedRollout(session_id="ok", input_id="i", index=0, outcome=Outcome.OK, ended_s=9.0)
    failed = replace(ended, outcome=Outcome.AGENT_ERROR, error=AgentError("boom"), ended_s=None)
    request = GroupRequest(input_id="i", payload={})
    began = time.time()
    with open_recording(tmp_path, {}, session_log=log) as recording:
        recording.add(ended, request)
        for name in ("failed", "silent", "unknown"):
            recording.at("eval", 3).add(replace(failed, session_id=name), request, 5)
    with RunReader(tmp_path) as run:
        rows = [run.rollout(n) or {} for n in (1, 2, 3, 4)]
    assert [row["detail"]["log"] for row in rows] == [None, "x" * 19_999 + "y", None, None]
    assert [(row["phase"], row["step"]) for row in rows[:2]] == [("train", None), ("eval", 3)]
    assert rows[0]["ended_s"] == 9.0
    assert began <= rows[1]["ended_s"] <= time.time()
