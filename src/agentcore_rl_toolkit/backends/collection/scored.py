"""A judge's scores as the rewards of a group."""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import replace
from typing import Any

from ...contract import Outcome
from ...errors import JudgeError
from ...logs import WarnsOnceAMinute
from ..llm_judge import JudgeScore, JudgeSettings, dialogue_of, judge_group
from .groups import CollectedRollout, Group, Reward

AT_ONCE = 8  # groups of a process; two calls each
_warnings = WarnsOnceAMinute(logging.getLogger(__name__))


@functools.lru_cache
def _places(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    return asyncio.Semaphore(AT_ONCE)


async def scored(group: Group, settings: JudgeSettings) -> Group:
    """The group with the judge's scores in its rewards. Where the judge fails, all its rollouts are masked.

    The judge reads the usable rollouts that ended `ok`. A failure of the policy keeps the reward that its agent declares.
    """
    alone = settings.judge_weight == 1  # else a rollout needs a reward of its agent, too
    read = [r for r in group.rollouts if r.usable and r.outcome is Outcome.OK and (alone or r.reward is not None)]
    if not read:
        return group
    usage: dict[str, float] = {}
    dialogues_G = [dialogue_of(getattr(r.capture, "dialogue", None), r.record) for r in read]
    try:
        async with _places(asyncio.get_running_loop()):
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
