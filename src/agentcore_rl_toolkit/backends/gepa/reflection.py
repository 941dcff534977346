"""The model that proposes better texts, behind OpenAI's chat API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..._installation import require
from ...errors import TrainingServiceError

DEADLINE_S = 600.0  # a reasoning model writes for minutes
RETRIES = 4  # by the client library, with its backoff


class Reflection:
    """Asks the model; GEPA calls it with a prompt. ``spent`` is called with what each answer cost.

    ``error`` is the first failure after all retries. From then on every call fails at once: GEPA itself would go on and spend
    rollouts.
    """

    def __init__(self, url: str, model: str, key: str | None, *, spent: Callable[..., None]) -> None:
        self._openai = require("openai", extra="optimize")
        self._settings = {"base_url": url, "api_key": key or "none", "timeout": DEADLINE_S, "max_retries": RETRIES}
        self._url, self._model, self._spent = url, model, spent
        self.error: TrainingServiceError | None = None

    def __call__(self, prompt: str | list[dict[str, Any]]) -> str:
        """Raises: TrainingServiceError."""
        if self.error is not None:
            raise self.error
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            with self._openai.OpenAI(**self._settings) as client:
                reply = client.chat.completions.create(model=self._model, messages=messages)
            text, usage = str(reply.choices[0].message.content or ""), reply.usage
            if usage is None or not text.strip():
                raise ValueError(
                    f"the answer has no text, or does not count its tokens: {reply.to_json(indent=None)[:500]}"
                )
        except (self._openai.OpenAIError, AttributeError, LookupError, TypeError, ValueError) as e:
            self.error = TrainingServiceError(
                f"the reflection model {self._model} at {self._url} does not answer as OpenAI's chat API does: "
                f"{e.__cause__ or e}. Check --reflect-url, --reflect-model and AGENTCORE_RL_REFLECT_KEY; --resume goes on"
            )
            raise self.error from e
        self._spent(reflections=1, input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens)
        return text
