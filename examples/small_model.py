"""Make a small policy: the network, the tokenizer, and supervised training on demonstrations.

A policy needs demonstrations before reinforcement learning can raise its reward. `scripts/policy/make.py` and the examples with
their own policy use this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from tokenizers import Tokenizer

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")


@dataclass(frozen=True, kw_only=True)
class PolicyShape:
    """Size of a policy. ``head_size`` 32 is the smallest that vLLM's CPU build has attention kernels for."""

    hidden: int = 96
    layers: int = 2
    heads: int = 4
    head_size: int = 32
    feed_forward: int = 288
    context: int = 1024


def new_model(tokenizer: Any, shape: PolicyShape, *, seed: int) -> Any:
    """Make a randomly initialized ``Qwen3ForCausalLM`` for a tokenizer of transformers.

    The vocabulary has no padding rows: every id that it can sample can be decoded.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def chat_tokenizer(tokenizer: Tokenizer, template: str) -> Any:
    """Make a tokenizer of transformers for `new_model`, with the marks of the built-in policy. `save_pretrained` writes it."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END_OF_TEXT, extra_special_tokens=[START]
    )
    fast.chat_template = template
    fast.padding_side = "left"
    fast.model_max_length = PolicyShape.context
    return fast


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Demonstrations as tensors. Shapes: ids_BT and weights_BT (B, T), right-padded; weights 0 on padding."""

    ids_BT: torch.Tensor
    weights_BT: torch.Tensor


def assistant_spans(ids: Sequence[int], header: Sequence[int], end_id: int) -> list[tuple[int, int]]:
    """Half-open spans of what the assistant wrote, each with the closing ``<|im_end|>``."""
    spans: list[tuple[int, int]] = []
    n = len(header)
    k = 0
    while k + n <= len(ids):
        if list(ids[k : k + n]) != list(header):
            k += 1
            continue
        first = k + n
        k = first
        while k < len(ids) and ids[k] != end_id:
            k += 1
        spans.append((first, min(k + 1, len(ids))))
    return spans


def train(
    model: Any, stream: Iterator[Batch], *, steps: int, peak_rate: float, log: Callable[[str], None] = lambda line: None
) -> list[float]:
    """Supervised training; returns the loss of every step (nats per weighted token)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, betas=(0.9, 0.95), weight_decay=0.01)
    warm_up = min(50, max(1, steps // 5))
    losses: list[float] = []
    started_s = time.monotonic()
    model.train()
    for step in range(steps):
        rate = peak_rate * min(1.0, (step + 1) / warm_up) * max(0.05, 1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = next(stream)
        logits_BTV = model(input_ids=batch.ids_BT).logits[:, :-1]  # right padding and causal attention need no mask
        nats_N = F.cross_entropy(logits_BTV.flatten(0, 1), batch.ids_BT[:, 1:].flatten(), reduction="none")
        weights_N = batch.weights_BT[:, 1:].flatten()
        loss = (nats_N * weights_N).sum() / weights_N.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if (step + 1) % 50 == 0 or step + 1 == steps:
            own = weights_N == 1.0
            log(
                f"  step {step + 1}/{steps}  loss {losses[-1]:.3f}  assistant {float(nats_N.detach()[own].mean()):.4f}"
                f"  {time.monotonic() - started_s:.0f} s"
            )
    model.eval()
    return losses
