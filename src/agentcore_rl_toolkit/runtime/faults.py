"""Faults on purpose, so that clients can be tested against everything AWS may do to them.

A plan is a list of rules; each says what goes wrong, where, and how often. Choices are drawn from a seeded generator:
the same plan and the same
order of requests give the same faults.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import ConfigError
from .wire import WireError

Kind = Literal[
    "throttle", "quota", "runtime_error", "server_error", "conflict", "slow_start", "drop", "duplicate", "kill"
]
_ERRORS = {
    "throttle": ("ThrottlingException", "Rate exceeded"),
    "quota": ("ServiceQuotaExceededException", "maxVms limit exceeded for account"),
    "runtime_error": (
        "RuntimeClientError",
        "Received error (500) from runtime. Please check your CloudWatch logs for more information.",
    ),
    "server_error": ("InternalServerException", "An internal error occurred."),
    "conflict": ("RetryableConflictException", "Session operation in progress, please retry"),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rule.

    ``kind``: throttle (429), quota (402), runtime_error (424), server_error (500), conflict (409, retryable): the request is
    answered with it and never reaches an agent. slow_start: a new session starts ``delay_s`` late. drop: the connection
    breaks,
    ``when`` = "before" the agent got the request or "after" it finished. duplicate: the agent gets the request twice.
    kill: the session's
    process is killed ``delay_s`` after the request reached it.

    Which requests: ``operation`` (as AWS names it), ``agent`` (its name), the ``first`` so many, every ``every``-th, a
    share of
    ``probability``, only from ``after_s`` to ``until_s`` seconds of the server's life. What is not given does not narrow.
    """

    kind: Kind
    operation: str | None = None
    agent: str | None = None
    first: int | None = None
    every: int | None = None
    probability: float | None = None
    after_s: float | None = None
    until_s: float | None = None
    delay_s: float = 0.0
    when: Literal["before", "after"] = "before"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"fault kind must be one of {', '.join(get_args(Kind))}; got {self.kind!r}")
        if self.when not in ("before", "after"):
            raise ConfigError(f"fault 'when' must be before or after, got {self.when!r}")
        for name in ("first", "every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"fault {name!r} must be a whole number from 1 up, got {value!r}")
        if self.probability is not None and not 0.0 <= self.probability <= 1.0:
            raise ConfigError(f"fault 'probability' must be from 0 to 1, got {self.probability!r}")


class FaultPlan:
    """Rules with their counters."""

    def __init__(self, rules: Sequence[Fault] = (), *, seed: int = 0) -> None:
        self.rules = list(rules)
        self.injected: dict[str, int] = {}
        self._seen = [0] * len(self.rules)
        self._random = random.Random(seed)

    def draw(self, operation: str, agent: str, uptime_s: float) -> list[Fault]:
        """The rules that hit this request, in order. Counts it."""
        return [rule for index, rule in enumerate(self.rules) if self._hits(index, rule, operation, agent, uptime_s)]

    def _hits(self, index: int, rule: Fault, operation: str, agent: str, uptime_s: float) -> bool:
        if rule.operation not in (None, operation) or rule.agent not in (None, agent):
            return False
        if (rule.after_s is not None and uptime_s < rule.after_s) or (
            rule.until_s is not None and uptime_s >= rule.until_s
        ):
            return False
        self._seen[index] += 1
        count = self._seen[index]
        if rule.first is not None and count > rule.first:
            return False
        if rule.every is not None and count % rule.every:
            return False
        if rule.probability is not None and self._random.random() >= rule.probability:
            return False
        self.injected[rule.kind] = self.injected.get(rule.kind, 0) + 1
        return True

    @classmethod
    def parse(cls, data: Any, *, seed: int = 0) -> FaultPlan:
        """From ``{"seed": ..., "fault": [{"kind": ...}, ...]}`` or the list alone. Raises: ConfigError on anything
        unknown."""
        if isinstance(data, Mapping):
            unknown = set(data) - {"seed", "fault"}
            if unknown:
                raise ConfigError(f"unknown entries in the fault plan: {', '.join(sorted(unknown))}")
            seed, data = int(data.get("seed", seed)), data.get("fault", [])
        if not isinstance(data, list):
            raise ConfigError("a fault plan is a list of rules, or an object with 'fault' and 'seed'")
        names = {f.name for f in fields(Fault)}
        rules = []
        for entry in data:
            if not isinstance(entry, Mapping) or not set(entry) <= names or "kind" not in entry:
                raise ConfigError(
                    f"fault rule {entry!r}: needs 'kind' and may have {', '.join(sorted(names - {'kind'}))}"
                )
            rules.append(Fault(**entry))
        return cls(rules, seed=seed)

    @classmethod
    def load(cls, path: Path) -> FaultPlan:
        """From a TOML or JSON file. Raises: ConfigError."""
        try:
            text = path.read_text()
            return cls.parse(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
        except (OSError, ValueError) as e:
            raise ConfigError(f"cannot read the fault plan {path}: {e}") from e


def as_error(fault: Fault) -> WireError | None:
    """The error reply of a rule that is one, else None."""
    known = _ERRORS.get(fault.kind)
    return WireError(*known) if known is not None else None
