"""Evaluations with a judge: items of a batch, judged over real HTTP and written into the run again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentcore_rl_toolkit.cli.eval import most_frequent
from agentcore_rl_toolkit.cli.training.kept_evaluation import finish, judge_items, row_of
from agentcore_rl_toolkit.client import BatchItem
from agentcore_rl_toolkit.client.evaluation import reward_of, summarize, write_results
from agentcore_rl_toolkit.contract import Cause, Outcome
from agentcore_rl_toolkit.runs import RunReader, RunWriter

from ..backends.test_llm_judge import judge as judge
from ..backends.test_llm_judge import prose, said, scores, shown
from ..conftest import CommandLine

PAYLOADS = {name: {"prompt": f"do {name}"} for name in "ab"}


def items() -> list[BatchItem]:
    """Two rollouts of each input, without a reward; the policy failed in one more."""
    good: dict[str, Any] = {"success": True, "outcome": Outcome.OK, "result": {"answer": "what it returned"}}
    made = [BatchItem(index=n, input_id="ab"[n // 2], session_id=f"s{n}", **good) for n in range(4)]
    failed: dict[str, Any] = {"outcome": Outcome.AGENT_ERROR, "cause": Cause.POLICY, "error": "out of turns"}
    return [*made, BatchItem(success=False, index=4, input_id="a", session_id="s4", **failed)]


def by_place_of_x(body: dict[str, Any]) -> tuple[int, str]:
    return scores(body, lambda _, dialogue: 1.0 if "x" in dialogue else 0.25)


def judged(folder: Path, settings: Any, fetch: Any = None) -> tuple[list[BatchItem], dict[str, Any]]:
    with RunWriter(folder) as run:
        finished = [finish(item, PAYLOADS[str(item.input_id)], fetch) for item in items()]
        for item, rollout in finished:
            run.rollout(row_of(item, rollout, PAYLOADS[str(item.input_id)]))
        found, cost = judge_items(run, finished, PAYLOADS, settings)
    summary = summarize(found, 1.0, cost)
    write_results(folder, found, summary)
    return found, dataclasses.asdict(summary)


def test_an_evaluation_has_the_judges_rewards_in_its_results_and_its_run(tmp_path: Path, judge: Any) -> None:
    settings, server = judge(by_place_of_x)
    dialogues = {f"s{n}": said("x" if n % 2 else "y") for n in range(4)}
    fetch = lambda name: SimpleNamespace(  # noqa: E731
        session_id=name, turns=[], train=None, dialogue=dialogues.get(name, []), errors=[]
    )
    found, facts = judged(tmp_path / "run", settings, fetch)
    assert [reward_of(item) for item in found] == [0.25, 1.0, 0.25, 1.0, None]
    assert (facts["mean"], facts["mean_ok"]) == ((1.25 / 3 + 0.625) / 2, 0.625)
    assert facts["judge"]["calls"] == len(server.calls) == 4
    assert {shown(body)["task"] for _, body in server.calls} == {json.dumps(p) for p in PAYLOADS.values()}
    lines = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    record = {"answer": "what it returned", "judge": "because 1.0 / because 1.0"}
    assert lines[1]["record"] == {**record, "rewards": {"reward": 1.0, "judge": 1.0}}
    with RunReader(tmp_path / "run") as run:
        rows = [run.rollout(row["id"]) or {} for row in run.rollouts()]
    assert [(row["reward"], row["score"]) for row in rows] == [(0.25, 0.25), (1.0, 1.0)] * 2 + [(None, 0.0)]
    assert rows[1]["detail"]["reward_parts"]["judge"]["reason"] == "because 1.0 / because 1.0"
    assert rows[1]["dialogue"] == dialogues["s1"]


def test_an_evaluation_whose_judge_fails_has_no_reward_and_says_why(tmp_path: Path, judge: Any) -> None:
    settings, _ = judge(prose)
    found, facts = judged(tmp_path / "run", settings)
    assert [reward_of(item) for item in found] == [None] * 5
    assert (facts["rewarded"], facts["failures"], facts["judge"]["failed"]) == (0, 4, 2)
    assert "not the requested JSON" in most_frequent(found)
    with RunReader(tmp_path / "run") as run:
        assert [row["mask_reason"] for row in run.rollouts()] == ["judge"] * 4 + [None]


def test_a_weight_without_a_judge_is_refused(tmp_path: Path, command_line: CommandLine) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi"}\n')
    words = ("--agent", "agent.py", "--data", str(tmp_path / "rows.jsonl"), "--judge-weight", "0.5")
    done = command_line("eval", *words)
    assert (done.returncode, done.stderr) == (2, "error: --judge-weight needs --judge FILE\n")
