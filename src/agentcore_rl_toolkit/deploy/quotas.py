"""An account's quotas of AgentCore Runtime, and those that limit a run. Read from Service Quotas, or AWS's defaults.

Source: "Quotas for Amazon Bedrock AgentCore" in its developer guide, November 2026; names as Service Quotas lists them.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError
from ..store.remote import find_session
from . import cost

LARGE_REGIONS = ("us-east-1", "us-west-2")
SESSIONS_ELSEWHERE = 2500
# What Service Quotas calls the quota of new sessions, whose default holds for archives; images have another quota.
NEW_SESSIONS_PER_S = 25.0
_NAMES = {
    "sessions": r"active session",
    "new sessions": r"new (runtime )?session",
    "requests": r"runtime data plane|invokeagentruntime\b",
}
_PERIODS_S = {"SECOND": 1.0, "MINUTE": 60.0, "HOUR": 3600.0}
HOW_TO_RAISE = "ask for more in the Service Quotas console, under Amazon Bedrock AgentCore"
DEADLINE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Quotas:
    """Quotas of one agent. The defaults are AWS's for us-east-1 and us-west-2, as of November 2026.

    Attributes:
        requests_per_s: of InvokeAgentRuntime.
        new_sessions_per_min: of an agent deployed as an image; one deployed as code may start 1,500.
        sessions: that may be alive at once in the account.
        why: why some or all are AWS's defaults; "" when Service Quotas had them.
    """

    requests_per_s: float = 200.0
    new_sessions_per_min: float = 400.0
    sessions: int = 5000
    why: str = ""


def read(client: Any, region: str | None) -> Quotas:
    """Read the account's quotas with a boto3 client of ``service-quotas``. A quota that cannot be read has its default."""
    from botocore.exceptions import BotoCoreError, ClientError

    usual = Quotas() if region in LARGE_REGIONS else Quotas(sessions=SESSIONS_ELSEWHERE)
    try:
        pages = client.get_paginator("list_service_quotas").paginate(ServiceCode="bedrock-agentcore")
        listed = [quota for page in pages for quota in page["Quotas"]]
    except (ClientError, BotoCoreError) as e:
        code = e.response["Error"].get("Code") if isinstance(e, ClientError) else type(e).__name__
        return replace(usual, why=f"Service Quotas is not readable ({code}; servicequotas:ListServiceQuotas)")
    found: dict[str, float] = {}
    for quota in listed:
        period = quota.get("Period") or {}  # without one it is a number, or a rate per second
        seconds = float(period.get("PeriodValue", 1)) * _PERIODS_S.get(str(period.get("PeriodUnit")), 1.0)
        for kind, pattern in _NAMES.items():
            if quota.get("Value") is not None and re.search(pattern, str(quota.get("QuotaName", "")), re.IGNORECASE):
                found.setdefault(kind, float(quota["Value"]) / seconds)
    new = found.get("new sessions", NEW_SESSIONS_PER_S)
    missing = [kind for kind in _NAMES if kind not in found]
    return Quotas(
        sessions=int(found.get("sessions", usual.sessions)),
        requests_per_s=found.get("requests", usual.requests_per_s),
        new_sessions_per_min=usual.new_sessions_per_min if new == NEW_SESSIONS_PER_S else new * 60,
        why=f"Service Quotas lists none of {', '.join(missing)}" if missing else "",
    )


def nothing_runs(quotas: Quotas) -> str | None:
    """Return the reason why no rollout can run under these quotas, or None. New accounts may have a quota of 0."""
    for name, value in (
        ("sessions alive at once", quotas.sessions),
        ("new sessions", quotas.new_sessions_per_min),
        ("requests", quotas.requests_per_s),
    ):
        if value <= 0:
            return f"this account's quota of {name} on AgentCore Runtime is 0, so that nothing can run: {HOW_TO_RAISE}"
    return None


def line(q: Quotas, *, rollouts: int | None = None, concurrent: int | None = None) -> str:
    """Describe in one line the quotas that limit a run. Each rollout is a new session."""
    source = f"AWS's defaults: {q.why}" if q.why else "Service Quotas"
    of = " (deployed as code: 1,500)" if q.new_sessions_per_min == Quotas.new_sessions_per_min else ""
    text = (
        f"quotas ({source}): {q.sessions:,} sessions alive, "
        f"{q.new_sessions_per_min:,.0f} new ones per minute{of}, {q.requests_per_s:,.0f} requests per second"
    )
    if rollouts is not None:
        minutes = math.ceil(rollouts / min(q.new_sessions_per_min, q.requests_per_s * 60))
        text += f"; to start {rollouts:,} rollouts takes about {minutes:,} min; {cost.line(rollouts)}"
    if concurrent is not None and concurrent > q.sessions:
        text += f"; {q.sessions:,} of the {concurrent:,} rollouts asked for run at once"
    return text


def before_a_run(
    arn: str, *, endpoint_url: str | None = None, rollouts: int | None = None, concurrent: int | None = None
) -> str | None:
    """Return the line for a run of a deployed agent, or None for an agent of a local runtime.

    Raises: ConfigError if nothing can run.
    """
    from botocore.config import Config

    from ..client.transport import is_aws

    own = endpoint_url or os.environ.get("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE") or os.environ.get("AWS_ENDPOINT_URL")
    asked = os.environ.get("AWS_ENDPOINT_URL_SERVICE_QUOTAS")
    parts = arn.split(":")
    if len(parts) < 6 or (own and not is_aws(own) and not asked):
        return None
    config = Config(connect_timeout=5, read_timeout=DEADLINE_S, retries={"total_max_attempts": 2})
    client = find_session().client("service-quotas", region_name=parts[3], config=config)
    found = read(client, parts[3])
    refusal = nothing_runs(found)
    if refusal is not None:
        raise ConfigError(refusal)
    return line(found, rollouts=rollouts, concurrent=concurrent)
