"""Rollouts -> the output of verl's AgentLoop. Needs no verl.

Field names and meanings as of verl 0.9.1. One `AgentLoopOutput` per training sequence; the V1 trainer writes each as
a row `{uid}_{session}_{index}`, computes the group advantage from the last row of every session and gives it to the
others. A masked rollout returns no rows at all: V1 then has no row of that session, so neither the loss nor the
group's mean sees it.
"""

from __future__ import annotations

import math
from typing import Any

from ..collection.experts import routed_experts
from ..collection.groups import CollectedRollout
from ..collection.samples import Sample, rollout_samples


def to_verl(
    rollout: CollectedRollout,
    *,
    prompt_length: float = math.inf,
    response_length: float = math.inf,
    expert_shape: tuple[int, int] | None = None,
    step: Any = None,
) -> list[dict[str, Any]]:
    """Return arguments of `AgentLoopOutput`, one dict per training sequence, none for a masked rollout.

    The sequence with the most trained tokens comes last, because V1 takes metrics of a session from its last row.
    A usable rollout with a sequence longer than `prompt_length` or `response_length` allows gives nothing:
    cutting it, or training only its other branches, would give the reward to a part of the work. `expert_shape`
    is (layers, top k) of the model, needed for expert routing. An unknown weight version is that of the requesting `step`, which
    is one less than its number and never newer than the real one.
    Raises: CaptureError when expert routing does not fit.
    """
    samples = rollout_samples(rollout)  # verl computes the advantages
    if any(len(s.prompt_ids) > prompt_length or len(s.response_ids) > response_length for s in samples):
        return []
    samples.sort(key=lambda s: s.trained_tokens)  # stable: equal ones keep their branch order
    return [_output(rollout, s, expert_shape, step) for s in samples]


def _output(
    rollout: CollectedRollout, sample: Sample, expert_shape: tuple[int, int] | None, step: Any
) -> dict[str, Any]:
    versions = sample.version_range
    if versions is None and step is not None:
        versions = (max(0, int(step) - 1),) * 2
    experts = None
    if expert_shape is not None and sample.routed_experts:
        experts = routed_experts(sample, layers=expert_shape[0], top_k=expert_shape[1])
    output: dict[str, Any] = {
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "response_mask": sample.response_mask,
        "response_logprobs": [0.0 if lp is None else lp for lp in sample.response_logprobs],
        "reward_score": sample.reward,
        "num_turns": sample.turns,
        "metrics": {},
        "extra_fields": {
            "reward_extra_info": dict(sample.metrics),
            "min_global_steps": versions[0] if versions else None,
            "max_global_steps": versions[1] if versions else None,
            "agentcore_session": rollout.session_id,
            "agentcore_branch": sample.sequence_index,
        },
    }
    if experts is not None:
        output["routed_experts"] = experts.tolist()
    return output
