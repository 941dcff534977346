"""Tinker's sampling: what its SDK is asked, and how its answer is read. The call itself is in `gateway.tinker`.

Source: the `tinker` package 0.38.0 (`SamplingClient.sample`, `SamplingParams`, `SampleResponse`).
"""

from __future__ import annotations

import math
import os
from typing import Any

import msgspec

from ...errors import CaptureError
from ...messages.dialects.canonical import LENGTH, STOP, ModelRequest
from ...messages.errors import NOT_JSON
from .base import GenerationStream, Piece, TokenEngine

PRODUCTION_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
KEY_ENV, URL_ENV = "TINKER_API_KEY", "TINKER_BASE_URL"  # the SDK's own names

_encode = msgspec.json.Encoder().encode


class SampleAsked(msgspec.Struct):
    """The arguments of `SamplingClient.sample`."""

    prompt: list[int]
    num_samples: int
    sampling_params: dict[str, Any]


class Sequence(msgspec.Struct):
    """One sampled sequence. Shapes: both (K,)."""

    tokens: list[int]
    logprobs: list[float | None] | None
    stop_reason: str


read_request = msgspec.json.Decoder(SampleAsked).decode
_read_answer = msgspec.json.Decoder(list[Sequence]).decode


class TinkerEngine(TokenEngine):
    """See the module. ``stop`` strings are cut by the gateway and not sent: a request takes either strings or token ids, and
    the ids that end a turn must stop it in any case."""

    name = "tinker"
    features = frozenset({"n", "seed", "top_k", "stop"})

    def request(
        self, prompt_json: bytes, asked: ModelRequest, *, max_tokens: int, stop_token_ids: list[int], stream: bool
    ) -> tuple[bytes, bytes]:
        given = asked.sampling
        params: dict[str, Any] = {
            "max_tokens": max_tokens,
            "stop": stop_token_ids or None,  # an empty list would disable the model's own end of text too
            "temperature": 1.0 if given.temperature is None else given.temperature,
            "top_k": -1 if given.top_k is None else given.top_k,
            "top_p": 1.0 if given.top_p is None else given.top_p,
            "seed": given.seed,
        }
        params = {k: v for k, v in params.items() if v is not None}
        body = {"prompt": msgspec.Raw(prompt_json), "num_samples": asked.n, "sampling_params": params}
        return b"", _encode(body)

    def reply(self, body: bytes) -> list[Piece]:
        try:
            sequences = _read_answer(body)
        except NOT_JSON as e:
            raise CaptureError(f"the SDK's answer cannot be read: {e}") from e
        unknown = [s.stop_reason for s in sequences if s.stop_reason not in (STOP, LENGTH)]
        if unknown:
            raise CaptureError(f"a sequence has the unknown stop reason {unknown[0]!r}")
        return [
            Piece(choice=i, ids=s.tokens, logprobs=s.logprobs, finish_reason=s.stop_reason)
            for i, s in enumerate(sequences)
        ]

    def stream(self) -> GenerationStream:
        raise CaptureError("Tinker answers whole")


def write_answer(response: Any) -> bytes:
    """A `tinker.SampleResponse` as `TinkerEngine.reply` reads it; NaN stands for a logprob that was not computed."""
    return _encode([_sequence(s) for s in response.sequences])


def _sequence(sampled: Any) -> Sequence:
    logprobs = sampled.logprobs
    values = None if logprobs is None else [None if math.isnan(lp) else lp for lp in logprobs]
    return Sequence(list(sampled.tokens), values, sampled.stop_reason)


def service_url() -> str:
    """The service that the SDK would use: TINKER_BASE_URL, or production."""
    return (os.environ.get(URL_ENV) or PRODUCTION_URL).rstrip("/")
