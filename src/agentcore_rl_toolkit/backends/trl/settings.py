"""Settings of a TRL run, and its plan."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from ...errors import ConfigError
from ...weights.arrival import MAX_MEAN_GAP
from ...weights.engines import Kind
from ..collection.groups import trained_temperature
from ..collection.settings import CollectConfig
from ..service import ServiceSettings
from ..settings import Count, GroupSize, Plan, Positive, SettingsGroup, planned

# Keys of GRPOConfig for sampling, which agents' calls must keep.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class TrlSettings(SettingsGroup):
    """The settings that only TRL has.

    ``policy_url`` is the engine whose weights the training replaces, of the kind ``policy_engine`` (the built-in policy,
    vLLM or SGLang). It is None when TRL itself syncs to a vLLM server (``training: {use_vllm: true, vllm_mode: server,
    vllm_server_base_url: ...}``). ``max_weights_gap`` is by how much engine and trainer may differ on a probe after that; None:
    1e-3, or 1.0 where the engine says that it computes in bfloat16. ``max_mean_logprob_gap`` is by how much the recorded logprobs
    of a batch and the trainer's may differ on average, before its first step; None lets them.

    ``eval_data_path`` has rows that are never trained on; every ``training.eval_steps`` (20) steps they are run. With
    ``training.save_steps`` the state is saved, and the same command continues from the last one.

    ``model`` is a local folder or hub id. ``lora`` are arguments of peft's LoraConfig, None trains all weights. ``training`` goes
    to TRL's GRPOConfig unchanged; its ``temperature``, ``top_p`` and the like hold for the agents' calls where they are set.

    ``max_tokens`` masks and counts rollouts whose row would be longer.
    """

    model: str
    data_path: Path | None = None
    eval_data_path: Path | None = None
    output_dir: Path = Path("runs/trl")
    rollouts: GroupSize = 8
    policy_url: str | None = None
    policy_engine: Kind = "policy"
    max_weights_gap: Positive | None = None
    max_mean_logprob_gap: Positive | None = MAX_MEAN_GAP
    max_tokens: Count | None = None
    lora: Mapping[str, Any] | None = None
    training: Mapping[str, Any] = Field(default_factory=dict)


class TrlConfig(ServiceSettings):
    """The settings of a TRL run. `gateway_url` must be a running gateway, because TRL may run as several processes.

    Raises: ConfigError.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"num_generations": "rollouts", "args": "training"}

    trl: TrlSettings

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        training, policy_url = self.trl.training, self.trl.policy_url
        if self.gateway.gateway_url is None:
            raise ConfigError(
                "`gateway_url` is needed: the gateway in front of the engine (agentcore-rl gateway serve)"
            )
        named = training.get("num_generations", self.trl.rollouts)
        if named != self.trl.rollouts:
            raise ConfigError(f"num_generations is {self.trl.rollouts} here and {named} under `training`")
        if policy_url is None and not training.get("use_vllm"):
            raise ConfigError(
                "no engine would get new weights: set policy_url (the built-in policy, vLLM or SGLang), or "
                "training.use_vllm with vllm_mode: server"
            )
        if training.get("use_vllm") and training.get("vllm_mode", "server") != "server":
            raise ConfigError("agents reach the model over HTTP: training.vllm_mode must be `server`")
        if training.get("use_vllm") and policy_url is not None:
            raise ConfigError("policy_url and training.use_vllm are two engines for one policy; keep one of them")
        if self.signals.per_token and training.get("use_liger_kernel"):
            raise ConfigError(
                "training.use_liger_kernel needs one advantage per rollout: leave it out with credit or teacher_url"
            )
        self.trained_sampling()

    def with_args(self, words: Sequence[str]) -> TrlConfig:
        given: dict[str, Any] = {}
        for word in words:
            name, sign, text = word.partition("=")
            if not sign:
                raise ConfigError(f"{word!r} is not an argument of GRPOConfig as NAME=VALUE")
            try:
                given[name] = json.loads(text)
            except ValueError:
                given[name] = text
        return self.replace(training={**self.trl.training, **given})

    def collect_config(self) -> CollectConfig:
        return super().collect_config().replace(sampling_params=self.trained_sampling())

    def shown(self) -> dict[str, Any]:
        """Return the settings as a run's folder keeps them, with the sampling parameters of its rollouts."""
        return {**super().shown(), "sampling_params": self.trained_sampling()}

    def trained_sampling(self) -> dict[str, Any]:
        """Return the agents' sampling parameters, with `training.temperature`, by which TRL divides its logits."""
        training = self.trl.training
        given = {name: training[name] for name in _SAMPLING if training.get(name) is not None}
        params = {**given, **(self.selection.sampling_params or {})}
        for name, wanted in {"temperature": 1.0, **given}.items():
            if params.get(name, wanted) != wanted:
                raise ConfigError(
                    f"sampling_params.{name} is {params[name]} and training.{name} is {wanted}: TRL would compare "
                    f"other probabilities than the agents sampled with; set training.{name} only"
                )
        self.signals.check_temperature(trained_temperature(params), "training.temperature")
        return params

    def plan(self) -> Plan:
        facts = planned(self, data=self.trl.data_path)
        needs = [f"pip install {name}" for name in ("torch", "trl", "datasets") if not importlib.util.find_spec(name)]
        if self.trl.lora and not importlib.util.find_spec("peft"):
            needs.append("pip install peft")
        return Plan(backend="trl", facts=facts, needs=needs)
