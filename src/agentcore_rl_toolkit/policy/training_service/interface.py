"""Data for a model behind a training service, and its completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
