"""Ended rollouts as they are judged: what counts as a reward, whose failure it is, and what trains."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.backends import CollectConfig
from agentcore_rl_toolkit.backends.collection.judge import end_of_record, ended_by, judge, trained_versions
from agentcore_rl_toolkit.contract import ANSWER_FIELD, Cause, Outcome, Stage
from agentcore_rl_toolkit.errors import GatewayError, GatewayLostError, RolloutTimeoutError
from agentcore_rl_toolkit.trajectory import Turn

TURN = Turn(
    turn_id="t0",
    index=0,
    prompt_ids=[1, 2],
    completion_ids=[5, 6],
    logprobs=[-0.5, -0.5],
    finish_reason="stop",
    weight_version_first=3,
    weight_version_last=3,
    started_s=5.0,
    finished_s=6.0,
)
NEXT = replace(TURN, turn_id="t1", index=1, prompt_ids=[1, 2, 5, 6, 7], completion_ids=[8], logprobs=[-0.5])
NEXT = replace(NEXT, weight_version_first=4, weight_version_last=4, started_s=7.0, finished_s=8.0)
JUDGED = {"judge": __file__, "judge_url": "http://j", "judge_model": "m"}
ANSWER = {ANSWER_FIELD: "42"}
RAISED = {"status_code": 500, "stop_reason": "boom", "_agent": {"cause": "agent"}}
BY_POLICY = {**RAISED, "rewards": -1.0, "_agent": {"cause": "policy"}}


def judged(
    record: Any,
    *turns: Turn,
    errors: Any = (),
    error: BaseException | None = None,
    captured: bool = True,
    **config: Any,
) -> Any:
    capture = None if error else SimpleNamespace(turns=list(turns), errors=list(errors), train=None)
    end = end_of_record(record, session_id="s", input_id="a", index=0)
    return judge(end, captured=captured, capture=capture, fetch_error=error, config=CollectConfig(**config))


@pytest.mark.parametrize(
    ("record", "config", "reward", "reason"),
    [
        ({"rewards": 0.5}, {}, 0.5, None),
        ({}, {}, None, "no_reward"),
        ({}, {"require_reward": False}, None, None),
        ({}, {"score": f"{__file__}:judged"}, None, None),
        ({}, JUDGED, None, None),
        ({}, {**JUDGED, "judge_weight": 0.5}, None, "no_reward"),
        ({}, {"evaluation": True}, None, "no_reward"),
        (ANSWER, {}, None, "no_reward"),
        (ANSWER, {"evaluation": True}, None, None),
        ({"rewards": "good"}, {"require_reward": False}, None, "no_reward"),
        ({"rewards": 0.5}, {"credit": "turn"}, None, "no_reward"),
        ({"rewards": [0.5]}, {"credit": "turn"}, 0.5, None),
        (BY_POLICY, {}, -1.0, None),
        (BY_POLICY, {"credit": "turn"}, -1.0, None),
        (BY_POLICY, {"policy_failures": "mask"}, -1.0, "policy_failure"),
        ({**BY_POLICY, "rewards": None}, {}, None, "policy_failure"),
        (RAISED, {}, None, "outcome"),
        (["rewards", 1.0], {}, None, "outcome"),
    ],
)
def test_which_records_are_trained(
    record: Any, config: dict[str, Any], reward: float | None, reason: str | None
) -> None:
    found = judged(record, TURN, **config)
    assert (found.mask_reason, found.usable) == (reason, reason is None)
    if config.get("credit") is None or reason is None:
        assert found.reward == reward
    assert (found.error is None) == (found.outcome is Outcome.OK)
    assert found.outcome in (
        (Outcome.OK, Outcome.AGENT_ERROR)
        if reason in (None, "policy_failure")
        else (Outcome.INVALID, Outcome.AGENT_ERROR)
    )


def test_a_missing_reward_says_what_the_record_has_instead() -> None:
    assert "(None)" in str(judged({}, TURN).error)
    assert "7 apples" in str(judged({"reward": {"value": "7 apples"}}, TURN).error)
    assert "--score FILE:FUNCTION" in str(judged(ANSWER, TURN).error)


@pytest.mark.parametrize(
    ("record", "turns", "config", "reason", "text"),
    [
        ({"rewards": 1.0}, (), {}, "no_tokens", "check that the agent calls"),
        ({"rewards": 1.0}, (), {"evaluation": True}, "no_tokens", "check that the agent calls"),
        ({"rewards": 1.0}, (), {"evaluation": True, "require_calls": False}, None, ""),
        ({"rewards": 1.0}, (), {"require_calls": False}, "no_tokens", ""),
        ({"rewards": 1.0}, (replace(TURN, trainable=False),), {}, "no_tokens", ""),
        ({"rewards": 1.0}, (replace(TURN, trainable=False),), {"evaluation": True}, None, ""),
        (BY_POLICY, (), {}, "no_tokens", "boom"),
    ],
)
def test_rollouts_without_tokens_are_masked(
    record: Any, turns: tuple[Turn, ...], config: dict[str, Any], reason: str | None, text: str
) -> None:
    found = judged(record, *turns, **config)
    assert found.mask_reason == reason
    assert text in str(found.error)
    invalid = reason is not None and record is not BY_POLICY
    assert (found.outcome is Outcome.INVALID) == (found.cause is Cause.INFRASTRUCTURE) == invalid
    assert judged(record, *turns, captured=False, **config).mask_reason is None


def test_a_gateway_without_an_answer_is_the_infrastructures_fault() -> None:
    assert str(judged({"rewards": 1.0}, error=GatewayError("gone")).error) == "the gateway returned no trajectory: gone"
    end = end_of_record({"rewards": 1.0}, session_id="s", input_id="a", index=0)
    found = judge(end, captured=True, capture=None, fetch_error=None, config=CollectConfig())
    assert str(found.error) == "the gateway returned no trajectory"
    assert (found.outcome, found.mask_reason, found.weight_version_min) == (Outcome.INVALID, "no_tokens", None)
    for lost in (judged({"rewards": 1.0}, error=GatewayLostError("gone")), judged(RAISED, error=GatewayError("gone"))):
        assert (lost.outcome, lost.mask_reason, lost.score) == (Outcome.LOST, "outcome", None)
        assert str(lost.error) == "lost with its model gateway: gone"
        assert str(lost.error.__cause__) == "gone"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        ({}, True),
        ({"http_status": 500}, True),
        ({"http_status": 429}, True),
        ({"status": "partial", "http_status": None}, True),
        ({"http_status": 499}, False),  # the agent's request was wrong
        ({"status": "aborted"}, False),
        ({"started_s": 6.0}, False),  # the time at which the last turn was answered
        ({"started_s": None}, False),
    ],
)
@pytest.mark.parametrize("record", [{"rewards": 1.0}, RAISED])
def test_an_agent_that_hides_the_failure_of_its_last_model_call_gets_no_reward(
    record: dict[str, Any], error: dict[str, Any], lost: bool
) -> None:
    failed = {"status": "error", "http_status": 502, "message": "no engine", "started_s": 10.0, **error}
    found = judged(record, TURN, errors=[failed])
    assert (found.outcome is Outcome.LOST) == (found.score is None) == lost
    if lost:
        assert (found.cause, found.mask_reason) == (Cause.INFRASTRUCTURE, "outcome")
        assert str(found.error) == "its last model call failed: no engine"
        assert str(found.error.__cause__) == ("boom" if record is RAISED else "None")
    if "started_s" not in error:
        assert (judged(record, errors=[failed]).outcome is Outcome.LOST) == lost


@pytest.mark.parametrize(("started_s", "failure"), [(5.0, "turns"), (4.9, None), (None, None)])
def test_a_limit_counts_from_the_start_of_the_last_turn(started_s: float | None, failure: str | None) -> None:
    found = judged(RAISED, TURN, errors=[{"type": "turn_limit", "started_s": started_s}])
    assert (found.failure, found.cause) == (failure, Cause.POLICY if failure else Cause.AGENT)
    assert judged(RAISED, errors=[{"type": "turn_limit", "started_s": started_s}]).failure == "turns"
    assert judged(BY_POLICY, TURN, errors=[{"type": "turn_limit", "started_s": 9.0}]).reward == -1.0


@pytest.mark.parametrize(
    ("calls_s", "ended_s", "stage", "cause"),
    [
        ((970.0,), 1000.0, Stage.RUN, Cause.AGENT),
        ((970.0, 3.0), 1000.0, Stage.RUN, Cause.AGENT),
        ((969.9,), 1000.0, Stage.RUN, Cause.INFRASTRUCTURE),
        ((1030.1,), 1000.0, Stage.RUN, Cause.INFRASTRUCTURE),
        ((None,), 1000.0, Stage.RUN, Cause.INFRASTRUCTURE),
        ((970.0,), None, Stage.RUN, Cause.INFRASTRUCTURE),
        ((970.0,), 1000.0, Stage.QUEUE, Cause.INFRASTRUCTURE),
        ((), 1000.0, Stage.RUN, Cause.INFRASTRUCTURE),
    ],
)
def test_an_agent_still_calls_up_to_30_seconds_before_its_deadline(
    calls_s: tuple[float | None, ...], ended_s: float | None, stage: Stage, cause: Cause
) -> None:
    late = RolloutTimeoutError("late", stage=stage, session_id="s", input_id="a")
    end = replace(ended_by(late, stage=stage), ended_s=ended_s)
    turns = [replace(TURN, turn_id=f"t{i}", index=i, finished_s=at) for i, at in enumerate(calls_s)]
    capture = SimpleNamespace(turns=turns, errors=[], train=None)
    found = judge(end, captured=True, capture=capture, fetch_error=None, config=CollectConfig())
    assert (found.cause, found.mask_reason) == (cause, "outcome")
    assert (f"still making model calls, {len(calls_s)} in all" in str(found.error)) == (cause is Cause.AGENT)


def test_versions_are_the_range_of_all_trained_tokens_or_unknown() -> None:
    found = judged({"rewards": 1.0}, TURN, NEXT)
    assert (found.weight_version_min, found.weight_version_max) == (3, 4)
    unknown = judged({"rewards": 1.0}, TURN, replace(NEXT, weight_version_first=None, weight_version_last=None))
    assert (unknown.weight_version_min, unknown.weight_version_max) == (None, None)
    assert trained_versions(None) is None


def test_many_calls_are_logged_above_the_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentcore_rl_toolkit.backends.collection.judge.WARN_TURNS", 1)
    judged({"rewards": 1.0}, TURN)
    assert caplog.messages == []
    judged({"rewards": 1.0}, TURN, NEXT)
    assert "made 2 model calls (max_turns ends a session at 2000)" in caplog.text


def test_a_blank_last_answer_is_the_policys_failure_with_its_reward_kept() -> None:
    found = judged({"rewards": 0.5}, TURN, replace(NEXT, answered=False))
    assert (found.outcome, found.failure, found.reward) == (Outcome.OK, "answer", 0.5)
    limited = judged(
        {"rewards": 0.5}, replace(TURN, answered=False), errors=[{"type": "turn_limit", "started_s": 10.0}]
    )
    assert (limited.failure, limited.reward) == ("answer", 0.5)
    assert judged({"rewards": 0.5}, replace(TURN, answered=False), NEXT).failure is None
