"""Ready-made answers of the scripted engine, byte for byte as vLLM frames them.

One token is one server-sent event and one HTTP chunk. Nothing is serialized while a measurement runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

SIZES = (64, 1024)
PROMPT_TOKENS = 512
VARIANTS = 8  # distinct answers for `model: "distinct"`, so that a session's turns have little in common

_JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_TOP = {"id": "chatcmpl-1", "created": 1_700_000_000, "model": "m"}


@dataclass(frozen=True)
class Stream:
    """A streamed answer: the HTTP head, one chunk per event, and all of it in one piece."""

    head: bytes
    chunks: tuple[bytes, ...]
    at_once: bytes


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def whole(body: bytes) -> bytes:
    return _JSON_HEAD % len(body) + body


def stream(events: list[Any]) -> Stream:
    chunks = []
    for event in [*(dumps(e) for e in events), b"[DONE]"]:
        framed = b"data: %b\n\n" % event
        chunks.append(b"%x\r\n%b\r\n" % (len(framed), framed))
    chunks[-1] += b"0\r\n\r\n"
    return Stream(_SSE_HEAD, tuple(chunks), _SSE_HEAD + b"".join(chunks))


def prompt_ids(variant: int = 0, count: int = PROMPT_TOKENS) -> list[int]:
    return [(i * 7919 + variant * 13) % 150_000 for i in range(count)]


def sampled_ids(tokens: int, variant: int = 0) -> list[int]:
    return [(i * 104_729 + 11 + variant * 17) % 150_000 for i in range(tokens)]


def _logprob(i: int) -> float:
    return -((i % 97) + 1) / 64


def _entry(i: int) -> dict[str, Any]:
    word = f" word{i % 1000}"
    return {"token": word, "logprob": _logprob(i), "bytes": list(word.encode()), "top_logprobs": []}


def _usage(tokens: int, prompt: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}


@cache
def chat_body(tokens: int, variant: int = 0, prompt: int = PROMPT_TOKENS) -> bytes:
    """JSON of `/v1/chat/completions` with `return_token_ids` and `logprobs`."""
    choice = {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "".join(f" word{i % 1000}" for i in range(tokens)),
            "tool_calls": [],
        },
        "logprobs": {"content": [_entry(i) for i in range(tokens)]},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": sampled_ids(tokens, variant),
    }
    reply = {**_TOP, "object": "chat.completion", "choices": [choice], "usage": _usage(tokens, prompt)}
    return dumps({**reply, "prompt_token_ids": prompt_ids(variant, prompt)})


@cache
def chat_stream(tokens: int) -> Stream:
    """The same streamed."""
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    events: list[Any] = [
        {**_TOP, "object": "chat.completion.chunk", "choices": [first], "prompt_token_ids": prompt_ids()}
    ]
    for i, token in enumerate(sampled_ids(tokens)):
        choice = {
            "index": 0,
            "delta": {"content": f" word{i % 1000}"},
            "logprobs": {"content": [_entry(i)]},
            "finish_reason": "stop" if i == tokens - 1 else None,
            "token_ids": [token],
        }
        events.append({**_TOP, "object": "chat.completion.chunk", "choices": [choice]})
    return stream(events)


def _policy_ids(tokens: int) -> list[int]:
    return [300 + i % 150 for i in range(tokens)]  # ids that the built-in policy's tokenizer has


@cache
def generate_body(tokens: int) -> bytes:
    """JSON of `/inference/v1/generate`: token ids in, token ids out."""
    logprobs = {"content": [_entry(i) for i in range(tokens)]}
    choice = {"index": 0, "logprobs": logprobs, "finish_reason": "stop", "token_ids": _policy_ids(tokens)}
    return dumps({"request_id": "cmpl-1", "choices": [choice]})


@cache
def text_stream(tokens: int) -> Stream:
    """`/v1/completions` streamed, with `return_token_ids` and `include_usage`: what a gateway that renders asks for."""
    events: list[Any] = []
    for i, token in enumerate(_policy_ids(tokens)):
        word = f" word{i % 1000}"
        choice: dict[str, Any] = {
            "index": 0,
            "text": word,
            "logprobs": {"tokens": [word], "token_logprobs": [_logprob(i)], "top_logprobs": None, "text_offset": [0]},
            "finish_reason": "stop" if i == tokens - 1 else None,
            "stop_reason": None,
            "token_ids": [token],
        }
        if i == 0:
            choice["prompt_token_ids"] = prompt_ids()
        events.append({**_TOP, "object": "text_completion", "choices": [choice]})
    events.append({**_TOP, "object": "text_completion", "choices": [], "usage": _usage(tokens, PROMPT_TOKENS)})
    return stream(events)


class GrowingHistory:
    """Answers of one session whose prompts extend each other: prompt and completion of the turn before, then new tokens."""

    def __init__(self) -> None:
        head, tail = chat_body(64).split(b'"prompt_token_ids":[')
        self._head, self._tail = head + b'"prompt_token_ids":[', tail.partition(b"]")[2]
        self._sampled = b"," + dumps(sampled_ids(64))[1:-1]
        self._size, self._prompt = 0, b""
        first, *self._chunks = chat_stream(64).chunks
        self._event = first.split(b"\r\n")[1].split(dumps(prompt_ids()))

    def reply(self, size: int) -> bytes:
        """The whole HTTP answer to a prompt of `size` tokens; a smaller size than before starts another session."""
        self._grow(size)
        usage = dumps(_usage(64, size))
        head = self._head.replace(dumps(_usage(64, PROMPT_TOKENS)), usage)
        return whole(head + self._prompt + b"]" + self._tail)

    def stream(self, size: int) -> bytes:
        """The same streamed: the prompt's ids in the first event, as vLLM does."""
        self._grow(size)
        event = self._event[0] + b"[" + self._prompt + b"]" + self._event[1]
        return b"%b%x\r\n%b\r\n" % (_SSE_HEAD, len(event), event) + b"".join(self._chunks)

    def _grow(self, size: int) -> None:
        if size <= self._size:
            self._size, self._prompt = 0, b""
        new = size - self._size - (64 if self._size else 0)
        ids = b",".join(b"%d" % (1000 + (self._size + i) % 50_000) for i in range(new))
        self._prompt = self._prompt + self._sampled + b"," + ids if self._size else ids
        self._size = size
