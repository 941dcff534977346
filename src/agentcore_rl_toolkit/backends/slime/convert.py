"""Rollouts -> slime `Sample` objects. Needs no slime: it fills objects of the caller's class.

Field names and meanings as of slime 0.3.1 (git 624b824): `tokens` are prompt and response,
`loss_mask` and `rollout_log_probs` cover the last `response_length` of them; samples with the same `rollout_id` are
averaged as one rollout; `remove_sample` clears the loss mask of a sample while its group keeps its size.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ...errors import CaptureError
from ..collection.credit import Credit
from ..collection.experts import routed_experts
from ..collection.groups import CollectedRollout
from ..collection.samples import Sample, rollout_samples, signals_of

log = logging.getLogger(__name__)

NOTE = "_agentcore"  # key in Sample.metadata for outcome, session and metrics; payloads must not have it
METRICS = "agentcore"  # prefix of slime's logs


class Fork(list[Any]):
    """The samples of one forked rollout: a list, as slime takes several samples, with the attributes of one sample.

    slime 0.3.1 puts groups of an aborted step back into its buffer (``--partial-rollout``, fully asynchronous
    rollouts) and reads and writes attributes of a sample on every member, also if it is a list. A written attribute
    is set on all samples. A finished fork leaves the buffer unchanged.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle reads them from an empty fork
            raise AttributeError(name)
        return getattr(self[0], name)

    @property
    def index(self) -> Any:
        return self[0].index

    @property
    def response_length(self) -> int:
        return sum(s.response_length for s in self)

    @property
    def loss_mask(self) -> list[int]:
        return [m for s in self for m in s.loss_mask]

    @loss_mask.setter
    def loss_mask(self, mask: list[int]) -> None:
        # slime masks old tokens of a partial rollout by one list over all of them.
        start = 0
        for sample in self:
            sample.loss_mask = mask[start : start + sample.response_length]
            start += sample.response_length


def to_slime(rollout: CollectedRollout, base: Any, *, args: Any = None, filler_id: int = 0) -> list[Any]:
    """Return one slime sample per training sequence of the rollout, based on `base`, the sample that slime asked to fill.

    A masked rollout gives one filler sample: two tokens, loss mask 0, `remove_sample` set, status FAILED, and reward
    0.0, because slime calls its reward model for None. This number is not in the group's statistics:
    `hooks.normalize_rewards` leaves removed samples out. A rollout with a sample of more than `args.max_tokens` is masked. With
    `args.use_rollout_routing_replay` every sample carries expert routing, because slime stacks a batch's; a rollout without it,
    or with routing that does not fit the model, is masked.
    """
    rollout = rollout.within(getattr(args, "max_tokens", None))
    samples = rollout_samples(rollout)  # slime computes the advantages from the processed rewards
    if not samples:
        return [_filler(rollout, base, args, filler_id, str(rollout.error) if rollout.error else None)]
    try:
        made = [_filled(rollout, sample, base, args) for sample in samples]
    except CaptureError as e:
        log.warning("rollout %s cannot be replayed: %s", rollout.session_id, e)
        return [_filler(rollout, base, args, filler_id, str(e))]
    credit = credit_of(args)
    signals = signals_of(rollout, credit) if credit.per_token else {}
    for sample in made if signals else ():
        sample.metadata[NOTE]["signal"] = asdict(signals[sample.metadata[NOTE]["branch"]])
    return made


def credit_of(args: Any) -> Credit:
    return Credit(**{name: v for name in Credit.model_fields if (v := getattr(args, name, None)) is not None})


def flat(samples: Any) -> Iterator[Any]:
    """Yield the samples of slime's nested lists: groups, and forked rollouts in them."""
    if isinstance(samples, list):
        for part in samples:
            yield from flat(part)
    else:
        yield samples


def joined(samples: list[Any]) -> Any:
    return samples[0] if len(samples) == 1 else Fork(samples)


def _filled(rollout: CollectedRollout, sample: Sample, base: Any, args: Any) -> Any:
    made = _copy(base)
    status = type(base).Status
    made.tokens = sample.token_ids
    made.response_length = len(sample.response_ids)
    made.response = final_text(rollout)
    made.loss_mask = list(sample.response_mask)
    made.rollout_log_probs = [0.0 if lp is None else lp for lp in sample.response_logprobs]
    made.reward = sample.reward
    made.weight_versions = sorted({str(v) for v in sample.weight_versions if v is not None}, key=int)
    made.status = status.TRUNCATED if sample.truncated else status.COMPLETED
    made.remove_sample = False
    if _replays(args):
        experts = routed_experts(sample, layers=args.num_layers, top_k=args.moe_router_topk)
        if experts is None:
            raise CaptureError("the engine returned no expert routing", session_id=rollout.session_id)
        import numpy as np  # slime makes a tensor of its array without reading every number: a long episode has millions

        made.rollout_routed_experts = np.array(experts)
    _annotate(made, rollout, base, turns=sample.turns, branch=sample.sequence_index, branches=sample.sequences)
    return made


def _filler(rollout: CollectedRollout, base: Any, args: Any, filler_id: int, error: str | None) -> Any:
    made = _copy(base)
    made.tokens = [filler_id, filler_id]
    made.response_length = 1
    made.response = ""
    made.loss_mask = [0]
    made.rollout_log_probs = [0.0]
    made.reward = 0.0
    made.status = type(base).Status.FAILED
    made.remove_sample = True
    if _replays(args):
        # slime refuses routing that is all zero in a layer. The token is masked, so any other routing will do.
        made.rollout_routed_experts = [[list(range(args.moe_router_topk)) for _ in range(args.num_layers)]]
    _annotate(made, rollout, base, error=error)
    return made


def _replays(args: Any) -> bool:
    return bool(getattr(args, "use_rollout_routing_replay", False))


def _copy(base: Any) -> Any:
    """Copy a sample with separate lists, and without the results of an earlier attempt."""
    made = copy.copy(base)
    made.metadata = dict(base.metadata or {})
    made.weight_versions = []
    made.rollout_routed_experts = None
    return made


def _annotate(made: Any, rollout: CollectedRollout, base: Any, **facts: Any) -> None:
    # Siblings must share an id so that a forked episode counts once; slime falls back to the sample's own index.
    made.rollout_id = base.rollout_id if base.rollout_id is not None else base.index
    made.session_id = rollout.session_id
    metrics = dict(rollout.reward_detail.metrics) if rollout.reward_detail is not None else {}
    made.metadata[NOTE] = {
        "session_id": rollout.session_id,
        "outcome": rollout.outcome.value,
        "cause": None if rollout.cause is None else rollout.cause.value,
        "failure": rollout.failure,
        "score": rollout.score,
        "mask_reason": rollout.mask_reason,
        "elapsed_s": rollout.elapsed_s,
        "metrics": metrics,
        **facts,
    }


def final_text(rollout: CollectedRollout) -> str:
    """Return the model's last text for slime's logs, or "" if the gateway kept no dialogue."""
    dialogue: Sequence[Any] = getattr(rollout.capture, "dialogue", None) or ()
    for message in reversed(dialogue):
        if message.get("role") == "assistant" and isinstance(message.get("content"), str):
            return str(message["content"])
    return ""
