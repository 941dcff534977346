"""Groups -> training samples, which every backend converts into its trainer's own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError
from ...trajectory import ExpertSpan
from .advantages import Estimator, advantages
from .groups import CollectedRollout, Group

# Finish reasons of a last turn that was cut by a length limit, in the words of vLLM, SGLang, OpenAI and Anthropic.
TRUNCATED_REASONS = frozenset({"length", "max_tokens", "max_output_tokens", "model_context_window_exceeded"})


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One training sequence of a usable rollout.

    Shapes: `prompt_ids` (P,), the other lists (R,); P + R tokens in all. `response_mask` is 1 where the policy
    sampled the token and it is trained here; `response_logprobs` and `weight_versions` are None where it is 0.
    `advantage` is the rollout's, the same for all its sequences; `weight` is the sequence's share of the rollout's
    trained tokens: with it a loss that averages within each sequence counts a forked episode once. `sequence_index` is
    its place in the rollout's trajectory, `sequences` how many of them train.
    """

    session_id: str
    input_id: str
    group_index: int
    rollout_index: int
    sequence_index: int
    sequences: int
    prompt_ids: list[int] = field(repr=False)
    response_ids: list[int] = field(repr=False)
    response_mask: list[int] = field(repr=False)
    response_logprobs: list[float | None] = field(repr=False)
    weight_versions: list[int | None] = field(repr=False)
    reward: float
    advantage: float
    weight: float
    turns: int
    truncated: bool
    routed_experts: Sequence[ExpertSpan] = field(default=(), repr=False)
    metrics: Mapping[str, float] = field(default_factory=dict)
    per_turn_rewards: tuple[float, ...] | None = None
    metadata: Any = None

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    @property
    def trained_tokens(self) -> int:
        return sum(self.response_mask)

    @property
    def version_range(self) -> tuple[int, int] | None:
        """Oldest and newest weight version of the trained tokens; None when the engine gave none."""
        known = [v for v in set(self.weight_versions) if v is not None]
        return (min(known), max(known)) if known else None


def to_samples(groups: Sequence[Group], *, estimator: Estimator = "grpo") -> list[Sample]:
    """Samples of all usable rollouts, in group, rollout and branch order.

    Rollouts without an advantage (masked, or without a baseline under RLOO) give no sample; nothing is padded or made
    up. Sequences without a token to train on are left out; they carry weight 0.
    Raises: ConfigError on an unknown estimator, a reward that is not finite, or a usable rollout without one.
    """
    bare = next((r for g in groups for r in g.usable if r.reward is None), None)
    if bare is not None:
        raise ConfigError(
            f"rollout {bare.session_id} has no reward (it was collected with require_reward off): give every rollout one "
            "with `with_rewards` first"
        )
    found: list[Sample] = []
    for group_index, group in enumerate(groups):
        advantages_G = advantages(group.rewards, estimator=estimator)
        for rollout, advantage in zip(group.rollouts, advantages_G, strict=True):
            if advantage is not None:
                found.extend(rollout_samples(rollout, advantage, group_index, group.request.metadata))
    return found


def rollout_samples(
    rollout: CollectedRollout, advantage: float, group_index: int = 0, metadata: Any = None
) -> list[Sample]:
    """Samples of one usable rollout; none when it is masked, has no trajectory or no reward."""
    if not rollout.usable or rollout.trajectory is None or rollout.reward is None:
        return []
    trained = sum(s.trained_tokens > 0 for s in rollout.trajectory.sequences)
    detail = rollout.reward_detail
    found = []
    for index, sequence in enumerate(rollout.trajectory.sequences):
        if not sequence.trained_tokens:
            continue
        cut = sequence.prompt_length
        found.append(
            Sample(
                session_id=rollout.session_id,
                input_id=rollout.input_id,
                group_index=group_index,
                rollout_index=rollout.index,
                sequence_index=index,
                sequences=trained,
                prompt_ids=sequence.token_ids[:cut],
                response_ids=sequence.token_ids[cut:],
                response_mask=sequence.loss_mask[cut:],
                response_logprobs=sequence.logprobs[cut:],
                weight_versions=sequence.weight_versions[cut:],
                reward=rollout.reward,
                advantage=advantage,
                weight=sequence.weight,
                turns=len(sequence.turn_ids),
                truncated=sequence.finish_reason in TRUNCATED_REASONS,
                routed_experts=sequence.routed_experts,
                metrics=detail.metrics if detail is not None else {},
                per_turn_rewards=detail.per_turn if detail is not None else None,
                metadata=metadata,
            )
        )
    return found
