"""Run by test_real_slime.py with slime's Python: slime's and Megatron's own parsing and checks of `SlimeRunner`'s command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import megatron.training.arguments as megatron_arguments
import torch
from slime.utils.arguments import parse_args
from transformers import Qwen2Config, Qwen3MoeConfig

from agentcore_rl_toolkit.backends.slime import SlimeRunner

# Megatron asks the GPU for its generation; these are an H100's answers.
megatron_arguments.get_device_arch_version = lambda: 9
torch.cuda.get_device_capability = lambda: (9, 0)

# The dimensions of Qwen2.5-3B and Qwen3-30B-A3B, against which slime checks the model arguments.
DENSE = Qwen2Config(
    vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
    num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1e6, rms_norm_eps=1e-6,
)  # fmt: skip
EXPERTS = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
    tie_word_embeddings=False, rope_theta=1e6, rms_norm_eps=1e-6,
)  # fmt: skip


def main() -> None:
    slime_dir, megatron_dir = sys.argv[1:3]
    here = Path.cwd()
    rows = here / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": str(i), "answer": "1"}) + "\n" for i in range(64)))
    for name, model in (("dense", DENSE), ("experts", EXPERTS)):
        model.architectures = ["Qwen2ForCausalLM" if name == "dense" else "Qwen3MoeForCausalLM"]
        model.save_pretrained(here / name)
    common: dict[str, Any] = {
        "exp_id": "e",
        "agent_runtime_arn": "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math",
        "s3_bucket": "b",
        "model_dir": str(here / "dense"),
        "model_type": "qwen2.5-3B",
        "data_path": str(rows),
        "slime_dir": slime_dir,
        "megatron_dir": megatron_dir,
        "run_dir": str(here / "runs"),
    }
    cases: dict[str, dict[str, Any]] = {
        "sync": {"eval_data_path": str(rows), "save_dir": str(here / "saved"), "sglang_context_length": 4096},
        "async": {"mode": "async", "num_gpus": 4, "rollout_num_gpus": 4, "sglang_reasoning_parser": "qwen3"},
        "fully_async": {"mode": "fully_async", "num_gpus": 4, "rollout_num_gpus": 4},
        "routing": {"model_dir": str(here / "experts"), "model_type": "qwen3-30B-A3B", "routing_replay": True},
        "none": {"reward_postprocessing": "none", "sglang_data_parallel_size": 2},
    }
    accepted = []
    for name, more in cases.items():
        runner = SlimeRunner(**{**common, **more})
        runner._write_inputs()
        command = list(runner.plan(3).command or ())
        sys.argv = command[command.index("--") + 2 :]
        args = parse_args()
        written = json.loads(json.dumps(runner.rollout_settings()))  # the file has lists in place of tuples
        for key, value in written.items():
            assert getattr(args, key) == value, key
        assert args.custom_generate_function_path.endswith("slime.generate.generate")
        assert args.eval_function_path == args.rollout_function_path
        assert args.rollout_num_gpus == runner.rollout_gpus
        assert args.colocate is (runner.mode == "sync")
        assert args.rewards_normalization is (runner.reward_postprocessing == "grpo")
        assert bool(args.eval_datasets) is (runner.eval_data_path is not None)
        assert args.use_rollout_routing_replay is runner.routing_replay
        accepted.append(name)
    print("accepted:", *accepted)


if __name__ == "__main__":
    main()
