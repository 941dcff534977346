"""What a run will cost on AgentCore Runtime, and how long its quotas make it take. Arithmetic only."""

from __future__ import annotations

import math
from dataclasses import dataclass

# us-east-1 and us-west-2. Sources: the pricing pages of Bedrock AgentCore and S3, November 2026. AgentCore charges CPU that was
# used, and memory at its highest use so far, by the second.
PRICES_OF = "November 2026"
VCPU_HOUR, GB_HOUR = 0.0895, 0.00945
S3_WRITE, S3_READ = 0.005 / 1000, 0.0004 / 1000  # PUT and LIST, GET
LEAST_GB = 0.125  # memory that a session is charged for at least
HEARTBEAT_S, LISTING_S = 30.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Quotas:
    """Quotas of one agent. The defaults are AWS's for us-east-1 and us-west-2, as of November 2026.

    Attributes:
        requests_per_s: of InvokeAgentRuntime.
        new_sessions_per_min: of an agent deployed as an image; one deployed as code may start 1,500.
        sessions: that may be alive at once in the account.
    """

    requests_per_s: float = 200.0
    new_sessions_per_min: float = 400.0
    sessions: int = 5000


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: ``rollouts`` of ``minutes`` each, ``concurrent`` at once.

    Attributes:
        cpu_s: CPU seconds that a rollout uses. An agent that mostly waits for its model uses few.
        memory_gb: highest memory of a session.
        record_kb: size of a record; it is put once and read once.
    """

    rollouts: int
    minutes: float
    cpu_s: float
    memory_gb: float
    concurrent: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Dollars by what they are for, the time in hours, and what limits it."""

    cpu: float
    memory: float
    s3: float
    hours: float
    limited_by: str

    @property
    def total(self) -> float:
        return self.cpu + self.memory + self.s3


def estimate(run: Run, quotas: Quotas | None = None) -> Estimate:
    """Cost and duration of a run. The model's tokens are not in it: they are what its GPUs cost."""
    quotas = quotas or Quotas()
    session_s = run.minutes * 60
    hours_of_sessions = run.rollouts * session_s / 3600
    # How many run at once in the long run: as many as are asked for, as quotas allow, or as the starts keep alive.
    starts_per_s = min(quotas.new_sessions_per_min / 60, quotas.requests_per_s)
    bounds = {
        "the number of concurrent rollouts": run.concurrent / session_s,
        "the quota of sessions alive": quotas.sessions / session_s,
        "the quota of new sessions": starts_per_s,
    }
    limited_by, per_s = min(bounds.items(), key=lambda item: item[1])
    duration_s = run.rollouts / per_s + session_s
    heartbeats = math.ceil(session_s / HEARTBEAT_S)
    writes = run.rollouts * (1 + heartbeats) + duration_s / LISTING_S
    return Estimate(
        cpu=run.rollouts * run.cpu_s / 3600 * VCPU_HOUR,
        memory=hours_of_sessions * max(run.memory_gb, LEAST_GB) * GB_HOUR,
        s3=writes * S3_WRITE + run.rollouts * S3_READ,
        hours=duration_s / 3600,
        limited_by=limited_by,
    )
