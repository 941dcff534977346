"""Rollouts -> rLLM's `Episode` shape, as plain dicts. Needs no rLLM.

Field names as of rLLM git 9beb6e0 (`rllm.types`). rLLM merges steps whose prompt extends what came before into one
row, and gives all rows of a trajectory its reward. Each training sequence becomes one trajectory here, whose steps
are its trained spans, so that rLLM's own merge rebuilds exactly our sequence. A masked rollout gives an episode
without trajectories, which rLLM drops from the batch; its own AgentCore engine would keep it with reward 0.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..collection.advantages import Estimator
from ..collection.credit import Credit
from ..collection.experts import routed_experts
from ..collection.groups import CollectedRollout, Group
from ..collection.samples import EPISODE, Sample, rollout_samples, to_samples

TRAJECTORY_NAME = "default"


def groups_to_rllm(
    groups: Sequence[Group],
    *,
    estimator: Estimator = "grpo",
    credit: Credit = EPISODE,
    expert_shape: tuple[int, int] | None = None,
) -> list[dict[str, Any]]:
    """All rollouts as keyword arguments of `rllm.types.Episode`, with the advantages that every other backend trains with.

    Set ``rllm.algorithm.use_precomputed_advantage=true``: rLLM then takes them as they are. Its own GRPO divides by the
    population's spread (ours, slime's and verl's: the sample's), and would count each branch of a forked rollout as a rollout.
    The task is the request's metadata. Raises: as `to_rllm`; ConfigError on an unknown estimator.
    """
    samples = to_samples(groups, estimator=estimator, credit=credit)
    known = {(s.session_id, s.sequence_index): s.advantages for s in samples}
    return [
        to_rllm(rollout, group.request.metadata, advantages=known, expert_shape=expert_shape)
        for group in groups
        for rollout in group.rollouts
    ]


def to_rllm(
    rollout: CollectedRollout,
    task: Any = None,
    *,
    advantages: Mapping[tuple[str, int], list[float]] | None = None,
    expert_shape: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of `rllm.types.Episode`, with nested ones of `Trajectory` and `Step`.

    Without `advantages` (see `groups_to_rllm`) rLLM computes its own from the rewards.
    Raises: CaptureError when expert routing does not fit `expert_shape` (layers, top k).
    """
    samples = rollout_samples(rollout, advantages)
    return {
        "id": f"{rollout.input_id}:{rollout.index}",
        "task": task,
        "trajectories": [_trajectory(s, task, expert_shape) for s in samples],
        "metrics": dict(samples[0].metrics) if samples else {},
        "metadata": {
            "session_id": rollout.session_id,
            "outcome": rollout.outcome.value,
            "cause": None if rollout.cause is None else rollout.cause.value,
            "failure": rollout.failure,
            "mask_reason": rollout.mask_reason,
        },
    }


def _trajectory(sample: Sample, task: Any, expert_shape: tuple[int, int] | None) -> dict[str, Any]:
    tokens, start = sample.token_ids, len(sample.prompt_ids)
    steps = []
    for begin, end in trained_spans(sample.response_mask):
        steps.append(
            {
                "prompt_ids": tokens[: start + begin],
                "response_ids": tokens[start + begin : start + end],
                "logprobs": sample.response_logprobs[begin:end],  # trained tokens have one each
                "weight_version": sample.weight_versions[begin],
            }
            | ({"advantage": sample.advantages[begin:end]} if sample.advantages else {})
        )
    if expert_shape is not None and sample.routed_experts:
        # Routing covers the whole row, so it belongs to the last step; rLLM reads it there.
        experts = routed_experts(sample, layers=expert_shape[0], top_k=expert_shape[1])
        if experts is not None:
            header = json.dumps({"shape": list(expert_shape), "dtype": "int32"})
            steps[-1]["routing_matrices"] = [header, base64.b64encode(experts.tobytes()).decode()]
    return {
        "uid": f"{sample.session_id}-{sample.sequence_index}",
        "name": TRAJECTORY_NAME,
        "task": task,
        "reward": sample.reward,
        "steps": steps,
        "signals": dict(sample.metrics),
        "metadata": {"branch": sample.sequence_index, "branches": sample.sequences, "weight": sample.weight},
    }


def trained_spans(mask: list[int]) -> list[tuple[int, int]]:
    """[begin, end) of every run of ones in a mask."""
    # bytes.find runs at C speed; a Python loop over 10,000 tokens costs a millisecond.
    marks = bytes(mask)
    spans = []
    begin = marks.find(1)
    while begin >= 0:
        end = marks.find(0, begin)
        end = len(marks) if end < 0 else end
        spans.append((begin, end))
        begin = marks.find(1, end)
    return spans
