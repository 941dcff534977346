"""Generation by transformers itself, for the models that `decoder` does not know: any causal language model, one row at a time.

Each row keeps the cache that the library makes for its model: keys and values, windows, or the state of a recurrent layer.
Rows of different length cannot share such a cache, so a step calls the model once for each: right for every model, and slow.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .decoder import check_tensors, end_ids
from .linear import use_onednn


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The facts of a model that the batch needs."""

    vocabulary: int
    context: int
    end_ids: frozenset[int]


class TransformersDecoder:
    """A model of transformers with the interface of `Decoder`. Nothing of a prompt is kept for the next one."""

    def __init__(self, model: Any, *, rows: int = 64) -> None:
        config = model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None) or 2**20  # a recurrent model has no end
        ends = end_ids(config.eos_token_id)
        self.shape = Limits(vocabulary=int(config.vocab_size), context=int(context), end_ids=ends)
        self.rows = rows
        self.device, self.dtype = str(model.device), model.dtype
        self.cache_tokens: int | None = None
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._model = model.eval()
        use_onednn(model)
        asked = inspect.signature(model.forward).parameters
        self._cache = "cache" if "cache" in asked else "past_key_values"  # its name before transformers 5.24
        self._caches: list[Any] = [None] * rows

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over weights, all or nothing. Raises: PolicyError as `Decoder.load`."""
        own = dict(self._model.named_parameters())
        check_tensors(state, {name: tuple(p.shape) for name, p in own.items()})
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state[name])

    def plain_tensors(self) -> dict[str, torch.Tensor]:
        """Return the first and the last tensor, as `Decoder.plain_tensors`."""
        own = list(self._model.named_parameters())
        return dict((own[0], own[-1]))

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
        """Compute as `Decoder.forward`. A row that starts at 0 gets a new cache."""
        logits = []
        ends = [None] * len(ids_NQ) if last_N is None else (last_N + 1).tolist()
        for row, (ids_Q, start, end) in enumerate(zip(ids_NQ, starts_N, ends, strict=True), first_row):
            cache = {self._cache: self._caches[row] if start else None}
            output = self._model(input_ids=ids_Q[None, :end], use_cache=True, logits_to_keep=0 if every else 1, **cache)
            self._caches[row] = output[self._cache]
            logits.append(output.logits.float() if every else output.logits[:, -1].float())
        return torch.cat(logits)

    def move_row(self, source: int, target: int, tokens: int) -> None:
        """Give a row's cache to another row."""
        self._caches[target], self._caches[source] = self._caches[source], None

    def reserve(self, rows: int, width: int) -> None:
        """Do nothing: caches grow by themselves."""
