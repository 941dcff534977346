"""Rollouts and groups: scores, lengths, choices, counts, and a run's row of a rollout."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.groups import (
    CollectedRollout,
    Group,
    GroupRequest,
    Reward,
    UsableSteps,
    sampling_note,
    summarize,
)
from agentcore_rl_toolkit.backends.collection.recording import as_row, gaps_of, step_numbers
from agentcore_rl_toolkit.backends.llm_judge import JudgeScore
from agentcore_rl_toolkit.contract import Cause, Outcome, Stage
from agentcore_rl_toolkit.errors import AgentError, ConfigError, RolloutError

ROLLOUT = CollectedRollout(session_id="s0", input_id="i", index=0, outcome=Outcome.OK, reward=0.5)
FAILED = replace(ROLLOUT, session_id="s1", index=1, outcome=Outcome.AGENT_ERROR, cause=Cause.AGENT, reward=None)
FAILED = replace(FAILED, mask_reason="outcome", error=AgentError("boom", agent_traceback="Trace"))
STALE = replace(ROLLOUT, session_id="s2", index=2, mask_reason="stale")
REQUEST = GroupRequest(input_id="i", payload={"prompt": "x"})


def group(*rollouts: CollectedRollout, **facts: Any) -> Group:
    return Group(input_id="i", rollouts=list(rollouts), request=REQUEST, **facts)


@pytest.mark.parametrize(
    ("rollout", "score"),
    [
        (ROLLOUT, 0.5),
        (STALE, 0.5),
        (FAILED, 0.0),
        (replace(FAILED, cause=Cause.POLICY, mask_reason=None, reward=-1.0), 0.0),
        (replace(FAILED, cause=Cause.INFRASTRUCTURE), None),
        (replace(FAILED, outcome=Outcome.INVALID, mask_reason="no_reward"), None),
    ],
)
def test_a_score_is_the_reward_and_0_for_failures_of_agent_and_policy(
    rollout: CollectedRollout, score: float | None
) -> None:
    assert rollout.score == score


@pytest.mark.parametrize(
    ("limits", "reason"),
    [((None,), None), ((9,), None), ((8,), "too_long"), ((5, 1), None), ((4, 1), "too_long"), ((0, 0), None)],
)
def test_only_trained_sequences_are_too_long(limits: Any, reason: str | None) -> None:
    lengths = ((5, 3), (9, 1), (20, 0))  # tokens, and trained ones
    sequences = [SimpleNamespace(token_ids=[0] * n, trained_tokens=trained) for n, trained in lengths]
    long = replace(ROLLOUT, trajectory=SimpleNamespace(sequences=sequences))  # type: ignore[arg-type]
    assert long.within(*limits).mask_reason == reason
    assert replace(long, mask_reason="stale").within(*limits).mask_reason == "stale"
    assert ROLLOUT.within(*limits) is ROLLOUT


def test_usable_rollouts_are_chosen_first_and_keep_their_order() -> None:
    found = group(
        replace(FAILED, index=0), replace(STALE, index=1), replace(ROLLOUT, index=2), replace(ROLLOUT, index=3)
    )
    assert [[r.index for r in found.chosen(n)] for n in (1, 2, 3, 9)] == [[2], [2, 3], [0, 2, 3], [0, 1, 2, 3]]
    assert found.rewards == [None, None, 0.5, 0.5]
    with pytest.raises(ConfigError, match="at least one rollout"):
        GroupRequest(input_id="i", payload={}, n=0)


def test_a_run_ends_without_a_usable_rollout_at_its_start_or_in_several_steps_in_a_row() -> None:
    text = "none of the first 2 rollouts can be used; 2 of them: agent_error: boom\nTrace"
    with pytest.raises(RolloutError, match="none of the first") as raised:
        UsableSteps().check([group(FAILED, FAILED)])
    assert (str(raised.value), raised.value.session_id) == (text, "s1")
    steps = UsableSteps(limit=2)
    steps.check([])
    for _ in range(3):  # a usable rollout begins the count again
        steps.check([group(FAILED, ROLLOUT)])
        steps.check([group(FAILED, FAILED, STALE)])
    with pytest.raises(
        RolloutError, match="no rollout of the last 2 steps can be used; 2 of 3 in the last one: agent_error"
    ):
        steps.check([group(FAILED, FAILED, STALE)])
    resumed = UsableSteps(begun=True)
    resumed.check([group(FAILED)])
    resumed.check([group(FAILED)])
    with pytest.raises(RolloutError, match="no rollout of the last 3 steps can be used"):
        resumed.check([group(FAILED)])
    steps = UsableSteps(limit=2)
    steps.check([group(ROLLOUT)], left_out="too long")
    with pytest.raises(RolloutError, match=r"last 2 steps can be used; 1 of 1 in the last one: ok: too long$"):
        steps.check([group(ROLLOUT)], left_out="too long")


def test_a_collection_counts_rollouts_and_judges() -> None:
    policy = replace(FAILED, cause=Cause.POLICY, failure="tokens", mask_reason=None, reward=-1.0)
    cancelled = replace(FAILED, outcome=Outcome.CANCELLED, cause=None)
    bare = replace(ROLLOUT, reward=None)
    groups = [group(ROLLOUT, FAILED, STALE, bare, judge_usage={"calls": 2}), group(policy, cancelled)]
    stats = summarize([*groups, group(judge_usage={"calls": 1})])
    assert stats.evaluation() == {
        "reward": 1 / 6,
        "scored": 4,
        "reward_ok": 0.5,
        "ok": 2,
        "outcomes": {"ok": 3, "agent_error": 2, "cancelled": 1},
        "causes": {"agent": 1, "policy": 1},
        "policy_failures": {"tokens": 1},
        "metrics": {},
        "judge": {"calls": 3},
    }
    assert (stats.groups, stats.rollouts, stats.usable, stats.lost_rollouts) == (3, 6, 3, 1)
    assert (stats.reward_mean, stats.masked) == (-0.25, {"outcome": 2, "stale": 1})
    assert "judge" not in summarize([groups[1]]).evaluation()
    assert summarize([]).reward_mean is None


def test_tokens_sampled_otherwise_are_named_most_first() -> None:
    assert sampling_note(4, {"top_p 0.8": 1, "temperature 0.3": 2}) == (
        "2 tokens were sampled at temperature 0.3 and are not trained; "
        "25% of the trained tokens were sampled at top_p 0.8: their ratios are wrong"
    )
    assert sampling_note(0, {"top_k 3": 1}).startswith("100%")


@pytest.mark.parametrize(
    ("version", "oldest", "staleness"), [(5, 3, 2), (3, 3, 0), (0, 0, 0), (None, 3, None), (5, None, None)]
)
def test_a_row_of_a_run_has_the_age_of_its_rollout(
    version: int | None, oldest: int | None, staleness: int | None
) -> None:
    rollout = replace(ROLLOUT, weight_version_min=oldest, weight_version_max=4)
    row = as_row(rollout, REQUEST, weight_version=version)
    assert (row.staleness, row.weight_min, row.weight_max) == (staleness, oldest, 4)


def test_a_row_of_a_run_has_the_facts_of_its_rollout() -> None:
    row = as_row(ROLLOUT, REQUEST)
    assert (row.group, row.cause, row.stage, row.metrics, row.reward_parts, row.place) == ("i", None, None, {}, None, 0)
    detail = Reward(value=0.5, per_turn=(0.5,), metrics={"steps": 3.0})
    rollout = replace(FAILED, stage=Stage.RUN, reward_detail=detail, judge_score=JudgeScore(0.25, "short"))
    row = as_row(rollout, replace(REQUEST, group="g"), phase="eval", step=2)
    assert (row.group, row.cause, row.stage, row.place, row.phase, row.step) == ("g", "agent", "run", 1, "eval", 2)
    assert row.metrics == {"steps": 3.0}
    assert row.reward_parts == {"per_turn": (0.5,), "judge": {"score": 0.25, "reason": "short"}}
    assert row.traceback == "Trace"
    assert replace(FAILED, record={"traceback": "nearer"}).traceback == "nearer"
    assert ROLLOUT.traceback is None


def test_numbers_of_other_trainers_get_the_names_of_all_runs() -> None:
    assert gaps_of([-1.0, -2.0, -3.0], [-1.5, None, -3.0], [1, 1, 0]) == [0.5]
    found = step_numbers({"actor/pg_clipfrac": 0.25, "actor/pg_clipfrac_lower": 0.125})
    assert found["clip_fraction"] == 0.375
    assert step_numbers({"actor/pg_clipfrac": 0.25})["clip_fraction"] == 0.25
    assert "clip_fraction" not in step_numbers({"lr": 1.0})
