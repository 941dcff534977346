"""Publishes new weights and proves them: sampler and trainer agree on the logprobs of the same tokens.

A service names weights by a path and swaps them by itself, so the folder of other engines is a path here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ...weights.publishing import PROBE_ANSWER_TOKENS, PROBE_ANSWERS, PROBE_PROMPT_TOKENS, check_gap
from .client import TrainingClient

MAX_GAP = 0.05  # services compute in bfloat16; weights of one step ago differ by more in what was trained on
Publish = Callable[[str, int], Awaitable[None]]


def to_gateway(gateway: Any, training: TrainingClient, *, max_gap: float = MAX_GAP) -> Publish:
    """Let a gateway (`GatewayClient`) sample new weights, then prove them.

    The gateway samples from them once this returns, and records their version with each turn. Calls that run at that moment
    end on the old weights, and are recorded so. Raises: WeightsError.
    """

    async def publish(path: str, version: int) -> None:
        await gateway.set_weight_version_async(version, sampler=path)
        check_gap(await gap(training, path), version, f"{training.service} as {path}", max_gap)

    return publish


async def gap(training: TrainingClient, path: str) -> float:
    """Largest difference between the logprobs of sampled tokens and those of the weights in training. Units: nats."""
    prompt = list(range(1, PROBE_PROMPT_TOKENS + 1))  # ids that any vocabulary has
    answers = await training.sample(path, prompt, n=PROBE_ANSWERS, max_tokens=PROBE_ANSWER_TOKENS)
    computed = await training.compute_logprobs([[*prompt, *answer.ids] for answer in answers])
    found = 0.0
    for answer, logprobs in zip(answers, computed, strict=True):
        own = logprobs[len(prompt) - 1 :]
        found = max([found, *(abs(a - b) for a, b in zip(answer.logprobs, own, strict=True))])
    return found
