"""Keys and values of prompts already read, kept in blocks, so that a conversation's next turn reads only what is new.

A block holds 16 tokens and is known by the block before it and its own tokens: equal prefixes of all requests share blocks.
The tools and the system prompt of a run are thus read once per weight version, a problem once per group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from .decoder import Decoder
from .transformers_decoder import TransformersDecoder

BLOCK = 16  # tokens


class PrefixCache:
    """Least recently used blocks go first. Not thread-safe; belongs to the thread that computes.

    Units: ``capacity`` in blocks. A block of the shipped policy takes 32 KiB.
    """

    def __init__(self, decoder: Decoder | TransformersDecoder, *, capacity: int = 2048) -> None:
        self._decoder = decoder
        self._capacity = capacity if decoder.keys else 0  # transformers' caches are not cut into blocks
        self._known: OrderedDict[tuple[int, tuple[int, ...]], int] = OrderedDict()  # (parent's serial, tokens) -> slot
        self._serial_of_slot = [0] * self._capacity
        self._free = list(range(self._capacity - 1, -1, -1))
        self._next_serial = 1
        self._pool = torch.empty(0)
        self.hit_tokens = 0
        self.asked_tokens = 0

    def clear(self) -> None:
        """Forget everything; called when the weights change."""
        self._known.clear()
        self._free = list(range(self._capacity - 1, -1, -1))

    @torch.inference_mode()
    def fill(self, ids: Sequence[int], row: int) -> int:
        """Copy the longest known prefix into a row of the decoder's cache; returns its length in tokens.

        At least one token is left to compute, since its logits are needed.
        """
        slots: list[int] = []
        serial = 0
        for first in range(0, len(ids) - BLOCK, BLOCK):
            key = (serial, tuple(ids[first : first + BLOCK]))
            slot = self._known.get(key)
            if slot is None:
                break
            self._known.move_to_end(key)
            serial = self._serial_of_slot[slot]
            slots.append(slot)
        self.asked_tokens += len(ids)
        tokens = len(slots) * BLOCK
        if not slots:
            return 0
        self.hit_tokens += tokens
        self._decoder.reserve(row + 1, tokens)
        blocks = self._pool[slots]  # (n, layers, 2, heads, BLOCK, size)
        merged = blocks.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        for layer, (keys, values) in enumerate(zip(self._decoder.keys, self._decoder.values, strict=True)):
            keys[row, :, :tokens] = merged[layer, 0]
            values[row, :, :tokens] = merged[layer, 1]
        return tokens

    @torch.inference_mode()
    def keep(self, ids: Sequence[int], row: int) -> None:
        """Remember the full blocks of a row whose first ``len(ids)`` tokens have been computed."""
        if self._capacity == 0:
            return
        if self._pool.numel() == 0:
            heads, size = self._decoder.keys[0].shape[1], self._decoder.keys[0].shape[3]
            self._pool = torch.empty(self._capacity, len(self._decoder.keys), 2, heads, BLOCK, size)
        serial = 0
        for first in range(0, len(ids) - BLOCK + 1, BLOCK):
            key = (serial, tuple(ids[first : first + BLOCK]))
            slot = self._known.get(key)
            if slot is None:
                slot = self._free.pop() if self._free else self._known.popitem(last=False)[1]
                self._known[key] = slot
                self._serial_of_slot[slot] = self._next_serial
                self._next_serial += 1
                block = self._pool[slot]
                for layer, (keys, values) in enumerate(zip(self._decoder.keys, self._decoder.values, strict=True)):
                    block[layer, 0] = keys[row, :, first : first + BLOCK]
                    block[layer, 1] = values[row, :, first : first + BLOCK]
            else:
                self._known.move_to_end(key)
            serial = self._serial_of_slot[slot]

    def __len__(self) -> int:
        return len(self._known)
