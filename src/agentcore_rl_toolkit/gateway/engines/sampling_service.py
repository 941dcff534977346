"""The request for a service that is sampled by its client library. The call itself is in `gateway.sampling_services`."""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import CaptureError
from ...messages.wire.canonical import ModelRequest
from .base import GenerationStream, Piece, TokenEngine

_encode = msgspec.json.Encoder().encode


class ServiceEngine(TokenEngine):
    """Writes `Asked` for an adapter. The gateway ends answers at stop strings itself."""

    streams = False
    features = frozenset({"n", "seed", "top_k", "stop"})

    def __init__(self, name: str) -> None:
        self.name = name

    def request(
        self, prompt_json: bytes, asked: ModelRequest, *, max_tokens: int, stop_token_ids: list[int], stream: bool
    ) -> tuple[bytes, bytes]:
        given = asked.sampling
        body: dict[str, Any] = {
            "prompt": msgspec.Raw(prompt_json),
            "n": asked.n,
            "max_tokens": max_tokens,
            "stop_token_ids": stop_token_ids,
            "stop": given.stop,
            "temperature": 1.0 if given.temperature is None else given.temperature,
            "top_p": 1.0 if given.top_p is None else given.top_p,
            "top_k": given.top_k if given.top_k and given.top_k > 0 else None,  # 0 and -1 cut nothing
            "seed": given.seed,
        }
        return b"", _encode(body)

    def reply(self, body: bytes) -> list[Piece]:
        raise CaptureError("the client library has the answer")

    def stream(self) -> GenerationStream:
        raise CaptureError(f"{self.name} answers whole")


class Asked(msgspec.Struct, kw_only=True):
    """What is asked of a service. ``stop_token_ids`` are the model's own; an empty list leaves its end of text in force."""

    prompt: list[int]
    n: int
    max_tokens: int
    stop_token_ids: list[int] = []
    stop: list[str] = []
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
