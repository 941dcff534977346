"""What a run shows and leaves: both means of an evaluation, and failures by cause."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentcore_rl_toolkit.backends.collection.groups import CollectedRollout, Group, GroupRequest, summarize
from agentcore_rl_toolkit.backends.collection.recording import open_recording
from agentcore_rl_toolkit.cli.training import display as display_module
from agentcore_rl_toolkit.cli.training.display import Display, share
from agentcore_rl_toolkit.cli.training.report import Report
from agentcore_rl_toolkit.contract import Cause, Outcome
from agentcore_rl_toolkit.runs import Query, RunReader
from agentcore_rl_toolkit.runs.diagnosis import Finding


def rollout(index: int, end: float | Cause) -> CollectedRollout:
    failed = isinstance(end, Cause)
    return CollectedRollout(
        session_id=f"s{index}",
        input_id=f"after/{index:04d}",
        index=0,
        outcome=Outcome.AGENT_ERROR if failed else Outcome.OK,
        cause=end if failed else None,
        failure="tokens" if end == Cause.POLICY else None,
        reward=None if end in (Cause.AGENT, Cause.INFRASTRUCTURE) else 0.0 if failed else end,  # type: ignore[arg-type]
        mask_reason=None if not failed or end == Cause.POLICY else "outcome",
    )


ENDS: list[float | Cause] = [*[1.0] * 17, 0.0, Cause.POLICY, Cause.AGENT, Cause.INFRASTRUCTURE]


@pytest.fixture
def facts() -> dict[str, Any]:
    rollouts = [rollout(i, end) for i, end in enumerate(ENDS)]
    groups = [
        Group(input_id=r.input_id, rollouts=[r], request=GroupRequest(input_id="a", payload={})) for r in rollouts
    ]
    return {"reward_spread": 0.1, "tool_use": None, "groups_that_differ": 0, **summarize(groups).evaluation()}


def test_a_screen_says_both_means_of_how_many_and_failures_by_cause(facts: dict[str, Any]) -> None:
    out = io.StringIO()
    findings = [Finding("all_fail", "In 8 of 8 groups every rollout failed.", "Take easier inputs.")]
    with Display(Console(file=out, width=400), total_rollouts=42, findings=lambda: findings) as display:
        display.observe("rollouts_started", {"phase": "after", "total": 21})
        for i, end in enumerate(ENDS):
            made = rollout(i, end)
            display.rollout(made.cause, made.score, tokens=3)
        display.evaluated({"when": "after", **facts})
        step = {"step": 0, "sampled_tokens": 9, "logprob_gap": None, "rollout_s": 1.0, "train_s": 2.0}
        step |= {"usable": 60, "rollouts": 64, "groups": 8, "gradient_tokens": 1234}
        display.step({**facts, **step})
        display.step({**facts, **step, "step": 1})
    found = "! In 8 of 8 groups every rollout failed.\n  Take easier inputs.\n"
    assert out.getvalue().count(found) == 1
    header, held_out, *steps = out.getvalue().replace(found, "").splitlines()
    assert cells(header)[:6] == ["reward", "usable", "differ", "gradient", "seconds", "eta"]
    assert cells(held_out)[:3] == ["held out, after", "85 % of 20", "0:00"]  # an evaluation trains nothing
    assert cells(steps[0])[:6] == ["step 1", "85 %", "60/64", "0/8", "1,234", "1.0+2.0"]
    for name, value in (("of ok", "94 % of 18"), ("failed", "1 lost, 1 agent, 1 policy")):
        assert value in held_out[: header.index(name) + len(name) + 12]


@pytest.mark.parametrize("width", [80, 120])
def test_steps_fit_a_terminal_and_hide_zeros(facts: dict[str, Any], width: int) -> None:
    out = io.StringIO()
    with Display(Console(file=out, width=width, force_terminal=True, height=40), total_rollouts=42) as display:
        step = {"sampled_tokens": 9, "logprob_gap": 1e-5, "rollout_s": 100.0, "train_s": 20.0, "causes": {}}
        step |= {"usable": 512, "rollouts": 512, "groups": 64, "groups_that_differ": 64, "gradient_tokens": 1_234_567}
        for number in range(10):
            display.step({**facts, **step, "step": number})
        display.evaluated({"when": "after", **facts})
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).splitlines()
    steps = [line.rstrip() for line in shown if line.startswith("step ")]
    assert (len(steps), max(map(len, steps)) <= width) == (10, True)
    last = steps[-1]
    assert "1,234,567" in last
    assert ("94 %" in last) == (width == 120)
    assert " 0" not in last.replace("0:00", "")


def test_a_pipe_gets_a_line_when_nothing_was_printed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(display_module, "PROGRESS_S", 0.0)
    with Display(Console(file=out, width=400), total_rollouts=42) as display:
        display.observe("rollouts_started", {"phase": "training", "total": 42})
        display.rollout(None, 0.5, tokens=3)
    assert out.getvalue().startswith("1 of 42 rollouts, recent reward 50 %   tokens 3   eta ")


def test_a_long_table_repeats_its_header_every_20_rows(facts: dict[str, Any]) -> None:
    out = io.StringIO()
    with Display(Console(file=out, width=400), total_rollouts=42) as display:
        for _ in range(41):
            display.evaluated({"when": "after", **facts})
    lines = out.getvalue().splitlines()
    assert [i for i, line in enumerate(lines) if line.split()[:1] == ["reward"]] == [0, 21, 42]


def test_the_columns_of_a_file_stay_where_they_are_for_a_late_step(facts: dict[str, Any]) -> None:
    out = io.StringIO()
    with Display(Console(file=out, width=400), total_rollouts=42) as display:
        for when in ("before", "step-5", "step-100", "after"):
            display.evaluated({"when": when, **facts})
    assert len({line.index("%") for line in out.getvalue().splitlines()[1:]}) == 1


def test_a_reward_beyond_1_is_no_percentage() -> None:
    assert [share(value) for value in (None, 0.0, 0.875, 1.0, 8.75, -2.0)] == [
        "-",
        "0 %",
        "88 %",
        "100 %",
        "8.75",
        "-2",
    ]


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def test_a_summary_has_both_means(tmp_path: Path, facts: dict[str, Any]) -> None:
    report = Report(tmp_path)
    step = {
        "step": 0,
        "sampled_tokens": 9,
        "usable_tokens": 9,
        "gradient_tokens": 0,
        "branches": 0,
        "logprob_gap": None,
    }
    report.add("evaluated", {"when": "before", "reward": None, "scored": 0, "outcomes": {"lost": 1}})  # of an older run
    report.add("step", {**facts, **step})
    report.add("evaluated", {"when": "after", **facts})
    summary = report.summarize(exp_id="e", config={}, held_out=21, wall_s=1.0)
    assert (summary["sampled_tokens"], summary["usable_tokens"], summary["gradient_tokens"]) == (9, 9, 0)
    assert summary["held_out_reward_after"] == pytest.approx(17 / 20)
    assert summary["held_out_reward_ok_after"] == pytest.approx(17 / 18)
    assert (summary["held_out_scored_after"], summary["held_out_ok_after"]) == (20, 18)
    assert (summary["held_out_reward_before"], summary["held_out_reward_ok_before"]) == (None, None)
    assert summary["steps_that_taught"] == 0
    assert summary["causes"] == {"policy": 2, "agent": 2, "infrastructure": 2}
    assert (summary["policy_failures"], summary["lost_rollouts"]) == ({"tokens": 2}, 2)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_the_example_is_any_input_that_changed_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    recording = open_recording(tmp_path, {})
    scores: dict[str, tuple[float | Cause, float | Cause]] = {
        **{"better": (0.0, 1.0), "worse": (1.0, 0.0), "also worse": (1.0, 0.0), "same": (1.0, 1.0)},
        **{"lost": (Cause.INFRASTRUCTURE, 1.0), "lost ": (0.0, 0.0)},
    }
    for place, when in enumerate(("before", "after")):
        for i, (name, score) in enumerate(scores.items()):
            made = dataclasses.replace(rollout(i, score[place]), session_id=f"{when}-{i}")
            recording.at(when).add(made, GroupRequest(input_id=f"{when}/{i:04d}", payload={"name": name.strip()}))
    recording.run.close()
    report = Report(tmp_path)
    change = report.summarize(exp_id="e", config={}, held_out=4, wall_s=1.0)["held_out_change"]
    assert (change["inputs"], change["better"], change["worse"], change["verdict"]) == (5, 1, 2, "cannot tell")
    drawn = []
    for seed in range(20):
        example = report.example(seed)
        assert example == report.example(seed)
        assert [when for when, _ in example] == ["before", "after"]
        [name] = {found["detail"]["payload"]["name"] for _, found in example}
        drawn.append(name)
    assert set(drawn) == {"better", "worse", "also worse"}


def test_equal_held_out_inputs_count_once_each_and_a_lost_one_is_no_example(tmp_path: Path) -> None:
    recording = open_recording(tmp_path, {})
    ends: dict[str, list[float | Cause]] = {"before": [Cause.INFRASTRUCTURE, 0.0, 0.0], "after": [1.0, 1.0, 1.0]}
    for when, found in ends.items():
        for i, end in enumerate(found):
            made = dataclasses.replace(rollout(i, end), session_id=f"{when}-{i}")
            recording.at(when).add(made, GroupRequest(input_id=f"{when}/{i:04d}", payload={"name": "same"}))
    recording.run.close()
    report = Report(tmp_path)
    change = report.summarize(exp_id="e", config={}, held_out=3, wall_s=1.0)["held_out_change"]
    assert (change["inputs"], change["better"]) == (2, 2)
    assert [found["score"] for _, found in report.example(0)] == [0.0, 1.0]


def test_stored_rollouts_say_whose_failure_they_are(tmp_path: Path) -> None:
    recording = open_recording(tmp_path, {})
    for i, end in enumerate(ENDS):
        recording.at("after").add(rollout(i, end), GroupRequest(input_id=f"after/{i:04d}", payload={"n": i}))
    recording.run.close()
    with RunReader(tmp_path) as run:
        lines = run.rollouts(Query(phase="after"))
    assert [(r["cause"], r["failure"], r["score"]) for r in lines[-4:]] == [
        (None, None, 0.0),
        ("policy", "tokens", 0.0),
        ("agent", None, 0.0),
        ("infrastructure", None, None),
    ]
