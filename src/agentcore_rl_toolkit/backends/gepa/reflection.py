"""The model that proposes better texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ...errors import TrainingServiceError, UpstreamError
from ..chat import TOKENS, ask

DEADLINE_S = 600.0  # a reasoning model may take minutes


class Reflection:
    """Asks the model; GEPA calls it with a prompt. ``spent`` is called with the cost of each answer.

    ``error`` is the first failure after the last attempt. Later calls fail at once: GEPA itself would continue and spend
    rollouts.
    """

    def __init__(self, url: str, model: str, key: str | None, *, spent: Callable[..., None]) -> None:
        self._url, self._model, self._key, self._spent = url, model, key, spent
        self.error: TrainingServiceError | None = None

    def __call__(self, prompt: str | list[dict[str, Any]]) -> str:
        if self.error is not None:
            raise self.error
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body, usage = {"model": self._model, "messages": messages}, dict.fromkeys(TOKENS, 0.0)

        def read(text: str) -> str:
            if not text.strip() or not usage["prompt_tokens"]:
                raise UpstreamError("the answer has no text or no count of its tokens")
            return text

        try:
            text = asyncio.run(ask(self._url, body, key=self._key, timeout_s=DEADLINE_S, usage=usage, read=read))
        except UpstreamError as e:
            self.error = TrainingServiceError(
                f"the reflection model {self._model} at {self._url}: {e}. Check --reflect-url, --reflect-model and "
                "AGENTCORE_RL_REFLECT_KEY; --resume continues"
            )
            raise self.error from e
        self._spent(reflections=1, input_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"])
        return text
