"""verl's AgentLoop over a remote agent, for the stock AgentLoop workers of the V1 trainer.

`manager.AgentCoreManager` is the better plug (whole groups, early stop, one gateway); this one fits set-ups that keep
verl's workers: name it in a YAML file given as ``actor_rollout_ref.rollout.agent.agent_loop_config_path``::

    - name: agentcore
      _target_: agentcore_rl_toolkit.backends.verl.adapter.AgentCoreAgentLoop
      agent_runtime_arn: arn:aws:bedrock-agentcore:...
      s3_bucket: my-bucket
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from dataclasses import replace
from typing import Any

from ..._installation import missing_extra
from ..service import RolloutService
from .bridge import Bridge
from .convert import to_verl
from .dataset import PAYLOAD_KEY
from .settings import AgentCoreConfig

try:
    from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput
except ModuleNotFoundError as e:
    raise missing_extra(f"the verl backend needs {e.name!r}", "verl") from e

_lock = threading.Lock()
_services: dict[str, RolloutService] = {}

# verl's names of sampling parameters -> OpenAI's; the others mean nothing to an OpenAI client.
_PARAMETERS = ("temperature", "top_p", "top_k", "repetition_penalty")


class AgentCoreAgentLoop(AgentLoopBase):
    """One rollout of a remote agent per call; several outputs for a forked episode, none for a masked one.

    Keyword arguments are those of `AgentCoreConfig`. verl makes a new loop for every rollout, so the clients are kept
    per process and configuration.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = AgentCoreConfig.__dataclass_fields__
        ours = {k: kwargs.pop(k) for k in list(kwargs) if k in names}
        super().__init__(*args, **kwargs)
        self.agentcore = AgentCoreConfig(**ours) if ours else AgentCoreConfig.of(self.config)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Never raises for a failed rollout: V1 then has no row of this session, and the group's mean does not see it."""
        service = await asyncio.to_thread(self._service)
        payload = kwargs.get(PAYLOAD_KEY) or {"prompt": kwargs["raw_prompt"]}
        step = kwargs.get("global_steps")
        rollout = await service.roll(
            dict(payload), openai_params(sampling_params), step=None if step is None else int(step)
        )
        outputs = to_verl(
            rollout,
            prompt_length=self.rollout_config.prompt_length,
            response_length=self.rollout_config.response_length,
        )
        return [AgentLoopOutput(**with_steps(o, kwargs.get("global_steps"))) for o in outputs]

    def _service(self) -> RolloutService:
        key = repr(self.agentcore)
        with _lock:
            if key not in _services:
                # verl runs several workers, each with a gateway of its own: they cannot share a port.
                ours = replace(self.agentcore, gateway_port=0)
                _services[key], _ = open_service(ours, self.config, self.server_manager)
            return _services[key]


def open_service(agentcore: AgentCoreConfig, config: Any, llm_client: Any) -> tuple[RolloutService, Bridge | None]:
    """Clients and gateway over verl's rollout servers; the bridge where the gateway samples through `llm_client`."""
    rollout = config.actor_rollout_ref.rollout
    settings = agentcore.service(str(config.actor_rollout_ref.model.path))
    if agentcore.gateway_url is not None:
        return RolloutService.open(settings, list, engine="sglang"), None
    bridge = Bridge(llm_client, engine=str(rollout.name))
    window = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
    folder = agentcore.gateway_model or tokenizer_folder(str(config.actor_rollout_ref.model.path))
    settings = replace(settings, gateway_model=folder, gateway_context_tokens=int(window))
    return RolloutService.open(settings, lambda: [bridge.open()], engine="sglang", upstream_key=bridge.key), bridge


def tokenizer_folder(model_path: str) -> str:
    """The model's tokenizer and chat template as a folder, which the gateway's process reads."""
    from verl.utils.fs import copy_to_local

    local = str(copy_to_local(model_path))
    if os.path.isdir(local):
        return local
    from transformers import AutoTokenizer

    folder = tempfile.mkdtemp(prefix="agentcore-rl-tokenizer-")
    AutoTokenizer.from_pretrained(local).save_pretrained(folder)
    return folder


def openai_params(sampling_params: dict[str, Any]) -> dict[str, Any]:
    """verl's sampling parameters under OpenAI's names; neutral values are left out."""
    found = {k: sampling_params[k] for k in _PARAMETERS if sampling_params.get(k) is not None}
    return {k: v for k, v in found.items() if (k, v) not in (("top_k", -1), ("repetition_penalty", 1.0))}


def with_steps(output: dict[str, Any], global_steps: Any) -> dict[str, Any]:
    """Fill in unknown weight versions with those of the step that asked, whose weights are numbered one less.

    Never newer than the truth, so staleness is not understated.
    """
    extra = dict(output["extra_fields"])
    if extra["min_global_steps"] is None and global_steps is not None:
        extra["min_global_steps"] = extra["max_global_steps"] = max(0, int(global_steps) - 1)
    return {**output, "extra_fields": extra}
