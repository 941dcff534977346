"""Model calls in other dialects than chat completions, as chat completions and back. Needs msgspec (the extra `sagemaker`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...messages.wire import DIALECTS, Choice, Reply, RequestError, ToolCall, Usage, new_id
from .runtime import JobCallError


class TranslatedCall:
    """Translates a call of an agent from a dialect of `messages.wire` to a chat completion, and the reply back.

    ``chat`` is the chat completion. It is never streamed. An agent that asked for a stream gets all of it at the end.
    """

    def __init__(self, dialect: str, body: bytes) -> None:
        self._dialect = DIALECTS[dialect]
        try:
            self._request = self._dialect.parse_request(body)
        except RequestError as e:
            raise JobCallError(e.message, status=e.status or 400) from e
        self.chat = self._request.to_chat_body()
        self.chat.pop("stream", None)
        self.chat.pop("stream_options", None)
        self.media_type = "text/event-stream" if self._request.stream else "application/json"

    def answer(self, reply: bytes) -> bytes:
        """The body of the answer to a chat completion's."""
        found = json.loads(reply)
        usage = {k: v for k, v in (found.get("usage") or {}).items() if k in ("prompt_tokens", "completion_tokens")}
        whole = Reply(
            id=found.get("id") or new_id("chatcmpl-"),
            model=self._request.model,
            choices=[_choice(choice) for choice in found["choices"]],
            usage=Usage(**usage),
        )
        return self._dialect.encode_reply(whole, self._request)


def _choice(choice: Mapping[str, Any]) -> Choice:
    message = choice["message"]
    return Choice(
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content") or "",
        refusal=message.get("refusal"),
        tool_calls=[
            ToolCall(id=call.get("id") or "", name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ],
        finish_reason=choice.get("finish_reason"),
    )
