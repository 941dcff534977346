"""A reader of chat and text completions, whole and streamed, that shares nothing with the gateway's own (`capture`)."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from agentcore_rl_toolkit.errors import UpstreamError
from agentcore_rl_toolkit.messages.dialects.canonical import Delta, Reply, ToolDelta, Usage
from agentcore_rl_toolkit.messages.errors import NOT_JSON

from ..reply_builder import ReplyBuilder
from ..sse_parser import DONE, Event, SSEParser

_DECODER = msgspec.json.Decoder()
T = TypeVar("T")


def _member(data: dict[str, Any], name: str, kind: type[T]) -> T | None:
    """A member of this type, None where it is absent. Raises: UpstreamError on another type."""
    value = data.get(name)
    if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
        return value
    raise UpstreamError(f"the engine sent {name!r} as {type(value).__name__}, not {kind.__name__}")


def _members(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects. Raises: UpstreamError."""
    found = _member(data, name, list) or []
    if not all(isinstance(item, dict) for item in found):
        raise UpstreamError(f"the engine sent {name!r} with items that are no objects")
    return found


def read_usage(usage: dict[str, Any] | None) -> Usage | None:
    if usage is None:
        return None
    return Usage(
        prompt_tokens=_member(usage, "prompt_tokens", int),
        completion_tokens=_member(usage, "completion_tokens", int),
        cached_tokens=_member(_member(usage, "prompt_tokens_details", dict) or {}, "cached_tokens", int),
        reasoning_tokens=_member(_member(usage, "completion_tokens_details", dict) or {}, "reasoning_tokens", int),
    )


def decode_json(data: bytes) -> dict[str, Any]:
    """Raises: UpstreamError when an engine's answer is not a JSON object."""
    try:
        body = _DECODER.decode(data)
    except NOT_JSON as e:
        raise UpstreamError(f"the engine sent something that is not JSON: {data[:200]!r}") from e
    if not isinstance(body, dict):
        raise UpstreamError(f"the engine sent JSON that is not an object: {data[:200]!r}")
    return body


class ChatStream:
    """Bytes of a chat or text completion stream -> deltas; the whole reply at the end."""

    def __init__(self) -> None:
        self._parser = SSEParser()
        self._builder = ReplyBuilder()
        self.done = False

    def feed(self, data: bytes) -> list[Delta]:
        """Raises: UpstreamError on an event that is not JSON of this kind."""
        return self._events(self._parser.feed(data))

    def finish(self) -> list[Delta]:
        """To be called at the end of the bytes: an unterminated last event counts."""
        return self._events(self._parser.finish())

    @property
    def error(self) -> dict[str, Any] | None:
        """The error object that the engine sent inside the stream."""
        return self._builder.error

    @property
    def complete(self) -> bool:
        """Whether every choice has said why it finished, and there was no error."""
        return self._builder.complete

    def reply(self) -> Reply:
        return self._builder.reply()

    def _events(self, events: list[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            if event.data == DONE:
                self.done = True
                continue
            deltas += self._chunk(decode_json(event.data))
        return deltas

    def _chunk(self, chunk: dict[str, Any]) -> list[Delta]:
        builder = self._builder
        error = chunk.get("error")
        if error is not None:
            builder.error = error if isinstance(error, dict) else {"message": str(error)}
            return []
        _top_level(chunk, builder)
        deltas = [_delta(choice, builder) for choice in _members(chunk, "choices")]
        usage = read_usage(_member(chunk, "usage", dict))
        if usage is not None:
            deltas.append(Delta(choice=deltas[-1].choice if deltas else 0, usage=usage))
        for delta in deltas:
            builder.add(delta)
        return deltas


def _top_level(body: dict[str, Any], builder: ReplyBuilder) -> None:
    builder.id = builder.id or _member(body, "id", str) or ""
    builder.model = builder.model or _member(body, "model", str) or ""
    builder.created = builder.created or _member(body, "created", int) or 0


def _stop_sequence(choice: dict[str, Any]) -> str | None:
    # vLLM names the stop string here, or the id of a stop token, which is none of the agent's stop strings.
    reason = choice.get("stop_reason", choice.get("matched_stop"))
    return reason if isinstance(reason, str) else None


def _tool_pieces(calls: list[dict[str, Any]]) -> list[ToolDelta]:
    pieces = []
    for position, call in enumerate(calls):
        function = _member(call, "function", dict) or {}
        index = _member(call, "index", int)
        pieces.append(
            ToolDelta(
                index=position if index is None else index,
                id=_member(call, "id", str),
                name=_member(function, "name", str),
                arguments=_argument_text(function.get("arguments")),
            )
        )
    return pieces


def _argument_text(arguments: Any) -> str:
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    return msgspec.json.encode(arguments).decode()


def _delta(choice: dict[str, Any], builder: ReplyBuilder) -> Delta:
    index = _member(choice, "index", int) or 0
    answer = _member(choice, "delta", dict) or {}
    builder.choice(index)  # it exists from its first chunk on, whatever that holds
    entries = _logprobs(_member(choice, "logprobs", dict))
    delta = Delta(
        choice=index,
        text=_member(choice, "text", str) or _member(answer, "content", str) or "",
        reasoning=_member(answer, "reasoning_content", str) or _member(answer, "reasoning", str) or "",
        refusal=_member(answer, "refusal", str) or "",
        tool_calls=_tool_pieces(_members(answer, "tool_calls")),
        finish_reason=_member(choice, "finish_reason", str),
        logprob_entries=entries,
    )
    if delta.finish_reason is not None:
        delta.stop_sequence = _stop_sequence(choice)
    return delta


def _logprobs(logprobs: dict[str, Any] | None) -> list[dict[str, Any]] | None:
    """Chat entries as they are; those of text completions are turned into the same shape."""
    if logprobs is None:
        return None
    if logprobs.get("content") is not None:
        return _members(logprobs, "content")
    values = _member(logprobs, "token_logprobs", list)
    if values is None:
        return None
    tokens = _member(logprobs, "tokens", list) or [""] * len(values)
    tops = _member(logprobs, "top_logprobs", list) or [None] * len(values)
    try:
        return [
            {
                "token": token,
                "logprob": value,
                "bytes": list(token.encode()),
                "top_logprobs": [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in (top or {}).items()],
            }
            for token, value, top in zip(tokens, values, tops, strict=False)
        ]
    except (AttributeError, TypeError) as e:
        raise UpstreamError(f"the engine's logprobs cannot be read: {e}") from e


def decode_reply(body: bytes) -> Reply:
    """A whole chat or text completion answer. Raises: UpstreamError when it is not one."""
    answer = decode_json(body)
    choices = answer.get("choices")
    if not choices or not isinstance(choices, list):
        raise UpstreamError(f"the engine's answer has no choices: {body[:200]!r}")
    builder = ReplyBuilder()
    _top_level(answer, builder)
    for choice in _members(answer, "choices"):
        if not isinstance(choice.get("message"), dict) and not isinstance(choice.get("text"), str):
            raise UpstreamError(f"a choice of the engine's answer says nothing: {body[:200]!r}")
        # A whole answer says "message" where a chunk says "delta"; nothing else differs.
        builder.add(_delta({**choice, "delta": choice.get("message")}, builder))
    builder.usage = read_usage(_member(answer, "usage", dict))
    return builder.reply()
