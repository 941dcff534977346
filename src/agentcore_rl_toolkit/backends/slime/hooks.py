"""slime's reward post-processing and dynamic filter, aware of masked rollouts and forked episodes.

Plugged in with ``--custom-reward-post-process-path`` and ``--dynamic-sampling-filter-path``. They import nothing of
slime.
"""

from __future__ import annotations

from typing import Any

from ..collection.advantages import Estimator, advantages
from ..collection.credit import Credit, Signal, token_advantages
from .convert import NOTE, credit_of, flat
from .generate import recording_of_process

_CENTRED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")


def normalize_rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Return raw and normalized rewards of a flat list of samples, group by group.

    Each rollout counts once in its group however many samples it forked into; removed samples (masked rollouts) count
    not at all: their normalized reward is 0.0. slime logs the mean of the raw rewards over samples. The first sample of each
    usable rollout has its reward, and all others the mean of these (0.0 where nothing is usable), so the logged mean is that of
    the usable rollouts. Normalization follows slime's switches: none unless `rewards_normalization` and a group-relative
    estimator are on, divided by the spread only with `grpo_std_normalization`.
    Shapes: (N,) -> (N,), (N,).
    """
    estimated_by = getattr(args, "advantage_estimator", "grpo")
    credit, recording = credit_of(args), recording_of_process()
    centered = getattr(args, "rewards_normalization", True) and estimated_by in _CENTRED
    spread = getattr(args, "grpo_std_normalization", True) and estimated_by != _CENTRED[3]
    estimator: Estimator = "grpo" if spread else "dr_grpo"
    own = {(s.group_index, s.rollout_id): float(s.reward) for s in samples if not s.remove_sample}
    mean = sum(own.values()) / len(own) if own else 0.0
    raw = [own.pop((s.group_index, s.rollout_id), mean) for s in samples]
    normalized: dict[int, float] = {}
    groups: dict[Any, list[Any]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    for members in groups.values():
        if credit.per_token:
            _of_tokens(args, credit, members)
        rewards = {s.rollout_id: None if s.remove_sample else float(s.reward) for s in members}
        each = advantages(list(rewards.values()), estimator=estimator) if centered else rewards.values()
        advantage_of = dict(zip(rewards, each, strict=True))
        for sample in members:
            advantage = advantage_of[sample.rollout_id]
            normalized[id(sample)] = 0.0 if advantage is None else advantage
            note = (sample.metadata or {}).get(NOTE)
            if recording is not None and centered and not credit.per_token and note and advantage is not None:
                recording.run.annotate(note["session_id"], advantage=advantage)
    return raw, [normalized[id(s)] for s in samples]


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
    rewards = {float(s.reward) for s in flat(samples) if not s.remove_sample}
    keep = len(rewards) > 1 or (bool(rewards) and credit_of(args).per_token)
    reason = None if keep else ("no_usable_rollout" if not rewards else f"all_rewards_{next(iter(rewards)):g}")
    try:
        from slime.rollout.filter_hub.base_types import DynamicFilterOutput
    except ModuleNotFoundError:
        return keep
    return DynamicFilterOutput(keep=keep, reason=reason)
