"""Tinker's sampling: requests to its SDK and its answers. The call itself is in `gateway.tinker`.

Source: the `tinker` package 0.38.0 (`SamplingClient.sample`, `SamplingParams`, `SampleResponse`).
"""

from __future__ import annotations

import math
import os
from typing import Any

import msgspec

from ...errors import CaptureError
from ...messages.dialects.canonical import LENGTH, STOP, ModelRequest
from .base import GenerationStream, Piece, TokenEngine

PRODUCTION_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
KEY_ENV, URL_ENV = "TINKER_API_KEY", "TINKER_BASE_URL"  # the SDK's own names

_encode = msgspec.json.Encoder().encode


class TinkerEngine(TokenEngine):
    """Writes requests for Tinker's SDK. The gateway cuts ``stop`` strings itself and does not send them: a request takes
    either strings or token ids, and it needs the ids that end a turn."""

    name = "tinker"
    streams = False
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
        raise CaptureError("the SDK has the answer")

    def stream(self) -> GenerationStream:
        raise CaptureError("Tinker answers whole")


def pieces_of(response: Any, version: int | None) -> list[Piece]:
    """A `tinker.SampleResponse`; NaN stands for a logprob that was not computed. Raises: CaptureError."""
    pieces = []
    for choice, sampled in enumerate(response.sequences):
        if sampled.stop_reason not in (STOP, LENGTH):
            raise CaptureError(f"a sequence has the unknown stop reason {sampled.stop_reason!r}")
        logprobs = sampled.logprobs
        piece = Piece(
            choice=choice, ids=list(sampled.tokens), finish_reason=sampled.stop_reason, weight_version=version
        )
        if logprobs is not None:
            piece.logprobs = [None if math.isnan(lp) else lp for lp in logprobs]
        pieces.append(piece)
    return pieces


def service_url() -> str:
    """The service that the SDK would use: TINKER_BASE_URL, or production."""
    return (os.environ.get(URL_ENV) or PRODUCTION_URL).rstrip("/")
