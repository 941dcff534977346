"""Settings of slime rollouts: how they reach the process in which slime calls us."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ...weights.arrival import MAX_MEAN_GAP
from ..service import ServiceSettings
from ..settings import Count, Least0, Positive, SettingsGroup, with_environment

ADMIN_KEY = "AGENTCORE_RL_GATEWAY_ADMIN_KEY"


class HandoverSettings(SettingsGroup):
    """The limits of what slime gets.

    Rollouts with a sample of more than ``max_tokens``, prompt and response, are masked. So are those with a token that is more
    than ``max_staleness`` weight versions old. ``max_mean_logprob_gap`` is by how much recorded logprobs and slime's own of an
    earlier step may differ on average. Units: nats.
    """

    max_tokens: Count | None = None
    max_staleness: Least0 | None = None
    max_mean_logprob_gap: Positive = MAX_MEAN_GAP


class SlimeSettings(ServiceSettings):
    """The rollout settings of a run, which slime passes on as attributes of its arguments (``--custom-config-path``).

    Without `gateway_model` the gateway renders with the tokenizer of slime's `hf_checkpoint`, so that prompts and replies are
    those tokens that slime trains.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "acr_timeout": "rollout_timeout_s",
        "acr_submit_timeout": "submit_timeout_s",
        "acr_tps_limit": "tps_limit",
    }
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"model_id": "default", "max_concurrent": 100, "gateway_port": 9090}

    handover: HandoverSettings = Field(default_factory=HandoverSettings)

    @classmethod
    def from_args(cls, args: Any) -> SlimeSettings:
        """Read slime's arguments; AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET fill what they leave out. Raises: ConfigError."""
        names = (*cls.known(), *cls.ALIASES)
        values = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
        if os.environ.get(ADMIN_KEY):  # a secret: never in --custom-config-path
            values.setdefault("gateway_admin_key", os.environ[ADMIN_KEY])
        if "gateway_model" not in values and getattr(args, "hf_checkpoint", None):
            values["gateway_model"] = str(args.hf_checkpoint)
        return cls.from_values(with_environment(values), where="--custom-config-path")
