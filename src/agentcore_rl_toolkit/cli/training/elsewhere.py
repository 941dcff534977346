"""Trainers that need GPUs or a service: what `agentcore-rl train` was told, written as the configuration that they take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ...errors import ConfigError
from .settings import LocalRun, read

HUB_MODEL = "Qwen/Qwen3-4B-Instruct-2507"
WHERE = {
    "slime": "slime trains on GPUs, with Megatron-LM, in an environment of its own",
    "verl": "verl trains on GPUs, in an environment of its own",
    "rllm": "rLLM trains on GPUs, in an environment of its own",
    "tinker": "Tinker trains on Thinking Machines' service, with a key (TINKER_API_KEY)",
}


def hand_over(backend: str, flags: Mapping[str, Any], file: Path | None) -> NoReturn:
    """Write the configuration beside the agent. Raises: ConfigError that says where it is and what to run."""
    settings = read(flags, file)
    rows, held_out = settings.rows()
    if settings.held_out:
        raise ConfigError(f"backend {backend} takes whole files: write the rows to hold out into one, for --eval-data")
    path = settings.agent.parent / f"{backend}.toml"
    state = "is there already, and was left as it is" if path.exists() else "was written"
    if not path.exists():
        path.write_text(
            _HEADS[backend].format(name=_name(settings), data=settings.data) + toml(values(backend, settings))
        )
    raise ConfigError(
        f"{WHERE[backend]}, with an agent that is deployed: --agent FILE trains with --backend loop or trl only.\n"
        f"Its configuration {state}: {path} ({len(rows)} rows to train on, {len(held_out)} held out).\n"
        f"Deploy the agent ({settings.agent.parent}/Dockerfile, docs/your-agent.md), then where {backend} is installed:\n"
        "    export AGENTCORE_AGENT_ARN=... AGENTCORE_S3_BUCKET=...\n"
        f"    agentcore-rl train --backend {backend} --config {path} --dry-run    # what is still missing\n"
        f"    agentcore-rl train --backend {backend} --config {path}"
    )


def values(backend: str, settings: LocalRun) -> dict[str, Any]:
    """The run under the trainer's own names. Learning rates stay the trainer's: ours are for a very small model."""
    name, model = _name(settings), str(settings.model or HUB_MODEL)
    batch, group = settings.groups, settings.rollouts
    data, held_out = str(settings.data), settings.eval_data and str(settings.eval_data)
    if backend == "verl":
        overrides: dict[str, Any] = {
            "actor_rollout_ref.model.path": model,
            "actor_rollout_ref.rollout.n": group,
            "actor_rollout_ref.actor.ppo_mini_batch_size": batch,
            "data.train_files": data,
            "data.val_files": held_out or data,
            "data.train_batch_size": batch,
            "trainer.total_training_steps": settings.steps,
        }
        if settings.lora_rank:
            overrides["actor_rollout_ref.model.lora_rank"] = settings.lora_rank
            overrides["actor_rollout_ref.rollout.load_format"] = "safetensors"  # verl needs it for LoRA with vLLM
        return {
            "agentcore": {"exp_id": name, "max_rollout_time": settings.rollout_deadline_s},
            "overrides": overrides,
        }
    if backend == "slime":
        evaluation = {"eval_data_path": held_out, "eval_interval": 5} if held_out else {}
        return {
            "exp_id": name,
            "model_dir": model,
            "model_type": "qwen3-4B",
            "data_path": data,
            **evaluation,
            "rollout_batch_size": batch,
            "n_samples_per_prompt": group,
            "acr_timeout": settings.rollout_deadline_s,
        }
    if backend == "rllm":
        overrides = {"model.lora_rank": settings.lora_rank} if settings.lora_rank else {}
        return {
            "model_path": model,
            "dataset": name,
            "session_timeout": settings.rollout_deadline_s,
            "group_size": group,
            "train_batch_size": batch,
            "experiment_name": name,
            **({"overrides": overrides} if overrides else {}),
        }
    return {
        "exp_id": name,
        "base_model": HUB_MODEL,
        "model_dir": model,
        "data_path": data,
        "output_dir": f"runs/{name}-tinker",
        "steps": settings.steps,
        "groups_per_step": batch,
        "group_size": group,
        **({"rank": settings.lora_rank} if settings.lora_rank else {}),
        "rollout_timeout_s": settings.rollout_deadline_s,
    }


_DEPLOYED = "# agent_runtime_arn and s3_bucket come from AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET.\n"
_HEADS = {
    "verl": "# Settings of verl for {name}; all keys: docs/backends/verl.md\n" + _DEPLOYED,
    "slime": "# Settings of slime for {name}; all keys: docs/backends/slime.md\n"
    + _DEPLOYED
    + "# model_dir is a folder with the model, model_type its script in slime; slime_dir and megatron_dir are their checkouts.\n",
    "rllm": "# Settings of rLLM for {name}; all keys: docs/backends/rllm.md\n"
    + _DEPLOYED
    + "# The data goes into rLLM's registry first:\n"
    "#     python -c 'from agentcore_rl_toolkit.backends import data, gsm8k;"
    ' gsm8k.register_with_rllm(data.read_rows("{data}"), "train", "{name}")\'\n',
    "tinker": "# Settings of Tinker for {name}; all keys: docs/backends/tinker.md\n"
    + _DEPLOYED
    + "# model_dir is a folder with tokenizer and chat template of base_model, no weights. Agents must reach the\n"
    "# gateway that the run starts: gateway_public_url says where, if not at this machine's own address.\n",
}


def _name(settings: LocalRun) -> str:
    return settings.agent.parent.name


def toml(values: Mapping[str, Any]) -> str:
    """Plain values and one level of tables as TOML."""
    plain = [f"{_key(name)} = {json.dumps(value)}" for name, value in values.items() if not isinstance(value, Mapping)]
    tables = [f"\n[{_key(name)}]\n{toml(value)}" for name, value in values.items() if isinstance(value, Mapping)]
    return "".join(f"{line}\n" for line in plain) + "".join(tables)


def _key(name: str) -> str:
    return name if name.replace("_", "").isalnum() else json.dumps(name)
