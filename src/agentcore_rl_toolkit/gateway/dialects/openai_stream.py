"""Answers of OpenAI-like servers (chat and text completions), whole and streamed -> canonical.

Token fields as vLLM, SGLang and the built-in policy send them: ``prompt_token_ids`` at the top or in the choice,
``token_ids`` (vLLM) or ``response_token_ids`` (SGLang) in the choice, ``weight_version`` at the top or in the
choice's ``meta_info``."""

from __future__ import annotations

from typing import Any

import msgspec

from agentcore_rl_toolkit.errors import UpstreamError

from .builder import ReplyBuilder
from .canonical import Delta, Reply, ToolDelta, Usage
from .sse import DONE, Event, SSEParser

_DECODER = msgspec.json.Decoder()


def read_usage(usage: Any) -> Usage | None:
    if not isinstance(usage, dict):
        return None
    return Usage(
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens"),
    )


def decode_json(data: bytes) -> dict[str, Any]:
    """Raises: UpstreamError when an engine's answer is not a JSON object."""
    try:
        body = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
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
        """Raises: UpstreamError on an event that is not JSON."""
        return self._events(self._parser.feed(data))

    def finish(self) -> list[Delta]:
        """To be called at the end of the bytes: an unterminated last event counts."""
        return self._events(self._parser.finish())

    @property
    def error(self) -> dict[str, Any] | None:
        """The error object that the engine sent inside the stream."""
        return self._builder.error

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
        builder.id = builder.id or chunk.get("id") or ""
        builder.model = builder.model or chunk.get("model") or ""
        builder.created = builder.created or chunk.get("created") or 0
        _top_level(chunk, builder)
        deltas = [delta for choice in chunk.get("choices") or () if (delta := _delta(choice, builder)) is not None]
        usage = read_usage(chunk.get("usage"))
        if usage is not None:
            deltas.append(Delta(choice=deltas[-1].choice if deltas else 0, usage=usage))
        for delta in deltas:
            builder.add(delta)
        return deltas


def _top_level(body: dict[str, Any], builder: ReplyBuilder) -> None:
    ids = body.get("prompt_token_ids")
    if ids is not None and builder.prompt_token_ids is None:
        builder.prompt_token_ids = ids
    version = body.get("weight_version")
    if version is not None:
        _version(version, builder)


def _version(version: Any, builder: ReplyBuilder) -> None:
    # SGLang's versions are strings ("default" until the first update).
    try:
        builder.saw_version(int(version))
    except (TypeError, ValueError):
        return


def _tokens(choice: dict[str, Any], builder: ReplyBuilder) -> list[int] | None:
    ids = choice.get("prompt_token_ids")
    if ids is not None and builder.prompt_token_ids is None:
        builder.prompt_token_ids = ids
    meta = choice.get("meta_info")
    if isinstance(meta, dict):
        _version(meta.get("weight_version"), builder)
    experts = choice.get("routed_experts")
    if experts is not None:
        builder.choice(choice.get("index") or 0).choice.routed_experts = experts
    token_ids: list[int] | None = choice.get("token_ids")
    return token_ids if token_ids is not None else choice.get("response_token_ids")


def _stop_sequence(choice: dict[str, Any]) -> str | None:
    # vLLM names the stop string here, or the id of a stop token, which is none of the agent's stop strings.
    reason = choice.get("stop_reason", choice.get("matched_stop"))
    return reason if isinstance(reason, str) else None


def _tool_pieces(calls: Any) -> list[ToolDelta]:
    pieces = []
    for position, call in enumerate(calls or ()):
        function = call.get("function") or {}
        index = call.get("index")
        pieces.append(
            ToolDelta(
                index=position if index is None else index,
                id=call.get("id"),
                name=function.get("name"),
                arguments=_argument_text(function.get("arguments")),
            )
        )
    return pieces


def _argument_text(arguments: Any) -> str:
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    return msgspec.json.encode(arguments).decode()


def _delta(choice: dict[str, Any], builder: ReplyBuilder) -> Delta | None:
    index = choice.get("index") or 0
    said = choice.get("delta") or {}
    token_ids = _tokens(choice, builder)
    entries = _logprobs(choice.get("logprobs"), builder.choice(index))
    delta = Delta(
        choice=index,
        text=choice.get("text") or said.get("content") or "",
        reasoning=said.get("reasoning_content") or said.get("reasoning") or "",
        refusal=said.get("refusal") or "",
        tool_calls=_tool_pieces(said.get("tool_calls")),
        finish_reason=choice.get("finish_reason"),
        token_ids=token_ids,
        logprob_entries=entries,
    )
    if delta.finish_reason is not None:
        delta.stop_sequence = _stop_sequence(choice)
    return delta


def _logprobs(logprobs: Any, growing: Any) -> list[dict[str, Any]] | None:
    """Chat entries as they are; those of text completions are turned into the same shape."""
    if not isinstance(logprobs, dict):
        return None
    content = logprobs.get("content")
    if content is not None:
        return list(content)
    values = logprobs.get("token_logprobs")
    if values is None:
        return None
    tokens = logprobs.get("tokens") or [""] * len(values)
    tops = logprobs.get("top_logprobs") or [None] * len(values)
    return [
        {
            "token": token,
            "logprob": value,
            "bytes": list(token.encode()),
            "top_logprobs": [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in (top or {}).items()],
        }
        for token, value, top in zip(tokens, values, tops, strict=False)
    ]


def decode_reply(body: bytes) -> Reply:
    """A whole chat or text completion answer. Raises: UpstreamError when it is not one."""
    answer = decode_json(body)
    choices = answer.get("choices")
    if not isinstance(choices, list):
        raise UpstreamError(f"the engine's answer has no choices: {body[:200]!r}")
    builder = ReplyBuilder()
    builder.id = answer.get("id") or ""
    builder.model = answer.get("model") or ""
    builder.created = answer.get("created") or 0
    _top_level(answer, builder)
    for choice in choices:
        # A whole answer says "message" where a chunk says "delta"; nothing else differs.
        delta = _delta({**choice, "delta": choice.get("message") or {}}, builder)
        if delta is not None:
            builder.add(delta)
    builder.usage = read_usage(answer.get("usage"))
    return builder.reply()
