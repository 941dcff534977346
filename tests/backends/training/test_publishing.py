"""The proof of new weights at a training service, against answers that prove nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.training.publishing import publish
from agentcore_rl_toolkit.errors import WeightsError
from agentcore_rl_toolkit.weights.engines import Sampled
from agentcore_rl_toolkit.weights.publishing import PROBE_PROMPT_TOKENS


class Service:
    """Samples the same answer each time, and computes these logprobs of it."""

    service = "a service"

    def __init__(self, answer: Sampled, own: list[float]) -> None:
        self.answer, self.own = answer, own

    async def save_weights(self, name: str) -> str:
        return name

    async def sample(self, path: str, prompt_ids: list[int], *, n: int, max_tokens: int) -> list[Sampled]:
        return [self.answer] * n

    async def compute_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        return [[-1.0] * (PROBE_PROMPT_TOKENS - 1) + self.own for _ in sequences]

    async def set_weight_version_async(self, version: int, *, sampler: Any) -> None: ...


@pytest.mark.parametrize(
    ("ids", "recorded", "own"),
    [
        ([7, 8], [-1.0, -1.0], [-1.0, math.nan]),
        ([7, 8], [math.nan, -1.0], [-1.0, -1.0]),
        ([], [], []),
        ([7, 8], [], [-1.0, -1.0]),
    ],
)
async def test_what_cannot_be_compared_is_not_proved(ids: list[int], recorded: list[float], own: list[float]) -> None:
    service = Service(Sampled(ids, recorded), own)
    with pytest.raises(WeightsError, match=r"did not arrive|nothing can be compared"):
        await publish(service, "run", 1, service)


async def test_equal_logprobs_are_a_proof() -> None:
    service = Service(Sampled([7, 8], [-1.0, -2.0]), [-1.0, -2.0])
    assert await publish(service, "run", 1, service) == "run-000001"
