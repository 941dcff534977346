"""Judge one ended rollout: outcome, reward, trajectory, age. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...contract import (
    ANSWER_FIELD,
    DEFAULT_TRAIN,
    INFO_FIELD,
    POLICY_REWARD_FIELD,
    TRUNCATED_REASONS,
    Cause,
    Outcome,
    Stage,
    advise_on_calls,
    cause_of,
    record_error,
    record_train,
    short,
)
from ...errors import (
    AgentCoreRLError,
    AgentError,
    ContractError,
    GatewayError,
    GatewayLostError,
    InvalidResultError,
    RolloutError,
    RolloutLostError,
    RolloutTimeoutError,
)
from ...trajectory import SIDE_CALLS, Trajectory, build_trajectory
from .groups import CollectedRollout, Reward, read_reward
from .samples import rewards_of_turns
from .settings import CollectConfig

log = logging.getLogger(__name__)

# The gateway's refusals that are failures of the policy, and the kind of failure.
LIMITS = {"turn_limit": "turns", "context_overflow": "context"}
STILL_CALLING_S = 30.0  # limit between the last model call and the deadline for an agent that still calls the model
WARN_TURNS = 200  # model calls of a session above which it is logged
# The gateway decides these, whatever the record says: an agent whose model calls fail has not failed itself.
DECIDED_BY_THE_GATEWAY = (Outcome.OK, Outcome.AGENT_ERROR, Outcome.INVALID)


def ended_by(error: RolloutError, *, index: int = 0, stage: Stage | None = None) -> CollectedRollout:
    """Return a rollout that ended with this error, which has its session and input. It is not judged yet."""
    return CollectedRollout(
        session_id=str(error.session_id),
        input_id=str(error.input_id),
        index=index,
        outcome=Outcome(error.outcome),
        record=getattr(error, "record", None),
        error=error,
        stage=stage,
    )


def end_of_record(record: object, *, session_id: str, input_id: str, index: int) -> CollectedRollout:
    """Return a rollout that ended with this stored record. It is not judged yet."""
    ids = {"session_id": session_id, "input_id": input_id}
    if not isinstance(record, Mapping):
        message = f"the record must be an object, got {type(record).__name__}"
        return ended_by(InvalidResultError(message, **ids), index=index)
    error = record_error(record)
    outcome = Outcome.OK if error is None else Outcome(error.outcome)
    if error is not None:
        error.session_id, error.input_id = session_id, input_id
        error.message = str(record.get("stop_reason") or error)  # the outcome and the type are shown next to it
    return CollectedRollout(
        session_id=session_id, input_id=input_id, index=index, outcome=outcome, record=record, error=error
    )


def judge(end: CollectedRollout, **known: Any) -> CollectedRollout:
    """Judge a rollout that has ended. An unexpected error in judging is the infrastructure's and is logged."""
    try:
        return _judged(end, **known)
    except Exception as e:
        log.exception("rollout %s cannot be judged", end.session_id)
        why = f"the rollout cannot be judged: {type(e).__name__}: {e}"
        error = RolloutLostError(why, session_id=end.session_id, input_id=end.input_id)
        error.__cause__ = e
        return lost(end, error)


def lost(rollout: CollectedRollout, error: AgentCoreRLError) -> CollectedRollout:
    facts: dict[str, Any] = {"outcome": Outcome.LOST, "cause": Cause.INFRASTRUCTURE, "failure": None, "error": error}
    return replace(rollout, mask_reason="outcome", **facts)


def _judged(
    end: CollectedRollout,
    *,
    captured: bool,
    capture: Any,
    fetch_error: BaseException | None,
    config: CollectConfig,
    sampling_params: Mapping[str, Any] | None = None,
) -> CollectedRollout:
    """Add cause, reward, trajectory and mask reason to a rollout that has ended.

    ``captured``: the rollout ran against a gateway. ``capture`` is None when the gateway had nothing to give, and
    ``fetch_error`` is the error of its call. ``sampling_params`` are those that the trainer asked for.
    """
    why, failed = end_of_calls(capture)
    if fetch_error is not None and (end.outcome is not Outcome.OK or isinstance(fetch_error, GatewayLostError)):
        why = f"lost with its model gateway: {fetch_error}"
    if why is not None and end.outcome in DECIDED_BY_THE_GATEWAY:
        broken = RolloutLostError(why)
        broken.__cause__ = fetch_error or end.error
        end = replace(end, outcome=Outcome.LOST, error=broken)
    outcome, error, record = end.outcome, end.error, end.record
    cause, failure = cause_of(error), error.failure if isinstance(error, AgentError) else None
    reason: str | None = None if outcome is Outcome.OK else "outcome"
    calls = 0 if capture is None else len(capture.turns)
    if calls > WARN_TURNS:
        text = "rollout %s made %d model calls (max_turns ends a session at %s): check that the agent ends"
        log.warning(text, end.session_id, calls, config.max_turns)
    if outcome is Outcome.OK and calls and not capture.turns[-1].answered:
        failure = "answer"
    elif outcome is Outcome.AGENT_ERROR and cause is Cause.AGENT and record is not None and failed is not None:
        # Frameworks raise anything if the policy failed in the last model call.
        cause, failure = Cause.POLICY, failed
        record = {"rewards": record.get(INFO_FIELD, {}).get(POLICY_REWARD_FIELD)}
    if outcome is Outcome.TIMEOUT and end.stage is Stage.RUN and _still_calling(end, capture):
        cause, why = Cause.AGENT, f"the agent was still making model calls, {calls} in all, when its time was over"
        error = RolloutTimeoutError(f"{error}; {why}", stage=Stage.RUN)
    reward: Reward | None = None
    if outcome is Outcome.OK and end.record is not None:
        required = config.require_reward if config.judging.judge is None else config.judging.judge_weight < 1
        required = required and config.score is None and not (config.evaluation and ANSWER_FIELD in end.record)
        reward, trouble = _reward(end.record, required=required)
        if trouble is not None:
            outcome, error, reason, cause = Outcome.INVALID, trouble, "no_reward", Cause.AGENT
    elif cause is Cause.POLICY and record is not None:
        reward, _ = _reward(record, required=False)
        reason = None if reward is not None and config.policy_failures == "score" else "policy_failure"
    trajectory: Trajectory | None = None
    versions: tuple[int, int] | None = None
    if captured:
        rule = config.train or record_train(end.record) or getattr(capture, "train", None) or DEFAULT_TRAIN
        temperature = None if config.evaluation else (sampling_params or {}).get("temperature", 1.0)
        trajectory, flaw = _trajectory(capture, fetch_error, end.session_id, rule, temperature)
        if flaw is not None and calls == 0 and (advice := advise_on_calls([record])):
            flaw = InvalidResultError(advice, cause=Cause.INFRASTRUCTURE)
        versions = trained_versions(trajectory)
        measured = config.evaluation and capture is not None and (calls or not config.require_calls)
        if reason is None and flaw is not None and not measured:
            reason = "no_tokens"
            if outcome is Outcome.OK:  # a policy may fail before its first token
                outcome, error, cause = Outcome.INVALID, flaw, Cause.INFRASTRUCTURE
        if reason is None and config.credit == "turn" and outcome is Outcome.OK and reward is not None and trajectory:
            try:
                rewards_of_turns(reward, trajectory, capture)
            except ContractError as e:
                error = InvalidResultError(str(e))
                outcome, reason, cause = Outcome.INVALID, "no_reward", Cause.AGENT
        if reason is None and config.refuse_other_sampling and trajectory and trajectory.report.other_sampling:
            reason = "other_sampling"
    if isinstance(error, AgentCoreRLError):
        error.session_id, error.input_id = end.session_id, end.input_id
    return replace(
        end,
        outcome=outcome,
        cause=cause,
        failure=failure,
        reward=reward.value if reward is not None else None,
        reward_detail=reward,
        trajectory=trajectory,
        capture=capture,
        error=error,
        weight_version_min=versions[0] if versions else None,
        weight_version_max=versions[1] if versions else None,
        mask_reason=reason,
    )


def _still_calling(end: CollectedRollout, capture: Any) -> bool:
    """Return True if a model call ended shortly before the rollout, so that neither engine nor gateway hung."""
    finished_s = max((turn.finished_s or 0.0 for turn in capture.turns), default=0.0) if capture is not None else 0.0
    # The gateway's clock may differ, and then shows nothing.
    return end.ended_s is not None and abs(end.ended_s - finished_s) <= STILL_CALLING_S


def end_of_calls(capture: Any) -> tuple[str | None, str | None]:
    """Return why engine or gateway failed the session's last model call, and what the policy failed at in it.

    A call that failed, or that one of our limits refused, is no turn.
    """
    if capture is None:
        return None, None
    last = capture.turns[-1] if capture.turns else None
    ended_s = getattr(last, "started_s", None) or 0.0
    later = [error for error in reversed(capture.errors) if (error.get("started_s") or 0.0) >= ended_s]
    limit = next((LIMITS[error["type"]] for error in later if error.get("type") in LIMITS), None)
    answered_s = max((turn.finished_s or 0.0 for turn in capture.turns), default=0.0)
    broken = [error for error in later if _is_broken(error) and (error.get("started_s") or 0.0) > answered_s]
    if last is None or broken:
        return (f"its last model call failed: {broken[0].get('message')}" if broken else None), limit
    cut, unparsed = last.finish_reason in TRUNCATED_REASONS, last.parse_status == "unparsed"
    return None, limit or ("answer" if not last.answered else "tokens" if cut else "calls" if unparsed else None)


def _is_broken(error: Mapping[str, Any]) -> bool:
    """Return True for a call that engine or gateway failed. They do not answer 5xx or 429 to a mistake of the agent."""
    status = error.get("http_status") or 500
    return error.get("status") in ("error", "partial") and (status >= 500 or status == 429)


def trained_versions(trajectory: Trajectory | None) -> tuple[int, int] | None:
    """Return the oldest and newest weight version of the trained tokens, or None if one is missing."""
    if trajectory is None:
        return None
    known: set[int] = set()
    for sequence in trajectory.sequences:
        if sequence.weight_versions.count(None) != sequence.loss_mask.count(0):
            return None
        known.update(v for v in set(sequence.weight_versions) if v is not None)
    return (min(known), max(known)) if known else None


def _reward(record: Mapping[str, Any], *, required: bool) -> tuple[Reward | None, InvalidResultError | None]:
    try:
        reward = read_reward(record)
    except ContractError as e:
        return None, InvalidResultError(str(e))
    if reward is None and required:
        given = short(record.get("rewards", record.get("reward")))
        message = (
            f"the record has no number in `rewards` ({given}): return a number, a list of them, or a dict with `reward`"
        )
        if ANSWER_FIELD in record:
            message = "the agent runs unmodified and returns no reward: give a function that scores it with --score FILE:FUNCTION"
        return None, InvalidResultError(message)
    return reward, None


def _trajectory(
    capture: Any, fetch_error: BaseException | None, session_id: str, rule: str, temperature: float | None
) -> tuple[Trajectory | None, AgentCoreRLError | None]:
    """Return the trajectory, and the error if it cannot be trained on."""
    if capture is None:
        why = f": {fetch_error}" if fetch_error is not None else ""
        error = GatewayError(f"the gateway returned no trajectory{why}")
        error.__cause__ = fetch_error
        return None, error
    try:
        trajectory = build_trajectory(session_id, capture.turns, train=rule, temperature=temperature)
    except AgentCoreRLError as e:
        return None, e
    if any(1 in s.loss_mask for s in trajectory.sequences):
        return trajectory, None
    side_calls = ", ".join(SIDE_CALLS[name] for name in trajectory.report.side_calls)
    others = ", ".join(trajectory.report.other_sampling)
    why = (
        f"its calls were sampled at {others}, and the trainer computes at temperature {temperature} without penalties: "
        "set that in sampling_params"
        if others
        else f"every call is a side call under train={rule!r} ({side_calls}): give a tag of the calls that train"
        if side_calls
        else "the agent forces a tool or a schema in every call, and a grammar enforced it: set forced_tools to wish"
        if "held_to_a_form" in trajectory.report.untrainable_reasons
        else "check that the agent calls `_rollout.base_url` with its api_key, and that the engine returns token ids and logprobs"
    )
    why = f"the trajectory has no sampled token to train on: {why}"
    return trajectory, InvalidResultError(why, cause=Cause.INFRASTRUCTURE)
