"""The reward forms an agent may return, read in one place for every trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...contract import extract_reward
from ...errors import ContractError


@dataclass(frozen=True, kw_only=True)
class Reward:
    """The reward in a record.

    `value` is the scalar that enters the group statistics; `per_turn` is set when the agent returned a list (its last
    element is `value`); `metrics` are the numbers beside the reward in the dict form, for logging only.
    """

    value: float
    per_turn: tuple[float, ...] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def read_reward(record: Mapping[str, Any]) -> Reward | None:
    """Read `rewards` (or `reward`) of a record: a number, a per-turn list, or `{"reward": ..., <metric>: ...}`.

    None when the record has no reward, which is never the same as reward 0.
    Raises: ContractError when something is there that is not a finite number.
    """
    value = extract_reward(record)
    if value is None:
        return None
    raw = record.get("rewards", record.get("reward"))
    metrics: dict[str, float] = _numbers(record.get("metrics"))
    if isinstance(raw, Mapping):
        metrics.update(_numbers({k: v for k, v in raw.items() if k != "reward"}))
        raw = raw.get("reward")
    per_turn: tuple[float, ...] | None = None
    if isinstance(raw, Sequence) and not isinstance(raw, (str, bytes)):
        per_turn = tuple(_number(v) for v in raw)
    return Reward(value=value, per_turn=per_turn, metrics=metrics)


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ContractError(f"a per-turn reward must be a finite number, got {value!r}")
    return float(value)


def _numbers(values: object) -> dict[str, float]:
    """The finite numbers of a mapping; text and nested values are not metrics."""
    if not isinstance(values, Mapping):
        return {}
    return {str(k): float(v) for k, v in values.items() if isinstance(v, (int, float)) and math.isfinite(v)}
