"""Injected faults, for tests of clients against the faults of AWS.

A plan is a list of rules. Each rule has a kind of fault, the requests that it affects, and a rate. Choices are drawn from a
seeded generator: the same plan and the same order of requests give the same faults.
"""

from __future__ import annotations

import contextlib
import json
import random
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
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
_STOP = "StopRuntimeSession"


class Fault(BaseModel):
    """A rule.

    ``kind``: throttle (429), quota (402), runtime_error (424), server_error (500), conflict (409, retryable), validation
    (400), access_denied (403), not_found (404): the request is answered with it and never reaches an agent. slow_start: a new
    session starts ``delay_s`` late. drop: the connection breaks, ``when`` = "before" the request was obeyed or "after". kill:
    the session's process is killed ``delay_s`` after the request reached it.

    Which requests: ``operation`` (as AWS names it), ``agent`` (its name), the ``first`` so many, every ``every``-th, a share of
    ``probability``. Omitted fields match every request. A rule does not count requests to which its kind does not apply.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    kind: str = Field(pattern=f"^({'|'.join((*_ERRORS, 'slow_start', 'drop', 'kill'))})$")
    operation: Literal["InvokeAgentRuntime", "InvokeAgentRuntimeCommand", "StopRuntimeSession"] | None = None
    agent: str | None = None
    first: int | None = Field(None, ge=1)
    every: int | None = Field(None, ge=1)
    probability: float | None = Field(None, ge=0)
    delay_s: float = Field(0.0, ge=0)
    when: Literal["before", "after"] = "before"


_RULES = TypeAdapter(list[Fault])


@contextlib.asynccontextmanager
async def injected(drawn: Sequence[Fault], send: Send) -> AsyncIterator[Send]:
    """Inject the faults that were drawn for a request around its handling, which writes to the yielded ``send``.

    The handling does slow_start and kill itself. Raises: WireError, ConnectionResetError.
    """
    for fault in drawn:
        if fault.kind in _ERRORS:
            raise WireError(*_ERRORS[fault.kind])
    dropped = next((fault.when for fault in drawn if fault.kind == "drop"), None)
    if dropped == "before":
        raise ConnectionResetError("an injected fault")
    yield send if dropped is None else _discard
    if dropped == "after":
        raise ConnectionResetError("an injected fault")


async def _discard(message: Message) -> None:
    return None


class FaultPlan:
    """Rules, and how often each kind was injected."""

    def __init__(self, rules: Sequence[Fault] = (), *, seed: int = 0) -> None:
        self.rules = list(rules)
        self.injected: Counter[str] = Counter()
        self._seen = [0] * len(self.rules)
        self._random = random.Random(seed)

    def draw(self, operation: str, agent: str, *, starts: bool = True) -> list[Fault]:
        """Draw the rules that hit this request, in order, and count it. ``starts``: it will start a session."""
        hits = []
        for index, rule in enumerate(self.rules):
            if rule.operation not in (None, operation) or rule.agent not in (None, agent):
                continue
            if rule.kind in ("kill", "slow_start") and (
                operation == _STOP or (rule.kind == "slow_start" and not starts)
            ):
                continue
            self._seen[index] += 1
            count, first, every, probability = self._seen[index], rule.first, rule.every, rule.probability
            hit = count <= (first or count) and count % (every or 1) == 0
            if hit and (probability is None or self._random.random() < probability):
                self.injected[rule.kind] += 1
                hits.append(rule)
        return hits

    @classmethod
    def parse(cls, data: Any) -> FaultPlan:
        """Read ``{"seed": ..., "fault": [{"kind": ...}, ...]}``, or only the list. Raises: ConfigError on anything unknown."""
        given = data if isinstance(data, dict) else {"fault": data}
        try:
            rules = _RULES.validate_python(given["fault"])
            return cls(rules, **{k: v for k, v in given.items() if k != "fault"})
        except (TypeError, LookupError, ValidationError) as e:
            raise ConfigError(f"a fault plan is a list of rules, or an object with 'fault' and 'seed': {e}") from e

    @classmethod
    def load(cls, path: Path) -> FaultPlan:
        """Read a TOML or JSON file. Raises: ConfigError."""
        try:
            text = path.read_text()
            return cls.parse(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
        except (OSError, ValueError) as e:
            raise ConfigError(f"cannot read the fault plan {path}: {e}") from e
