"""The record of a run that goes on: what becomes of rollouts and metrics that are about to be repeated."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from agentcore_rl_toolkit.backends import open_recording
from agentcore_rl_toolkit.cli.training.run import observed
from agentcore_rl_toolkit.cli.training.settings import LocalRun
from agentcore_rl_toolkit.runs import Rollout, RunReader


def test_steps_that_are_repeated_are_in_the_run_once(tmp_path: Path) -> None:
    for name in ("agent.py", "rows.jsonl"):
        (tmp_path / name).write_text('{"prompt": "hello"}\n')
    settings = LocalRun(agent=tmp_path / "agent.py", data=tmp_path / "rows.jsonl", steps=3, groups=1, rollouts=2)

    def rollouts(name: str, phase: str, step: int | None) -> None:
        for place in range(2):
            recording.run.rollout(
                Rollout(session_id=f"{name}-{phase}-{step}-{place}", phase=phase, step=step, group="g", outcome="ok")
            )

    with (
        open_recording(tmp_path, {}) as recording,
        observed(settings, tmp_path, Console(file=io.StringIO()), held_out=0) as (report, _),
    ):
        rollouts("first", "before", None)
        for step in range(2):
            rollouts("first", "train", step)
            report.add("step", {"step": step})
        rollouts("first", "train", 2)  # the kill comes before its checkpoint
    with (
        open_recording(tmp_path, {}) as recording,
        observed(settings, tmp_path, Console(file=io.StringIO()), held_out=0) as (_, observer),
    ):
        recording.resumed(1, 3)
        observer("begins", {"steps_done": 1, "rollouts_done": 4})
        for step in (1, 2):
            rollouts("second", "train", step)
        rollouts("second", "after", None)
    with RunReader(tmp_path) as run:
        names = {(row["phase"], row["step"]): row["session_id"].partition("-")[0] for row in run.rollouts()}
        assert names == {
            ("before", None): "first",
            ("train", 0): "first",
            ("train", 1): "second",
            ("train", 2): "second",
            ("after", None): "second",
        }
        assert run.count() == 10
        assert [e["step"] for e in run.metrics() if e["event"] == "step"] == [0]
