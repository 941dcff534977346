"""Scores as rewards: what a scorer sees, and what becomes of the agent's own reward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.groups import CollectedRollout, Group, GroupRequest, Reward
from agentcore_rl_toolkit.backends.collection.scored import scored, with_score
from agentcore_rl_toolkit.backends.llm_judge import JudgeScore, JudgeSettings
from agentcore_rl_toolkit.backends.scorer import Scorer, scorer_at
from agentcore_rl_toolkit.contract import Cause, Outcome
from agentcore_rl_toolkit.errors import AgentError, JudgeError

SCORE = """
def score(payload, answer, reference, trajectory):
    if payload["row"] == "broken":
        raise ValueError("no such row")
    return {"reward": len(trajectory), "agent_reward": 7.0}
"""
ROLLOUT = CollectedRollout(
    session_id="s",
    input_id="i",
    index=0,
    outcome=Outcome.OK,
    record={"answer": "x"},
    reward=0.25,
    reward_detail=Reward(value=0.25, metrics={"steps": 3.0}),
    capture=SimpleNamespace(dialogue=[{"role": "user"}, {"role": "assistant"}]),  # type: ignore[arg-type]
)


@pytest.fixture
def scorer(tmp_path: Path) -> Scorer:
    (tmp_path / "score.py").write_text(SCORE)
    return scorer_at(f"{tmp_path}/score.py:score")


async def test_the_scorer_sees_the_dialogue_and_the_agents_reward_becomes_a_metric(scorer: Scorer) -> None:
    found = await with_score(ROLLOUT, {"row": "good"}, scorer)
    assert (found.reward, found.mask_reason, found.usable) == (2.0, None, True)
    assert found.reward_detail is not None
    assert found.reward_detail.metrics == {"steps": 3.0, "agent_reward": 0.25}
    alone = await with_score(replace(ROLLOUT, capture=None, reward=None, reward_detail=None), {"row": "good"}, scorer)
    assert alone.reward == 0.0
    assert alone.reward_detail is not None
    assert alone.reward_detail.metrics == {"agent_reward": 7.0}


async def test_a_scorer_that_fails_masks_the_rollout_unless_it_is_masked_already(scorer: Scorer) -> None:
    found = await with_score(ROLLOUT, {"row": "broken"}, scorer)
    assert (found.reward, found.reward_detail, found.mask_reason, found.cause) == (None, None, "scorer", Cause.SCORER)
    assert "no such row" in str(found.reason)
    stale = await with_score(replace(ROLLOUT, mask_reason="stale"), {"row": "broken"}, scorer)
    assert stale.mask_reason == "stale"
    failed = replace(ROLLOUT, outcome=Outcome.AGENT_ERROR)
    assert await with_score(failed, {"row": "good"}, scorer) is failed


BARE = replace(ROLLOUT, session_id="bare", reward=None, reward_detail=None)
FAILED = replace(ROLLOUT, session_id="failed", outcome=Outcome.AGENT_ERROR, reward=-1.0, error=AgentError("boom"))
STALE = replace(ROLLOUT, session_id="stale", mask_reason="stale")


def judged(monkeypatch: pytest.MonkeyPatch, error: JudgeError | None = None) -> list[int]:
    """Let a judge score each dialogue with 1. Returns the numbers of dialogues that it reads."""
    read: list[int] = []

    async def judge_group(payload: Any, dialogues_G: Any, settings: Any, usage: dict[str, float]) -> list[JudgeScore]:
        read.append(len(dialogues_G))
        usage["calls"] = 1
        if error is not None:
            raise error
        return [JudgeScore(1.0, "good")] * len(dialogues_G)

    monkeypatch.setattr("agentcore_rl_toolkit.backends.collection.scored.judge_group", judge_group)
    return read


@pytest.mark.parametrize(("weight", "rewards"), [(1.0, [1.0, 1.0, -1.0, 0.25]), (0.5, [0.625, None, -1.0, 0.25])])
async def test_a_judge_scores_usable_rollouts_that_ended_ok(
    monkeypatch: pytest.MonkeyPatch, weight: float, rewards: list[float | None]
) -> None:
    read, settings = judged(monkeypatch), JudgeSettings(judge_weight=weight)
    group = Group(input_id="i", rollouts=[ROLLOUT, BARE, FAILED, STALE], request=GroupRequest(input_id="i", payload={}))
    found = await scored(group, settings)
    assert ([r.reward for r in found.rollouts], read) == (rewards, [2 if weight == 1 else 1])
    assert found.judge_usage == {"calls": 1}
    details = [r.reward_detail.metrics if r.reward_detail is not None else None for r in found.rollouts]
    assert details[0] == {"steps": 3.0, "judge": 1.0, "agent_reward": 0.25}
    assert details[1] == ({"judge": 1.0} if weight == 1 else None)
    nothing = replace(group, rollouts=[FAILED, STALE])
    assert await scored(nothing, settings) is nothing


async def test_a_judge_that_fails_masks_the_usable_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    judged(monkeypatch, error := JudgeError("no answer"))
    group = Group(input_id="i", rollouts=[ROLLOUT, FAILED, STALE], request=GroupRequest(input_id="i", payload={}))
    found = await scored(group, JudgeSettings())
    assert [(r.mask_reason, r.reward) for r in found.rollouts] == [("judge", None), ("judge", None), ("stale", 0.25)]
    assert [r.error for r in found.rollouts] == [error, FAILED.error, None]
    assert found.judge_usage == {"calls": 1, "failed": 1}
