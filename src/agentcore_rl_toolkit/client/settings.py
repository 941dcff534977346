"""Settings of a client: deadlines of the stages, the reaction to failures, watching."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..contract import Outcome
from ..errors import ConfigError
from ..store import ObjectStore

OnFailure = Literal["return", "raise"]
Prepare = Callable[[str, int], Any]  # (session_id, attempt) -> Mapping of `_rollout` overrides, or an awaitable of one
TurnsOf = Callable[[str], int | Awaitable[int | None] | None]  # session_id -> model calls

# Failures of the infrastructure may pass. An agent whose code raised would raise again. A failure of the policy is a result.
RETRYABLE = frozenset({Outcome.LOST, Outcome.TIMEOUT, Outcome.THROTTLED})

AGENTCORE_MAX_LIFETIME_S = 28_800.0  # the service ends a session after 8 h
MAX_RECORD_BYTES = 256_000_000  # two and a half times the largest record of our agents


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    whole: bool = False,
    optional: bool = False,
) -> None:
    """Check that a value is a number within its bound, or None if that is allowed. Raises: ConfigError."""
    if value is None and optional:
        return
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if number and (above is None or value > above) and (at_least is None or value >= at_least):
        return
    bound = f" > {above:g}" if above is not None else f" >= {at_least:g}"
    kind = "whole number" if whole else "number"
    raise ConfigError(f"{name} must be a {kind}{bound}{' or None' if optional else ''}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """The longest time that each stage of a rollout may take. Units: seconds. None means no limit.

    Attributes:
        throttle_s: how long refusals (429, 402) of one rollout are waited out: the refused invokes and the pauses after them. The
            queue counts only while the runtime accepts no rollout of this client.
        start_s: one invoke request, cold start included, and before it one call of `prepare`.
        confirm_s: after an invoke whose reply was lost, how long to look for signs that the agent runs. After a reply of 500 or
            503 at most 5 s.
        run_s: from the accepted invoke to the record. The default is the service's own limit on a session, plus a little.
        result_s: reading a record that is known to exist.
        stop_s: stopping a session, retries included. `RolloutClient.close` gives up if it can stop nothing for this long.
    """

    throttle_s: float | None = 600.0
    start_s: float = 300.0
    confirm_s: float = 60.0
    run_s: float | None = AGENTCORE_MAX_LIFETIME_S + 120.0
    result_s: float = 120.0
    stop_s: float = 60.0

    def __post_init__(self) -> None:
        for each in fields(self):
            check_number(each.name, getattr(self, each.name), at_least=0, optional="None" in str(each.type))


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Settings of the search for results, and of their proofs. Units: seconds.

    Attributes:
        interval_s: pause between two looks at the store. None: 0.5 s for a remote store, 0.05 s for a local one. It is longer
            while a look takes many requests.
        heartbeat_s: how often the agent is asked to renew its sign of life.
        lost_after_s: a session without a new sign of life for this long, and without a record, is lost. None: three heartbeats of
            the period that the agent promised, and five seconds.
        max_record_bytes: a larger record is not read. Its rollout ends as `invalid`.
        store: the opened store to read results from, if not that of the client's `s3_bucket`.
        require_proof: refuse records that do not prove that they come from their session.
    """

    interval_s: float | None = None
    heartbeat_s: float = 10.0
    lost_after_s: float | None = None
    max_record_bytes: int = MAX_RECORD_BYTES
    store: ObjectStore | None = None
    require_proof: bool = False

    def __post_init__(self) -> None:
        check_number("heartbeat_s", self.heartbeat_s, above=0)
        check_number("interval_s", self.interval_s, at_least=0, optional=True)
        check_number("lost_after_s", self.lost_after_s, at_least=0, optional=True)
        check_number("max_record_bytes", self.max_record_bytes, at_least=1, whole=True)
