"""Reads verl's numbers of our rows: whether the weights arrived, and values for the run's folder.

V1 keeps the values of a row in TransferQueue. It writes its own logprobs and entropy there before the first update of
a step, and removes all of a row when its step is over. Both happen in the trainer's process, which is the manager's as well.
verl has no hook for either, so TransferQueue's `kv_batch_put` and `kv_clear` and verl's `Tracking.log` are wrapped.

verl moves the weights itself. When it writes its own logprobs, they are compared with the engine's, which shows whether the
weights arrived. A run that ends there has made no update from the step.
"""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._installation import missing_extra
from ...errors import WeightsError
from ...weights import check_arrived
from ...weights.arrival import MAX_MEAN_GAP
from ..collection.recording import FILTERED, Recording, gaps_of, of_sampled, step_numbers

try:
    import transfer_queue as tq
    from verl.utils.tracking import Tracking
except ModuleNotFoundError as e:
    raise missing_extra(f"the verl backend needs {e.name!r}", "verl") from e

log = logging.getLogger(__name__)

MASK, ADVANTAGES, LOGPROBS, ENTROPY = "response_mask", "advantages", "old_log_probs", "entropy"
GAP = "agentcore/logprob_gap_mean"  # TRL's runs have the same name


@dataclass(frozen=True, slots=True)
class Row:
    """The training sequence of a row, and the sampled part of its response.

    ``version`` is the version of the weights that sampled its oldest token, None if the engine does not report it.
    Shapes: (T,) of the response, for ``mask`` and ``logprobs``; a token that was not sampled has logprob 0.
    """

    session_id: str
    sequence: int
    prompt_tokens: int
    mask: Sequence[int] = field(repr=False)
    logprobs: Sequence[float] = field(repr=False)
    version: int | None = None


class TrainerNumbers:
    """Ends a run if the weights did not arrive at the engine, and adds the trainer's numbers to its folder.

    ``own_logprobs`` is False if the trainer uses the sampler's logprobs: then there is nothing to compare. ``max_mean_gap``
    limits the mean difference, None without a limit. Units: nats.
    """

    def __init__(self, recording: Recording, *, own_logprobs: bool, max_mean_gap: float | None = MAX_MEAN_GAP) -> None:
        self._recording = recording
        self._max_mean_gap = max_mean_gap
        self._gap_sum, self._tokens = 0.0, 0  # sums over the current step
        self._rows: dict[str, Row] = {}
        if own_logprobs:
            before(tq, "kv_batch_put", self.put)
        before(tq, "kv_clear", self.clearing)
        before(Tracking, "log", self.logged)

    def wrote(self, key: str, output: Mapping[str, Any]) -> None:
        """Keep the facts of an output of `to_verl` that goes into the queue."""
        fields = output["extra_fields"]
        self._rows[key] = Row(
            fields["agentcore_session"],
            fields["agentcore_branch"],
            len(output["prompt_ids"]),
            bytes(output["response_mask"]),
            array("f", output["response_logprobs"]),
            fields["min_global_steps"],
        )

    def left_out(self, session_id: str, reason: str) -> None:
        self._recording.run.annotate(session_id, mask_reason=reason)

    def put(self, keys: Sequence[str], partition_id: str, fields: Any = None, *rest: Any, **more: Any) -> None:
        """Put rows into the queue: those with logprobs are the trainer's own."""
        if fields is not None and LOGPROBS in (names := set(fields.keys())):
            self.computed(keys, {name: fields[name] for name in (LOGPROBS, ENTROPY) if name in names})

    def computed(self, keys: Sequence[str], fields: Mapping[str, Any]) -> None:
        """Record the trainer's own logprobs and entropies of these rows, before any update with them.

        Raises: WeightsError, which ends the run, if its logprobs and the recorded ones are of different weights.
        """
        rows = [(i, row) for i, key in enumerate(keys) if (row := self._rows.get(key)) is not None]
        # In asynchronous modes, older rows differ because verl has learned since, not because weights were lost.
        newest = max((row.version for _, row in rows if row.version is not None), default=None)
        gap_sum, tokens = 0.0, 0
        for i, row in rows:
            values = {name: fields[name][i].tolist() for name in (LOGPROBS, ENTROPY) if name in fields}
            own = {name: of_sampled(found, row.mask, row.prompt_tokens) for name, found in values.items()}
            logprobs, entropies = own.get(LOGPROBS), own.get(ENTROPY)
            self._recording.trained(row.session_id, row.sequence, logprobs=logprobs, entropies=entropies, updates=0)
            if row.version == newest:  # also tokens that verl's rollout correction will reject: they differ most
                gaps = gaps_of(values[LOGPROBS], row.logprobs, row.mask)
                gap_sum, tokens = gap_sum + sum(gaps), tokens + len(gaps)
        self._gap_sum, self._tokens = self._gap_sum + gap_sum, self._tokens + tokens
        try:
            check_arrived(gap_sum, tokens, newest, self._max_mean_gap)
        except WeightsError:
            self._recording.run.flush()  # nothing comes after this
            raise

    def clearing(self, keys: list[str] | str, partition_id: str) -> None:
        """Read the advantages of these rows, which the trainer is about to remove."""
        keys = [keys] if isinstance(keys, str) else keys
        rows = {key: row for key in keys if (row := self._rows.pop(key, None)) is not None}
        if not rows:
            return
        try:
            data = tq.kv_batch_get(keys=list(rows), partition_id=partition_id, select_fields=[MASK, ADVANTAGES])
            if ADVANTAGES not in set(data.keys()):  # dropped before training
                for session_id in {row.session_id for row in rows.values()}:
                    self.left_out(session_id, FILTERED)
                return
            for i, row in enumerate(rows.values()):
                # The queue's mask, which lacks the tokens that verl's rollout correction rejected: their advantage is 0.
                each = zip(data[ADVANTAGES][i].tolist(), data[MASK][i].tolist(), strict=True)
                advantages = {value for value, kept in each if kept}
                if len(advantages) == 1:  # otherwise each token has its own, and the rollout none
                    self._recording.run.annotate(row.session_id, advantage=advantages.pop())
        except Exception:  # training continues without its record
            log.warning("verl's numbers of %d rows were not kept", len(rows), exc_info=True)

    def logged(self, tracking: Any, data: Mapping[str, Any], step: Any, *rest: Any, **more: Any) -> None:
        """Add verl's log of a step, with its seconds of waiting and of training, or of a validation."""
        found = step_numbers(data)
        waited, whole = found.get("timing_s/gen"), found.get("timing_s/step")
        if waited is not None and whole is not None:
            found |= {"rollout_s": waited, "train_s": max(0.0, whole - waited)}
        if whole is not None:
            if self._tokens:
                found[GAP] = self._gap_sum / self._tokens
            self._gap_sum, self._tokens = 0.0, 0
        self._recording.run.event("evaluated" if whole is None else "step", {"step": int(step), **found})


def before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Call ``look`` with the arguments of each call of ``owner.name`` in this process, ahead of it."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def called(*given: Any, **more: Any) -> Any:
        look(*given, **more)
        return call(*given, **more)

    setattr(owner, name, called)
