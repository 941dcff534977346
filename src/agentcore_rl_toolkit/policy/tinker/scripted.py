"""What stands behind a `testing.TinkerServer`: the interface of a model, and one that makes tokens up.

The losses are Tinker's, over sampled tokens t with logprob l_t, the sampler's logprob o_t, advantage A_t and
r_t = exp(l_t - o_t)::

    cross_entropy         - sum  w_t l_t
    importance_sampling   - sum  r_t A_t
    ppo                   - sum  min(r_t A_t, clip(r_t, low, high) A_t)
    cispo                 - sum  clip(r_t, low, high) A_t l_t        (the clipped ratio is a constant)

Source: tinker-docs.thinkingmachines.ai, "Losses"; the clips are 0.8 and 1.2 unless the request says otherwise.
"""

from __future__ import annotations

import math
import random
import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from ...errors import ConfigError
from .messages import LENGTH, STOP, Completion, ReceivedDatum, Sampled

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")
CLIP_LOW, CLIP_HIGH = 0.8, 1.2


class TinkerModel(Protocol):
    """A model. All methods may block; training comes one call at a time, sampling from many threads.

    A run is a model in training; a path names saved weights, None the base model. Raises: ConfigError on unknown names.
    """

    base_model: str

    @property
    def paths(self) -> Collection[str]:
        """All saved and published weights."""
        ...

    def create(self, run: str) -> None: ...
    def forward_backward(
        self,
        run: str,
        data: Sequence[ReceivedDatum],
        loss_fn: str,
        config: Mapping[str, float | str],
        forward_only: bool,
    ) -> tuple[list[list[float]], dict[str, float]]:
        """The logprobs of the target tokens, and metrics whose names end in how they are combined (``loss:sum``)."""
        ...

    def optim_step(self, run: str, adam: Mapping[str, float]) -> dict[str, float]: ...
    def save(self, run: str, path: str) -> None: ...
    def load(self, run: str, path: str, optimizer: bool) -> None: ...
    def publish(self, run: str, path: str) -> None: ...
    def sample(
        self, path: str | None, prompt_ids: list[int], n: int, params: Mapping[str, Any]
    ) -> Sequence[Completion]: ...
    def prompt_logprobs(self, path: str | None, prompt_ids: list[int]) -> list[float | None]: ...


def logprob_of(token: int) -> float:
    """The logprob that `ScriptedModel` gives a token: made up, and exact in 32 bits.

    The scripted engine of `gateway.testing` gives the same.
    """
    return -(token % 97) / 64 - 0.015625


class ScriptedModel:
    """Makes tokens up, or takes them from `replies` (``{"token_ids": [...]}``); its logprobs are `logprob_of`.

    It learns nothing: the weights of a run are the number of steps taken (`steps`), saved and loaded as such.
    """

    def __init__(self, *, base_model: str = "scripted/model", tokens: int = 8, seed: int = 0) -> None:
        self.base_model = base_model
        self.tokens = tokens
        self.first_id, self.last_id = 10, 900
        self.replies: deque[dict[str, Any]] = deque()
        self.steps: Counter[str] = Counter()
        self.saved: dict[str, int] = {}
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    @property
    def paths(self) -> Collection[str]:
        return self.saved

    def create(self, run: str) -> None:
        self.steps[run] = 0

    def forward_backward(
        self,
        run: str,
        data: Sequence[ReceivedDatum],
        loss_fn: str,
        config: Mapping[str, float | str],
        forward_only: bool,
    ) -> tuple[list[list[float]], dict[str, float]]:
        logprobs_B = [[logprob_of(int(t)) for t in datum.inputs["target_tokens"]] for datum in data]
        pairs = zip(logprobs_B, data, strict=True)
        return logprobs_B, {"loss:sum": sum(loss(loss_fn, lp, d.inputs, config) for lp, d in pairs)}

    def optim_step(self, run: str, adam: Mapping[str, float]) -> dict[str, float]:
        self.steps[run] += 1
        return {}

    def save(self, run: str, path: str) -> None:
        self.saved[path] = self.steps[run]

    def load(self, run: str, path: str, optimizer: bool) -> None:
        self.steps[run] = self.saved[path]

    def publish(self, run: str, path: str) -> None:
        self.saved[path] = self.steps[run]

    def sample(self, path: str | None, prompt_ids: list[int], n: int, params: Mapping[str, Any]) -> list[Sampled]:
        with self._lock:
            return [self._one(params) for _ in range(n)]

    def _one(self, params: Mapping[str, Any]) -> Sampled:
        limit, stops = int(params.get("max_tokens") or self.tokens), params.get("stop") or [self.last_id]
        if self.replies:
            reply = self.replies.popleft()
            ids, reason = list(reply["token_ids"]), LENGTH if reply.get("finish_reason") == "length" else STOP
        else:
            ids = [self._random.randrange(self.first_id, self.last_id) for _ in range(min(limit, self.tokens))]
            reason = STOP if self.tokens <= limit else LENGTH
            if reason == STOP:
                ids[-1] = stops[0]
        return Sampled(ids=ids, logprobs=[logprob_of(i) for i in ids], stop_reason=reason)

    def prompt_logprobs(self, path: str | None, prompt_ids: list[int]) -> list[float | None]:
        return [None, *(logprob_of(i) for i in prompt_ids[1:])]


def loss(
    name: str, logprobs_T: Sequence[float], inputs: Mapping[str, Sequence[float]], config: Mapping[str, float | str]
) -> float:
    """One example's loss. Shapes: `logprobs_T` and the inputs (T,). Raises: ConfigError on another loss."""
    low, high = clips(config)
    if name == "cross_entropy":
        return -sum(w * lp for w, lp in zip(inputs["weights"], logprobs_T, strict=True))
    if name not in LOSSES:
        raise ConfigError(f"loss {name!r} is not known here; there are {', '.join(LOSSES)}")
    total = 0.0
    for lp, old, advantage in zip(logprobs_T, inputs["logprobs"], inputs["advantages"], strict=True):
        ratio = math.exp(lp - old)
        clipped = min(max(ratio, low), high)
        if name == "importance_sampling":
            total -= ratio * advantage
        elif name == "ppo":
            total -= min(ratio * advantage, clipped * advantage)
        else:
            total -= clipped * advantage * lp
    return total


def clips(config: Mapping[str, float | str]) -> tuple[float, float]:
    return float(config.get("clip_low_threshold", CLIP_LOW)), float(config.get("clip_high_threshold", CLIP_HIGH))
