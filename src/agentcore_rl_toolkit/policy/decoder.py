"""The forward pass of Qwen3, written out for generation on a CPU.

Same numbers as transformers' ``Qwen3ForCausalLM`` (a test holds them to 1e-5) in a fraction of its time per step: at this size
a step is mostly the overhead of calling operations, so the query, key and value projections are one matrix, both norms and both
rotations are done at once, and keys and values are written into one preallocated cache instead of being concatenated.

Rows of the cache are sequences. A call covers a contiguous range of rows, each with its own number of tokens already in the
cache, so the same code reads a prompt (many new tokens) and takes a decoding step (one).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody gives it)

from ..errors import ConfigError, PolicyError
from .model import WEIGHTS_FILE, check_directory

_CACHE_STEP = 128  # tokens by which the cache grows


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """What of a Qwen3 ``config.json`` decides the computation."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    context: int
    rope_theta: float
    norm_epsilon: float
    tied: bool
    end_ids: frozenset[int]  # of the tokens that end a completion

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DecoderShape:
        """Read a ``config.json``. Raises: ConfigError for anything but a plain dense Qwen3."""
        rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
        if (
            config.get("model_type") != "qwen3"
            or config.get("use_sliding_window")
            or config.get("attention_bias")
            or rope.get("rope_type", "default") != "default"
            or config.get("hidden_act", "silu") != "silu"
        ):
            raise ConfigError("the policy server runs plain dense Qwen3 models; serve any other with vLLM or SGLang")
        heads = int(config["num_attention_heads"])
        ends = config.get("eos_token_id")
        return cls(
            vocabulary=int(config["vocab_size"]),
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config["head_dim"]),
            feed_forward=int(config["intermediate_size"]),
            context=int(config["max_position_embeddings"]),
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
            end_ids=frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends]),
        )


class _Layer:
    """Fused weights of one layer."""

    __slots__ = ("down", "gate_up", "in_norm", "mid_norm", "out", "qk_norm", "qkv")

    def __init__(self) -> None:
        self.in_norm = self.mid_norm = self.qkv = self.qk_norm = self.out = self.gate_up = self.down = torch.empty(0)


class Decoder:
    """A Qwen3 model that generates. Not thread-safe: one thread computes and changes weights.

    Shapes: N rows, Q new tokens per row, V vocabulary.
    """

    def __init__(self, shape: DecoderShape, state: Mapping[str, torch.Tensor], *, rows: int = 64) -> None:
        self.shape = shape
        self.rows = rows
        self._layers = [_Layer() for _ in range(shape.layers)]
        self._embedding = self._final_norm = self._head = torch.empty(0)
        self._width = 0
        self.keys: list[torch.Tensor] = [torch.empty(0)] * shape.layers
        self.values: list[torch.Tensor] = [torch.empty(0)] * shape.layers
        half = shape.head_size // 2
        angles = torch.arange(shape.context).float()[:, None] * (
            shape.rope_theta ** (-torch.arange(half).float() / half)
        )
        # The rotation of [x1, x2] is [x1, x2] * cos + [-x2, x1] * sin; a roll swaps the halves, the sign sits in the table.
        self._cos = torch.cat([angles.cos(), angles.cos()], -1)[:, None]
        self._sin = torch.cat([-angles.sin(), angles.sin()], -1)[:, None]
        self._columns = torch.arange(shape.context)
        self.load(state)

    @classmethod
    def from_directory(cls, directory: str | Path | None = None, *, rows: int = 64) -> Decoder:
        """Read a policy directory; None stands for the shipped one. Raises: ConfigError, PolicyError."""
        from safetensors.torch import load_file

        folder = check_directory(directory)
        shape = DecoderShape.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        return cls(shape, load_file(folder / WEIGHTS_FILE), rows=rows)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over weights named as transformers names them. All or nothing.

        Raises: PolicyError when a tensor is missing, has another shape, or holds NaN or infinity; the old weights stay.
        """
        checked = self._checked(state)
        shape = self.shape
        for k, layer in enumerate(self._layers):
            prefix = f"model.layers.{k}."
            w = {n[len(prefix) : -len(".weight")]: t for n, t in checked.items() if n.startswith(prefix)}
            layer.in_norm, layer.mid_norm = w["input_layernorm"], w["post_attention_layernorm"]
            layer.qkv = torch.cat([w["self_attn.q_proj"], w["self_attn.k_proj"], w["self_attn.v_proj"]])
            layer.qk_norm = torch.cat(
                [
                    w["self_attn.q_norm"].expand(shape.heads, -1),
                    w["self_attn.k_norm"].expand(shape.kv_heads, -1),
                ]
            )
            layer.out, layer.down = w["self_attn.o_proj"], w["mlp.down_proj"]
            layer.gate_up = torch.cat([w["mlp.gate_proj"], w["mlp.up_proj"]])
        self._embedding = checked["model.embed_tokens.weight"]
        self._final_norm = checked["model.norm.weight"]
        self._head = self._embedding if shape.tied else checked["lm_head.weight"]

    @torch.inference_mode()
    def forward(
        self,
        ids_NQ: torch.Tensor,
        starts_N: torch.Tensor,
        *,
        first_row: int,
        width: int,
        last_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of the next token of each row.

        ``starts_N`` says how many tokens of a row the cache already holds; ``last_N`` which of the Q new ones is its last
        (rows may be padded on the right), None for Q - 1. ``width`` is an upper bound of starts + Q over the rows.
        Shapes: (N, Q), (N,) -> (N, V).
        """
        shape = self.shape
        n, q = ids_NQ.shape
        self._reserve(width)
        heads, kv_heads = shape.heads, shape.kv_heads
        # padding may run past the context; its results are never read
        positions_NQ = (starts_N[:, None] + self._columns[:q]).clamp_(max=shape.context - 1)
        seen = (self._columns[:width] <= positions_NQ[:, :, None])[:, None]
        mask = torch.where(seen, 0.0, float("-inf"))
        cos, sin = self._cos[positions_NQ], self._sin[positions_NQ]
        rows_N1 = torch.arange(first_row, first_row + n)[:, None]
        x = F.embedding(ids_NQ, self._embedding)
        for k, layer in enumerate(self._layers):
            h = F.linear(F.rms_norm(x, (shape.hidden,), layer.in_norm, shape.norm_epsilon), layer.qkv)
            h = h.view(n, q, heads + 2 * kv_heads, shape.head_size)
            qk = F.rms_norm(h[:, :, : heads + kv_heads], (shape.head_size,), None, shape.norm_epsilon) * layer.qk_norm
            qk = torch.addcmul(qk * cos, qk.roll(shape.head_size // 2, -1), sin)
            self.keys[k][rows_N1, :, positions_NQ] = qk[:, :, heads:]
            self.values[k][rows_N1, :, positions_NQ] = h[:, :, heads + kv_heads :]
            attended = F.scaled_dot_product_attention(
                qk[:, :, :heads].transpose(1, 2),
                self.keys[k][first_row : first_row + n, :, :width],
                self.values[k][first_row : first_row + n, :, :width],
                attn_mask=mask,
                enable_gqa=heads != kv_heads,
            )
            if last_N is not None and k == shape.layers - 1:  # nothing after the last attention looks at other tokens
                chosen = torch.arange(n)
                attended, x = attended[chosen, :, last_N][:, :, None], x[chosen, last_N][:, None]
            x = x + F.linear(attended.transpose(1, 2).flatten(2), layer.out)
            gate, up = F.linear(
                F.rms_norm(x, (shape.hidden,), layer.mid_norm, shape.norm_epsilon), layer.gate_up
            ).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(F.rms_norm(x[:, -1], (shape.hidden,), self._final_norm, shape.norm_epsilon), self._head)

    @torch.inference_mode()
    def move_row(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` cached tokens of a row over another row."""
        for cache in (*self.keys, *self.values):
            cache[target, :, :tokens] = cache[source, :, :tokens]

    def _reserve(self, width: int) -> None:
        if width <= self._width:
            return
        grown = min(self.shape.context, -(-width // _CACHE_STEP) * _CACHE_STEP)
        for caches in (self.keys, self.values):
            for k, old in enumerate(caches):
                new = torch.zeros(self.rows, self.shape.kv_heads, grown, self.shape.head_size)
                if self._width:
                    new[:, :, : self._width] = old
                caches[k] = new
        self._width = grown

    def reserve(self, width: int) -> None:
        """Make room for ``width`` tokens in every row (it also grows by itself)."""
        with torch.inference_mode():
            self._reserve(width)

    def _checked(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        checked: dict[str, torch.Tensor] = {}
        for name, dims in expected_tensors(self.shape).items():
            tensor = state.get(name)
            if tensor is None:
                raise PolicyError(f"the weights lack the tensor {name}")
            if tuple(tensor.shape) != dims:
                raise PolicyError(f"the tensor {name} has shape {tuple(tensor.shape)}, this policy needs {dims}")
            tensor = tensor.detach().to(dtype=torch.float32, device="cpu", copy=True)
            if not bool(torch.isfinite(tensor).all()):
                raise PolicyError(f"the tensor {name} holds NaN or infinity")
            checked[name] = tensor
        return checked


def expected_tensors(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a policy, as transformers names them."""
    d, size = shape.hidden, shape.head_size
    per_layer = {
        "input_layernorm": (d,),
        "post_attention_layernorm": (d,),
        "self_attn.q_proj": (shape.heads * size, d),
        "self_attn.k_proj": (shape.kv_heads * size, d),
        "self_attn.v_proj": (shape.kv_heads * size, d),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "self_attn.o_proj": (d, shape.heads * size),
        "mlp.gate_proj": (shape.feed_forward, d),
        "mlp.up_proj": (shape.feed_forward, d),
        "mlp.down_proj": (d, shape.feed_forward),
    }
    tensors: dict[str, tuple[int, ...]] = {
        f"model.layers.{k}.{name}.weight": dims for k in range(shape.layers) for name, dims in per_layer.items()
    }
    tensors["model.embed_tokens.weight"] = (shape.vocabulary, d)
    tensors["model.norm.weight"] = (d,)
    if not shape.tied:
        tensors["lm_head.weight"] = (shape.vocabulary, d)
    return tensors
