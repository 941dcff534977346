"""The cost of rollouts on AgentCore Runtime, and of a model's instance."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError

# us-east-1 and us-west-2. Sources: the pricing pages of Bedrock AgentCore and S3, November 2026. AgentCore charges CPU that was
# used, and memory at its highest use so far, by the second.
PRICES_OF = "November 2026"
VCPU_HOUR, GB_HOUR = 0.0895, 0.00945
S3_WRITE, S3_READ = 0.005 / 1000, 0.0004 / 1000  # PUT and LIST, GET
HEARTBEAT_S, LISTING_S = 10.0, 0.5  # the defaults of the client
# A usual rollout: seconds of CPU (an agent that waits for its model uses 0.5 s per turn), memory, and rollouts at the same time.
CPU_S, MEMORY_GB, CONCURRENT = 12.0, 0.5, 128


def dollars(rollouts: int, minutes: float = 5.0) -> float:
    """Return the price of a run of usual rollouts of this length, without the model."""
    session_s = minutes * 60
    cpu = rollouts * CPU_S / 3600 * VCPU_HOUR
    memory = rollouts * session_s / 3600 * MEMORY_GB * GB_HOUR
    duration_s = rollouts / CONCURRENT * session_s + session_s
    writes = rollouts * (1 + math.ceil(session_s / HEARTBEAT_S)) + duration_s / LISTING_S
    return cpu + memory + writes * S3_WRITE + rollouts * S3_READ


def line(rollouts: int) -> str:
    """Describe the price of rollouts of the usual size."""
    return (
        f"{rollouts:,} rollouts of 5 min, 12 s of CPU and 0.5 GB cost about ${dollars(rollouts):,.2f} on AgentCore Runtime "
        f"(prices of {PRICES_OF}; without the model)"
    )


def dollars_per_hour(instance: str, region: str, pricing: Callable[..., Any]) -> float | None:
    """Return the price of a SageMaker instance by AWS's price list. None if the list is not open to this user, or lacks it.

    ``pricing`` calls an operation of the price list's service.
    """
    wanted = {"instanceName": instance, "component": "Hosting", "regionCode": region}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    try:
        listed = (pricing("GetProducts", ServiceCode="AmazonSageMaker", Filters=filters) or {})["PriceList"]
        (terms,) = json.loads(listed[0])["terms"]["OnDemand"].values()
        (dimension,) = terms["priceDimensions"].values()
        return float(dimension["pricePerUnit"]["USD"])
    except (ConfigError, LookupError, ValueError):
        return None
