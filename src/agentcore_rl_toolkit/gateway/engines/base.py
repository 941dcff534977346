"""The interface of a token engine, and the parts that engines share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ...messages.wire.canonical import ModelRequest
from ..capture.choice import version_of

# The features of every engine except the sampling services.
COMMON = frozenset(
    ("n", "seed", "min_p", "top_k", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop")
)
FORMS = frozenset(("response_format", "tool_choice", "parallel_tool_calls"))  # constraints on the form of an answer
VLLM_FORMS = frozenset({"structured_outputs"})
SGLANG_FORMS = frozenset({"json_schema", "regex", "ebnf", "structural_tag"})


class Piece(msgspec.Struct, kw_only=True):
    """Some sampled tokens of one choice, in order. A whole answer is one piece per choice.

    Shapes: ``ids`` and ``logprobs`` (K,); ``logprobs`` None if the engine reported none. ``finish_reason`` is set on a
    choice's last piece.
    """

    choice: int = 0
    ids: list[int] = []
    logprobs: list[float | None] | None = None
    finish_reason: str | None = None
    stop_sequence: str | None = None
    weight_version: int | str | None = None  # the last token's, as the engine names it
    weight_version_first: int | str | None = None  # the first token's
    routed_experts: Any = None  # base64
    spans: list[tuple[int, int]] | None = None  # (first token, version), where weights changed within the choice
    error: dict[str, Any] | None = None  # it has no tokens: the engine reports an error


class WeightSpan(msgspec.Struct, gc=False):
    """Tokens of a choice, from ``start`` on, that one version of the weights sampled: as vLLM and SGLang write it."""

    version: str
    start: int = 0


def changes(reported: list[WeightSpan]) -> list[tuple[int, int]] | None:
    """Return (first token, version) where weights changed within a choice.

    None: they did not, or a token or a version is no number of 32 bits, as the record has them.
    """
    found = [(span.start, version) for span in reported if (version := version_of(span.version)) is not None]
    fits = all(0 <= number < 2**31 for span in found for number in span)
    return found if 1 < len(found) == len(reported) and fits else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRequest:
    """A request for tokens. ``prompt`` is a JSON list of ids. ``sampling`` are the agent's parameters.

    ``stop_token_ids`` end the answer: the model's and the agent's.

    `ModelRequest.response_format` has the chat shape; ``{"type": "structural_tag", "format": ...}`` is a tool choice, made by
    `render.call_format`. The call is cancelled by its ``name``.
    """

    prompt: bytes
    asked: ModelRequest
    sampling: dict[str, Any]
    name: str
    max_tokens: int
    stop_token_ids: list[int]
    stream: bool


def error_piece(error: Any) -> Piece:
    """Return the piece for an error that an engine reports inside a reply."""
    return Piece(error=error if isinstance(error, dict) else {"message": str(error)})


@dataclass(frozen=True, kw_only=True)
class TokenEngine:
    """An engine's wire format. ``features`` are those of `ModelRequest.features` that it supports.

    ``request`` returns path and body. ``reader`` returns a function for one reply, which reads a whole reply, or the data of an
    event (raises: CaptureError, one of NOT_JSON). ``cancel`` returns path and body of the request that ends a call by its name.
    None: a call ends when its connection closes.
    """

    features: frozenset[str]
    request: Callable[[TokenRequest], tuple[bytes, bytes]]
    reader: Callable[[], Callable[[bytes], list[Piece]]]
    cancel: Callable[[str], tuple[bytes, bytes]] | None = None
