"""Run by test_rllm_checkout.py with rLLM's checkout on the path: our overrides through rLLM's own configuration and sync."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from agentcore_rl_toolkit.backends.rllm import RllmConfig

SHOWN = {
    "tinker": (
        "training.group_size",
        "training.learning_rate",
        "data.train_batch_size",
        "data.max_prompt_length",
        "model.name",
    ),
    "verl": (
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.temperature",
        "actor_rollout_ref.actor.optim.lr",
        "algorithm.adv_estimator",
        "algorithm.rollout_correction.bypass_mode",
        "data.train_batch_size",
        "data.max_prompt_length",
        "trainer.experiment_name",
    ),
}
COMMON = (
    "rllm.remote_runtime",
    "rllm.rollout.n",
    "rllm.rollout.train.temperature",
    "rllm.compact_filtering.enable",
    "rllm.trainer.experiment_name",
    "rllm.workflow.n_parallel_tasks",
)


def check_with_verl(config: Any) -> None:
    """What verl refuses, it refuses here, before any GPU is asked for."""
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=False)


def main() -> None:
    backend = sys.argv[1]
    settings = RllmConfig(
        agent_runtime_arn="arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math",
        s3_bucket="bucket",
        model_path="some/model",
        backend=backend,  # type: ignore[arg-type]  # one of the two
        group_size=5,
        temperature=0.7 if backend == "verl" else 1.0,  # Tinker computes losses at 1
        train_batch_size=24,
        max_prompt_length=1111,
        session_timeout=42,
        n_parallel=17,
        experiment_name="mine",
    )
    overrides = settings.hydra_overrides()
    with initialize_config_module("rllm.trainer.config", version_base=None):
        config: Any = compose(config_name="unified", overrides=overrides)
    importlib.import_module(f"rllm.trainer.{backend}.utils").sync_config(config, overrides)
    if backend == "verl":
        OmegaConf.resolve(config)
        check_with_verl(config)
    shown = {key: OmegaConf.select(config, key) for key in (*COMMON, *SHOWN[backend])}
    print(
        "CONFIG "
        + json.dumps({k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in shown.items()})
    )


main()
