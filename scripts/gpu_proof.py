"""The proof that one GPU runs all of it, in ten minutes: `python scripts/gpu_proof.py [--device cpu] [--shape NAME] [--quick]`.

Nothing is downloaded: models with random weights in these shapes are made here. For each, the built-in engine samples beside
transformers' `generate` (64 sequences of 256 prompt tokens and 64 new ones; 8 and 16 on a CPU). Then `train` takes five steps
(two on a CPU) of 36 rollouts, 125 tokens of prompt and at most 25 sampled ones, with publishing and its proof, on an agent
whose reward is the length of its answer. The end is one table in Markdown: next to each measured memory stands the one that
docs/hardware.md computes. It needs the extra `local`, and a PyTorch for the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHAPES: dict[str, dict[str, Any]] = {  # family, and what differs from its defaults
    "SmolLM2-135M": {
        "family": "Llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "SmolLM2-360M": {
        "family": "Llama",
        "vocab_size": 49152,
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
    },
    "Qwen3-0.6B": {
        "family": "Qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
AGENT = """
from openai import AsyncOpenAI
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@app.rollout_entrypoint
async def invoke_agent(payload):
    rollout = payload["_rollout"]
    async with AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout["api_key"]) as client:
        reply = await client.chat.completions.create(
            model=rollout["model_id"],
            messages=[{"role": "user", "content": payload["prompt"]}],
            max_tokens=25,
            extra_body=rollout.get("sampling_params"),
        )
    return {"rewards": min(1.0, len(reply.choices[0].message.content or "") / 1000)}
"""


def make(name: str, folder: Path) -> int:
    """A model of this shape, with the shipped tokenizer filled up to its vocabulary. Returns its parameters."""
    import torch
    import transformers

    from agentcore_rl_toolkit.policy import WEIGHTS_DIR

    torch.manual_seed(0)
    wanted = dict(SHAPES[name])
    family = wanted.pop("family")
    config = getattr(transformers, f"{family}Config")(
        **wanted, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=2
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(folder)
    tokenizer = json.loads((WEIGHTS_DIR / "tokenizer.json").read_text())
    known = tokenizer["model"]["vocab"]
    first = max(*known.values(), *(token["id"] for token in tokenizer["added_tokens"])) + 1
    known.update({f"word{n}": n for n in range(first, config.vocab_size)})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / file).write_bytes((WEIGHTS_DIR / file).read_bytes())
    return int(model.num_parameters())


def sample(folder: Path, batch: int, new: int) -> dict[str, Any]:
    """Tokens a second of the engine and of transformers, and the engine's memory."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torch
    from transformers import AutoModelForCausalLM

    from agentcore_rl_toolkit.policy.engine import Engine
    from agentcore_rl_toolkit.policy.loading import load_decoder
    from engine import by_engine, by_transformers, timed, worst_gap

    decoder = load_decoder(folder, rows=batch)
    on_gpu = decoder.device == "cuda"
    memory = torch.cuda.memory_allocated() if on_gpu else None  # before the cache
    prompts = torch.randint(600, decoder.shape.vocabulary, (batch, 256)).tolist()
    with Engine(decoder, seed=0) as engine:
        by_engine(engine, prompts[:2], 4)
        engine_s, _, done = timed(lambda: by_engine(engine, prompts[2:] + prompts[:2], new))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=decoder.dtype).to(decoder.device)
    by_transformers(model, prompts[:2], 4)
    peer_s, _, _ = timed(lambda: by_transformers(model, prompts, new))
    found = {"device": decoder.device, "dtype": engine.dtype, "engine_bytes": memory, "gap": worst_gap(model, done)}
    return {**found, "engine": batch * new / engine_s, "transformers": batch * new / peer_s}


def train(folder: Path, scratch: Path, steps: int) -> list[dict[str, Any]]:
    """Steps of the loop, each with publishing and its proof: the run ends with an error where one fails."""
    (scratch / "agent.py").write_text(AGENT)
    (scratch / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Count to {n}. " + "and so on " * 11}) + "\n" for n in range(32))
    )
    words = ["--agent", str(scratch / "agent.py"), "--data", str(scratch / "rows.jsonl"), "--model", str(folder)]
    words += f"--steps {steps} --groups 6 --rollouts 6 --set lora_rank=0".split()
    words += ["--set", "rollout_timeout_s=300", "--out", str(scratch / "run")]
    subprocess.run([sys.executable, "-m", "agentcore_rl_toolkit.cli", "train", *words], check=True, stdout=sys.stderr)
    events = [json.loads(line) for line in (scratch / "run/metrics.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), action="append", help="only these shapes [all]")
    parser.add_argument("--quick", action="store_true", help="two layers of each shape, the sizes for a CPU")
    a = parser.parse_args()
    if a.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if torch.cuda.is_available() != (a.device == "cuda"):
        sys.exit("PyTorch sees no GPU here")
    batch, new, steps = (8, 16, 2) if a.quick or a.device == "cpu" else (64, 64, 5)
    columns = ["shape", "on", "parameters", f"engine, tokens/s at {batch}", "transformers", "gap"]
    columns += [
        "loop: sampling, tokens/s",
        "training, tokens/s",
        "gap, last step",
        "minutes a step",
        "CPU minutes a step",
    ]
    columns += ["engine GB (by the table)", "trainer GB (by the table, no activations)"]
    rows = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name in a.shape or SHAPES:
        if a.quick:
            SHAPES[name]["num_hidden_layers"] = 2
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / name
            parameters = make(name, folder)
            found = sample(folder, batch, new)
            torch.cuda.empty_cache()
            before = os.times()
            done = train(folder, Path(scratch), steps)
            after, last = os.times(), done[-1]
        wall_s = sum(step["rollout_s"] + step["train_s"] for step in done) / steps
        cpu_s = sum(after[2:4]) - sum(before[2:4])  # of the loop and all its processes, their start included
        size = found["engine_bytes"]
        cells = [
            name,
            f"{found['device']}, {found['dtype']}",
            f"{parameters / 1e6:,.0f} million",
            f"{found['engine']:,.0f}",
        ]
        cells += [f"{found['transformers']:,.0f}", f"{found['gap']:.1e}", f"{last['sampled_tokens_per_s']:,.0f}"]
        cells += [f"{last['computed_tokens_per_s']:,.0f}", f"{last['logprob_gap']:.1e}"]
        cells += [f"{wall_s / 60:.1f}", f"{cpu_s / steps / 60:.1f}"]
        cells += ["-" if size is None else f"{size / 1e9:.2f} ({2 * parameters / 1e9:.2f})"]
        cells += [f"{last['peak_memory_gb']:.1f} ({16 * parameters / 1e9:.1f})"]
        rows.append("| " + " | ".join(cells) + " |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
