"""Generation of many completions at once, one token of each per step; sequences come and go between steps.

Theory of operation. Running sequences hold rows 0..n-1 of the decoder's cache. `add` gives a sequence the next row, fills it
from the prefix cache and marks it as new; the next `step` reads the prompts of all new sequences together, which gives each its
first token; each later step decodes one token of every sequence. A sequence that ends gives its row to the last running one, so
rows stay contiguous and no step ever gathers. Weights change only between steps; a sequence in flight keeps its cache, as in vLLM
and SGLang, and reports the weight versions of its first and last token.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tokenizers import Tokenizer

from .decoder import Decoder
from .sampling import Sampler, SamplingParams, seeded_generator
from .transformers_decoder import TransformersDecoder

_TOKENS_OF_PART, _LEAST_PART = 4096, 16  # limits of new prompts together, and of each
# The limit of the tokens of a part times the tokens that each may see: 256 MiB of a mask for 4 heads.
_PAIRS_OF_PART = 2**24
_LOGITS_AT_ONCE = 512  # tokens: of a large vocabulary these fill memory first
FinishReason = Literal["stop", "length", "cancelled", "error"]
BLOCK = 16  # tokens


class PrefixCache:
    """Keys and values of prompts, in blocks of tokens. The least recently used blocks are dropped first.

    A block is found by the number of the block before it (0 for none) and by its tokens.
    Not thread-safe. It belongs to the thread that computes. Units: ``capacity`` in blocks. A block of the shipped policy takes
    32 KiB.
    """

    def __init__(self, decoder: Decoder | TransformersDecoder, *, capacity: int = 2048) -> None:
        self._decoder = decoder
        self._capacity = capacity if decoder.keys else 0  # transformers' caches are not cut into blocks
        # Shapes: (layers, 2, heads, BLOCK, size).
        self._blocks: OrderedDict[tuple[int, tuple[int, ...]], tuple[int, torch.Tensor]] = OrderedDict()
        self._numbers = itertools.count(1)

    def clear(self) -> None:
        """Delete everything. Called when the weights change."""
        self._blocks.clear()

    def _known(self, ids: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        """Return the known blocks of the longest prefix, with their numbers, and mark them as used."""
        found: list[tuple[int, torch.Tensor]] = []
        keys = []
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            key = (found[-1][0] if found else 0, tuple(ids[end - BLOCK : end]))
            if key not in self._blocks:
                break
            keys.append(key)
            found.append(self._blocks[key])
        for key in reversed(keys):  # the ends are dropped first: without its beginning, a prefix is of no use
            self._blocks.move_to_end(key)
        return found

    @torch.inference_mode()
    def fill(self, ids: Sequence[int], row: int) -> int:
        """Copy the longest known prefix into a row of the decoder's cache; returns its length in tokens.

        At least one token is left to compute, since its logits are needed.
        """
        found = [block for _, block in self._known(ids[:-1])]
        if not found:
            return 0
        tokens = len(found) * BLOCK
        merged = torch.cat(found, dim=-2)
        for layer, (keys, values) in enumerate(zip(self._decoder.keys, self._decoder.values, strict=True)):
            keys[row, :, :tokens], values[row, :, :tokens] = merged[layer]
        return tokens

    @torch.inference_mode()
    def keep(self, ids: Sequence[int], row: int) -> None:
        """Keep the full blocks of a row whose first ``len(ids)`` tokens have been computed."""
        ids = ids[: self._capacity * BLOCK]
        known = self._known(ids)
        number, start, end = known[-1][0] if known else 0, len(known) * BLOCK, len(ids) // BLOCK * BLOCK
        if start < end:
            caches = zip(self._decoder.keys, self._decoder.values, strict=True)
            computed = torch.stack([torch.stack((k[row, :, start:end], v[row, :, start:end])) for k, v in caches])
            for at, block in zip(range(start, end, BLOCK), torch.split(computed, BLOCK, dim=-2), strict=True):
                key, number = (number, tuple(ids[at : at + BLOCK])), next(self._numbers)
                self._blocks[key] = number, block.clone()
            self._known(ids)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


@dataclass(eq=False)
class Generation:
    """A completion in progress. The computing thread writes it; others read.

    ``token_ids`` hold every sampled token, also the one that ended it; ``stop_reason`` is the stop string or stop token that did.
    ``weight_version_first`` and ``_last`` are None until the first token.
    """

    prompt_ids: list[int]
    params: SamplingParams
    listener: Callable[[Generation], None] | None = None
    notify_every: int = 0  # tokens between calls of the listener; 0: only at the end
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)  # all tokens but the first, if requested
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    weight_version_first: int | None = None
    weight_version_last: int | None = None
    cached_tokens: int = 0
    cancelled: bool = False
    error: str | None = None
    generator: torch.Generator | None = None
    old_cache: bool = False  # a part of its keys and values is of earlier weights

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)


class Batch:
    """The running sequences. Not thread-safe. ``tokenizer`` finds stop strings, and is needed for nothing else."""

    def __init__(
        self,
        decoder: Decoder | TransformersDecoder,
        tokenizer: Tokenizer | None = None,
        *,
        version: int = 0,
        seed: int | None = None,
        cache_blocks: int = 2048,
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.version = version
        if decoder.cache_tokens is not None:
            cache_blocks = min(cache_blocks, decoder.cache_tokens // (2 * BLOCK))
        self.prefixes = PrefixCache(decoder, capacity=cache_blocks)
        self.running: list[Generation] = []
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._new = 0  # the last so many running sequences have not read their prompt
        self._sampler: Sampler | None = None
        self._lengths_N = self._numbers([])  # tokens in the cache
        self._next_N = self._numbers([])  # sampled, not yet in the cache

    def has_room(self, generation: Generation) -> bool:
        """Return True if a sequence can join: a row is free, and memory for all at their longest. The first always can."""
        rows = len(self.running) + 1
        if rows == 1 or self.decoder.cache_tokens is None:
            return rows <= self.decoder.rows
        longest = max(len(g.prompt_ids) + g.params.max_tokens for g in (*self.running, generation))
        width = min(longest, self.decoder.shape.context)
        return rows <= self.decoder.rows and rows * width <= self.decoder.cache_tokens

    def add(self, generation: Generation) -> None:
        """Take a sequence in; there must be room for it."""
        row, longest = len(self.running), max(g.length for g in (*self.running, generation))
        generation.generator = seeded_generator(generation.params.seed)
        self.decoder.reserve(row + 1, longest)
        generation.cached_tokens = self.prefixes.fill(generation.prompt_ids, row)
        self.running.append(generation)
        self._new += 1
        self._sampler = None

    def load(self, state: dict[str, torch.Tensor], version: int) -> None:
        """Change weights between two steps. Raises: PolicyError and changes nothing when they do not fit."""
        self.decoder.load(state)
        self.version = version
        self.prefixes.clear()
        read = len(self.running) - self._new
        for generation in self.running[:read]:
            generation.old_cache = True
        for generation in self.running[
            read:
        ]:  # filled from the cache of the old weights: read them whole with the new ones
            generation.cached_tokens = 0

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Add a token to each sequence. Returns the sequences that ended. Cancelled sequences end here too."""
        if self._new:
            self._read_prompts()
        elif self.running:
            logits_NV = self.decoder.forward(
                self._next_N[:, None], self._lengths_N, first_row=0, width=int(self._lengths_N.max()) + 1
            )
            self._lengths_N += 1
            self._take(logits_NV, 0)
        for generation in self.running:
            if generation.cancelled:
                generation.finish_reason = "cancelled"
        return self._drop_ended()

    @torch.inference_mode()
    def fail_all(self, error: str) -> list[Generation]:
        """End everything after a failed step, and clear the cache. Returns the sequences that were running."""
        gone = self.running
        for g in gone:
            g.error = error
            g.finish_reason = "error"
        self.running = []
        self._new = 0
        self._sampler = None
        self._lengths_N = self._lengths_N[:0]
        self._next_N = self._next_N[:0]
        self.prefixes.clear()
        return gone

    def _read_prompts(self) -> None:
        first = len(self.running) - self._new
        fresh = self.running[first:]
        for row, g in enumerate(fresh, first):
            if g.params.prompt_logprobs is not None:
                g.prompt_logprobs = self._logprobs(g.prompt_ids, row)
                g.cached_tokens = 0
        tails = [g.prompt_ids[g.cached_tokens :] for g in fresh]
        starts_N = self._numbers([g.cached_tokens for g in fresh])
        last_N = self._numbers([len(tail) - 1 for tail in tails])
        longest = max(map(len, tails))
        ids_NQ = self._numbers([tail + [0] * (longest - len(tail)) for tail in tails])
        # In parts, whose attention fits into memory however long prompts are. A row's logits are of the part with its last token.
        most = max(len(g.prompt_ids) for g in fresh) + 1  # tokens of a row, and a slot for the padding of shorter rows
        part = max(_LEAST_PART, min(_TOKENS_OF_PART, _PAIRS_OF_PART // most) // len(fresh))
        part = part if self.decoder.keys else longest
        logits_NV = torch.empty(len(fresh), self.decoder.shape.vocabulary, device=self.decoder.device)
        for at in range(0, longest, part):
            ids_NP = ids_NQ[:, at : at + part]
            width = min(int(starts_N.max()) + at + ids_NP.shape[1], most)
            last_P = (last_N - at).clamp(0, ids_NP.shape[1] - 1)
            found_NV = self.decoder.forward(ids_NP, starts_N + at, first_row=first, width=width, last_N=last_P)
            logits_NV = torch.where((last_N >= at)[:, None], found_NV, logits_NV)
        self._lengths_N = torch.cat([self._lengths_N, starts_N + last_N + 1])
        self._new = 0
        for k, generation in enumerate(fresh):
            self.prefixes.keep(generation.prompt_ids, first + k)
        self._take(logits_NV, first)

    def _logprobs(self, ids: Sequence[int], row: int) -> list[float]:
        """Return the logprobs of all tokens but the first. Shapes: (T,) -> (T - 1,)."""
        found: list[float] = []
        self.decoder.reserve(len(self.running), len(ids))  # `forward` reserves for this row
        part = _LOGITS_AT_ONCE if self.decoder.keys else len(ids)
        for at in range(0, len(ids) - 1, part):
            ids_1Q = self._numbers([ids[at : min(at + part, len(ids) - 1)]])
            chosen_Q = self._numbers(ids[at + 1 : at + 1 + ids_1Q.shape[1]])
            logits_QV = self.decoder.forward(
                ids_1Q, self._numbers([at]), first_row=row, width=at + ids_1Q.shape[1], every=True
            )[0]
            found += torch.log_softmax(logits_QV, -1).gather(1, chosen_Q[:, None])[:, 0].tolist()
        return found

    def _numbers(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.decoder.device)

    def _take(self, logits_NV: torch.Tensor, first: int) -> None:
        """Sample for the rows from ``first`` on and note the tokens."""
        rows = self.running[first:]
        if first or self._sampler is None:
            sampler = Sampler([g.params for g in rows], [g.generator for g in rows], self.decoder.device)
            self._sampler = None if first else sampler
        else:
            sampler = self._sampler
        sampled = sampler.sample(logits_NV, self._generator)
        self._next_N = torch.cat([self._next_N[:first], sampled.tensor_N]) if first else sampled.tensor_N
        version, shape = self.version, self.decoder.shape
        for g, token, logprob in zip(rows, sampled.ids_N, sampled.logprobs_N, strict=True):
            if not math.isfinite(logprob):  # finite weights can still overflow
                g.error = "the logits are not finite; the weights are unusable"
                g.finish_reason = "error"
                continue
            g.token_ids.append(token)
            g.logprobs.append(logprob)
            if g.weight_version_first is None:
                g.weight_version_first = version
            g.weight_version_last = version
            if token in shape.end_ids and not g.params.ignore_eos:
                g.finish_reason = "stop"
            elif token in g.params.stop_token_ids:
                g.stop_reason, g.finish_reason = token, "stop"
            elif g.params.stop and (stop := self._stop_in(g)) is not None:
                g.stop_reason, g.finish_reason = stop, "stop"
            elif len(g.token_ids) >= g.params.max_tokens or g.length >= shape.context:
                g.finish_reason = "length"

    def _stop_in(self, generation: Generation) -> str | None:
        """Return the stop string that the newest token has completed."""
        assert self.tokenizer is not None
        stops = generation.params.stop
        last = generation.token_ids[-4 * max(map(len, stops)) - 4 :]  # a character may take four tokens
        text = self.tokenizer.decode(last, skip_special_tokens=False)
        return next((stop for stop in stops if stop in text), None)

    def _drop_ended(self) -> list[Generation]:
        """Take ended sequences out. The last row fills each hole."""
        ended = [row for row, g in enumerate(self.running) if g.finish_reason is not None]
        if not ended:
            return []
        gone = [self.running[row] for row in ended]
        for row in reversed(ended):
            g, last = self.running[row], len(self.running) - 1
            if not g.old_cache and g.finish_reason in ("stop", "length"):
                self.prefixes.keep([*g.prompt_ids, *g.token_ids[:-1]], row)
            if row != last:
                moved = self.running[row] = self.running[last]
                self.decoder.move_row(last, row, min(moved.length, self.decoder.shape.context))
                self._lengths_N[row], self._next_N[row] = self._lengths_N[last], self._next_N[last]
            self._lengths_N, self._next_N = self._lengths_N[:last], self._next_N[:last]
            self.running.pop()
        self._sampler = None
        return gone
