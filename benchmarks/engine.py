"""The built-in engine and transformers' `generate` side by side, on random weights in the shape of SmolLM2-135M.

    python benchmarks/engine.py [--quick] [--threads N] [--json FILE]

Rows, each by the engine and by `generate` (its default cache, no padding: all prompts are as long):
    batch        sequences at once, of 256 prompt tokens and 64 new ones (--quick: 64 and 16)
    tokens/s     sampled tokens a second, reading the prompts included
    tokens/cpu s the same by the CPU time of the process, which a busy machine changes less
    first token  seconds to the first token of all
Below them: the largest difference between the engine's logprobs and those of a full forward pass, and the peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentcore_rl_toolkit.policy.decoder import Decoder, DecoderShape
from agentcore_rl_toolkit.policy.engine import Engine
from agentcore_rl_toolkit.policy.sampling import SamplingParams


def model_of_that_shape() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def timed(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds by the clock, seconds of CPU, the result."""
    wall, cpu = time.monotonic(), time.process_time()
    result = run()
    return time.monotonic() - wall, time.process_time() - cpu, result


def by_engine(engine: Engine, prompts: list[list[int]], new: int) -> list[Any]:
    return engine.generate(prompts, SamplingParams(max_tokens=new, ignore_eos=True), timeout_s=None)


@torch.inference_mode()
def by_transformers(model: Any, prompts: list[list[int]], new: int) -> Any:
    ids = torch.tensor(prompts)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
    )


def worst_gap(model: Any, generations: list[Any]) -> float:
    """Between the engine's logprobs and those of the whole model on prompt and completion."""
    worst = 0.0
    for g in generations[:4]:
        with torch.inference_mode():
            logprobs_TV = model(torch.tensor([g.prompt_ids + g.token_ids])).logits[0].log_softmax(-1)
        for k, token in enumerate(g.token_ids):
            worst = max(worst, abs(float(logprobs_TV[len(g.prompt_ids) - 1 + k, token]) - g.logprobs[k]))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    prompt_tokens, new = (64, 16) if a.quick else (256, 64)
    model = model_of_that_shape()
    rows: list[dict[str, Any]] = []
    gap = 0.0
    print(
        f"{'batch':>5}  {'by':<12}  {'tokens/s':>8}  {'tokens/cpu s':>12}  {'first token':>11}   ({a.threads} threads)"
    )
    # no prefix cache: a prompt is read whole each time, as by generate
    decoder = Decoder(DecoderShape.from_config(model.config), model.state_dict(), cache_tokens=0, rows=32)
    with Engine(decoder, seed=0) as engine:
        decoder.cache_tokens = None
        for batch in (1, 8) if a.quick else (1, 8, 32):
            ids = torch.randint(0, 49152, (batch, prompt_tokens), generator=torch.Generator().manual_seed(batch))
            prompts = ids.tolist()
            for name, run in (
                ("engine", lambda p, n: by_engine(engine, p, n)),
                ("transformers", lambda p, n: by_transformers(model, p, n)),
            ):
                first_s, _, _ = timed(lambda run=run, prompts=prompts: run(prompts, 1))  # type: ignore[misc]
                wall_s, cpu_s, result = timed(lambda run=run, prompts=prompts: run(prompts, new))  # type: ignore[misc]
                tokens = batch * new
                rates = {"tokens_per_s": tokens / wall_s, "tokens_per_cpu_s": tokens / cpu_s, "first_token_s": first_s}
                rows.append({"batch": batch, "by": name, **rates})
                print(f"{batch:>5}  {name:<12}  {tokens / wall_s:>8.1f}  {tokens / cpu_s:>12.1f}  {first_s:>9.2f} s")
                gap = max(gap, worst_gap(model, result)) if name == "engine" else gap
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"logprob gap {gap:.1e}, peak memory {memory:.1f} GB (both models)")
    if a.json:
        a.json.write_text(json.dumps({"rows": rows, "logprob_gap": gap, "memory_gb": memory}, indent=2) + "\n")


if __name__ == "__main__":
    main()
