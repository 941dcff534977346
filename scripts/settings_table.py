"""Write docs/settings.md: the settings of all trainers with meaning, values, and defaults.

python scripts/settings_table.py           # prints the page
python scripts/settings_table.py --write   # replaces it
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from agentcore_rl_toolkit.backends.rllm import RllmConfig
from agentcore_rl_toolkit.backends.sagemaker.settings import SageMakerConfig
from agentcore_rl_toolkit.backends.settings import Settings
from agentcore_rl_toolkit.backends.slime import SlimeRunner
from agentcore_rl_toolkit.backends.tinker.settings import TinkerConfig
from agentcore_rl_toolkit.backends.trl import TrlConfig
from agentcore_rl_toolkit.backends.verl.settings import AgentCoreConfig
from agentcore_rl_toolkit.cli.training.settings import LocalRun, by_size

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
TRAINERS: dict[str, type[Settings]] = {
    "loop": LocalRun,
    "slime": SlimeRunner,
    "verl": AgentCoreConfig,
    "TRL": TrlConfig,
    "rLLM": RllmConfig,
    "Tinker": TinkerConfig,
    "SageMaker": SageMakerConfig,
}
INTRODUCTION = """\
# Settings

A setting has the same name in all trainers. `agentcore-rl train --set NAME=VALUE` sets a setting of the built-in loop, which is
`train` without `--backend`. The other trainers read their settings from a file (`--config`). The group of a setting is optional
there: `tps_limit: 25` and `limits: {tps_limit: 25}` mean the same.

The column of defaults shows which trainers have the setting. "Required" means that it has no default. "By size" means that
the default depends on [the size of the model](policy.md#training-another-model). The names in the last column work
too.

`python scripts/settings_table.py --write` writes this page from the code.
"""
MEANINGS: dict[str, str] = {
    # limits
    "rollout_timeout_s": "Seconds from the runtime's answer to the record",
    "submit_timeout_s": "Seconds of a request that starts a rollout, to the runtime's answer",
    "tps_limit": "Requests per second to AgentCore",
    "max_concurrent": "Rollouts at the same time",
    "max_pool_connections": "Connections to AgentCore that are open at the same time",
    "max_turns": "Model calls of a session; the next call is refused, which is a failure of the policy",
    "extra_rollouts": "Rollouts above the size of a group; the rest is cancelled when enough are usable",
    # selection
    "policy_failures": "Train the reward that the agent declares for a failure of the policy, or mask the rollout",
    "train_on": "[Which conversations train](trajectory.md#which-conversations-train)",
    "refuse_other_sampling": "Mask rollouts with another temperature, cuts, or penalties",
    "sampling_params": "Sampling parameters of all model calls, which the gateway enforces",
    # signals
    "credit": "Compare the rewards of rollouts, or the returns of model calls",
    "discount": "Share of the next call's return in a call's return",
    "normalize": "Compare returns at the same position, or of the complete group",
    "teacher_url": "Server of a teacher with the same vocabulary",
    "reward_weight": "With a teacher: weight of the rewards' advantage",
    # judging, scoring
    "judge": "File with the rubric of a judge",
    "judge_url": "Address of the judge's API",
    "judge_model": "Model of the judge",
    "judge_weight": "Share of the judge's score in the reward",
    "judge_timeout_s": "Seconds for each call of the judge",
    "judge_price": "Dollars per million tokens read and written",
    "score": "Function that scores rollouts: `FILE:FUNCTION` or `MODULE:FUNCTION`",
    "score_timeout_s": "Seconds for each score",
    # step
    "steps": "Training steps",
    "groups": "Inputs per step",
    "rollouts": "Rollouts per input",
    "replace_up_to": "Replace groups with equal rewards, up to this multiple of `groups`",
    "max_staleness": "Weight versions between the start of a rollout and its training",
    "hold_calls": "Replace weights between model calls; otherwise running calls continue with new weights",
    "eval_every": "Steps between evaluations; 0 evaluates only before and after",
    "checkpoint_every": "Steps between checkpoints (the last step has one, too); 0 saves none",
    "max_empty_steps": "Steps in a row without a usable rollout that end the run",
    "seed": "Seed of the rows and the sampling",
    # optimizer
    "learning_rate": "Learning rate, before `schedule` and `warmup_steps` reduce it",
    "schedule": "Fall of the learning rate over all steps, at most to a twentieth",
    "warmup_steps": "Steps at the beginning with a smaller learning rate, which rises",
    "beta1": "First moment of Adam",
    "beta2": "Second moment of Adam",
    "max_grad_norm": "Largest norm of the gradient; 0 does not clip",
    # update
    "estimator": "[Comparison of the rewards](algorithms.md#advantages) in a group",
    "loss": "[Loss](algorithms.md#the-policy-loss) of a token",
    "clip_low": "The ratio is at least 1 minus this",
    "clip_high": "The ratio is at most 1 plus this",
    "dual_clip": "Bound of the loss for negative advantages",
    "loss_options": "More options of the loss",
    "minibatches": "Optimizer steps per step",
    "max_tokens": "Rollouts with a longer sequence are left out and counted",
    # inputs
    "agent": "File of the agent",
    "data_path": "Rows to train on",
    "eval_data_path": "Rows that are never trained on",
    "held_out": "Share of the data that is kept for evaluations",
    # learner
    "model": "[Model](policy.md#any-other-model) to train; none: the built-in policy",
    "lora_rank": "Rank of LoRA adapters; 0 trains all weights",
    "lora_alpha": "Scale of the adapters; none: twice the rank",
    "tokens_at_once": "Tokens of a minibatch that are computed together, padding included",
    "gradient_checkpointing": "Save memory by computing activations twice",
    "dtype": "Number type of the engine's and the trainer's products",
    "weight_decay": "Weight decay of AdamW",
    "kl_penalty": "Weight of the divergence from the model at the start",
    # sessions
    "session_env": "Variables of the sessions: `NAME=VALUE`, or `NAME` for the value of this shell",
    "model_hosts": "More hosts of model APIs, for agents that run as they are",
    "policy_models": "Models that the policy replaces, for the same agents",
    "readable": "Paths that sessions may read",
    "writable": "Folders that sessions may write",
    # agent
    "agent_runtime_arn": "ARN of the agent, or `AGENTCORE_AGENT_ARN`",
    "s3_bucket": "Bucket or store URL of the records, or `AGENTCORE_S3_BUCKET`",
    "exp_id": "First part of every record's key",
    "model_id": "Name by which agents ask for the model",
    "endpoint_url": "Another AgentCore endpoint, such as the local runtime",
    "record_dir": "Folder that keeps the rollouts for `agentcore-rl view`",
    # gateway
    "gateway_url": "Gateways that run already",
    "gateway_public_url": "Address of the gateway for agents; none: this machine's address",
    "gateway_admin_key": "Admin key of a gateway that runs already",
    "gateway_host": "Address on which the gateway listens",
    "gateway_port": "Port of the gateway; 0 takes a free one",
    "gateways": "Gateways that the run starts",
    "gateway_store": "Folder for captured turns; none: a temporary one",
    "gateway_model": "Folder with tokenizer and chat template",
    "gateway_context_tokens": "Window of the model in tokens",
    "gateway_patience_s": "Seconds to wait for a gateway that cannot be reached",
    # handover
    "max_mean_logprob_gap": "Nats by which recorded and recomputed logprobs may differ on average",
    # slime
    "model_dir": "Folder of the model; for services only its tokenizer and chat template",
    "model_type": "Name of a file in slime's `scripts/models`",
    "slime_dir": "Checkout of slime",
    "megatron_dir": "Checkout of Megatron-LM",
    "cuda_home": "Folder of CUDA",
    "run_dir": "Folder of the run",
    "save_dir": "Folder of checkpoints",
    "save_interval": "Steps between checkpoints",
    "num_gpus": "GPUs per machine",
    "rollout_num_gpus": "GPUs of the engines in asynchronous modes",
    "rollout_gpus_per_engine": "GPUs per engine",
    "tp_size": "Tensor parallelism of the trainer",
    "max_tokens_per_gpu": "Tokens of a minibatch per GPU",
    "ray_address": "Ray cluster of the job",
    "job_env": "Variables that the job gets from this process",
    "sglang_tool_call_parser": "Parser of tool calls",
    "sglang_reasoning_parser": "Parser of reasoning",
    "sglang_data_parallel_size": "Data parallelism of an engine",
    "sglang_mem_fraction_static": "Share of GPU memory for weights and cache",
    "sglang_context_length": "Window of the engine in tokens",
    "routing_replay": "Train each token with the experts that sampled it",
    "cumulative_token_mode": "Accepted, without effect",
    "renderer_family": "Accepted, without effect",
    "gateway_log_level": "Accepted, without effect",
    "mode": "Order of rollouts and training",
    "over_sampling_batch_size": "Inputs that slime starts per step",
    "temperature": "Temperature of sampling and training",
    "rollout_max_response_len": "Tokens of each model call",
    "eps_clip": "As `clip_low`",
    "eps_clip_high": "As `clip_high`",
    "adam_beta2": "As `beta2`",
    "reward_postprocessing": "Compare rewards within groups, or leave them as they are",
    "use_tis": "Correct for the difference between engine and trainer",
    "eval_interval": "Steps between evaluations",
    "n_samples_per_eval_prompt": "Rollouts per input of an evaluation",
    "trainer_numbers": "Keep what slime's trainer computed; none: if Ray runs on this machine",
    "wandb_project": "Project of Weights & Biases",
    "wandb_group": "Group of Weights & Biases",
    "extra_flags": "More options of slime",
    # verl
    "gateway_cumulative_token_mode": "Accepted, without effect",
    "gateway_renderer_model_family": "Accepted, without effect",
    # trl
    "output_dir": "Folder of metrics and checkpoints",
    "policy_url": "Engine that gets the weights; none if TRL syncs to vLLM",
    "policy_engine": "Kind of this engine",
    "max_weights_gap": "Nats by which engine and trainer may differ in [the proof](engines.md#the-proof)",
    "lora": "Arguments of peft's `LoraConfig`",
    "training": "Arguments of TRL's `GRPOConfig`",
    # services
    "base_model": "The service's name of the model",
    "role_arn": "Role of the session",
    "output_s3": "Place of the session's output",
    "model_package_group_arn": "Group of the model packages",
    "accept_eula": "Accept the license of the model",
    "alpha": "Scale of the LoRA adapters",
    "poll_s": "Longest time in seconds between two requests for a result",
    "start_timeout_s": "Seconds until the session runs",
    "operation_timeout_s": "Seconds for one operation",
    "service_url": "Another service",
    "rank": "Rank of the LoRA adapters",
    "form": "Training Session or job",
    # others
    "engine": "Engine that samples",
    "forced_tools": "[Calls that force a tool or a schema](rendering.md#holding-an-answer-to-a-form)",
    "history": "[Prompts](rendering.md#prompts-as-sampled-or-as-the-template-writes-them) as sampled, or of the template",
    "tracker": "Receivers of the metrics",
    "model_path": "Folder or hub name of the model",
    "backend": "Trainer below rLLM",
    "dataset": "Name of rLLM's data set",
    "mask_failures": "Leave failed rollouts out; otherwise rLLM trains them with reward 0",
    "max_prompt_length": "Tokens of a prompt",
    "max_response_length": "Tokens of a response",
    "n_gpus_per_node": "GPUs per machine",
    "tool_call_parser": "Parser of tool calls",
    "project_name": "Project of rLLM's trackers",
    "overrides": "More keys of the trainer's configuration",
    "words": "More keys, from the command line",
}
# The same in slime, verl 0.9 and TRL.
EQUIVALENTS: dict[str, tuple[str, str, str]] = {
    "steps": ("`num_rollout` of `train()`", "`trainer.total_training_steps`", "`training.max_steps`"),
    "groups": ("`groups`", "`data.train_batch_size`", "`training.generation_batch_size` / `rollouts`"),
    "rollouts": ("`rollouts`", "`actor_rollout_ref.rollout.n`", "`rollouts`"),
    "learning_rate": ("`learning_rate`", "`actor_rollout_ref.actor.optim.lr`", "`training.learning_rate`"),
    "weight_decay": ("`weight_decay`", "`actor_rollout_ref.actor.optim.weight_decay`", "`training.weight_decay`"),
    "max_grad_norm": ("`--clip-grad`", "`actor_rollout_ref.actor.grad_clip`", "`training.max_grad_norm`"),
    "clip_low": ("`eps_clip`", "`actor_rollout_ref.actor.clip_ratio_low`", "`training.epsilon`"),
    "clip_high": ("`eps_clip_high`", "`actor_rollout_ref.actor.clip_ratio_high`", "`training.epsilon_high`"),
    "kl_penalty": ("`--kl-loss-coef`", "`actor_rollout_ref.actor.kl_loss_coef`", "`training.beta`"),
    "estimator": ("`--advantage-estimator`", "`algorithm.adv_estimator`", "`training.scale_rewards`"),
    "eval_every": ("`eval_interval`", "`trainer.test_freq`", "`training.eval_steps`"),
    "checkpoint_every": ("`save_interval`", "`trainer.save_freq`", "`training.save_steps`"),
    "seed": ("`--seed`", "`data.seed`", "`training.seed`"),
    "model": ("`model_dir`", "`actor_rollout_ref.model.path`", "`model`"),
    "lora_rank": ("", "`actor_rollout_ref.model.lora_rank`", "`lora: {r: 16}`"),
    "data_path": ("`data_path`", "`data.train_files`", "`data_path`"),
    "eval_data_path": ("`eval_data_path`", "`data.val_files`", "`eval_data_path`"),
}


def default_of(trainer: type[Settings], name: str) -> str:
    """Return the default of a setting as text, empty if the trainer has no such setting."""
    if name not in trainer.known():
        return ""
    if trainer is LocalRun and name in by_size(None):
        return "by size"
    field = trainer.known()[name][1]
    value: Any = trainer.DEFAULTS.get(name, field.get_default(call_default_factory=True))
    if name not in trainer.DEFAULTS and field.is_required():
        return "required"
    if value in (None, (), {}):
        return "none"
    if isinstance(value, tuple):
        return "several"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def defaults_of(name: str) -> str:
    """Return the defaults of a setting, each with the trainers that have it."""
    trainers: dict[str, list[str]] = {}
    for trainer, settings in TRAINERS.items():
        if default := default_of(settings, name):
            trainers.setdefault(default, []).append(trainer)
    return "; ".join(f"{default} ({_short(names)})" for default, names in trainers.items())


def _short(names: list[str]) -> str:
    missing = [trainer for trainer in TRAINERS if trainer not in names]
    return ", ".join(names) if len(missing) > 1 else f"all but {missing[0]}" if missing else "all"


def values_of(field: FieldInfo) -> str:
    """Return the type of a setting with its bounds, or its choices."""
    kinds = [kind for kind in (typing.get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    if typing.get_origin(field.annotation) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in kinds)
    inner = [m for kind in kinds for m in getattr(kind, "__metadata__", ())]
    limits = [*field.metadata, *(limit for m in inner for limit in (m.metadata if isinstance(m, FieldInfo) else [m]))]
    kinds = [typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind for kind in kinds]
    if any(typing.get_origin(kind) is typing.Literal for kind in kinds):
        return ", ".join(f"`{choice}`" for kind in kinds for choice in typing.get_args(kind))
    of = typing.get_origin(field.annotation) or kinds[0]
    name = {int: "whole number", float: "number", bool: "`true`, `false`", tuple: "list", Mapping: "mapping"}.get(
        of, ""
    )
    name = name or {int: "whole number", float: "number", Mapping: "mapping"}.get(
        typing.get_origin(kinds[0]) or kinds[0], "text"
    )
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limit = [f"{word} {getattr(m, sign):g}" for m in limits for sign, word in signs.items() if hasattr(m, sign)]
    name = "list of numbers" if name == "list" and limit else name
    return " ".join([name, ", ".join(dict.fromkeys(limit))]).strip()


def page() -> str:
    """Return the page. Raises: ValueError if a setting has no meaning here, or a meaning has no setting."""
    groups: dict[str, dict[str, FieldInfo]] = {}
    for trainer in TRAINERS.values():
        for name, (group, field) in trainer.known().items():
            if not any(name in names for names in groups.values()):
                groups.setdefault(group or "others", {})[name] = field
    if differ := {name for names in groups.values() for name in names} ^ MEANINGS.keys():
        raise ValueError(
            f"{', '.join(sorted(differ))}: a setting without a meaning in this script, or a meaning without a setting"
        )
    lines = [INTRODUCTION]
    for group, names in sorted(groups.items(), key=lambda item: item[0] == "others"):
        lines += [f"## {group}\n", "| setting | meaning | values | default | other names |", "|---|---|---|---|---|"]
        for name, field in names.items():
            aliases = sorted({a for t in TRAINERS.values() for a, place in t.ALIASES.items() if place == name})
            cells = (
                f"`{name}`",
                MEANINGS[name],
                values_of(field),
                defaults_of(name),
                ", ".join(f"`{a}`" for a in aliases),
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += [
        "## The same setting in the trainers' own configuration\n",
        "TRL, verl, and slime configure the training under their own names. These mean the same as in the loop:\n",
        "| setting of the loop | slime | verl | TRL |",
        "|---|---|---|---|",
        *(f"| `{name}` | {' | '.join(others)} |" for name, others in EQUIVALENTS.items()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace docs/settings.md")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
