"""Checks of what callers give: numbers, choices, and keywords that nobody knows."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigError

# What code for the published client gives to agents by name, and may go on to: its documentation's names, the usual ones of
# sampling, and those of the `_rollout` block that a call may replace. Everything else has `rollout_config`.
PASSED_BY_NAME = frozenset(
    {
        "api_key",
        "base_url",
        "exp_id",
        "model_id",
        "s3_bucket",
        "sampling_params",
        "frequency_penalty",
        "logprobs",
        "max_completion_tokens",
        "max_new_tokens",
        "max_tokens",
        "min_p",
        "n",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "stop",
        "temperature",
        "top_k",
        "top_p",
    }
)


def for_the_agent(
    rollout_config: Mapping[str, Any] | None,
    by_name: Mapping[str, Any],
    function: Callable[..., Any],
    fuller: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """The `_rollout` entries that a call of `function` gives: of `rollout_config`, and published names as keywords, which win.

    ``fuller`` is another function for the same, with more parameters, to name in the error.
    Raises: ConfigError on any other keyword; it says which one was probably meant.
    """
    if rollout_config is not None and not isinstance(rollout_config, Mapping):
        raise ConfigError(f"rollout_config must be a mapping, got {type(rollout_config).__name__}")
    for name in by_name:
        if name not in PASSED_BY_NAME:
            raise _unknown(name, function, fuller)
    return {**(rollout_config or {}), **by_name}


def _parameters(function: Callable[..., Any] | None) -> set[str]:
    parameters = () if function is None else inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD}


def _unknown(name: str, function: Callable[..., Any], fuller: Callable[..., Any] | None) -> ConfigError:
    """The error for a keyword that `function` does not have."""
    close = difflib.get_close_matches(name, {*_parameters(function), *PASSED_BY_NAME}, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    if fuller is not None and name in _parameters(fuller):
        hint = f"{fuller.__qualname__} has it. "
    called = function.__qualname__.removesuffix(".__init__")
    return ConfigError(
        f"{called} has no parameter {name!r}: {hint}What is meant for the agent goes into rollout_config={{{name!r}: ...}}"
    )


def check_number(
    name: str, value: Any, *, above: float | None = None, at_least: float | None = None, optional: bool = False
) -> None:
    """Raises: ConfigError unless it is a finite number within the bound (or None where that is allowed)."""
    if value is None and optional:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    if number and (above is None or value > above) and (at_least is None or value >= at_least):
        return
    bound = f" > {above:g}" if above is not None else f" >= {at_least:g}" if at_least is not None else ""
    raise ConfigError(f"{name} must be a number{bound}{' or None' if optional else ''}, got {value!r}")


def check_whole(name: str, value: Any, *, at_least: int, optional: bool = False) -> None:
    """Raises: ConfigError unless it is a whole number from `at_least` up (or None where that is allowed)."""
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"{name} must be a whole number >= {at_least}{' or None' if optional else ''}, got {value!r}")


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raises: ConfigError unless it is one of these."""
    if any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
        return
    names = [repr(choice) for choice in choices]
    raise ConfigError(f"{name} must be {', '.join(names[:-1])} or {names[-1]}, got {value!r}")


def check_instance(name: str, value: Any, kind: type[Any]) -> None:
    """Raises: ConfigError unless it is None or of this class."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} must be a {kind.__name__}, got {value!r}")


def check_url(name: str, value: Any) -> None:
    """Raises: ConfigError unless it is None or an http address."""
    if value is None:
        return
    try:
        parts = urlsplit(value) if isinstance(value, str) else None
        good = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"{name} must be an address like http://HOST:PORT, got {value!r}")
