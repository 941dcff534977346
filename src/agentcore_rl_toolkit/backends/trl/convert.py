"""Groups -> the rows that TRL's `rollout_func` returns. No TRL, no torch.

TRL takes exactly `num_generations` rows for every prompt, in order, one row per rollout. So:

- a masked rollout becomes a filler row with `env_mask` 0 everywhere and reward None: TRL leaves it out of the group's mean and
  spread, gives it advantage 0 and counts none of its tokens;
- a forked rollout has several sequences but only one row. `fork_policy` decides which one is trained; dropped ones are counted
  in `ConvertStats`, which the adapter logs with every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..collection.groups import CollectedRollout, Group
from ..collection.samples import Sample, rollout_samples
from .settings import ForkPolicy

# Names of the per-rollout lists in addition to TRL's own keys; reward functions receive them as keyword arguments.
REWARD_KEY = "agent_reward"
OUTCOME_KEY = "agent_outcome"
CAUSE_KEY = "agent_cause"
SESSION_KEY = "agent_session"
SEQUENCE_KEY = "agent_sequence"  # the index of the row's sequence in its trajectory; removed before TRL gets the row
KEYS = (
    *("prompt_ids", "completion_ids", "logprobs", "env_mask"),
    *(REWARD_KEY, OUTCOME_KEY, CAUSE_KEY, SESSION_KEY, SEQUENCE_KEY),
)


@dataclass(frozen=True, kw_only=True)
class ConvertStats:
    """Counts of the rollouts on the way to TRL. Units: tokens sampled by the policy."""

    rows: int
    usable: int
    masked: int
    forked: int
    dropped_sequences: int
    dropped_tokens: int
    too_long: int
    trained_tokens: int
    sampled_tokens: int

    @property
    def trained_token_share(self) -> float | None:
        """Tokens in the loss / tokens sampled by usable rollouts; None when nothing was sampled."""
        return self.trained_tokens / self.sampled_tokens if self.sampled_tokens else None


@dataclass(frozen=True, kw_only=True)
class _Row:
    rollout: CollectedRollout | None = None
    sample: Sample | None = None  # the trained sequence
    samples: Sequence[Sample] = ()  # all sequences of the rollout
    too_long: bool = False

    @property
    def dropped(self) -> list[Sample]:
        return [s for s in self.samples if s is not self.sample]


def to_trl(
    groups: Sequence[Group],
    *,
    num_generations: int,
    filler_id: int,
    fork_policy: ForkPolicy = "longest",
    max_tokens: int | None = None,
) -> tuple[dict[str, list[Any]], ConvertStats]:
    """Return the dict for `rollout_func`, and counts of what it leaves out.

    Shapes: every list has `len(groups) * num_generations` rows; row lengths of `completion_ids`, `logprobs` and
    `env_mask` agree. `logprobs` are None where `env_mask` is 0. `filler_id` is the token that masked rows consist of
    (the end-of-text id).
    """
    rows = [
        row
        for group in groups
        for row in _group_rows(group, num_generations, fork_policy=fork_policy, max_tokens=max_tokens)
    ]
    output: dict[str, list[Any]] = {key: [] for key in KEYS}
    for row in rows:
        sample = row.sample
        output["prompt_ids"].append(sample.prompt_ids if sample else [filler_id])
        output["completion_ids"].append(sample.response_ids if sample else [filler_id])
        output["logprobs"].append(sample.response_logprobs if sample else [None])
        output["env_mask"].append(sample.response_mask if sample else [0])
        output[REWARD_KEY].append(sample.reward if sample else None)
        output[OUTCOME_KEY].append(row.rollout.outcome.value if row.rollout else "missing")
        output[CAUSE_KEY].append(row.rollout.cause.value if row.rollout and row.rollout.cause else None)
        output[SESSION_KEY].append(row.rollout.session_id if row.rollout else None)
        output[SEQUENCE_KEY].append(sample.sequence_index if sample else None)
    usable = [r.rollout for r in rows if r.rollout is not None and r.rollout.usable]
    reports = [r.trajectory.report for r in usable if r.trajectory is not None]
    return output, ConvertStats(
        rows=len(rows),
        usable=sum(r.sample is not None for r in rows),
        masked=sum(r.sample is None for r in rows),
        forked=sum(len(r.samples) > 1 for r in rows),
        dropped_sequences=sum(len(r.dropped) for r in rows),
        dropped_tokens=sum(s.trained_tokens for r in rows for s in r.dropped),
        too_long=sum(r.too_long for r in rows),
        trained_tokens=sum(r.sample.trained_tokens for r in rows if r.sample is not None),
        sampled_tokens=sum(report.sampled_tokens - report.side_call_tokens for report in reports),
    )


def _group_rows(group: Group, n: int, *, fork_policy: ForkPolicy, max_tokens: int | None) -> list[_Row]:
    """Return exactly n rows: usable rollouts, then masked ones, in submission order, then fillers."""
    chosen = group.chosen(n)
    missing = [_Row()] * (n - len(chosen))
    return [*(_row(r, fork_policy, max_tokens) for r in chosen), *missing]


def _row(rollout: CollectedRollout, fork_policy: ForkPolicy, max_tokens: int | None) -> _Row:
    samples = rollout_samples(rollout)  # TRL computes the advantage itself
    if not samples or (len(samples) > 1 and fork_policy == "mask"):
        return _Row(rollout=rollout, samples=samples)
    best = max(samples, key=lambda s: s.trained_tokens)
    too_long = max_tokens is not None and len(best.token_ids) > max_tokens
    return _Row(rollout=rollout, sample=None if too_long else best, samples=samples, too_long=too_long)
