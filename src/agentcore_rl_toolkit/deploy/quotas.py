"""An account's quotas of AgentCore Runtime, and those that limit a run. Read from Service Quotas, or AWS's defaults.

Source: "Quotas for Amazon Bedrock AgentCore" in its developer guide, November 2026; names as Service Quotas lists them.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..store.remote import find_session
from . import cost

_NAMES = {
    "sessions": r"active session",
    "new_sessions_per_s": r"new (runtime )?session",
    "requests_per_s": r"runtime data plane|invokeagentruntime\b",
}
_CODE_DEFAULT = ("new_sessions_per_s", 25.0)  # listed by AWS, but it holds for agents deployed as code only
HOW_TO_RAISE = "ask for more in the Service Quotas console, under Amazon Bedrock AgentCore"
DEADLINE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Quotas:
    """Quotas of one agent: sessions alive at once, and rates. The defaults are AWS's for us-east-1, as of November 2026.

    ``why`` is the reason why these are the defaults, or "".
    """

    sessions: float = 5000
    new_sessions_per_s: float = 400 / 60  # images; an agent deployed as code may start 25
    requests_per_s: float = 200
    why: str = ""


def read(client: Any) -> Quotas:
    """Read the account's quotas with a boto3 client of ``service-quotas``. A quota that is not listed has its default."""
    from botocore.exceptions import BotoCoreError, ClientError

    found: dict[str, Any] = {}
    try:
        for page in client.get_paginator("list_service_quotas").paginate(ServiceCode="bedrock-agentcore"):
            for quota in page["Quotas"]:
                for kind, pattern in _NAMES.items():
                    known = re.search(pattern, quota["QuotaName"], re.IGNORECASE)
                    if known and (kind, quota["Value"]) != _CODE_DEFAULT:
                        found.setdefault(kind, quota["Value"])
    except (ClientError, BotoCoreError) as e:
        code = e.response["Error"].get("Code") if isinstance(e, ClientError) else type(e).__name__
        return Quotas(why=f"Service Quotas is not readable ({code}; servicequotas:ListServiceQuotas)")
    return Quotas(**found)


def nothing_runs(quotas: Quotas) -> str | None:
    """Return the reason why no rollout can run under these quotas, or None. New accounts may have a quota of 0."""
    values = {
        "sessions alive at once": quotas.sessions,
        "new sessions": quotas.new_sessions_per_s,
        "requests": quotas.requests_per_s,
    }
    none = next((name for name, value in values.items() if value <= 0), None)
    if none is None:
        return None
    return f"this account's quota of {none} on AgentCore Runtime is 0, so that nothing can run: {HOW_TO_RAISE}"


def line(q: Quotas, rollouts: int | None = None) -> str:
    """Describe in one line the quotas that limit a run. Each rollout is a new session."""
    text = (
        f"quotas ({f'AWS defaults: {q.why}' if q.why else 'Service Quotas'}): {q.sessions:,.0f} sessions alive, "
        f"{q.new_sessions_per_s * 60:,.0f} new ones per minute, {q.requests_per_s:,.0f} requests per second"
    )
    if rollouts is not None:
        minutes = math.ceil(rollouts / min(q.new_sessions_per_s, q.requests_per_s) / 60)
        text += f"; to start {rollouts:,} rollouts takes about {minutes:,} min; {cost.line(rollouts)}"
    return text


def before_a_run(arn: str, *, endpoint_url: str | None = None, rollouts: int | None = None) -> str | None:
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
    found = read(find_session().client("service-quotas", region_name=parts[3], config=config))
    if (refusal := nothing_runs(found)) is not None:
        raise ConfigError(refusal)
    return line(found, rollouts)
