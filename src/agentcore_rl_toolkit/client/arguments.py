"""Checks of callers' arguments: numbers, choices, and unknown keywords."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import ConfigError

# What code for the published client gives to agents by name, and may go on to: its documentation's names, the usual ones of
# sampling, and those of the `_rollout` block that a call may replace. Everything else has `rollout_config`.
PASSED_BY_NAME = frozenset(
    (
        *("api_key", "base_url", "exp_id", "model_id", "s3_bucket", "sampling_params"),
        *("frequency_penalty", "logprobs", "max_completion_tokens", "max_new_tokens", "max_tokens", "min_p", "n"),
        *("presence_penalty", "repetition_penalty", "seed", "stop", "temperature", "top_k", "top_p"),
    )
)


def for_the_agent(rollout_config: Mapping[str, Any] | None, by_name: Mapping[str, Any]) -> dict[str, Any]:
    """The `_rollout` entries that a call gives: of `rollout_config`, and published names as keywords, which win.

    Raises: ConfigError on any other keyword.
    """
    for name in by_name:
        if name not in PASSED_BY_NAME:
            raise ConfigError(
                f"there is no parameter {name!r}; what is meant for the agent goes into rollout_config={{{name!r}: ...}}"
            )
    return {**(rollout_config or {}), **by_name}


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    whole: bool = False,
    optional: bool = False,
) -> None:
    """Raises: ConfigError unless it is a number (a `whole` one) within the bound (or None where that is allowed)."""
    if value is None and optional:
        return
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if number and (above is None or value > above) and (at_least is None or value >= at_least):
        return
    bound = f" > {above:g}" if above is not None else f" >= {at_least:g}" if at_least is not None else ""
    kind = "whole number" if whole else "number"
    raise ConfigError(f"{name} must be a {kind}{bound}{' or None' if optional else ''}, got {value!r}")


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raises: ConfigError unless it is one of these."""
    if value not in choices:
        names = [repr(choice) for choice in choices]
        raise ConfigError(f"{name} must be {', '.join(names[:-1])} or {names[-1]}, got {value!r}")
