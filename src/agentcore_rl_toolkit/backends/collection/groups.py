"""The input and output of a collection: group requests, collected rollouts, groups, counts.

The one rule every backend relies on: a rollout is `usable` only when it ended `ok` or the policy failed, it has a
reward (after a failure of the policy, the reward that its agent declares), its trajectory has at least one token to train on,
and it is fresh enough. Everything else is masked, with a reason, and never becomes reward 0.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...client.batch import error_line
from ...client.evaluation import mean_metrics, mean_over_inputs, metrics_of
from ...contract import Cause, Outcome, Stage, check_id, extract_reward
from ...errors import ConfigError, RolloutError
from ...trajectory import CUTS, Trajectory
from ..llm_judge import JudgeScore

if TYPE_CHECKING:
    from ...gateway import SessionCapture

# The sampling that every trainer reproduces: without cuts and penalties.
WHOLE_DISTRIBUTION: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


def trained_temperature(sampling_params: Mapping[str, Any] | None) -> float:
    """Return the trainer's temperature: that of the sampling parameters, or 1. Raises: ConfigError."""
    found = (sampling_params or {}).get("temperature", 1.0)
    if not isinstance(found, (int, float)) or not 0 < found < math.inf:
        raise ConfigError(
            f"a run cannot train at temperature {found!r}: at 0 all rollouts of an input are the same; give a number "
            "above 0 (1 samples from the unchanged distribution)"
        )
    return float(found)


@dataclass(frozen=True, kw_only=True)
class Reward:
    """The reward in a record.

    `value` is the scalar that enters the group statistics; `per_turn` is set when the agent returned a list (its last
    element is `value`), `by_call` when it returned `turn_rewards`; `metrics` are the other numbers in the dict
    form, for logging only.
    """

    value: float
    per_turn: tuple[float, ...] | None = None
    by_call: Mapping[str, float] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def read_reward(record: Mapping[str, Any]) -> Reward | None:
    """Read `rewards` (or `reward`) of a record: a number, a per-turn list, or `{"reward": ..., <metric>: ...}`.

    `turn_rewards` is read as well. None when the record has no reward; this is never reward 0.
    Raises: ContractError if a value is not a finite number.
    """
    value = extract_reward(record)
    if value is None:
        return None
    raw = record.get("rewards", record.get("reward"))
    if isinstance(raw, Mapping):
        raw = raw.get("reward")
    per_turn = tuple(map(float, raw)) if isinstance(raw, Sequence) else None
    named = record.get("turn_rewards")
    by_call = None if named is None else {str(name): float(v) for name, v in named.items()}
    return Reward(value=value, per_turn=per_turn, by_call=by_call, metrics=metrics_of(record))


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """An input to roll out `n` times.

    `payload` is what the agent receives (without `_rollout`); `overrides` go into its `_rollout` block. `group` is a key that
    groups share if trainers ask for the rollouts of one input one by one. None: the rollouts are compared with each other.
    `places` are the `n` indexes of the rollouts in their group, if they are not the first ones.
    Raises: ConfigError, ContractError.
    """

    input_id: str
    payload: Mapping[str, Any]
    n: int = 1
    sampling_params: Mapping[str, Any] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None
    places: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_id(self.input_id, "input_id")
        if self.n < 1:
            raise ConfigError(f"a group needs at least one rollout, got n={self.n} for input {self.input_id!r}")


@dataclass(frozen=True, kw_only=True)
class CollectedRollout:
    """A rollout after its end, also a failed one.

    `reward` is None when there is none; `trajectory` is None without a gateway or when its turns could not be put
    together; `error` is the exception of any outcome but `ok` (of an agent that raised it carries the traceback);
    `stage` says where a timeout struck; `mask_reason` is None exactly when the rollout may be trained on. `cause` is whose
    failure it is, None where it did not fail; `failure` what the policy failed at, where it is the cause. `attempt` is that of
    its last session, None when it was never submitted.
    `teacher_gaps` are the teacher's minus the student's logprobs of a sequence's response, by its index; 0 where none is trained.
    `judge_score` is a part of `reward`.
    Units: `elapsed_s` seconds from submission to the end, None when it was never submitted; `ended_s` unix time; `stages` seconds
    in each stage.
    """

    session_id: str
    input_id: str
    index: int
    attempt: int | None = None
    outcome: Outcome
    cause: Cause | None = None
    failure: str | None = None
    reward: float | None = None
    reward_detail: Reward | None = None
    record: Mapping[str, Any] | None = field(default=None, repr=False)
    # Megabytes each: a traceback that prints a rollout must not contain them.
    trajectory: Trajectory | None = field(default=None, repr=False)
    capture: SessionCapture | None = field(default=None, repr=False)
    error: BaseException | None = None
    stage: Stage | None = None
    elapsed_s: float | None = None
    ended_s: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    weight_version_min: int | None = None
    weight_version_max: int | None = None
    mask_reason: str | None = None
    teacher_gaps: Mapping[int, Sequence[float]] | None = field(default=None, repr=False)
    judge_score: JudgeScore | None = None

    @property
    def usable(self) -> bool:
        return self.mask_reason is None

    @property
    def score(self) -> float | None:
        """The value in an evaluation: the reward, 0 if agent or policy failed, None if it is unknown.

        It is unknown after a failure of the infrastructure, and for an agent that returned no reward.
        """
        if self.outcome is Outcome.OK:
            return self.reward
        return 0.0 if self.cause in (Cause.AGENT, Cause.POLICY) and self.mask_reason != "no_reward" else None

    def within(self, max_tokens: int | None, sequences: int | None = None) -> CollectedRollout:
        """Return the rollout, masked if a training sequence is longer than ``max_tokens``.

        If the trainer takes only the ``sequences`` with the most trained tokens, only their lengths count.
        """
        trained = [s for s in self.trajectory.sequences if s.trained_tokens] if self.trajectory else []
        taken = sorted(trained, key=lambda s: -s.trained_tokens)[:sequences]
        longest = max((len(s.token_ids) for s in taken), default=0)
        fits = max_tokens is None or longest <= max_tokens
        return self if fits else replace(self, mask_reason=self.mask_reason or "too_long")

    @property
    def reason(self) -> str | None:
        """The failure on one line; None without one."""
        return None if self.error is None else error_line(self.error)

    @property
    def traceback(self) -> str | None:
        """The scorer's traceback if the scorer failed. Otherwise the agent's, from its record or from the error."""
        if self.cause is Cause.SCORER and self.error is not None and self.error.__cause__ is not None:
            return "".join(traceback.format_exception(self.error.__cause__))
        found = (self.record or {}).get("traceback") or getattr(self.error, "agent_traceback", None)
        return str(found) if found else None


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rollouts of one `input_id`, in submission order, and the counts of `judge_group`."""

    input_id: str
    rollouts: list[CollectedRollout]
    request: GroupRequest
    judge_usage: Mapping[str, float] = field(default_factory=dict)

    @property
    def usable(self) -> list[CollectedRollout]:
        return [r for r in self.rollouts if r.usable]

    def chosen(self, n: int) -> list[CollectedRollout]:
        """Return at most n rollouts in submission order. Masked ones are left out before usable ones."""
        return sorted(sorted(self.rollouts, key=lambda r: not r.usable)[:n], key=lambda r: r.index)

    def within(self, max_tokens: int | None, sequences: int | None = None) -> Group:
        """Return the group with longer rollouts masked (`CollectedRollout.within`)."""
        return replace(self, rollouts=[rollout.within(max_tokens, sequences) for rollout in self.rollouts])

    @property
    def rewards(self) -> list[float | None]:
        """Shapes: (G,). None for every masked rollout, ready for `advantages`."""
        return [r.reward if r.usable else None for r in self.rollouts]


@dataclass(kw_only=True)
class UsableSteps:
    """Ends a run that cannot learn: no usable rollout in its first step, or in `limit` steps in a row.

    `begun` is for a resumed run: an earlier step had a usable rollout.
    """

    limit: int = 3
    begun: bool = False
    unusable: int = field(default=0, init=False)  # steps in a row

    def check(self, groups: Sequence[Group], *, left_out: str | None = None) -> None:
        """Count a step. ``left_out`` is why the trainer used none of its usable rollouts.

        Raises: RolloutError with the most frequent reason and its first case.
        """
        every = [rollout for group in groups for rollout in group.rollouts]
        if not every:
            return
        usable = any(rollout.usable for rollout in every)
        self.begun |= usable
        self.unusable = 0 if usable and left_out is None else self.unusable + 1
        if self.begun and self.unusable < self.limit:
            return
        reasons = [f"{r.outcome}: {r.reason or r.mask_reason or left_out}" for r in every]
        reason, times = Counter(reasons).most_common(1)[0]
        first = every[reasons.index(reason)]
        text = f"none of the first {len(every)} rollouts can be used; {times} of them: {reason}"
        if self.begun:
            text = f"no rollout of the last {self.unusable} steps can be used; {times} of {len(every)} in the last one: {reason}"
        raise RolloutError(f"{text}\n{first.traceback or ''}".strip(), session_id=first.session_id) from first.error


@dataclass(frozen=True, kw_only=True)
class CollectStats:
    """Counts over a collection, for logs and progress.

    `reward_mean` is over the usable rollouts, which are trained on. The two means of an evaluation are `score_mean`, over the
    `scored` ones, where failures of agent and policy count as 0 and those of the infrastructure do not count, and `ok_mean`,
    over the `rewarded` ones, which ended `ok`; both are means over groups. Means of nothing are None. `causes` counts failures
    by whose they are, `policy_failures` the policy's by what it failed at. `metrics` are the means, over the usable rollouts
    that have them, of the numbers that agents returned along with the reward. `side_call_tokens` were sampled and, by the
    sessions' rules, not meant to be trained; `other_sampling` are tokens that were sampled otherwise than the trainer
    reproduces, by how (`FidelityReport`). `judge` is the sum of the groups' `judge_usage`.
    """

    groups: int
    rollouts: int
    usable: int
    outcomes: Mapping[str, int]
    masked: Mapping[str, int]
    reward_mean: float | None
    trained_tokens: int
    turns: int
    sequences: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    causes: Mapping[str, int] = field(default_factory=dict)
    policy_failures: Mapping[str, int] = field(default_factory=dict)
    scored: int = 0
    score_mean: float | None = None
    rewarded: int = 0
    ok_mean: float | None = None
    side_call_tokens: int = 0
    other_sampling: Mapping[str, int] = field(default_factory=dict)
    judge: Mapping[str, float] = field(default_factory=dict)

    @property
    def lost_rollouts(self) -> int:
        """Rollouts that ended in anything but `ok`, a failure of the policy or a deliberate cancellation."""
        wanted = (Outcome.OK, Outcome.CANCELLED)
        failed = sum(n for name, n in self.outcomes.items() if name not in wanted)
        return failed - self.causes.get(Cause.POLICY, 0)

    def evaluation(self) -> dict[str, Any]:
        """Return both means with their counts, and the outcomes, under the names of reports."""
        return {
            "reward": self.score_mean,
            "scored": self.scored,
            "reward_ok": self.ok_mean,
            "ok": self.rewarded,
            "outcomes": dict(self.outcomes),
            "causes": dict(self.causes),
            "policy_failures": dict(self.policy_failures),
            "metrics": dict(self.metrics),
            **({"judge": dict(self.judge)} if self.judge else {}),
        }


def summarize(groups: Sequence[Group]) -> CollectStats:
    rollouts = [r for g in groups for r in g.rollouts]
    usable = [r for r in rollouts if r.usable]
    rewards = [r.reward for r in usable if r.reward is not None]
    scores = [[r.score for r in g.rollouts if r.score is not None] for g in groups]
    ok = [[r.reward for r in g.rollouts if r.outcome is Outcome.OK and r.reward is not None] for g in groups]
    reports = [r.trajectory.report for r in usable if r.trajectory is not None]
    return CollectStats(
        groups=len(groups),
        rollouts=len(rollouts),
        usable=len(usable),
        outcomes=dict(Counter(r.outcome.value for r in rollouts)),
        masked=dict(Counter(r.mask_reason for r in rollouts if r.mask_reason is not None)),
        reward_mean=math.fsum(rewards) / len(rewards) if rewards else None,
        trained_tokens=sum(r.trained_tokens for r in reports),
        turns=sum(r.turns for r in reports),
        sequences=sum(r.sequences for r in reports),
        metrics=mean_metrics(r.reward_detail.metrics for r in usable if r.reward_detail is not None),
        causes=dict(Counter(r.cause.value for r in rollouts if r.cause is not None)),
        policy_failures=dict(Counter(r.failure for r in rollouts if r.failure is not None)),
        scored=sum(map(len, scores)),
        score_mean=mean_over_inputs(scores),
        rewarded=sum(map(len, ok)),
        ok_mean=mean_over_inputs(ok),
        side_call_tokens=sum(r.side_call_tokens for r in reports),
        other_sampling=dict(sum((Counter(r.other_sampling) for r in reports), Counter())),
        judge=dict(sum((Counter(g.judge_usage) for g in groups), Counter())),
    )


def sampling_note(trained_tokens: int, other_sampling: Mapping[str, int]) -> str:
    """Return a warning about tokens whose sampling the trainer does not reproduce."""
    parts = []
    for how, tokens in sorted(other_sampling.items(), key=lambda item: -item[1]):
        if how.startswith(CUTS):
            share = tokens / max(1, trained_tokens)
            parts.append(f"{share:.0%} of the trained tokens were sampled at {how}: their ratios are wrong")
        else:
            parts.append(f"{tokens} tokens were sampled at {how} and are not trained")
    return "; ".join(parts)
