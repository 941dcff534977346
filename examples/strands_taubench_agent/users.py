"""Users of retail and airline tasks. In telecom's solo mode, a ticket replaces the user."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

ENDS = (
    "###STOP###",
    "###TRANSFER###",
    "###OUT-OF-SCOPE###",
)  # the benchmark's user ends a conversation with one of these
GREETING = "Hi! How can I help you today?"


class UserSimulator(Protocol):
    """A user with a request. Called in turn: `opening` once, then `reply` after each text of the agent."""

    async def opening(self) -> str: ...

    async def reply(self, text: str) -> str | None:
        """The next words, None when there is nothing more to say."""


class ScriptedUser:
    """Says its lines in order, whatever the agent says, and ends after the reply to the last one."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = list(lines)

    async def opening(self) -> str:
        return self._lines.pop(0)

    async def reply(self, text: str) -> str | None:
        return self._lines.pop(0) if self._lines else None


class ModelUser:
    """A model that plays the task's scenario by the benchmark's own guidelines, over any OpenAI-compatible endpoint.

    Never point it at the address of the rollout: its turns would be recorded as the policy's.
    """

    def __init__(self, client: Any, model_id: str, scenario: str, *, guidelines: str | None = None) -> None:
        rules = guidelines if guidelines is not None else published_guidelines()
        self._client = client
        self._model_id = model_id
        self._messages: list[dict[str, str]] = [
            {"role": "system", "content": f"{rules}\n\n<scenario>\n{scenario}\n</scenario>"}
        ]

    @classmethod
    def from_env(cls, scenario: str) -> ModelUser:
        """Create the user from ``USER_BASE_URL``, ``USER_MODEL_ID`` and ``USER_API_KEY``.

        Raises: ValueError if the model is not set.
        """
        missing = [name for name in ("USER_BASE_URL", "USER_MODEL_ID") if not os.environ.get(name)]
        if missing:
            raise ValueError(
                f"this task has a user: set {' and '.join(missing)} to a model that plays it, or send `user_lines`"
            )
        from openai import AsyncOpenAI

        client = AsyncOpenAI(
            base_url=os.environ["USER_BASE_URL"], api_key=os.environ.get("USER_API_KEY", "none"), timeout=120
        )
        return cls(client, os.environ["USER_MODEL_ID"], scenario)

    async def opening(self) -> str:
        return await self.reply(GREETING) or ""

    async def reply(self, text: str) -> str | None:
        self._messages.append({"role": "user", "content": text})  # for this model, the agent is the user
        answer = await self._client.chat.completions.create(model=self._model_id, messages=self._messages)
        said = answer.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": said})
        return None if any(end in said for end in ENDS) else said


def published_guidelines() -> str:
    """Return the instructions of the benchmark for a model that plays a user."""
    import tau2

    folder = Path(tau2.__file__).parent / "data" / "tau2" / "user_simulator"
    return (folder / "simulation_guidelines.md").read_text(encoding="utf-8")
