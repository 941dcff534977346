"""Settings of slime rollouts: how they reach the process in which slime calls us."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ...weights.arrival import MAX_MEAN_GAP
from ..service import RolloutSettings, ServiceSettings
from ..settings import Count, Least0, Port, Positive

ADMIN_KEY = "AGENTCORE_RL_GATEWAY_ADMIN_KEY"

# Names under which the published toolkit's slime integration read the same settings from the environment.
_ENVIRONMENT = {
    "agent_runtime_arn": ("AGENTCORE_AGENT_ARN", "ACR_AGENT_RUNTIME_ARN"),
    "s3_bucket": ("AGENTCORE_S3_BUCKET", "ACR_S3_BUCKET"),
    "exp_id": ("EXP_ID",),
    "gateway_port": ("GATEWAY_PORT",),
    "acr_timeout": ("ACR_TIMEOUT",),
    "acr_tps_limit": ("ACR_TPS_LIMIT",),
    "max_concurrent": ("MAX_CONCURRENT",),
    "model_id": ("MODEL_ID",),
    "gateway_admin_key": (ADMIN_KEY,),  # a secret: never in --custom-config-path
}


@dataclass(frozen=True, kw_only=True)
class SlimeSettings(RolloutSettings):
    """What a run says of its rollouts, in its file and in the process that rolls out, which slime hands it as attributes of its
    arguments (``--custom-config-path``).

    Names and defaults are those of the published toolkit where it has them; `service.ServiceSettings` says what they
    mean, except those that `rollout` looks at when it hands a step over: `max_staleness`, and `max_mean_logprob_gap`, by how much
    recorded logprobs and slime's own of an earlier step may differ on average. Without `gateway_model` the gateway renders with
    the tokenizer of slime's `hf_checkpoint`, so that prompts and replies are those tokens that slime trains.
    Units: seconds.
    """

    exp_id: str
    model_id: str = "default"
    acr_timeout: Positive = 900.0
    acr_submit_timeout: Positive = 120.0
    acr_tps_limit: Count = 25
    max_concurrent: Count = 100
    max_pool_connections: Count = 100
    gateway_port: Port = 9090
    gateway_admin_key: str | None = dataclasses.field(default=None, repr=False)
    max_staleness: Least0 | None = None
    max_mean_logprob_gap: Positive = MAX_MEAN_GAP

    @classmethod
    def from_args(cls, args: Any, environ: Mapping[str, str] = os.environ) -> SlimeSettings:
        """Read slime's arguments; the environment fills what they do not set.

        Raises: ConfigError naming the missing setting and both ways to give it.
        """
        found: dict[str, Any] = {}
        for f in dataclasses.fields(cls):
            value = getattr(args, f.name, None)
            if value is None:
                value = next((environ[n] for n in _ENVIRONMENT.get(f.name, ()) if environ.get(n)), None)
                if isinstance(value, str) and f.name in (
                    "acr_timeout",
                    "acr_tps_limit",
                    "gateway_port",
                    "max_concurrent",
                ):
                    value = _number(f.name, value)
            if value is not None:
                found[f.name] = value
            elif f.default is dataclasses.MISSING:
                names = " or ".join(_ENVIRONMENT[f.name])
                raise ConfigError(f"slime rollouts need `{f.name}`: set it in --custom-config-path, or {names}")
        if found.get("gateway_model") is None and getattr(args, "hf_checkpoint", None):
            found["gateway_model"] = str(args.hf_checkpoint)
        return cls(**found)

    def service(self) -> ServiceSettings:
        """The same under the names that all backends share."""
        return self.service_settings(
            exp_id=self.exp_id,
            model_id=self.model_id,
            rollout_timeout_s=self.acr_timeout,
            submit_timeout_s=self.acr_submit_timeout,
            tps_limit=self.acr_tps_limit,
            max_concurrent=self.max_concurrent,
            max_pool_connections=self.max_pool_connections,
            gateway_admin_key=self.gateway_admin_key,
        )


def _number(name: str, text: str) -> float | int:
    try:
        return float(text) if name == "acr_timeout" else int(text)
    except ValueError as e:
        raise ConfigError(f"{'/'.join(_ENVIRONMENT[name])} must be a number, got {text!r}") from e
