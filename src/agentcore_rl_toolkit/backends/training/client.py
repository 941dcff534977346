"""The interface between the training loop and the holder of the weights: torch in this process, or a training service."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from .batch import Datum

LossName = Literal["importance_sampling", "ppo", "cispo", "cross_entropy"]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss of `policy.losses`. The options ``clip_low_threshold`` and ``clip_high_threshold`` bound the ratio."""

    name: LossName = "ppo"
    options: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Adam:
    """The settings of one optimizer step. A ``grad_clip_norm`` of 0 does not clip."""

    learning_rate: float
    beta1: float
    beta2: float
    grad_clip_norm: float


@dataclass(frozen=True, kw_only=True)
class Passed:
    """The results of a forward and backward pass.

    ``logprobs`` and ``entropies`` are those of each datum's targets, or None if the service returns none.
    Shapes: each (T - 1,).
    """

    metrics: Mapping[str, float]
    logprobs: Sequence[Sequence[float]] | None = None
    entropies: Sequence[Sequence[float]] | None = None


class TrainingClient(Protocol):
    """The weights in training.

    Operations take effect in the order of their calls. `forward_backward` and `step` send theirs at once and return an
    awaitable, so a service does not wait for this process between the two.
    """

    service: str  # the client's name in messages
    max_logprob_gap: float | None  # the largest gap by rounding at equal weights; None: not checked
    penalizes: bool  # the loss has a gradient for tokens with advantage 0, too

    def forward_backward(self, data: Sequence[Datum], loss: Loss, tokens: float) -> Awaitable[Passed]:
        """Add the gradient of the loss. torch divides the sum over tokens by ``tokens``; services only sum."""
        ...

    def step(self, adam: Adam) -> Awaitable[Mapping[str, float]]:
        """Take an optimizer step on the gradients added up, and clear them. Returns metrics."""
        ...

    async def publish(self, version: int, gateway: Any, probe: Sequence[int] | None) -> None:
        """Let agents sample from the weights in training, under this version, and prove that they do.

        ``probe`` are the ids of a prompt of the policy's own dialogues. Raises: WeightsError if the sampler has other weights.
        """
        ...

    async def save(self, steps: int) -> str:
        """Save weights and optimizer after so many steps. Returns the name to open a client from."""
        ...

    async def close(self, status: str) -> None:
        """End the session: "success", "errored" or "interrupted"."""
        ...
