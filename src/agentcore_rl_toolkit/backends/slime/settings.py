"""Settings of slime rollouts: how they reach the process in which slime calls us."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from ...weights.arrival import MAX_MEAN_GAP
from ..service import RolloutSettings, ServiceSettings
from ..settings import Count, Least0, Port, Positive, from_mapping, with_environment

ADMIN_KEY = "AGENTCORE_RL_GATEWAY_ADMIN_KEY"


@dataclass(frozen=True, kw_only=True)
class SlimeSettings(RolloutSettings):
    """The rollout settings of a run, from its file, and in the process that rolls out, which slime hands it as attributes of its
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
    def from_args(cls, args: Any) -> SlimeSettings:
        """Read slime's arguments; AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET fill what they leave out. Raises: ConfigError."""
        values = {
            f.name: getattr(args, f.name) for f in dataclasses.fields(cls) if getattr(args, f.name, None) is not None
        }
        if os.environ.get(ADMIN_KEY):  # a secret: never in --custom-config-path
            values.setdefault("gateway_admin_key", os.environ[ADMIN_KEY])
        if "gateway_model" not in values and getattr(args, "hf_checkpoint", None):
            values["gateway_model"] = str(args.hf_checkpoint)
        return from_mapping(cls, with_environment(values), where="--custom-config-path")

    def service(self) -> ServiceSettings:
        """The same under the names that all backends share."""
        return self.service_settings(
            rollout_timeout_s=self.acr_timeout,
            submit_timeout_s=self.acr_submit_timeout,
            tps_limit=self.acr_tps_limit,
        )
