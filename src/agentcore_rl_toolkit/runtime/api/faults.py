"""Faults on purpose, so that clients can be tested against everything AWS may do to them.

A plan is a list of rules; each says what goes wrong, where, and how often. Choices are drawn from a seeded generator: the
same plan and the same order of requests give the same faults.
"""

from __future__ import annotations

import contextlib
import json
import random
import tomllib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from starlette.types import Message, Send

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
}
_KINDS = (*_ERRORS, "slow_start", "drop", "kill")
_STOP = "StopRuntimeSession"
_OPERATIONS = ("InvokeAgentRuntime", "InvokeAgentRuntimeCommand", _STOP)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rule.

    ``kind``: throttle (429), quota (402), runtime_error (424), server_error (500), conflict (409, retryable), validation
    (400), access_denied (403), not_found (404): the request is answered with it and never reaches an agent. slow_start: a new
    session starts ``delay_s`` late. drop: the connection breaks, ``when`` = "before" the request was obeyed or "after". kill:
    the session's process is killed ``delay_s`` after the request reached it.

    Which requests: ``operation`` (as AWS names it), ``agent`` (its name), the ``first`` so many, every ``every``-th, a share of
    ``probability``. What is not given does not narrow. A rule passes over, and does not count, what its kind cannot be done to.
    """

    kind: str
    operation: str | None = None
    agent: str | None = None
    first: int | None = None
    every: int | None = None
    probability: float | None = None
    delay_s: float = 0.0
    when: Literal["before", "after"] = "before"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("kind", self.kind, _KINDS),
            ("operation", self.operation, (None, *_OPERATIONS)),
            ("when", self.when, ("before", "after")),
        ):
            if value not in known:
                raise ConfigError(f"fault {name!r} must be one of {', '.join(filter(None, known))}; got {value!r}")
        for name, least in (("first", 1), ("every", 1), ("probability", 0), ("delay_s", 0)):
            number = getattr(self, name)
            if number is not None and (type(number) not in (int, float) or not number >= least):
                raise ConfigError(f"fault {name!r} must be a number from {least} up, got {number!r}")


class Effects:
    """The effect of the rules that hit one request."""

    def __init__(self, drawn: Sequence[Fault] = ()) -> None:
        """Raises: WireError, the first one that is planned."""
        for fault in drawn:
            if fault.kind in _ERRORS:
                raise WireError(*_ERRORS[fault.kind])
        self.drop = next((f.when for f in drawn if f.kind == "drop"), None)
        self.start_delay_s = sum(f.delay_s for f in drawn if f.kind == "slow_start")
        self.kills_s = [f.delay_s for f in drawn if f.kind == "kill"]

    @contextlib.asynccontextmanager
    async def dropping(self, send: Send) -> AsyncIterator[Send]:
        """Break the connection before the block, or after it without a response. Raises: ConnectionResetError."""
        if self.drop == "before":
            raise ConnectionResetError("a planned fault")
        yield send if self.drop is None else _nowhere
        if self.drop == "after":
            raise ConnectionResetError("a planned fault")


async def _nowhere(message: Message) -> None:
    return None


class FaultPlan:
    """Rules with their counters."""

    def __init__(self, rules: Sequence[Fault] = (), *, seed: int = 0) -> None:
        self.rules = list(rules)
        self.injected: dict[str, int] = {}
        self._seen = [0] * len(self.rules)
        self._random = random.Random(seed)

    def draw(self, operation: str, agent: str, *, starts: bool = True) -> list[Fault]:
        """The rules that hit this request, in order. Counts it. ``starts``: it will start a session."""
        return [rule for index, rule in enumerate(self.rules) if self._hits(index, rule, operation, agent, starts)]

    def _hits(self, index: int, rule: Fault, operation: str, agent: str, starts: bool) -> bool:
        if rule.operation not in (None, operation) or rule.agent not in (None, agent):
            return False
        if (rule.kind == "kill" and operation == _STOP) or (
            rule.kind == "slow_start" and (operation == _STOP or not starts)
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
    def parse(cls, data: Any) -> FaultPlan:
        """From ``{"seed": ..., "fault": [{"kind": ...}, ...]}`` or the list alone. Raises: ConfigError on anything unknown."""
        given = data if isinstance(data, dict) else {"fault": data}
        try:
            return cls([Fault(**rule) for rule in given["fault"]], **{k: v for k, v in given.items() if k != "fault"})
        except (TypeError, LookupError) as e:
            raise ConfigError(f"a fault plan is a list of rules, or an object with 'fault' and 'seed': {e}") from e

    @classmethod
    def load(cls, path: Path) -> FaultPlan:
        """From a TOML or JSON file. Raises: ConfigError."""
        try:
            text = path.read_text()
            return cls.parse(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
        except (OSError, ValueError) as e:
            raise ConfigError(f"cannot read the fault plan {path}: {e}") from e
