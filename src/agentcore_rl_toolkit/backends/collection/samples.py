"""Groups -> training samples, which every backend converts into its trainer's data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...contract import TRUNCATED_REASONS, Outcome
from ...errors import ConfigError, ContractError
from ...trajectory import ExpertSpan, Trajectory
from .advantages import Estimator
from .credit import Credit, CreditReport, Signal, token_advantages, turns_of
from .groups import CollectedRollout, Group, Reward

EPISODE = Credit()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A training sequence of a usable rollout.

    Shapes: `prompt_ids` (P,), the other lists (R,); P + R tokens in all. `response_mask` is 1 where the policy
    sampled the token and it is trained here; `response_logprobs` and `weight_versions` are None where it is 0.
    `advantages` are 0 there, and the same for all tokens of a rollout unless `Credit` says otherwise; empty where the trainer
    computes its own. `weight` is the sequence's share of the rollout's trained tokens: with it a loss that averages within each
    sequence counts a forked episode once. `sequence_index` is its place in the rollout's trajectory, `sequences` how many of
    them train.
    """

    session_id: str
    input_id: str
    group_index: int
    sequence_index: int
    sequences: int
    prompt_ids: list[int] = field(repr=False)
    response_ids: list[int] = field(repr=False)
    response_mask: list[int] = field(repr=False)
    response_logprobs: list[float | None] = field(repr=False)
    weight_versions: list[int | None] = field(repr=False)
    advantages: list[float] = field(repr=False)
    reward: float | None
    weight: float
    turns: int
    truncated: bool
    routed_experts: Sequence[ExpertSpan] = field(default=(), repr=False)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    @property
    def trained_tokens(self) -> int:
        return sum(self.response_mask)

    @property
    def advantage(self) -> float:
        """The mean over the trained tokens."""
        return math.fsum(self.advantages) / self.trained_tokens

    @property
    def version_range(self) -> tuple[int, int] | None:
        """Oldest and newest weight version of the trained tokens; None when the engine gave none."""
        known = [v for v in set(self.weight_versions) if v is not None]
        return (min(known), max(known)) if known else None


def to_samples(
    groups: Sequence[Group],
    *,
    estimator: Estimator = "grpo",
    credit: Credit = EPISODE,
    report: CreditReport | None = None,
) -> list[Sample]:
    """Make the samples of all usable rollouts, in group, rollout and branch order. Add counts to ``report``.

    Rollouts without an advantage (masked, or without a baseline under RLOO) give no sample; nothing is padded.
    Sequences without a token to train on are left out; they have weight 0. If only a teacher gives the advantages, rollouts need
    no reward.
    Raises: ConfigError on an unknown estimator, a reward that is not finite, or a usable rollout without one.
    """
    bare = next((r for g in groups for r in g.usable if r.reward is None), None)
    if bare is not None and credit.uses_rewards:
        raise ConfigError(
            f"rollout {bare.session_id} has no reward (it was collected with require_reward off): give every rollout a "
            "reward first"
        )
    found: list[Sample] = []
    for group_index, group in enumerate(groups):
        signals = [(r, i, s) for r in group.usable if r.trajectory for i, s in signals_of(r, credit).items()]
        known = token_advantages([s for *_, s in signals], credit, estimator=estimator, report=report)
        advantages = {(r.session_id, i): A for (r, i, _), A in zip(signals, known, strict=True) if A is not None}
        for rollout in group.usable:
            found += rollout_samples(rollout, advantages, group_index)
    return found


def signals_of(rollout: CollectedRollout, credit: Credit) -> dict[int, Signal]:
    """Return the signals of a usable rollout by index of sequence. A reward without turns is that of the last turn."""
    trajectory = rollout.trajectory
    assert trajectory is not None
    turns: dict[int, list[tuple[int, int, int, float]]] = {}
    if credit.credit == "turn" and rollout.reward is not None:
        places = turns_of(trajectory, rollout.capture)
        if rollout.outcome is Outcome.OK and rollout.reward_detail is not None:
            rewards = rewards_of_turns(rollout.reward_detail, trajectory, rollout.capture)
        else:  # the policy failed: the agent's reward for that is the last turn's
            rewards = dict.fromkeys(places, 0.0) | {list(places)[-1]: rollout.reward}
        value = 0.0
        returns: dict[str, float] = {}
        for name in reversed(rewards):
            value = returns[name] = rewards[name] + credit.discount * value
        for position, name in enumerate(places):
            if name in returns:
                index, begin, end = places[name]
                start = trajectory.sequences[index].prompt_length
                turns.setdefault(index, []).append((position, begin - start, end - start, returns[name]))
    return {
        index: Signal(
            rollout=rollout.session_id,
            reward=rollout.reward,
            mask=sequence.loss_mask[sequence.prompt_length :],
            turns=turns.get(index, ()),
            gaps=None if rollout.teacher_gaps is None else rollout.teacher_gaps[index],
        )
        for index, sequence in enumerate(trajectory.sequences)
        if sequence.trained_tokens
    }


def rollout_samples(
    rollout: CollectedRollout,
    advantages: Mapping[tuple[str, int], list[float]] | None = None,
    group_index: int = 0,
) -> list[Sample]:
    """Make the samples of one usable rollout. Masked rollouts, and those without a trajectory, have none.

    ``advantages`` are those of its sequences, by session and index: one without is left out. None: the trainer computes its own.
    """
    if not rollout.usable or rollout.trajectory is None or (advantages is None and rollout.reward is None):
        return []
    trained = sum(s.trained_tokens > 0 for s in rollout.trajectory.sequences)
    detail = rollout.reward_detail
    found = []
    for index, sequence in enumerate(rollout.trajectory.sequences):
        given = [] if advantages is None else advantages.get((rollout.session_id, index))
        if not sequence.trained_tokens or given is None:
            continue
        cut = sequence.prompt_length
        found.append(
            Sample(
                session_id=rollout.session_id,
                input_id=rollout.input_id,
                group_index=group_index,
                sequence_index=index,
                sequences=trained,
                prompt_ids=sequence.token_ids[:cut],
                response_ids=sequence.token_ids[cut:],
                response_mask=sequence.loss_mask[cut:],
                response_logprobs=sequence.logprobs[cut:],
                weight_versions=sequence.weight_versions[cut:],
                advantages=given,
                reward=rollout.reward,
                weight=sequence.weight,
                turns=len(sequence.turn_ids),
                truncated=sequence.finish_reason in TRUNCATED_REASONS,
                routed_experts=sequence.routed_experts,
                metrics=detail.metrics if detail is not None else {},
            )
        )
    return found


def rewards_of_turns(reward: Reward, trajectory: Trajectory, capture: Any) -> dict[str, float]:
    """Return the reward of each model call that the agent rewards, by turn id, in the order of their start.

    The keys of `turn_rewards` are the ids of the agent's replies. A list of `rewards` has one number for each call that trains.
    Raises: ContractError with what the agent should return.
    """
    turns = sorted(capture.turns, key=lambda turn: (turn.index, turn.choice_index))
    if reward.by_call is not None:
        named = {_call(name): value for name, value in reward.by_call.items()}
        unknown = named.keys() - {_call(turn.reply_id or turn.turn_id) for turn in turns}
        if unknown:
            raise ContractError(
                f"`turn_rewards` has rewards for {len(unknown)} model calls that the session did not make, such as "
                f"{min(unknown)!r}: its keys are the ids of the model's replies (`response.id`)"
            )
        ids = {turn.turn_id: _call(turn.reply_id or turn.turn_id) for turn in turns}
        return {turn_id: named[call] for turn_id, call in ids.items() if call in named}
    trained = list(turns_of(trajectory, capture))
    given = len(reward.per_turn or ())
    if reward.per_turn is not None and given == len(trained):
        return dict(zip(trained, reward.per_turn, strict=True))
    found = "one reward" if reward.per_turn is None else f"a list of {given} rewards"
    raise ContractError(
        f"the record has {found} and {len(trained)} of the session's model calls train: with credit `turn` an agent returns "
        "`rewards` as a list with one number for each of them, or, next to `rewards`, a dict `turn_rewards` from the ids of the "
        "model's replies to numbers; credit `episode` takes one reward"
    )


def _call(reply_id: str) -> str:
    """Return the part of a reply's id that all wire formats share."""
    return re.sub("^(chatcmpl-|cmpl-|resp_|msg_)", "", reply_id)
