"""Settings of slime runs, and of their rollouts in the process in which slime calls us."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from ...weights.arrival import MAX_MEAN_GAP
from ..collection.teacher import KEY_ENV as TEACHER_KEY
from ..llm_judge import KEY as JUDGE_KEY
from ..service import ServiceSettings
from ..settings import Count, Least0, Positive, SettingsGroup, with_environment

ADMIN_KEY = "AGENTCORE_RL_GATEWAY_ADMIN_KEY"
# Variables that the job gets from this process, because a running cluster has its own environment.
JOB_ENV = (
    *("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "HF_TOKEN", "HF_ENDPOINT", ADMIN_KEY, JUDGE_KEY, TEACHER_KEY),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", "AWS_ENDPOINT_URL_S3"),
)


class HandoverSettings(SettingsGroup):
    """The limits of the samples for slime.

    Rollouts with a sample of more than ``max_tokens``, prompt and response, are masked. So are those with a token that is more
    than ``max_staleness`` weight versions old. ``max_mean_logprob_gap`` limits the mean difference between recorded
    and slime's logprobs of an earlier step. Units: nats.
    """

    max_tokens: Count | None = None
    max_staleness: Least0 | None = None
    max_mean_logprob_gap: Positive = MAX_MEAN_GAP


class SlimeSettings(ServiceSettings):
    """The rollout settings of a run, which slime passes on as attributes of its arguments (``--custom-config-path``).

    Without `gateway_model` the gateway renders with the tokenizer of slime's `hf_checkpoint`, so that slime
    trains the tokens of prompts and replies.
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


class ModelSettings(SettingsGroup):
    """The model, the data, and where things are. ``model_type`` names a file of slime's `scripts/models`."""

    model_dir: str
    model_type: str
    data_path: str
    eval_data_path: str | None = None
    slime_dir: str = "slime"
    megatron_dir: str = "Megatron-LM"
    cuda_home: str | None = None
    run_dir: str = "runs/slime"
    save_dir: str | None = None
    save_interval: Count = 20


class MachineSettings(SettingsGroup):
    """The GPUs and the Ray cluster. ``job_env`` are variables that the job gets from this process."""

    num_gpus: Count = 8
    rollout_num_gpus: Count | None = None
    rollout_gpus_per_engine: Count = 2
    tp_size: Count = 2
    max_tokens_per_gpu: Count = 9216
    ray_address: str | None = None
    job_env: tuple[str, ...] = JOB_ENV


class EngineSettings(SettingsGroup):
    """SGLang. ``cumulative_token_mode``, ``renderer_family`` and ``gateway_log_level`` are accepted and have no effect."""

    sglang_tool_call_parser: str | None = "qwen"
    sglang_reasoning_parser: str | None = None
    sglang_data_parallel_size: Count = 1
    sglang_mem_fraction_static: Positive = 0.7
    sglang_context_length: Count | None = None
    routing_replay: bool = False
    cumulative_token_mode: bool = False
    renderer_family: str = "auto"
    gateway_log_level: str = "warning"


class TrainingSettings(SettingsGroup):
    """A step takes ``groups`` inputs, ``rollouts`` times each. Names and defaults are otherwise slime's."""

    mode: Literal["sync", "async", "fully_async"] = "sync"
    groups: Count = 32
    rollouts: Count = 8
    over_sampling_batch_size: Count | None = None
    temperature: Positive = 1.0
    rollout_max_response_len: Count = 1024
    learning_rate: Positive = 1e-6
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    weight_decay: float = 0.1
    adam_beta2: float = 0.98
    reward_postprocessing: Literal["grpo", "none"] = "grpo"
    use_tis: bool = True


class ReportSettings(SettingsGroup):
    """Evaluations, and where numbers go. ``trainer_numbers`` None: `keeps_trainer_numbers` decides."""

    eval_interval: Count = 20
    n_samples_per_eval_prompt: Count = 1
    trainer_numbers: bool | None = None
    wandb_project: str | None = None
    wandb_group: str | None = None
