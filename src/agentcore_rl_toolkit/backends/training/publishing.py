"""New weights at a training service: let agents sample from them, and prove that they do.

Each service has a path for weights: Tinker's ``tinker://`` path, or the ARN of a model package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...weights.engines import Sampled
from ...weights.publishing import PROBE_ANSWER_TOKENS, PROBE_ANSWERS, PROBE_PROMPT_TOKENS, Gap, check_gap

MAX_GAP = 0.05  # services compute in bfloat16; the last step's weights differ by more on trained tokens


class Sampler(Protocol):
    """The part of a training service that samples."""

    service: str

    async def save_weights(self, name: str) -> str:
        """Save the weights in training for sampling. Returns their path."""
        ...

    async def sample(self, path: str, prompt_ids: list[int], *, n: int, max_tokens: int) -> list[Sampled]: ...
    async def compute_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Return the logprobs of all tokens but the first, by the weights in training."""
        ...


async def publish(training: Sampler, name: str, version: int, gateway: Any, *, max_gap: float = MAX_GAP) -> str:
    """Save the weights for sampling and let a gateway (`GatewayClient`) sample from them. Returns their path.

    The gateway samples from them once this returns, and records their version with each turn. Calls that run at that moment
    end on the old weights, and are recorded so. Raises: WeightsError if the sampler has other weights.
    """
    path = await training.save_weights(f"{name}-{version:06d}")
    await gateway.set_weight_version_async(version, sampler=path)
    check_gap(await gap(training, path), version, f"{training.service} as {path}", max_gap)
    return path


async def gap(training: Sampler, path: str) -> float:
    """Return the largest difference between recorded logprobs and those of the weights in training, NaN if one is NaN.

    Units: nats. Raises: WeightsError when there is nothing to compare.
    """
    prompt = list(range(1, PROBE_PROMPT_TOKENS + 1))  # ids that exist in every vocabulary
    answers = await training.sample(path, prompt, n=PROBE_ANSWERS, max_tokens=PROBE_ANSWER_TOKENS)
    sequences = [[*prompt, *answer.ids] for answer in answers]
    computed = await training.compute_logprobs(sequences) if any(answer.ids for answer in answers) else []
    return Gap.of(answers, computed, len(prompt)).largest
