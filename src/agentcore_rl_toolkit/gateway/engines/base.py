"""The interface of a token engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from ...messages.wire.canonical import ModelRequest
from ..capture.versions import version_of


class Piece(msgspec.Struct, kw_only=True):
    """Some sampled tokens of one choice, in order. A whole answer is one piece per choice.

    Shapes: ``ids`` and ``logprobs`` (K,); ``logprobs`` None where the engine gave none. ``finish_reason`` is set on a
    choice's last piece.
    """

    choice: int = 0
    ids: list[int] = []
    logprobs: list[float | None] | None = None
    finish_reason: str | None = None
    stop_sequence: str | None = None
    weight_version: int | None = None
    weight_version_first: int | None = None  # of the choice's first token, where the engine says so at its end
    routed_experts: bytes | None = None
    weights: str | None = None  # what the engine calls the weights of the last token, number or not
    spans: list[tuple[int, int]] | None = None  # (first token, version), where weights changed within the choice


class WeightSpan(msgspec.Struct, gc=False):
    """Tokens of a choice, from ``start`` on, that one version of the weights sampled: as vLLM and SGLang write it."""

    version: str
    start: int = 0
    end: int = 0


def changes(reported: list[WeightSpan] | None) -> list[tuple[int, int]] | None:
    """(first token, version) where weights changed within a choice; None where they did not, or one has no number."""
    if reported is None or len(reported) < 2:
        return None
    found = [(span.start, version_of(span.version)) for span in reported]
    return None if any(v is None for _, v in found) else found  # type: ignore[return-value]


def error_of(error: Any) -> dict[str, Any]:
    """The error that an event reports."""
    return error if isinstance(error, dict) else {"message": str(error)}


def stops(ours: list[int], asked: Mapping[str, Any]) -> list[int]:
    """The token ids that end an answer: the model's, unless it is to go on past them (``ignore_eos``), and the agent's."""
    return sorted({*(() if asked.get("ignore_eos") else ours), *(asked.get("stop_token_ids") or ())})


# What every engine but sampling services honours.
_COMMON = """
    n seed min_p top_k logit_bias presence_penalty frequency_penalty repetition_penalty stop
"""
COMMON = frozenset(_COMMON.split())


class GenerationStream(Protocol):
    """Bytes of a streamed answer -> pieces."""

    error: dict[str, Any] | None

    def feed(self, data: bytes) -> list[Piece]: ...


class TokenEngine(ABC):
    """One engine's wire format. ``features`` are those of `ModelRequest.features` that it can honour."""

    name: str
    features: frozenset[str]
    streams = True  # False: it answers whole

    @abstractmethod
    def request(
        self, prompt_json: bytes, asked: ModelRequest, *, max_tokens: int, stop_token_ids: list[int], stream: bool
    ) -> tuple[bytes, bytes]:
        """Path and body. ``prompt_json`` is the prompt's ids as a JSON list."""

    @abstractmethod
    def reply(self, body: bytes) -> list[Piece]:
        """Read a whole answer. Raises: CaptureError when it is not one."""

    @abstractmethod
    def stream(self) -> GenerationStream: ...

    def named(self, body: bytes, name: str) -> bytes:
        """The request with a name by which it can be ended. An engine refuses a name that is under way, so every attempt
        has its own.
        """
        return body

    def cancel(self, name: str) -> tuple[bytes, bytes] | None:
        """Path and body of the request that ends the call; None: it ends when its connection closes."""
        return None
