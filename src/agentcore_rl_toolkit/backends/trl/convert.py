"""Groups -> the rows that TRL's `rollout_func` returns. No TRL, no torch.

TRL takes exactly `num_generations` rows for every prompt, in order, one row per rollout. So:

- a masked rollout becomes a filler row with `env_mask` 0 everywhere and reward None: TRL leaves it out of the group's mean and
  spread, gives it advantage 0 and counts none of its tokens;
- a forked rollout has several sequences but only one row: the sequence with the most sampled tokens. Dropped ones are counted in
  `ConvertStats`, which the adapter logs with every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..collection.groups import CollectedRollout, Group
from ..collection.samples import rollout_samples

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


@dataclass(kw_only=True)
class ConvertStats:
    """Counts of the rollouts on the way to TRL. Units: tokens sampled by the policy."""

    rows: int = 0
    usable: int = 0
    forked: int = 0
    dropped_sequences: int = 0
    dropped_tokens: int = 0
    trained_tokens: int = 0
    sampled_tokens: int = 0

    @property
    def trained_token_share(self) -> float | None:
        """Tokens in the loss / tokens sampled by usable rollouts; None when nothing was sampled."""
        return self.trained_tokens / self.sampled_tokens if self.sampled_tokens else None


def to_trl(
    groups: Sequence[Group], *, num_generations: int, filler_id: int
) -> tuple[dict[str, list[Any]], ConvertStats]:
    """Return the dict for `rollout_func`, and counts of what it leaves out.

    A group has its usable rollouts, then masked ones, in submission order, then fillers.
    Shapes: every list has `len(groups) * num_generations` rows; row lengths of `completion_ids`, `logprobs` and
    `env_mask` agree. `logprobs` are None where `env_mask` is 0. `filler_id` is the token that masked rows consist of
    (the end-of-text id).
    """
    output: dict[str, list[Any]] = {key: [] for key in KEYS}
    stats = ConvertStats()
    for group in groups:
        chosen: list[CollectedRollout | None] = [*group.chosen(num_generations)]
        for rollout in [*chosen, *[None] * (num_generations - len(chosen))]:
            samples = [] if rollout is None else rollout_samples(rollout)  # TRL computes the advantage itself
            sample = max(samples, key=lambda s: s.trained_tokens, default=None)
            stats.rows += 1
            stats.usable += sample is not None
            if rollout is not None and rollout.trajectory is not None and sample is not None:
                report = rollout.trajectory.report
                stats.forked += len(samples) > 1
                stats.dropped_sequences += len(samples) - 1
                stats.dropped_tokens += sum(s.trained_tokens for s in samples) - sample.trained_tokens
                stats.trained_tokens += sample.trained_tokens
                stats.sampled_tokens += report.sampled_tokens - report.side_call_tokens
            row = {
                "prompt_ids": sample.prompt_ids if sample else [filler_id],
                "completion_ids": sample.response_ids if sample else [filler_id],
                "logprobs": sample.response_logprobs if sample else [None],
                "env_mask": sample.response_mask if sample else [0],
                REWARD_KEY: sample.reward if sample else None,
                OUTCOME_KEY: rollout.outcome.value if rollout else "missing",
                CAUSE_KEY: rollout.cause.value if rollout and rollout.cause else None,
                SESSION_KEY: rollout.session_id if rollout else None,
                SEQUENCE_KEY: sample.sequence_index if sample else None,
            }
            for key, value in row.items():
                output[key].append(value)
    return output, stats
