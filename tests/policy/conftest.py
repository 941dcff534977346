"""Shared pieces: the shipped policy as a model of transformers and as a decoder."""

from __future__ import annotations

from typing import Any

import pytest

from agentcore_rl_toolkit.policy.decoder import Decoder
from agentcore_rl_toolkit.policy.loading import load_decoder
from agentcore_rl_toolkit.policy.model import load_policy
from agentcore_rl_toolkit.policy.word_problems import problems


@pytest.fixture(scope="session")
def hf() -> tuple[Any, Any]:
    """``(model, tokenizer)`` of the shipped policy as transformers objects."""
    return load_policy()


@pytest.fixture(scope="session")
def prompts(hf: tuple[Any, Any]) -> list[list[int]]:
    """What the example agent of the quickstart asks first, of twelve problems."""
    texts = [
        f"<|im_start|>system\nSolve the problem.<|im_end|>\n<|im_start|>user\n{p.prompt}<|im_end|>\n<|im_start|>assistant\n"
        for p in problems("train", 12)
    ]
    return [list(hf[1](text)["input_ids"]) for text in texts]


@pytest.fixture
def decoder() -> Decoder:
    return load_decoder(rows=16)
