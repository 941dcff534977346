"""What verl's trainer makes of our rows, into the run's folder: advantages, its own logprobs, entropy, a step's log.

V1 keeps the former in TransferQueue beside the rows and removes all of it when a step is over. They are read right before
that, in the trainer's process, which is the manager's as well. verl has no hook for either, so TransferQueue's `kv_clear`
and verl's `Tracking.log` are wrapped.

verl moves the weights itself. Whether they arrived is checked here, when a step is over: its own logprobs of the step, computed
before its first update, are compared with those that the engine sampled with.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._installation import missing_extra
from ...weights import check_arrived
from ...weights.arrival import MAX_MEAN_GAP
from ..collection.recording import FILTERED, Recording, step_numbers

try:
    import transfer_queue as tq
    from verl.utils.tracking import Tracking
except ModuleNotFoundError as e:
    raise missing_extra(f"the verl backend needs {e.name!r}", "verl") from e

log = logging.getLogger(__name__)

MASK, ADVANTAGES, LOGPROBS, ENTROPY = "response_mask", "advantages", "old_log_probs", "entropy"
SAMPLED = "rollout_log_probs"
GAP = "agentcore/logprob_gap_mean"  # TRL's runs have the same name


@dataclass(frozen=True, slots=True)
class Row:
    """Which training sequence a row holds, and which tokens of its response were sampled.

    ``version`` is that of the weights which sampled its oldest token, None where the engine does not say.
    """

    session_id: str
    sequence: int
    prompt_tokens: int
    mask: Sequence[int] = field(repr=False)
    version: int | None = None


class TrainerNumbers:
    """Adds to a run what the trainer computed, and ends it where the weights did not arrive at the engine.

    ``own_logprobs`` is False where the trainer takes the sampler's for its own: then there is nothing to compare.
    ``max_mean_gap`` is by how much both may differ on average, None without a limit. Units: nats.
    """

    def __init__(self, recording: Recording, *, own_logprobs: bool, max_mean_gap: float | None = MAX_MEAN_GAP) -> None:
        self._recording = recording
        self._max_mean_gap = max_mean_gap
        self._gap: float | None = None  # of the step that ends
        self._wanted = [MASK, ADVANTAGES, *((LOGPROBS, ENTROPY, SAMPLED) if own_logprobs else ())]
        self._rows: dict[str, Row] = {}
        before_clear(self.clearing)
        before_log(self.logged)

    def wrote(self, key: str, output: Mapping[str, Any]) -> None:
        """A row of this output, as `to_verl` gives it, goes into the queue."""
        fields = output["extra_fields"]
        self._rows[key] = Row(
            fields["agentcore_session"],
            fields["agentcore_branch"],
            len(output["prompt_ids"]),
            bytes(output["response_mask"]),
            fields["min_global_steps"],
        )

    def left_out(self, session_id: str, reason: str) -> None:
        """A rollout that could have been trained, and is not."""
        self._recording.run.annotate(session_id, mask_reason=reason)

    def clearing(self, keys: Iterable[str], partition: str) -> None:
        """Read what there is of these rows, which the trainer is about to remove.

        Raises: WeightsError, which ends the run, where verl's logprobs and the recorded ones are of different weights.
        """
        rows = {key: row for key in keys if (row := self._rows.pop(key, None)) is not None}
        if not rows:
            return
        gap_sum, tokens = 0.0, 0
        # In asynchronous modes older rows differ by what verl has learnt since, and not by weights that were lost.
        newest = max((row.version for row in rows.values() if row.version is not None), default=None)
        try:
            data = tq.kv_batch_get(keys=list(rows), partition_id=partition, select_fields=self._wanted)
            names = set(data.keys())
            if ADVANTAGES not in names:  # dropped before it was trained on
                for session_id in {row.session_id for row in rows.values()}:
                    self.left_out(session_id, FILTERED)
                return
            for i, row in enumerate(rows.values()):
                values = {name: data[name][i].tolist() for name in self._wanted if name in names}
                self._add(row, values)
                if row.version == newest:
                    gaps = gaps_of(row, values)
                    gap_sum, tokens = gap_sum + sum(gaps), tokens + len(gaps)
        except Exception:  # a training goes on without its record
            log.warning("what verl computed of %d rows was not kept", len(rows), exc_info=True)
        self._gap = check_arrived(gap_sum, tokens, newest, self._max_mean_gap)

    def logged(self, data: Mapping[str, Any], step: int) -> None:
        """Add what verl logs: of a step, with the seconds it waited for rollouts and those it trained, or of a validation."""
        found = step_numbers(data)
        waited, whole = found.get("timing_s/gen"), found.get("timing_s/step")
        if waited is not None and whole is not None:
            found |= {"rollout_s": waited, "train_s": max(0.0, whole - waited)}
        if whole is not None and self._gap is not None:
            found[GAP], self._gap = self._gap, None
        self._recording.run.event("evaluated" if whole is None else "step", {"step": step, **found})

    def _add(self, row: Row, values: Mapping[str, Sequence[float]]) -> None:
        # The queue's mask, which lacks the tokens that verl's rollout correction rejected: their advantage is 0.
        advantages = {value for value, kept in zip(values[ADVANTAGES], values[MASK], strict=True) if kept}
        if len(advantages) == 1:  # else each token has its own, and the rollout none
            self._recording.run.annotate(row.session_id, advantage=advantages.pop())

        def aligned(name: str) -> list[float | None] | None:
            if name not in values:
                return None
            sampled = (value if mine else None for value, mine in zip(values[name], row.mask, strict=True))
            return [*[None] * row.prompt_tokens, *sampled]

        logprobs, entropies = aligned(LOGPROBS), aligned(ENTROPY)
        if logprobs is not None or entropies is not None:
            self._recording.trained(row.session_id, row.sequence, logprobs=logprobs, entropies=entropies, updates=0)


def gaps_of(row: Row, values: Mapping[str, Sequence[float]]) -> list[float]:
    """By how much verl's own logprob and the recorded one differ, for each sampled token; none where one side is missing.

    Tokens that verl's rollout correction rejected are among them: it rejects those that differ most.
    """
    if LOGPROBS not in values or SAMPLED not in values:
        return []
    each = zip(values[LOGPROBS], values[SAMPLED], row.mask, strict=True)
    return [abs(own - recorded) for own, recorded, mine in each if mine]


def before_clear(look: Callable[[Iterable[str], str], None]) -> None:
    """Call ``look(keys, partition)`` before this process removes rows from the queue."""
    clear = tq.kv_clear

    @functools.wraps(clear)
    def kv_clear(keys: list[str] | str, partition_id: str) -> Any:
        look([keys] if isinstance(keys, str) else keys, partition_id)
        return clear(keys=keys, partition_id=partition_id)

    tq.kv_clear = kv_clear


def before_log(look: Callable[[Mapping[str, Any], int], None]) -> None:
    """Call ``look(data, step)`` with everything that verl logs in this process."""
    log_of = Tracking.log

    @functools.wraps(log_of)
    def log_step(tracking: Any, data: Any, step: Any, *rest: Any, **more: Any) -> Any:
        try:
            look(data, int(step))
        except Exception:  # a training goes on without its record
            log.warning("what verl logged of step %s was not kept", step, exc_info=True)
        return log_of(tracking, data, step, *rest, **more)

    Tracking.log = log_step
