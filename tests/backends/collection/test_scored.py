"""Scores as rewards: what a scorer sees, and what becomes of the agent's own reward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentcore_rl_toolkit.backends.collection.groups import CollectedRollout, Reward
from agentcore_rl_toolkit.backends.collection.scored import with_score
from agentcore_rl_toolkit.backends.scorer import Scorer, scorer_at
from agentcore_rl_toolkit.contract import Cause, Outcome

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
