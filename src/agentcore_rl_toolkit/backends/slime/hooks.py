"""slime's reward post-processing and dynamic filter, aware of masked rollouts and forked episodes.

Plugged in with ``--custom-reward-post-process-path`` and ``--dynamic-sampling-filter-path``. They import nothing of
slime.
"""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError
from ..collection.advantages import Estimator, advantages
from ..collection.credit import Credit, Signal, token_advantages
from .convert import NOTE, credit_of, flat
from .generate import recording_of_process

_CENTRED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")


def normalize_rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Return raw and normalized rewards of a flat list of samples, group by group.

    Each rollout counts once in its group however many samples it forked into; removed samples (masked rollouts) count
    not at all. Their own entries: the normalized reward is 0.0, the raw one the mean of their group (0.0 where
    nothing is usable), so that slime's logged mean is that of the usable rollouts. Normalization follows slime's
    switches: none unless `rewards_normalization` and a group-relative estimator are on, divided by the spread only
    with `grpo_std_normalization`.
    Shapes: (N,) -> (N,), (N,).
    """
    estimated_by = getattr(args, "advantage_estimator", "grpo")
    credit = credit_of(args)
    if credit.per_token:
        for members in _by_group(samples).values():
            _of_tokens(args, credit, [samples[i] for i in members])
    centered = getattr(args, "rewards_normalization", True) and estimated_by in _CENTRED
    spread = getattr(args, "grpo_std_normalization", True) and estimated_by != _CENTRED[3]
    estimator: Estimator = "grpo" if spread else "dr_grpo"
    raw = [0.0] * len(samples)
    normalized = [0.0] * len(samples)
    for members in _by_group(samples).values():
        rewards: dict[Any, float | None] = {}
        for i in members:
            rewards[samples[i].rollout_id] = None if samples[i].remove_sample else _reward(samples[i])
        values = list(rewards.values())
        usable = [r for r in values if r is not None]
        mean = sum(usable) / len(usable) if usable else 0.0
        each = advantages(values, estimator=estimator) if centered else values
        advantage_of = dict(zip(rewards, each, strict=True))
        if centered and not credit.per_token:
            _note_advantages({_session(samples[i]): advantage_of[samples[i].rollout_id] for i in members})
        for i in members:
            own, advantage = rewards[samples[i].rollout_id], advantage_of[samples[i].rollout_id]
            raw[i] = mean if own is None else own
            normalized[i] = 0.0 if advantage is None else advantage
    return raw, normalized


def _of_tokens(args: Any, credit: Credit, members: list[Any]) -> None:
    """Put the advantages of a group's tokens into slime's only field for numbers of tokens, which is named after teachers."""
    live = [sample for sample in members if not sample.remove_sample]
    signals = [Signal(**sample.metadata[NOTE]["signal"]) for sample in live]
    estimator: Estimator = "grpo" if getattr(args, "grpo_std_normalization", True) else "dr_grpo"
    found = token_advantages(signals, credit, estimator=estimator)
    for sample in members:
        sample.teacher_log_probs = [0.0] * sample.response_length
    for sample, advantages_R in zip(live, found, strict=True):
        sample.teacher_log_probs = advantages_R


def take_token_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Set the advantages of `normalize_rewards`, as slime's ``--custom-advantage-function-path`` in its trainer."""
    rollout_data["advantages"] = rollout_data["returns"] = rollout_data["teacher_log_probs"]


def keep_informative_group(args: Any, samples: Any, **_: Any) -> Any:
    """Keep a group if its usable rewards differ: slime's dynamic filter.

    Masked rollouts do not count: three successes and one lost session teach nothing, though slime's stock filter
    would see rewards 1, 1, 1, 0. Return slime's DynamicFilterOutput if slime is importable, otherwise a bool of the
    same meaning.
    """
    rewards = {_reward(s) for s in flat(samples) if not s.remove_sample}
    keep = len(rewards) > 1 or (bool(rewards) and credit_of(args).per_token)
    reason = None if keep else ("no_usable_rollout" if not rewards else f"all_rewards_{next(iter(rewards)):g}")
    try:
        from slime.rollout.filter_hub.base_types import DynamicFilterOutput
    except ModuleNotFoundError:
        return keep
    return DynamicFilterOutput(keep=keep, reason=reason)


def _note_advantages(found: dict[str | None, float | None]) -> None:
    """Write the advantages into the run's folder, if this process has one."""
    recording = recording_of_process()
    for session_id, advantage in found.items() if recording is not None else ():
        if recording is not None and session_id is not None and advantage is not None:
            recording.run.annotate(session_id, advantage=advantage)


def _session(sample: Any) -> str | None:
    return ((getattr(sample, "metadata", None) or {}).get(NOTE) or {}).get("session_id")


def _reward(sample: Any) -> float:
    if sample.reward is None:
        raise ConfigError(f"sample {sample.index} has no reward; set `remove_sample`, or give it a reward")
    return float(sample.reward)


def _by_group(samples: list[Any]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group_index, []).append(i)
    return groups
