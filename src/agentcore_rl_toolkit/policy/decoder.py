"""The forward pass of the dense Llama family, written out for generation on a CPU.

One architecture with switches that `config.json` sets: Llama, Mistral, Qwen2, Qwen3, SmolLM2 (a Llama) and SmolLM3. Same
numbers as transformers (tests hold each family to 1e-4) in a fraction of its time per step: at small sizes a step is mostly the
overhead of calling operations, so the query, key and value projections are one matrix, both rotations are done at once, and
keys and values are written into one preallocated cache instead of being concatenated. `transformers_decoder` runs the others.

Rows of the cache are sequences. A call covers a contiguous range of rows, each with its own number of tokens already in the
cache, so the same code reads a prompt (many new tokens) and takes a decoding step (one).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

from ..errors import ConfigError, PolicyError
from .linear import products

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
_ROPES = ("default", "linear", "llama3", "yarn")  # the others change with the length of the sequence
# Names of the tensors that are used, besides a head that is not tied to the embedding.
_USED = re.compile(r"model\.(embed_tokens|norm|layers\.\d+\.\S+(_proj|norm))\.(weight|bias)")
_CACHE_STEP = 128  # tokens by which the cache grows


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """The part of a model's configuration that decides the computation."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    context: int
    norm_epsilon: float
    tied: bool
    frequencies: tuple[float, ...]  # head_size / 2 frequencies of the rotation
    rope_scale: float  # factor of its cosine and sine
    rotated: tuple[bool, ...]  # which layers rotate queries and keys
    end_ids: frozenset[int]  # the tokens that end a completion

    @classmethod
    def from_config(cls, config: Any) -> DecoderShape:
        """Read a configuration of transformers. Raises: ConfigError for a model that this forward pass does not compute."""
        family = config.model_type
        rope = getattr(config, "rope_parameters", None) or {}
        windows = getattr(config, "sliding_window", None)
        if (
            family not in FAMILIES
            or config.hidden_act != "silu"
            or (windows and getattr(config, "use_sliding_window", True))
            or rope.get("rope_type", "default") not in _ROPES
            or rope.get("partial_rotary_factor", 1.0) != 1.0
        ):
            raise ConfigError(f"the fast decoder does not know this model ({family})")
        layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
        head_size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        frequencies, rope_scale = _rotation(config, head_size)
        return cls(
            vocabulary=int(config.vocab_size),
            hidden=int(config.hidden_size),
            layers=layers,
            heads=heads,
            kv_heads=int(config.num_key_value_heads or heads),
            head_size=head_size,
            context=int(config.max_position_embeddings),
            norm_epsilon=float(config.rms_norm_eps),
            tied=bool(config.tie_word_embeddings),
            frequencies=frequencies,
            rope_scale=rope_scale,
            rotated=tuple(map(bool, getattr(config, "no_rope_layers", None) or [1] * layers)),
            end_ids=end_ids(config.eos_token_id),
        )


def end_ids(eos: int | list[int] | None) -> frozenset[int]:
    """Return the `eos_token_id` of a configuration as a set."""
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])


def _rotation(config: Any, head_size: int) -> tuple[tuple[float, ...], float]:
    """Return the frequencies of the rotation, and the factor of its cosine and sine."""
    rope = config.rope_parameters or {"rope_theta": 10000.0}
    if rope.get("rope_type", "default") == "default":
        halves = torch.arange(0, head_size, 2).float() / head_size
        return tuple((1.0 / rope["rope_theta"] ** halves).tolist()), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(scale)


class _Layer:
    """Fused weights of one layer, from tensors named without their prefix; None where the model has none.

    ``like`` has their device and type. ``kept`` brings a matrix into the order that it is multiplied in.
    """

    def __init__(
        self,
        w: Mapping[str, torch.Tensor],
        shape: DecoderShape,
        like: torch.Tensor,
        kept: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        qkv, gate_up = [f"self_attn.{x}_proj" for x in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]

        def fused(*names: str) -> torch.Tensor:
            return torch.cat([w[name] for name in names]).to(like)

        def weight(*parts: str) -> torch.Tensor:
            return fused(*(f"{part}.weight" for part in parts))

        def bias(*parts: str) -> torch.Tensor | None:
            return fused(*(f"{part}.bias" for part in parts)) if f"{parts[0]}.bias" in w else None

        self.in_norm, self.mid_norm = weight("input_layernorm"), weight("post_attention_layernorm")
        self.qkv, self.out = kept(weight(*qkv)), kept(weight("self_attn.o_proj"))
        self.gate_up, self.down = kept(weight(*gate_up)), kept(weight("mlp.down_proj"))
        self.qkv_bias, self.out_bias = bias(*qkv), bias("self_attn.o_proj")
        self.gate_up_bias, self.down_bias = bias(*gate_up), bias("mlp.down_proj")
        self.qk_norm = None
        if "self_attn.q_norm.weight" in w:
            rows = [w["self_attn.q_norm.weight"]] * shape.heads + [w["self_attn.k_norm.weight"]] * shape.kv_heads
            self.qk_norm = torch.stack(rows).to(like)


class Decoder:
    """A model that generates. Not thread-safe: one thread computes and changes weights.

    ``cache_tokens`` bounds rows times tokens of the cache; None: nothing does. It computes in ``dtype`` on ``device``; logits are
    float32.
    Shapes: N rows, Q new tokens per row, V vocabulary.
    """

    def __init__(
        self,
        shape: DecoderShape,
        state: Mapping[str, torch.Tensor],
        *,
        rows: int = 64,
        cache_tokens: int | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shape = shape
        self.rows = rows
        self.cache_tokens = cache_tokens
        self.device, self.dtype = device, dtype
        nothing = torch.empty(0, device=device, dtype=dtype)
        self._kept, self._linear = products(shape.hidden, device, dtype)
        self._layers: list[_Layer] = []
        self._embedding, self._final_norm = (
            nothing.new_empty(shape.vocabulary, shape.hidden),
            nothing.new_empty(shape.hidden),
        )
        self._head = self._embedding if shape.tied else torch.empty_like(self._embedding)
        self._held = (0, 0)  # rows and tokens of the cache
        self.keys: list[torch.Tensor] = [nothing] * shape.layers
        self.values: list[torch.Tensor] = [nothing] * shape.layers
        self._cos = self._sin = nothing
        head = None if shape.tied else "lm_head.weight"
        self._expected = {n: tuple(t.shape) for n, t in state.items() if n == head or _USED.fullmatch(n)}
        self.load(state)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over weights named as transformers names them. All or nothing.

        Raises: PolicyError when a tensor of the first weights is missing, has another shape, or holds NaN or infinity; the old
        weights stay.
        """
        check_tensors(state, self._expected)
        with torch.inference_mode():
            try:
                for k in range(self.shape.layers):
                    prefix = f"model.layers.{k}."
                    own = {n[len(prefix) :]: t for n, t in state.items() if n.startswith(prefix)}
                    self._layers[k : k + 1] = [_Layer(own, self.shape, self._final_norm, self._kept)]
                self._embedding.copy_(state["model.embed_tokens.weight"])
                self._final_norm.copy_(state["model.norm.weight"])
                if not self.shape.tied:
                    self._head.copy_(state["lm_head.weight"])
            except KeyError as e:  # the first weights
                raise PolicyError(f"the weights lack the tensor {e}") from e

    def plain_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are kept as they were loaded, by their names in the file."""
        last = self.shape.layers - 1
        return {
            "model.embed_tokens.weight": self._embedding,
            "model.layers.0.input_layernorm.weight": self._layers[0].in_norm,
            f"model.layers.{last}.post_attention_layernorm.weight": self._layers[last].mid_norm,
            "model.norm.weight": self._final_norm,
        }

    @torch.inference_mode()
    def forward(
        self,
        ids_NQ: torch.Tensor,
        starts_N: torch.Tensor,
        *,
        first_row: int,
        width: int,
        last_N: torch.Tensor | None = None,
        every: bool = False,
    ) -> torch.Tensor:
        """Compute the logits of the next token of each row. With ``every``, after each of its new tokens: (N, Q, V).

        ``starts_N`` says how many tokens of a row the cache already holds; ``last_N`` which of the Q new ones is its last
        (rows may be padded on the right), None for Q - 1. ``width`` is an upper bound of starts + Q over the rows. If it is less,
        because rows are padded, it is larger than the number of tokens of each row.
        Shapes: (N, Q), (N,) -> (N, V).
        """
        shape, linear = self.shape, self._linear
        n, q = ids_NQ.shape
        self.reserve(first_row + n, width)
        heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_size
        shared = heads // kv_heads  # query heads that share a key head: they are read as further queries of it
        # padding may run past the width; its results are never read
        positions_NQ = (starts_N[:, None] + torch.arange(q, device=self.device)).clamp_(max=width - 1)
        seen = (torch.arange(width, device=self.device) <= positions_NQ[:, :, None])[:, None]
        mask = torch.where(seen, 0.0, float("-inf")).to(self.dtype).repeat(1, 1, shared, 1)
        cos, sin = self._cos[positions_NQ], self._sin[positions_NQ]
        rows_N1 = torch.arange(first_row, first_row + n, device=self.device)[:, None]
        x = F.embedding(ids_NQ, self._embedding)
        for k, layer in enumerate(self._layers):
            normed = F.rms_norm(x, (shape.hidden,), layer.in_norm, shape.norm_epsilon)
            h = linear(normed, layer.qkv, layer.qkv_bias).view(n, q, heads + 2 * kv_heads, size)
            qk = h[:, :, : heads + kv_heads]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (size,), None, shape.norm_epsilon) * layer.qk_norm
            if shape.rotated[k]:
                qk = torch.addcmul(qk * cos, qk.roll(size // 2, -1), sin)
            self.keys[k][rows_N1, :, positions_NQ] = qk[:, :, heads:]
            self.values[k][rows_N1, :, positions_NQ] = h[:, :, heads + kv_heads :]
            queries = qk[:, :, :heads].view(n, q, kv_heads, shared, size).permute(0, 2, 3, 1, 4)
            attended = F.scaled_dot_product_attention(
                queries.reshape(n, kv_heads, shared * q, size),
                self.keys[k][first_row : first_row + n, :, :width],
                self.values[k][first_row : first_row + n, :, :width],
                attn_mask=mask,
            ).view(n, heads, q, size)
            if last_N is not None and k == shape.layers - 1:  # other tokens are not needed after the last attention
                chosen = torch.arange(n, device=self.device)
                attended, x = attended[chosen, :, last_N][:, :, None], x[chosen, last_N][:, None]
            x = x + linear(attended.transpose(1, 2).flatten(2), layer.out, layer.out_bias)
            normed = F.rms_norm(x, (shape.hidden,), layer.mid_norm, shape.norm_epsilon)
            gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = x + linear(F.silu(gate) * up, layer.down, layer.down_bias)
        x = x if every else x[:, -1]
        return linear(F.rms_norm(x, (shape.hidden,), self._final_norm, shape.norm_epsilon), self._head).float()

    @torch.inference_mode()
    def move_row(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` cached tokens of a row over another row."""
        for cache in (*self.keys, *self.values):
            cache[target, :, :tokens] = cache[source, :, :tokens]

    @torch.inference_mode()
    def reserve(self, rows: int, width: int) -> None:
        """Make room for ``width`` tokens in each of the first ``rows`` rows, which are all that are in use.

        The cache does not shrink unless it would hold more than ``cache_tokens``.
        """
        shape, (held_rows, held) = self.shape, self._held
        if rows <= held_rows and width <= held:
            return
        most = self.cache_tokens if self.cache_tokens is not None else self.rows * shape.context
        # The cache grows by several rows and tokens at once, as far as there is room.
        width = max(width, min(shape.context, -(-width // _CACHE_STEP) * _CACHE_STEP, most // rows))
        rows = max(rows, min(self.rows, -(-rows // 8) * 8, most // width))
        new_rows, grown = max(held_rows, rows), max(held, width)
        if new_rows * grown > most:
            new_rows, grown = rows, width
        kept = (slice(min(held_rows, new_rows)), slice(None), slice(min(held, grown)))
        for caches in (self.keys, self.values):
            for k, old in enumerate(caches):
                caches[k] = old.new_zeros(new_rows, shape.kv_heads, grown, shape.head_size)
                if held:
                    caches[k][kept] = old[kept]
        self._held = (new_rows, grown)
        if grown > len(self._cos):
            # The rotation of [x1, x2] is [x1, x2] * cos + [-x2, x1] * sin; a roll swaps the halves, the sign sits in the table.
            angles = torch.arange(grown).float()[:, None] * torch.tensor(shape.frequencies)
            cos, sin = angles.cos() * shape.rope_scale, angles.sin() * shape.rope_scale
            self._cos = torch.cat([cos, cos], -1)[:, None].to(self.keys[0])
            self._sin = torch.cat([-sin, sin], -1)[:, None].to(self.keys[0])


def check_tensors(state: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise PolicyError if a tensor is missing, has another shape, or holds NaN or infinity."""
    for name, dims in expected.items():
        tensor = state.get(name)
        if tensor is None:
            raise PolicyError(f"the weights lack the tensor {name}")
        if tuple(tensor.shape) != dims:
            raise PolicyError(f"the tensor {name} has shape {tuple(tensor.shape)}, this policy needs {dims}")
        if not bool(torch.isfinite(tensor).all()):
            raise PolicyError(f"the tensor {name} holds NaN or infinity")
