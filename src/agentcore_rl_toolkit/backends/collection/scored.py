"""Scores of a user's function, and of a judge, as rewards."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...contract import Cause, Outcome
from ...errors import JudgeError, ScorerError
from ...logs import WarnsOnceAMinute
from ..llm_judge import JudgeScore, JudgeSettings, dialogue_of, judge_group
from ..scorer import Scorer
from .groups import CollectedRollout, Group, Reward
from .sessions import Places

AT_ONCE = 8  # groups that a process judges at once, with two calls each
_places = Places(AT_ONCE)
_warnings = WarnsOnceAMinute(logging.getLogger(__name__))


async def with_score(rollout: CollectedRollout, payload: Mapping[str, Any], scorer: Scorer) -> CollectedRollout:
    """Replace a rollout's reward with the scorer's, and keep the agent's as a metric. Mask it if the scorer fails.

    A failure of the policy keeps the reward that its agent declares.
    """
    if rollout.outcome is not Outcome.OK or rollout.record is None:
        return rollout
    try:
        metrics = await scorer.score(payload, rollout.record, getattr(rollout.capture, "dialogue", None) or [])
    except ScorerError as e:
        _warnings.warning("rollout %s has no score: %s", rollout.session_id, e)
        masked: dict[str, Any] = {"reward": None, "reward_detail": None, "cause": Cause.SCORER}
        return replace(rollout, error=e, mask_reason=rollout.mask_reason or "scorer", **masked)
    value = metrics.pop("reward")
    own = rollout.reward_detail
    metrics |= {} if own is None else {**own.metrics, **metrics, "agent_reward": own.value}
    return replace(rollout, reward=value, reward_detail=Reward(value=value, metrics=metrics))


async def scored(group: Group, settings: JudgeSettings) -> Group:
    """Add the judge's scores to the rewards of a group. Mask all its rollouts if the judge fails.

    The judge reads the usable rollouts that ended `ok`. A failure of the policy keeps the reward that its agent declares.
    """
    alone = settings.judge_weight == 1  # otherwise a rollout needs its agent's reward, too
    read = [r for r in group.rollouts if r.usable and r.outcome is Outcome.OK and (alone or r.reward is not None)]
    if not read:
        return group
    usage: dict[str, float] = {}
    dialogues_G = [dialogue_of(getattr(r.capture, "dialogue", None), r.record) for r in read]
    try:
        async with _places:
            scores_G = await judge_group(group.request.payload, dialogues_G, settings, usage)
    except JudgeError as e:
        _warnings.warning("the rollouts of %s are masked: %s", group.input_id, e)
        usage["failed"] = 1
        masked: dict[str, Any] = {"reward": None, "reward_detail": None, "mask_reason": "judge"}
        rollouts = [replace(r, error=r.error or e, **masked) if r.usable else r for r in group.rollouts]
    else:
        rewarded = {r.session_id: _rewarded(r, s, settings.judge_weight) for r, s in zip(read, scores_G, strict=True)}
        rollouts = [rewarded.get(r.session_id, r) for r in group.rollouts]
    return replace(group, rollouts=rollouts, judge_usage=usage)


def _rewarded(rollout: CollectedRollout, judged: JudgeScore, weight: float) -> CollectedRollout:
    own, value = rollout.reward, judged.score
    metrics = dict(rollout.reward_detail.metrics) if rollout.reward_detail is not None else {}
    metrics["judge"] = judged.score
    if own is not None:
        metrics["agent_reward"] = own
        value = weight * judged.score + (1 - weight) * own
    return replace(rollout, reward=value, reward_detail=Reward(value=value, metrics=metrics), judge_score=judged)
