"""Model calls in other dialects than chat completions, as chat completions and back. Needs msgspec (the extra `sagemaker`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from ...messages.wire import DIALECTS, Choice, Reply, RequestError, ToolCall, Usage, bedrock, gemini, new_id
from ...messages.wire.fields import with_path
from .runtime import JobCallError

_PATHS = {dialect.path.encode(): dialect for dialect in DIALECTS.values()}
_KINDS = {401: "authentication", 403: "permission", 404: "not_found", 408: "timeout", 429: "rate_limit", 504: "timeout"}


class TranslatedCall:
    """Translates a call of an agent from a dialect of `messages.wire` to a chat completion, and the reply back.

    ``path`` is that of the agent's call, below its base URL. It chooses the dialect.

    The chat completion is never streamed. An agent that asked for a stream gets all of it at the end.
    """

    def __init__(self, path: bytes) -> None:
        self._route = (bedrock if path.startswith(b"bedrock/") else gemini).route_of(path)
        dialect = _PATHS.get(path if self._route is None else self._route.pattern)
        if dialect is None:
            raise JobCallError(f"a multi-turn RL job has no {path.decode('utf-8', 'replace')[:80]}", status=404)
        self._dialect = dialect

    def read(self, body: bytes) -> dict[str, Any]:
        """Translate the agent's request into a chat completion. Raises: JobCallError."""
        try:
            if self._route is not None:
                body = with_path(body, self._route)
            self._request = self._dialect.parse_request(body)
        except RequestError as e:
            raise JobCallError(e.message, status=e.status) from e
        chat = self._request.to_chat_body()
        chat.pop("stream", None)
        chat.pop("stream_options", None)
        return chat

    @property
    def media_type(self) -> str:
        """The media type of the reply."""
        return self._dialect.stream_type if self._request.stream else "application/json"

    def failure(self, error: JobCallError) -> tuple[bytes, int, dict[str, str]]:
        """Return the body, status and headers of a failed call's response, as the agent's client reads them."""
        kind = _KINDS.get(error.status, "upstream" if error.status >= 500 else "invalid_request")
        shown = RequestError(str(error), kind=kind, status=error.status)
        status, headers = self._dialect.error_head(shown)
        return msgspec.json.encode(self._dialect.error_dict(shown)), status, headers

    def answer(self, reply: bytes) -> bytes:
        """Translate the body of a chat completion's response for the agent."""
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
        content=message.get("content") or message.get("refusal") or "",
        reasoning=message.get("reasoning_content") or "",
        tool_calls=[
            ToolCall(id=call.get("id") or "", name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ],
        finish_reason=choice.get("finish_reason"),
    )
