"""Rollouts -> slime `Sample` objects. Needs no slime: it fills objects of the caller's class.

Field names and meanings as of slime 0.3.1 (git 624b824). What slime does with them: `tokens` are prompt and response,
`loss_mask` and `rollout_log_probs` cover the last `response_length` of them; samples with the same `rollout_id` are
averaged as one rollout; `remove_sample` clears the loss mask of a sample while its group keeps its size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from ..experts import routed_experts
from ..groups import CollectedRollout
from ..samples import Sample, rollout_samples

NOTE = "agentcore"  # key under Sample.metadata where outcome, session and metrics are kept


def to_slime(rollout: CollectedRollout, base: Any, *, args: Any = None, filler_id: int = 0) -> list[Any]:
    """One slime sample per training sequence of the rollout, made from `base`, the sample slime asked to fill.

    A masked rollout gives one filler sample: two tokens, loss mask 0, `remove_sample` set, status FAILED, and reward
    0.0 because slime would call its reward model for None. That number never reaches the group's statistics:
    `hooks.normalize_rewards` leaves removed samples out. `args` (slime's arguments) is needed for expert routing
    only.
    Raises: CaptureError when expert routing does not fit the model.
    """
    samples = rollout_samples(rollout, 0.0)  # slime computes the advantages from the processed rewards
    if not samples:
        return [_filler(rollout, base, filler_id)]
    return [_filled(rollout, sample, base, args) for sample in samples]


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
    if sample.routed_experts and args is not None and getattr(args, "use_rollout_routing_replay", False):
        experts = routed_experts(sample, layers=args.num_layers, top_k=args.moe_router_topk)
        made.rollout_routed_experts = experts.tolist() if experts is not None else None
    _annotate(made, rollout, base, turns=sample.turns, branch=sample.sequence_index, branches=sample.sequences)
    return made


def _filler(rollout: CollectedRollout, base: Any, filler_id: int) -> Any:
    made = _copy(base)
    made.tokens = [filler_id, filler_id]
    made.response_length = 1
    made.response = ""
    made.loss_mask = [0]
    made.rollout_log_probs = [0.0]
    made.reward = 0.0
    made.status = type(base).Status.FAILED
    made.remove_sample = True
    _annotate(made, rollout, base, error=str(rollout.error) if rollout.error else None)
    return made


def _copy(base: Any) -> Any:
    """A sibling of `base` whose lists are its own; a response left over from an aborted attempt is not carried along."""
    made = copy.copy(base)
    made.metadata = dict(base.metadata or {})
    made.weight_versions = []
    return made


def _annotate(made: Any, rollout: CollectedRollout, base: Any, **facts: Any) -> None:
    # Siblings must share an id so that a forked episode counts once; slime falls back to the sample's own index.
    made.rollout_id = base.rollout_id if base.rollout_id is not None else base.index
    made.session_id = rollout.session_id
    metrics = dict(rollout.reward_detail.metrics) if rollout.reward_detail is not None else {}
    made.metadata[NOTE] = {
        "session_id": rollout.session_id,
        "outcome": rollout.outcome.value,
        "mask_reason": rollout.mask_reason,
        "elapsed_s": rollout.elapsed_s,
        "metrics": metrics,
        **facts,
    }


def final_text(rollout: CollectedRollout) -> str:
    """The last thing the model said, for slime's logs; empty when the gateway kept no dialogue."""
    dialogue: Sequence[Any] = getattr(rollout.capture, "dialogue", None) or ()
    for message in reversed(dialogue):
        if message.get("role") == "assistant" and isinstance(message.get("content"), str):
            return str(message["content"])
    return ""
