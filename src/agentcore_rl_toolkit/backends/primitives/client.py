"""The interface of a training service's adapter."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...weights.engines import Sampled
from .data import Datum


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Settings of one optimizer step."""

    learning_rate: float
    beta1: float
    beta2: float
    grad_clip_norm: float


@dataclass(frozen=True, kw_only=True)
class Passed:
    """The results of a forward and backward pass. ``logprobs`` are those of each datum's targets; None where the service gives
    none. Shapes: each (T - 1,)."""

    metrics: Mapping[str, float]
    logprobs: Sequence[Sequence[float]] | None = None


class TrainingClient(Protocol):
    """A model in training at a service. Operations are done in the order of their calls: `forward_backward` and `optim_step`
    send theirs before they are awaited.

    A path names saved weights: Tinker's ``tinker://`` path, the ARN of a model package.
    """

    service: str  # its name, for people
    engine: str  # the gateway's engine for it
    upstream: str  # the URL that the gateway samples from

    def forward_backward(self, data: Sequence[Datum], loss: str, config: Mapping[str, float]) -> Awaitable[Passed]: ...
    def optim_step(self, adam: Adam) -> Awaitable[Mapping[str, float]]: ...
    async def save_weights(self, name: str) -> str:
        """Weights to sample from; their path."""
        ...

    async def save_state(self, name: str) -> str:
        """Weights and optimizer, to go on from; their path."""
        ...

    async def sample(self, path: str, prompt_ids: list[int], *, n: int, max_tokens: int) -> list[Sampled]: ...
    async def compute_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Those of the weights in training, of all tokens but the first."""
        ...

    async def close(self, status: str) -> None:
        """End the session at the service, as "success", "errored" or "interrupted"."""
        ...
