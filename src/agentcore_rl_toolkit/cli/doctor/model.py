"""Checks of one model: its kind, the engine that runs it, its memory, its chat template, and its sampling speed here."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .finding import Check, Finding, fail, note, ok

if TYPE_CHECKING:
    from ...policy.batch import Generation

SPEED_S = 5.0  # duration of the measurement
SEQUENCES = 8  # at once
PROMPT_TOKENS = 32


def checks(folder: Path) -> list[tuple[str, Check]]:
    """Check a model. Of a folder without weights, only tokenizer and template are checked."""
    whole = (("model", _kind), ("memory", _memory), ("template", _template), ("speed", _speed))
    chosen = whole if any(folder.glob("*.safetensors")) else whole[2:3]
    return [(name, functools.partial(check, folder)) for name, check in chosen]


def _kind(folder: Path) -> Finding:
    from ...policy.loading import sizes_of

    sizes = sizes_of(folder)
    text = f"{folder.name}: {sizes.family}, {sizes.text}"
    if sizes.fast:
        return ok("model", f"{text}; the built-in engine runs it")
    slow = "the built-in engine runs it through transformers, one sequence at a time: slow"
    return note("model", f"{text}; {slow}", "if vLLM supports the model, use --engine vllm")


def _memory(folder: Path) -> Finding:
    from ...policy.loading import free_memory, gigabytes, sizes_of

    sizes, free = sizes_of(folder), free_memory()
    full, lora = (sizes.training(lora=with_lora) for with_lora in (False, True))
    text = f"engine {gigabytes(sizes.engine)}, with training {gigabytes(full)}, with LoRA {gigabytes(lora)}, and activations"
    if free is None:
        return ok("memory", text)
    text = f"{text}; {gigabytes(free)} are free"
    if sizes.engine > free:
        return fail("memory", text, "use a smaller model, or a machine with more memory")
    if full > free:
        only_served = "this machine can serve it, but not train it"
        return note("memory", text, "train it with --set lora_rank=16" if lora < free else only_served)
    return ok("memory", text)


def _template(folder: Path) -> list[Finding]:
    from ...messages.render import Renderer
    from .template import NO_TOOLS, examine

    renderer = Renderer.from_path(folder)
    found = examine(renderer)
    if renderer.facts.tools_shown:
        return [*found, ok("tool calls", f"read as {renderer.grammar.name}")]
    return [*found, note("tool calls", "none", NO_TOOLS)]


def _speed(folder: Path) -> Finding:
    from ...policy.batch import Generation
    from ...policy.engine import Engine
    from ...policy.sampling import SamplingParams

    began = time.monotonic()
    with Engine.from_directory(folder, max_batch=SEQUENCES, seed=0) as engine:
        ready = time.monotonic()
        params = SamplingParams(max_tokens=engine.context, ignore_eos=True)
        prompt = [k % engine.vocabulary for k in range(PROMPT_TOKENS)]
        first = threading.Event()
        generations = [
            Generation(prompt_ids=prompt, params=params, listener=lambda _: first.set(), notify_every=1)
            for _ in range(SEQUENCES)
        ]
        engine.submit(generations)
        first.wait()
        before, began_s = _tokens(generations), time.monotonic()
        time.sleep(SPEED_S)
        rate = (_tokens(generations) - before) / (time.monotonic() - began_s)
    if broken := next((g.error for g in generations if g.error is not None), None):
        return fail(
            "speed", f"sampling ended: {broken}", "the folder's weights or configuration are damaged or do not match"
        )
    text = f"{rate:,.0f} tokens/s for {SEQUENCES} sequences at once; loaded in {ready - began:.1f} s"
    return ok("speed", text)


def _tokens(generations: Sequence[Generation]) -> int:
    return sum(len(g.token_ids) for g in generations)
