"""The built-in engine and trainer beside transformers, vLLM and a bare loop, on random weights in the shape of SmolLM2-135M.

    python benchmarks/engine.py [--quick] [--threads N] [--json FILE]

Sampling, by the engine, by transformers' `generate` (its default cache, no padding: all prompts are as long), and by vLLM where
`make vllm-env` has built it (eager, as `agentcore-rl policy vllm` starts it), none with a prefix cache:
    type         of the numbers; bfloat16 where this CPU has instructions for it
    batch        sequences at once, of 256 prompt tokens and 64 new ones (--quick: 64 and 16)
    tokens/s     sampled tokens a second, reading the prompts included
    decoded/s    the same without the prompts
    tokens/cpu s sampled tokens by the CPU time of the process, which a busy machine changes less
    first token  seconds to the first token of all
Training: tokens a second of one update of the loop, and of the same update in plain PyTorch with all logits. Then the checks.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: threads that wait would count as CPU time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentcore_rl_toolkit.backends import CollectedRollout, Group, GroupRequest
from agentcore_rl_toolkit.backends.training.loop import update
from agentcore_rl_toolkit.backends.training.settings import LoopSettings
from agentcore_rl_toolkit.backends.training.torch_client import TorchClient, TorchSettings, compute_in
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.policy import WEIGHTS_DIR
from agentcore_rl_toolkit.policy.decoder import Decoder, DecoderShape
from agentcore_rl_toolkit.policy.engine import Engine
from agentcore_rl_toolkit.policy.sampling import SamplingParams
from agentcore_rl_toolkit.trajectory import Turn, build_trajectory

ROOT = Path(__file__).resolve().parents[1]
VLLM_PYTHON = Path(os.environ.get("AGENTCORE_RL_ENGINE_PYTHON") or ROOT / ".venvs/vllm/bin/python")
VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
asked = json.load(sys.stdin)
llm = LLM(asked["folder"], skip_tokenizer_init=True, dtype=asked["type"], max_model_len=1024, max_num_seqs=32,
          enforce_eager=True, enable_prefix_caching=False, disable_log_stats=True)
def run(prompts, new):
    began = time.monotonic()
    params = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
    done = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert all(len(d.outputs[0].token_ids) == new for d in done)
    return time.monotonic() - began
run(asked["prompts"][:1], 2)
print(json.dumps({"first": run(asked["prompts"], 1), "wall": run(asked["prompts"], asked["new"])}))
"""


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
    ids = torch.tensor(prompts, device=model.device)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
    )


def by_vllm(folder: Path, prompts: list[list[int]], new: int, dtype: str, threads: int) -> tuple[float, float]:
    """Seconds to the first token, and to the last."""
    own = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    asked = {"folder": str(folder), "type": dtype, "prompts": prompts, "new": new}
    done = subprocess.run(
        [VLLM_PYTHON, "-c", VLLM],
        input=json.dumps(asked),
        env={**os.environ, **own, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        sys.exit(f"vLLM failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["first"], found["wall"]


def worst_gap(model: Any, generations: list[Any]) -> float:
    """Between the engine's logprobs and those of the whole model on prompt and completion."""
    worst = 0.0
    for g in generations[:4]:
        with torch.inference_mode():
            ids_1T = torch.tensor([g.prompt_ids + g.token_ids], device=model.device)
            logprobs_TV = model(ids_1T).logits[0].float().log_softmax(-1)
        for k, token in enumerate(g.token_ids):
            worst = max(worst, abs(float(logprobs_TV[len(g.prompt_ids) - 1 + k, token]) - g.logprobs[k]))
    return worst


def sampling(
    model: Any, folder: Path, dtype: str, batches: tuple[int, ...], tokens: tuple[int, int], threads: int, vllm: bool
) -> list[dict[str, Any]]:
    prompt_tokens, new = tokens
    rows: list[dict[str, Any]] = []
    # no prefix cache: a prompt is read whole each time, as by generate
    kind = getattr(torch, dtype)
    decoder = Decoder(
        DecoderShape.from_config(model.config), model.state_dict(), cache_tokens=0, rows=max(batches), dtype=kind
    )
    peer = copy.deepcopy(model).to(kind)

    def add(batch: int, by: str, first_s: float, wall_s: float, cpu_s: float | None, gap: float | None = None) -> None:
        rates = {"tokens_per_s": batch * new / wall_s, "decoded_per_s": batch * (new - 1) / (wall_s - first_s)}
        row = {"type": dtype, "batch": batch, "by": by, **rates, "first_token_s": first_s, "logprob_gap": gap}
        row["tokens_per_cpu_s"] = cpu_s and batch * new / cpu_s
        rows.append(row)
        by_cpu = "" if cpu_s is None else f"{row['tokens_per_cpu_s']:.1f}"
        text = f"{dtype:<8}  {batch:>5}  {by:<12}  {rates['tokens_per_s']:>8.1f}  {rates['decoded_per_s']:>9.1f}"
        print(f"{text}  {by_cpu:>12}  {first_s:>9.2f} s{'' if gap is None else f'  logprob gap {gap:.1e}'}", flush=True)

    with Engine(decoder, seed=0) as engine:
        decoder.cache_tokens = None
        for batch in batches:
            ids = torch.randint(0, 49152, (batch, prompt_tokens), generator=torch.Generator().manual_seed(batch))
            prompts = ids.tolist()
            for name, run in (
                ("engine", lambda p, n: by_engine(engine, p, n)),
                ("transformers", lambda p, n: by_transformers(peer, p, n)),
            ):
                run(prompts[:1], 2)
                first_s, _, _ = timed(lambda run=run, prompts=prompts: run(prompts, 1))
                wall_s, cpu_s, result = timed(lambda run=run, prompts=prompts: run(prompts, new))
                add(batch, name, first_s, wall_s, cpu_s, worst_gap(model, result) if name == "engine" else None)
            if vllm and batch == max(batches):
                add(batch, "vLLM", *by_vllm(folder, prompts, new, dtype, threads), None)
    return rows


def rollouts(groups: int, size: int) -> list[Group]:
    """As many as a step of `examples/pretrained` trains: 125 tokens of a prompt and 25 sampled ones."""
    rng = random.Random(0)
    found = []
    for g in range(groups):
        members = []
        for index in range(size):
            ids = [rng.randrange(49152) for _ in range(150)]
            turn = Turn(
                turn_id="t",
                index=0,
                prompt_ids=ids[:125],
                completion_ids=ids[125:],
                logprobs=[-11.0] * 25,
                finish_reason="stop",
                weight_version_first=0,
                weight_version_last=0,
            )
            rollout = CollectedRollout(
                session_id=f"{g}-{index}",
                input_id=str(g),
                index=index,
                outcome=Outcome.OK,
                reward=float(index % 2),
                record={},
                trajectory=build_trajectory(f"{g}-{index}", [turn]),
            )
            members.append(rollout)
        request = GroupRequest(input_id=str(g), payload={}, n=size)
        found.append(Group(input_id=str(g), rollouts=members, request=request))
    return found


def training(model: Any, groups: list[Group], dtype: str) -> tuple[float, float]:
    """Tokens a CPU second of one update: by the loop, and by a bare one over the same minibatches."""
    ours, bare = copy.deepcopy(model), copy.deepcopy(model)
    compute_in(ours, dtype)
    client = TorchClient(ours, 0, TorchSettings(tokens_at_once=2048, dtype=dtype), run_dir=Path())
    client.max_logprob_gap = None  # the logprobs are made up
    adam = {"learning_rate": 1e-5, "beta2": 0.99, "max_grad_norm": 1.0}
    settings = LoopSettings(steps=1, groups=len(groups), rollouts=len(groups[0].rollouts), minibatches=4, **adam)
    rollouts = [r for group in groups for r in group.rollouts if r.trajectory is not None]
    rows = [s for r in rollouts if r.trajectory is not None for s in r.trajectory.sequences]
    advantages = [float(r.reward or 0) - 0.5 for r in rollouts]

    def bare_update() -> None:
        optimizer = torch.optim.AdamW(bare.parameters(), lr=adam["learning_rate"], betas=(0.9, 0.99), weight_decay=0.0)
        for part in range(settings.minibatches):
            sequences = rows[part :: settings.minibatches]
            ids_BT = torch.tensor([s.token_ids for s in sequences])
            mask_BT = torch.tensor([s.loss_mask for s in sequences])[:, 1:]
            advantages_B = torch.tensor(advantages[part :: settings.minibatches])
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                logits_BTV = bare(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
            logprobs_BT = logits_BTV.log_softmax(-1).gather(2, ids_BT[:, 1:, None])[..., 0]
            ratio_BT = (logprobs_BT + 11.0).exp()
            loss = -(ratio_BT * advantages_B[:, None] * mask_BT).sum() / mask_BT.sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
            optimizer.step()

    tokens = sum(len(s.token_ids) for s in rows)
    _, cpu_s, _ = timed(lambda: asyncio.run(update(client, groups, settings, 0)))
    _, bare_s, _ = timed(bare_update)
    return tokens / cpu_s, tokens / bare_s


def ready_after(folder: Path) -> float:
    """Seconds from the start of `agentcore-rl policy serve` until it listens."""
    with tempfile.TemporaryDirectory() as scratch:
        ready = Path(scratch) / "ready.json"
        words = [
            "policy",
            "serve",
            "--model",
            str(folder),
            "--ready-file",
            str(ready),
            "--parent-pid",
            str(os.getpid()),
        ]
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "agentcore_rl_toolkit.cli", *words], stderr=subprocess.DEVNULL
        )
        try:
            while not ready.exists():
                if process.poll() is not None or time.monotonic() - began > 300:
                    sys.exit("the policy server did not start")
                time.sleep(0.02)
            return time.monotonic() - began
        finally:
            process.terminate()
            process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    model = model_of_that_shape()
    able = torch.cpu.get_capabilities()
    types = ["float32", *(["bfloat16"] if able.get("avx512_bf16") or able.get("amx_bf16") else [])]
    types = types[:1] if a.quick else types
    batches, tokens = ((1, 8), (64, 16)) if a.quick else ((1, 8, 32), (256, 64))
    vllm = VLLM_PYTHON.exists() and not a.quick
    rows: list[dict[str, Any]] = []
    checks: list[tuple[str, float, str, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model.save_pretrained(folder)
        shutil.copy(WEIGHTS_DIR / "tokenizer.json", folder)  # asked for by stop strings alone
        checks.append(("ready after, s", ready_after(folder), "<=", 10))
        print(
            f"{'type':<8}  {'batch':>5}  {'by':<12}  {'tokens/s':>8}  {'decoded/s':>9}  {'tokens/cpu s':>12}  {'first token':>11}"
            f"   ({a.threads} threads)"
        )
        for dtype in types:
            rows += sampling(model, folder, dtype, batches, tokens, a.threads, vllm)
    for dtype in types:
        ours, bare = training(model, rollouts(2 if a.quick else 6, 6), dtype)
        print(f"{dtype:<8}  training: {ours:.0f} tokens/cpu s by the loop, {bare:.0f} by bare PyTorch")
        checks.append((f"training, loop / bare, {dtype}", ours / bare, ">=", 0.7))
    for dtype in types:
        at = {row["by"]: row["tokens_per_s"] for row in rows if row["batch"] == 32 and row["type"] == dtype}
        for by, least in (("transformers", 2.0), ("vLLM", 0.8)):
            if by in at:
                checks.append((f"tokens/s at batch 32, engine / {by}, {dtype}", at["engine"] / at[by], ">=", least))
    checks.append(
        ("logprob gap, float32", max(r["logprob_gap"] or 0 for r in rows if r["type"] == "float32"), "<=", 1e-3)
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"peak memory {memory:.1f} GB (all models together)\n")
    good = [value <= bound if sign == "<=" else value >= bound for _, value, sign, bound in checks]
    for (name, value, sign, bound), ok in zip(checks, good, strict=True):
        print(f"{'ok    ' if ok else 'MISSED'} {name}: {value:.2g} (goal {sign} {bound:g})")
    if a.json:
        found = [{"name": n, "value": v, "target": b, "ok": ok} for (n, v, _, b), ok in zip(checks, good, strict=True)]
        a.json.write_text(json.dumps({"rows": rows, "checks": found, "memory_gb": memory}, indent=2) + "\n")
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
