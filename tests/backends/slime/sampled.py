"""What the engine sampled, as its journal says, and the reading of a training sample against it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]  # of `sglang_server.py`: rid, prompt, ids, logprobs, finish


def read_journal(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def turns_of(sample: dict[str, Any], journal: Sequence[Line]) -> list[Line]:
    """The finished generations that make up a sample, every token and logprob accounted for.

    A call that was cut off and one that was run again from the same prompt often begin with the same tokens and, in
    batches of the same shape, with the same logprobs. So a cut-off one explains nothing here, and of several finished
    ones the longest is taken: a shorter one leaves sampled tokens behind it that no prompt leads to.
    Raises: AssertionError when tokens are left over, with what the journal has for that place.
    """
    tokens, mask, logprobs = sample["tokens"], sample["loss_mask"], sample["logprobs"]
    start = at = len(tokens) - sample["response_length"]
    assert len(mask) == len(logprobs) == sample["response_length"]
    turns = []
    while at < len(tokens):
        if not mask[at - start]:
            at += 1
            continue
        asked = [line for line in journal if line["ids"] and line["prompt"] == tokens[:at]]
        # Floats are equal, not near: they come from the engine's JSON and are kept as the float32 that they are.
        wanted = [
            line
            for line in asked
            if line["finish"] != "abort"
            and line["ids"] == tokens[at : at + len(line["ids"])]
            and line["logprobs"] == logprobs[at - start : at - start + len(line["ids"])]
        ]
        assert wanted, (sample, at, [(line["finish"], line["ids"]) for line in asked])
        turn = max(wanted, key=lambda line: len(line["ids"]))
        length = len(turn["ids"])
        assert mask[at - start : at - start + length] == [1] * length, (sample, at, length)
        turns.append(turn)
        at += length
    return turns
