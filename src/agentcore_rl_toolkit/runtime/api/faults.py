"""Faults on purpose, so that clients can be tested against everything AWS may do to them.

A plan is a list of rules; each says what goes wrong, where, and how often. Choices are drawn from a seeded generator: the
same plan and the same order of requests give the same faults.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ...errors import ConfigError
from ..wire import WireError

_ERRORS = {
    "throttle": ("ThrottlingException", "Rate exceeded"),
    "quota": ("ServiceQuotaExceededException", "maxVms limit exceeded for account"),
    "runtime_error": (
        "RuntimeClientError",
        "Received error (500) from runtime. Please check your CloudWatch logs for more information.",
    ),
    "server_error": ("InternalServerException", "An internal error occurred."),
    "conflict": ("RetryableConflictException", "Session operation in progress, please retry"),
    "validation": ("ValidationException", "The request is not valid."),
    "access_denied": (
        "AccessDeniedException",
        "The caller is not authorized to perform this operation on the resource.",
    ),
    "not_found": ("ResourceNotFoundException", "The agent runtime was not found."),
    "unauthorized": ("UnauthorizedException", "The caller could not be authenticated."),
    "stop_conflict": ("ConflictException", "The session is in a state that does not allow this operation."),
}
INIT_TIMEOUT = "Runtime initialization time exceeded. Please make sure that initialization completes in {:g}s."
STARTING = frozenset({"InvokeAgentRuntime", "InvokeAgentRuntimeCommand"})
OPERATIONS = STARTING | {"StopRuntimeSession"}
_STOP = frozenset({"StopRuntimeSession"})
_OF_NEW_SESSIONS = ("slow_start", "init_timeout")
# What each kind can be done to; the service models name the last two errors for stops only.
_APPLIES: dict[str, frozenset[str]] = {
    **dict.fromkeys(_ERRORS, OPERATIONS),
    "slow_start": STARTING,
    "init_timeout": STARTING,
    "kill": STARTING,
    "drop": OPERATIONS,
    "partial": STARTING,
    "duplicate": frozenset({"InvokeAgentRuntime"}),
    "unauthorized": _STOP,
    "stop_conflict": _STOP,
}
# Fields that only some kinds have a use for.
_USED = {
    "delay_s": (*_OF_NEW_SESSIONS, "kill"),
    "when": ("drop",),
    "after_bytes": ("partial",),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rule.

    ``kind``: throttle (429), quota (402), runtime_error (424), server_error (500), conflict (409, retryable), validation
    (400), access_denied (403), not_found (404), and for StopRuntimeSession unauthorized (401), stop_conflict (409): the
    request is answered with it and never reaches an agent. slow_start: a new session starts ``delay_s`` late. init_timeout:
    a new session's first request gets, ``delay_s`` late, the 424 of an agent that was not ready in time. drop: the connection
    breaks, ``when`` = "before" the request was obeyed or "after". partial: it breaks after ``after_bytes`` of the reply's
    body. duplicate: the agent gets the request twice. kill: the session's process is killed ``delay_s`` after the request
    reached it.

    Which requests: ``operation`` (as AWS names it), ``agent`` (its name), the
    ``first`` so many, every ``every``-th, a share of ``probability``, only from ``after_s`` to ``until_s`` seconds of the
    server's life. What is not given does not narrow. A rule passes over, and does not count, what its kind cannot be done to.
    """

    kind: str
    operation: str | None = None
    agent: str | None = None
    first: int | None = None
    every: int | None = None
    probability: float | None = None
    after_s: float | None = None
    until_s: float | None = None
    delay_s: float = 0.0
    after_bytes: int = 0
    when: Literal["before", "after"] = "before"

    def __post_init__(self) -> None:
        operations = _APPLIES.get(str(self.kind))
        if operations is None:
            raise ConfigError(f"fault kind must be one of {', '.join(_APPLIES)}; got {self.kind!r}")
        if self.operation not in (None, *operations):
            can = ", ".join(sorted(operations))
            raise ConfigError(f"fault {self.kind!r} cannot be done to {self.operation!r}; it can to {can}")
        if self.when not in ("before", "after"):
            raise ConfigError(f"fault 'when' must be before or after, got {self.when!r}")
        for name in ("first", "every", "after_bytes", "after_s", "until_s", "delay_s", "probability"):
            value = getattr(self, name)
            types = (int,) if name in ("first", "every", "after_bytes") else (int, float)
            least = 1 if name in ("first", "every") else 0
            if value is not None and (type(value) not in types or not value >= least):
                raise ConfigError(f"fault {name!r} must be a number from {least} up, got {value!r}")
        for name, kinds in _USED.items():
            if self.kind not in kinds and getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ConfigError(f"fault {name!r} is for {', '.join(kinds)}; {self.kind} has no use for it")


class Effects:
    """What the rules that hit one request do to it."""

    def __init__(self, drawn: Sequence[Fault] = ()) -> None:
        """Raises: WireError, the first one that is planned."""
        for fault in drawn:
            if fault.kind in _ERRORS:
                raise WireError(*_ERRORS[fault.kind])
        self.drop = next((f.when for f in drawn if f.kind == "drop"), None)
        self.partial_bytes = min((f.after_bytes for f in drawn if f.kind == "partial"), default=None)
        self.duplicate = any(f.kind == "duplicate" for f in drawn)
        self.start_delay_s = sum(f.delay_s for f in drawn if f.kind == "slow_start")
        self.init_timeout_s = next((f.delay_s for f in drawn if f.kind == "init_timeout"), None)
        self.kills_s = [f.delay_s for f in drawn if f.kind == "kill"]


class FaultPlan:
    """Rules with their counters."""

    def __init__(self, rules: Sequence[Fault] = (), *, seed: int = 0) -> None:
        self.rules = list(rules)
        self.injected: dict[str, int] = {}
        self._seen = [0] * len(self.rules)
        self._random = random.Random(seed)

    def draw(self, operation: str, agent: str, uptime_s: float, *, starts: bool = True) -> list[Fault]:
        """The rules that hit this request, in order. Counts it. ``starts``: it will start a session."""
        return [
            rule
            for index, rule in enumerate(self.rules)
            if operation in _APPLIES[rule.kind]
            and (starts or rule.kind not in _OF_NEW_SESSIONS)
            and self._hits(index, rule, operation, agent, uptime_s)
        ]

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
            seed = data.get("seed", seed)
            data = data.get("fault") if set(data) <= {"seed", "fault"} else None
        if not isinstance(data, list) or type(seed) is not int:
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
