"""The interface of a model behind a training service."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Example:
    """Tokens, and the inputs of a loss, aligned with them. Shapes: all (T,)."""

    tokens: list[int]
    inputs: Mapping[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled sequence. Shapes: both (C,)."""

    ids: list[int]
    logprobs: list[float]
    stop_reason: str = "stop"  # or "length"


class TrainableModel(Protocol):
    """A model. All methods may block; training comes one call at a time, sampling from many threads.

    A run is a model in training; a path names saved weights, None the base model. Raises: ConfigError on unknown names.
    """

    base_model: str

    @property
    def paths(self) -> Collection[str]:
        """All saved and published weights."""
        ...

    def create(self, run: str) -> None: ...
    def forward_backward(
        self,
        run: str,
        data: Sequence[Example],
        loss_fn: str,
        config: Mapping[str, float | str],
        forward_only: bool,
    ) -> tuple[list[list[float]], dict[str, float]]:
        """The logprobs of the target tokens, and metrics whose names end in how they are combined (``loss:sum``)."""
        ...

    def optim_step(self, run: str, adam: Mapping[str, float]) -> dict[str, float]: ...
    def save(self, run: str, path: str) -> None: ...
    def load(self, run: str, path: str, optimizer: bool) -> None: ...
    def publish(self, run: str, path: str) -> None: ...
    def sample(
        self, path: str | None, prompt_ids: list[int], n: int, params: Mapping[str, Any]
    ) -> Sequence[Completion]: ...
    def logprobs(self, path: str | None, ids: list[int]) -> list[float]:
        """Those of all tokens but the first. Shapes: (T,) -> (T - 1,)."""
        ...

    def close(self) -> None: ...
