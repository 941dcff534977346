"""The interface of a token engine, and what the engines share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from ...messages.wire.canonical import ModelRequest
from ..capture.versions import version_of

# What every engine but sampling services honours.
COMMON = frozenset(
    ("n", "seed", "min_p", "top_k", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop")
)
FORMS = frozenset(("response_format", "tool_choice", "parallel_tool_calls"))  # constraints on the form of an answer
GUIDED = {  # vLLM's names before 0.11
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
VLLM_FORMS = frozenset({"structured_outputs", *GUIDED})
SGLANG_FORMS = frozenset({"json_schema", "regex", "ebnf", "structural_tag"})


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
    weight_version_first: int | None = None  # of the choice's first token, if the engine names it at its end
    routed_experts: bytes | None = None
    weights: str | None = None  # the engine's name of the weights of the last token, number or not
    spans: list[tuple[int, int]] | None = None  # (first token, version), where weights changed within the choice


class WeightSpan(msgspec.Struct, gc=False):
    """Tokens of a choice, from ``start`` on, that one version of the weights sampled: as vLLM and SGLang write it."""

    version: str
    start: int = 0
    end: int = 0


def changes(reported: list[WeightSpan] | None) -> list[tuple[int, int]] | None:
    """Return (first token, version) where weights changed within a choice; None where they did not, or one has no number."""
    if reported is None or len(reported) < 2:
        return None
    found = [(span.start, version_of(span.version)) for span in reported]
    return None if any(v is None for _, v in found) else found  # type: ignore[return-value]


def error_of(error: Any) -> dict[str, Any]:
    """Return the error that an event reports."""
    return error if isinstance(error, dict) else {"message": str(error)}


def stops(ours: list[int], asked: Mapping[str, Any]) -> list[int]:
    """Return the token ids that end an answer: the model's, unless it ignores them (``ignore_eos``), and the agent's."""
    return sorted({*(() if asked.get("ignore_eos") else ours), *(asked.get("stop_token_ids") or ())})


def constrained(asked: ModelRequest) -> bool:
    """Return True if the answer is held to a form, so that its logprobs are of the tokens that the form allows."""
    kind = (asked.response_format or {}).get("type", "text")
    return kind != "text" or not (VLLM_FORMS | SGLANG_FORMS).isdisjoint(asked.sampling.other)


class GenerationStream(Protocol):
    """Bytes of a streamed answer -> pieces."""

    error: dict[str, Any] | None

    def feed(self, data: bytes) -> list[Piece]: ...


class TokenEngine(ABC):
    """One engine's wire format. ``features`` are those of `ModelRequest.features` that it can honour.

    `ModelRequest.response_format` has the chat shape; ``{"type": "structural_tag", "format": ...}`` is a tool choice, made by
    `render.call_format`.
    """

    name: str
    features: frozenset[str]
    streams = True  # False: it answers whole

    @abstractmethod
    def request(
        self, prompt_json: bytes, asked: ModelRequest, *, max_tokens: int, stop_token_ids: list[int], stream: bool
    ) -> tuple[bytes, bytes]:
        """Return path and body. ``prompt_json`` is the prompt's ids as a JSON list."""

    @abstractmethod
    def reply(self, body: bytes) -> list[Piece]:
        """Read a whole answer. Raises: CaptureError when it is not one."""

    @abstractmethod
    def stream(self) -> GenerationStream: ...

    def named(self, body: bytes, name: str) -> bytes:
        """Return the request with a name by which it can be ended. An engine refuses a name that is under way, so every
        attempt has its own.
        """
        return body

    def cancel(self, name: str) -> tuple[bytes, bytes] | None:
        """Return path and body of the request that ends the call. None: it ends when its connection closes."""
        return None
