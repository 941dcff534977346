"""OpenAI text completions. Source: platform.openai.com/docs/api-reference/completions"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ...errors import UpstreamError
from ..errors import RequestError, unsupported
from .canonical import Choice, Delta, ModelRequest, Reply
from .chat import ChunkEncoder, check_response_format, usage_dict
from .fields import Fields, decode_body

DEFAULT_MAX_TOKENS = 16  # the provider's own default for this endpoint


def parse_request(body: bytes | dict[str, Any]) -> ModelRequest:
    """Read a completion request. Raises: RequestError that names the field.

    One prompt per call: a list of prompts has no place in a session, which is one line of calls.
    """
    fields = Fields(decode_body(body) if isinstance(body, bytes) else body)
    prompt = _prompt(fields.need("prompt", str, list))
    stream_options = fields.take("stream_options", dict) or {}
    count = fields.integer("n", 1, 128) or 1
    fields.refuse("best_of", "every sample is returned; use n", unless=(1, count))
    top = fields.either("logprobs", int, bool)
    special = fields.take("add_special_tokens", bool)
    sampling = fields.sampling(("max_tokens",))
    if sampling.max_tokens is None:
        sampling.max_tokens = DEFAULT_MAX_TOKENS
    request = ModelRequest(
        dialect="completions",
        model=fields.take("model", str) or "",
        prompt=prompt,
        add_special_tokens=special is not False,
        stream=fields.take("stream", bool) or False,
        include_usage=bool(stream_options.get("include_usage")),
        n=count,
        logprobs=top is not None and top is not False,
        top_logprobs=0 if top is None or isinstance(top, bool) else top,
        response_format=check_response_format(fields.take("response_format", dict), "response_format"),
        sampling=sampling,
    )
    request.unknown = fields.settle("completions")
    return request


def _prompt(prompt: str | list[Any]) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if prompt and all(type(item) is int and 0 <= item < 2**31 for item in prompt):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        return _prompt(prompt[0])
    if prompt and all(isinstance(item, (str, list)) for item in prompt):
        raise unsupported("prompt", "one prompt per call, send them one by one")
    raise RequestError("prompt must be a string or a list of token ids", param="prompt")


def _logprobs(entries: list[dict[str, Any]], offset: int) -> dict[str, Any]:
    tokens = [str(entry.get("token") or "") for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    offsets = [entry.get("text_offset", place) for entry, place in zip(entries, offsets, strict=True)]
    tops = [entry.get("top_logprobs") for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [entry.get("logprob") for entry in entries],
        "top_logprobs": [
            {str(t.get("token")): t.get("logprob") for t in top if isinstance(t, dict)} if isinstance(top, list) else {}
            for top in tops
        ],
        "text_offset": offsets,
    }


def chat_entries(logprobs: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Logprobs of an engine as chat writes them; those of text completions are turned into that shape. Raises: UpstreamError."""
    content = logprobs.get("content")
    if content is not None:
        if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
            raise UpstreamError("the engine's logprobs cannot be read: they are no list of objects")
        return content
    values = logprobs.get("token_logprobs")
    if values is None:
        return None
    try:
        tokens = logprobs.get("tokens") or [""] * len(values)
        tops = logprobs.get("top_logprobs") or [None] * len(values)
        offsets = logprobs.get("text_offset")
        places: list[dict[str, Any]] = [{"text_offset": at} for at in offsets] if offsets else [{}] * len(values)
        return [
            {
                "token": token,
                "logprob": value,
                "bytes": list(token.encode()),
                "top_logprobs": [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in (top or {}).items()],
                **place,
            }
            for token, value, top, place in zip(tokens, values, tops, places, strict=False)
        ]
    except (AttributeError, TypeError) as e:
        raise UpstreamError(f"the engine's logprobs cannot be read: {e}") from e


def _shown(choice: Choice, request: ModelRequest) -> dict[str, Any]:
    entries = choice.logprob_entries if request.logprobs else None
    return {
        "index": choice.index,
        "text": choice.content,
        "finish_reason": choice.finish_reason or "stop",
        "logprobs": _logprobs(entries, 0) if entries is not None else None,
    }


def encode_reply(reply: Reply, request: ModelRequest) -> bytes:
    """The JSON body of a whole answer."""
    return msgspec.json.encode(
        {
            "id": reply.id,
            "object": "text_completion",
            "created": reply.created or int(time.time()),
            "model": reply.model or request.model,
            "choices": [_shown(choice, request) for choice in reply.choices],
            "usage": usage_dict(reply.usage),
        }
    )


class Encoder(ChunkEncoder):
    """Deltas -> the bytes of a completion stream."""

    kind = "text_completion"

    def __init__(self, request: ModelRequest, *, reply_id: str, model: str = "", created: int = 0) -> None:
        super().__init__(request, reply_id=reply_id, model=model, created=created)
        self._offset: dict[int, int] = {}

    def start(self) -> bytes:
        """Nothing: this dialect begins with its first text."""
        return b""

    def feed(self, delta: Delta) -> bytes:
        if delta.usage is not None:
            self._usage = delta.usage
        entries = delta.logprob_entries if self._request.logprobs else None
        if not delta.text and delta.finish_reason is None and not entries:
            return b""
        # Tokens come in another delta than the text they are part of, so their place is counted by themselves.
        offset = self._offset.get(delta.choice, 0)
        self._offset[delta.choice] = offset + sum(len(str(entry.get("token") or "")) for entry in entries or ())
        choice = {
            "index": delta.choice,
            "text": delta.text,
            "finish_reason": delta.finish_reason,
            "logprobs": _logprobs(entries, offset) if entries is not None else None,
        }
        return self._chunk([choice])
