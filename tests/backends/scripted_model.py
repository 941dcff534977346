"""A model of a training service that makes tokens up and learns nothing."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentcore_rl_toolkit.backends.training.batch import Datum
from agentcore_rl_toolkit.backends.training.client import Adam, Loss, Passed
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.policy import WEIGHTS_DIR


def logprob_of(token: int) -> float:
    """The logprob that `ScriptedModel` gives a token: made up, and exact in 32 bits.

    The scripted engine of `gateway.testing` gives the same.
    """
    return -(token % 97) / 64 - 0.015625


@dataclass
class Made:
    """A completion, as `policy.batch.Generation` has it."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class ScriptedModel:
    """Makes tokens up, or takes them from `replies` (``{"token_ids": [...]}``); its logprobs are `logprob_of`.

    The weights of a run are the number of steps taken (`steps`), saved and loaded as such.
    """

    folder = WEIGHTS_DIR

    def __init__(self, *, tokens: int = 8, seed: int = 0) -> None:
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

    def create(self, run: str, *, temperature: float = 1.0) -> None:
        self.steps[run] = 0

    def forward_backward(self, run: str, data: Sequence[Datum], loss: Loss, *, backward: bool = True) -> Passed:
        logprobs = [[logprob_of(int(t)) for t in datum.target_tokens] for datum in data]
        return Passed(metrics={"loss": 0.0}, logprobs=logprobs)

    def step(self, run: str, adam: Adam) -> Mapping[str, float]:
        self.steps[run] += 1
        return {"grad_norm": 0.0}

    def save(self, run: str, path: str, *, optimizer: bool) -> None:
        self.saved[path] = self.steps[run]

    def load(self, run: str, path: str, *, optimizer: bool) -> None:
        if path not in self.saved:
            raise ConfigError(f"there are no weights {path!r}")
        self.steps[run] = self.saved[path]

    def sample(self, path: str | None, prompt_ids: list[int], n: int, params: Mapping[str, Any]) -> list[Any]:
        with self._lock:
            return [self._one(params) for _ in range(n)]

    def logprobs(self, path: str | None, ids: list[int]) -> list[float]:
        return [logprob_of(i) for i in ids[1:]]

    def _one(self, params: Mapping[str, Any]) -> Made:
        limit = int(params.get("max_tokens") or self.tokens)
        stops = [stop for stop in params.get("stop") or () if isinstance(stop, int)] or [self.last_id]
        if self.replies:
            reply = self.replies.popleft()
            ids, reason = list(reply["token_ids"]), str(reply.get("finish_reason", "stop"))
        else:
            ids = [self._random.randrange(self.first_id, self.last_id) for _ in range(min(limit, self.tokens))]
            reason = "stop" if self.tokens <= limit else "length"
            if reason == "stop":
                ids[-1] = stops[0]
        return Made(ids, [logprob_of(i) for i in ids], reason)

    def close(self) -> None: ...
