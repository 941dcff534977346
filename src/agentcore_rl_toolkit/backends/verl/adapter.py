"""Our clients and the gateway over verl's engines, and the translation of names between both."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from ..service import RolloutService
from .bridge import Bridge
from .settings import AgentCoreConfig


def open_service(agentcore: AgentCoreConfig, config: Any, llm_client: Any) -> tuple[RolloutService, Bridge | None]:
    """Open clients and gateway over verl's engines, and the bridge if the gateway samples through `llm_client`."""
    rollout = config.actor_rollout_ref.rollout
    settings = agentcore.service(str(config.actor_rollout_ref.model.path))
    if agentcore.gateway_url is not None:
        return RolloutService.open(settings, list, engine="sglang"), None
    bridge = Bridge(llm_client, engine=str(rollout.name))
    window = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
    folder = agentcore.gateway_model or tokenizer_folder(str(config.actor_rollout_ref.model.path))
    settings = settings.replace(gateway_model=folder, gateway_context_tokens=int(window))
    return RolloutService.open(settings, lambda: [bridge.open()], engine="sglang", upstream_key=bridge.key), bridge


def tokenizer_folder(model_path: str) -> str:
    """Return a folder with the model's tokenizer and chat template, which the gateway's process reads."""
    from verl.utils.fs import copy_to_local

    local = str(copy_to_local(model_path))
    if os.path.isdir(local):
        return local
    from transformers import AutoTokenizer

    folder = tempfile.mkdtemp(prefix="agentcore-rl-tokenizer-")
    AutoTokenizer.from_pretrained(local).save_pretrained(folder)
    return folder


def with_steps(output: dict[str, Any], global_steps: Any) -> dict[str, Any]:
    """Replace unknown weight versions with the version of the requesting step, which is one less than its number.

    It is never newer than the real one, so staleness is not understated.
    """
    extra = dict(output["extra_fields"])
    if extra["min_global_steps"] is None and global_steps is not None:
        extra["min_global_steps"] = extra["max_global_steps"] = max(0, int(global_steps) - 1)
    return {**output, "extra_fields": extra}
