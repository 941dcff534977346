"""A model whose replies a function decides. Tests and examples use it in place of an engine.

`ScriptedModel` is a `ScriptedEngine` in a thread. Each chat reply comes from ``decide(messages, tools)``, so an
oracle, a solver that does nothing and a wrong one are plain functions::

    def oracle(messages, tools):
        if messages[-1]["role"] == "tool":
            return f"#### {messages[-1]['content']}"
        return [ToolCall("calculator", {"expression": "2 + 3"})]

    with ScriptedModel(oracle) as model:
        ...  # agentcore-rl gateway serve --upstream model.url --engine vllm
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._portal import Portal
from ...errors import ConfigError
from .engine import ScriptedEngine, Seen

STOP_WITHIN_S = 10.0


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. ``arguments`` that are text are sent as they are, so they may be invalid JSON."""

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


@dataclass(frozen=True)
class Cut:
    """A text that ends because the reply ran out of tokens."""

    text: str


Reply = str | Cut | Sequence[ToolCall]
Decide = Callable[[list[dict[str, Any]], list[dict[str, Any]]], Reply]


class ScriptedModel:
    """An OpenAI-compatible chat server on a free loopback port, whole and streamed. Use as a context manager.

    ``decide`` gets the messages and tools of a request in OpenAI's form, for every API of the agent; content
    that is a list of text parts arrives as one text. It runs on the server's thread, one call at a time, and may be replaced
    between calls. A call for which it raises gets status 400, and its error is kept in ``errors``: a broken script
    must not look like a bad policy.
    """

    def __init__(self, decide: Decide | None = None, *, model: str = "scripted") -> None:
        self.decide = decide
        self.errors: list[Exception] = []
        self._engine = ScriptedEngine(model=model, decide=self._decide)
        self._numbers = itertools.count(1)
        self._portal = Portal("scripted-model", owner="ScriptedModel")

    @property
    def url(self) -> str:
        return self._engine.url

    @property
    def calls(self) -> list[Seen]:
        """Return the model calls so far."""
        return self._engine.calls

    def start(self) -> None:
        self._portal.call(self._engine.start())

    def stop(self) -> None:
        """Stop at once; a second time does nothing."""
        if self._portal.started:
            self._portal.call(self._engine.stop(), clean_up_s=STOP_WITHIN_S)
        self._portal.close()

    def __enter__(self) -> ScriptedModel:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _decide(self, seen: Seen) -> dict[str, Any]:
        try:
            if self.decide is None:
                raise ConfigError("this ScriptedModel was called before it had a `decide` function")
            reply = self.decide([_plain(m) for m in seen.body["messages"]], list(seen.body.get("tools") or []))
            if isinstance(reply, Cut):
                return {"content": reply.text, "finish_reason": "length"}
            return {"content": reply} if isinstance(reply, str) else {"content": None, "tool_calls": self._calls(reply)}
        except Exception as e:
            self.errors.append(e)
            raise

    def _calls(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        if not calls or not all(isinstance(call, ToolCall) for call in calls):
            raise ConfigError(f"decide must return a text, a Cut text or a list of one ToolCall or more, got {calls!r}")
        return [
            {
                "id": f"call_{next(self._numbers)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.text},
            }
            for call in calls
        ]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return {**message, "content": "".join(part["text"] for part in content)}
    return message
