"""The request for a service that is sampled by its client library (`gateway.sampling_services`)."""

from __future__ import annotations

import msgspec

FEATURES = frozenset({"n", "seed", "top_k", "stop"})  # the gateway ends answers at stop strings itself


class Asked(msgspec.Struct, kw_only=True):
    """A request to a service. ``stop_token_ids`` are the model's; with an empty list the service uses its end of text."""

    prompt: list[int]
    n: int
    max_tokens: int
    stop_token_ids: list[int] = []
    stop: list[str] = []
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
