"""rLLM runs: one file with the keys of its AgentCore runtime, and the resulting command."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from ...errors import ConfigError
from ...weights.arrival import MAX_MEAN_GAP
from ..collection.credit import refuse
from ..llm_judge import JudgeSettings
from ..settings import (
    Count,
    GroupSize,
    Plan,
    Positive,
    Settings,
    hydra_value,
    planned,
    read_settings,
    with_environment,
)

GAP_VARIABLE = "RLLM_MAX_MEAN_LOGPROB_GAP"
OPEN = (  # set here because rLLM has no default that works; another value is the user's choice
    *("rllm.algorithm.adv_estimator", "rllm.algorithm.norm_adv_by_std_in_grpo", "validation.group_size"),
    *("rllm.algorithm.rollout_correction.bypass_mode", "actor_rollout_ref.rollout.name"),
    *("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "actor_rollout_ref.rollout.max_model_len"),
    *("actor_rollout_ref.model.use_remove_padding", "actor_rollout_ref.actor.use_dynamic_bsz"),
)


class RllmConfig(Settings):
    """An rLLM run on AgentCore.

    `rollout_timeout_s` becomes ``rllm.remote_runtime.session_timeout``; under ``remote_runtime.agentcore``, where some
    guides print it, rLLM refuses it. `mask_failures` turns on rLLM's compact filtering for errors and timeouts:
    without it rLLM trains failed rollouts as reward 0. A step takes `groups` inputs, `rollouts` times each. `overrides` are
    further hydra keys, passed on unchanged. `record_dir` is the folder that keeps the rollouts for `agentcore-rl view`; None is
    `runs/EXPERIMENT_NAME`. The run ends when a step's sampled logprobs and the trainer's own differ by more than
    `max_mean_logprob_gap` nats on average; None is no limit.
    Units: seconds. Raises: ConfigError.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "session_timeout": "rollout_timeout_s",
        "n_parallel": "max_concurrent",
        "group_size": "rollouts",
        "train_batch_size": "groups",
        "experiment_name": "exp_id",
        "args": "overrides",
    }

    agent_runtime_arn: str
    s3_bucket: str
    model_path: str
    backend: Literal["verl", "tinker"] = "verl"
    dataset: str = "gsm8k_agentcore"
    tps_limit: Count = 25
    rollout_timeout_s: Positive = 300.0
    max_concurrent: Count = 256
    mask_failures: bool = True
    rollouts: GroupSize = 8
    groups: Count = 64
    max_prompt_length: Count = 14336
    max_response_length: Count = 2048
    learning_rate: Positive = 2e-5
    temperature: Positive = 1.0
    n_gpus_per_node: Count = 8
    tool_call_parser: str = "hermes"
    project_name: str = "agentcore-math"
    exp_id: str = "gsm8k"
    record_dir: str | None = None
    max_mean_logprob_gap: Positive | None = MAX_MEAN_GAP
    overrides: Mapping[str, Any] = Field(default_factory=dict)
    words: tuple[str, ...] = ()  # further arguments of the command line, as they were given

    def model_post_init(self, _: Any) -> None:
        if self.backend == "tinker" and self.temperature != 1.0:
            raise ConfigError("temperature must be 1 with backend tinker, which computes losses at temperature 1")

    @classmethod
    def from_file(cls, path: str | Path) -> RllmConfig:
        values = read_settings(path)
        refuse(values, "rLLM", "its own engine computes the advantages from the records' rewards, one per trajectory")
        refuse(values, "rLLM", "its own engine reads the reward of each record", JudgeSettings)
        return cls.from_values(with_environment(values), where=str(path))

    def hydra_overrides(self) -> list[str]:
        """Return the run as hydra overrides of rLLM's unified trainer.

        Settings that rLLM and its trainers share are set under ``rllm.``, and rLLM copies them to the trainer.
        """
        values: dict[str, Any] = {
            "rllm/backend": self.backend,
            "rllm.remote_runtime.enabled": True,
            "rllm.remote_runtime.backend": "agentcore",
            "rllm.remote_runtime.agentcore.agent_runtime_arn": self.agent_runtime_arn,
            "rllm.remote_runtime.agentcore.s3_bucket": self.s3_bucket,
            "rllm.remote_runtime.agentcore.tps_limit": self.tps_limit,
            "rllm.remote_runtime.session_timeout": self.rollout_timeout_s,
            "rllm.workflow.n_parallel_tasks": self.max_concurrent,
            "rllm.compact_filtering.enable": self.mask_failures,
            "rllm.algorithm.adv_estimator": "grpo",
            "rllm.algorithm.norm_adv_by_std_in_grpo": True,
            "rllm.rollout.train.temperature": self.temperature,
            "rllm.data.train_batch_size": self.groups,
            "rllm.data.max_prompt_length": self.max_prompt_length,
            "rllm.data.max_response_length": self.max_response_length,
            "rllm.trainer.project_name": self.project_name,
            "rllm.trainer.experiment_name": self.exp_id,  # also the experiment that records are stored under
            **(self._verl() if self.backend == "verl" else self._tinker()),
        }
        given = {*self.overrides, *(word.lstrip("+~").partition("=")[0] for word in self.words)}
        if owned := sorted(given & {key.lstrip("+") for key in values if key not in OPEN}):
            raise ConfigError(f"{', '.join(owned)}: the settings of this backend set this key; change the setting")
        values |= self.overrides
        return [*(f"{key}={hydra_value(value)}" for key, value in values.items()), *self.words]

    def with_args(self, words: Sequence[str]) -> RllmConfig:
        return self.replace(words=(*self.words, *words))

    def plan(self) -> Plan:
        command = [sys.executable, "-m", "agentcore_rl_toolkit.backends.rllm.main", *self.hydra_overrides()]
        wanted = [("rllm", "rLLM from its repository (github.com/rllm-org/rllm)"), ("hydra", "pip install hydra-core")]
        wanted.append(("verl", "verl") if self.backend == "verl" else ("tinker", "pip install tinker"))
        needs = [text for module, text in wanted if not importlib.util.find_spec(module)]
        record_dir = str(Path(self.record_dir or f"runs/{self.exp_id}").absolute())
        gap = "none" if self.max_mean_logprob_gap is None else f"{self.max_mean_logprob_gap:g}"
        environment = {"RLLM_DATASET": self.dataset, "RLLM_RECORD_DIR": record_dir, GAP_VARIABLE: gap}
        facts = planned(self)
        return Plan(backend="rllm", facts=facts, command=command, environment=environment, needs=needs)

    def _verl(self) -> dict[str, Any]:
        actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
        tokens = self.max_prompt_length + self.max_response_length
        return {
            "rllm.rollout.n": self.rollouts,
            # The update takes its ratio against the logprobs that were sampled, not against recomputed ones.
            "rllm.algorithm.rollout_correction.bypass_mode": True,
            "+model.name": self.model_path,
            "actor_rollout_ref.model.path": self.model_path,
            "actor_rollout_ref.model.use_remove_padding": True,
            f"{actor}.optim.lr": self.learning_rate,
            f"{actor}.ppo_mini_batch_size": self.groups,
            # verl refuses to start without a micro batch size; batches by length need none and waste no padding.
            f"{actor}.use_dynamic_bsz": True,
            f"{actor}.ppo_max_token_len_per_gpu": tokens,
            f"{rollout}.log_prob_micro_batch_size_per_gpu": 1,
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 1,
            f"{rollout}.max_model_len": tokens,
            f"{rollout}.name": "vllm",
            f"{rollout}.mode": "async",
            # Without these vLLM answers tool calls as plain text and the agent never calls a tool.
            f"+{rollout}.engine_kwargs.vllm.enable_auto_tool_choice": True,
            f"+{rollout}.engine_kwargs.vllm.tool_call_parser": self.tool_call_parser,
            "trainer.n_gpus_per_node": self.n_gpus_per_node,
        }

    def _tinker(self) -> dict[str, Any]:
        return {
            "model.name": self.model_path,
            "training.group_size": self.rollouts,
            "validation.group_size": 1,  # rLLM has no default for it
            "training.learning_rate": self.learning_rate,
            "training.max_length": self.max_prompt_length + self.max_response_length,
        }


def mean_gap(text: str | None) -> float | None:
    """Return the limit in RLLM_MAX_MEAN_LOGPROB_GAP, or the default if it is not set."""
    return None if text == "none" else float(text or MAX_MEAN_GAP)
