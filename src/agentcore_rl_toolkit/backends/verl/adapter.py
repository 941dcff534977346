"""Our clients and the gateway over verl's engines."""

from __future__ import annotations

from typing import Any

from ..service import RolloutService
from .bridge import Bridge
from .settings import AgentCoreConfig


def open_service(agentcore: AgentCoreConfig, config: Any, llm_client: Any) -> tuple[RolloutService, Bridge | None]:
    """Open clients and gateway over verl's engines, and the bridge if the gateway samples through `llm_client`."""
    rollout, model = config.actor_rollout_ref.rollout, str(config.actor_rollout_ref.model.path)
    settings = agentcore.service(model)
    if agentcore.gateway_url is not None:
        return RolloutService.open(settings, list, engine="sglang"), None
    bridge = Bridge(llm_client, engine=str(rollout.name))
    window = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
    settings = settings.replace(gateway_model=agentcore.gateway_model or model, gateway_context_tokens=int(window))
    return RolloutService.open(settings, lambda: [bridge.open()], engine="sglang", upstream_key=bridge.key), bridge
