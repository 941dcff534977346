"""Replies of vLLM with ``return_token_ids``.

These are chat completions, whole or with one event per token, streamed text completions, and the replies of
``/inference/v1/generate`` to token ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .tokens import Seen, logprob_of

_WORD = re.compile(r"\s*\S+|\s+\Z")


@dataclass(kw_only=True)
class Sampled:
    """A sampled choice. ``stop`` is the stop string that ended it."""

    index: int = 0
    ids: list[int]
    finish: str = "stop"
    stop: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


def vllm_choice(choice: Sampled) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{i}", "logprob": logprob_of(i), "bytes": None, "top_logprobs": []} for i in choice.ids
    ]
    return {
        "index": choice.index,
        "logprobs": {"content": content},
        "finish_reason": choice.finish,
        "token_ids": choice.ids,
        "routed_experts": None,
    }


@dataclass(frozen=True, kw_only=True)
class SampledReply:
    """The choices of a reply and its envelope. ``step`` is how many tokens an event of a text completion carries."""

    seen: Seen
    choices: list[Sampled]
    number: int
    model: str
    weight_version: int | None
    gives_tokens: bool
    step: int = 1

    @property
    def _with_ids(self) -> bool:
        return bool(self.seen.body.get("return_token_ids")) and self.gives_tokens

    @property
    def _usage(self) -> dict[str, int]:
        prompt, completion = len(self.seen.prompt_ids), sum(len(c.ids) for c in self.choices)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def _envelope(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        envelope: dict[str, Any] = {
            "id": f"cmpl-{self.number}",
            "object": kind,
            "created": 1_700_000_000,
            "model": self.seen.body.get("model", self.model),
        }
        if self.weight_version is not None:
            envelope["weight_version"] = self.weight_version
        return {**envelope, "choices": choices, **more}

    def whole(self) -> dict[str, Any]:
        """Return the body of a chat completion that is not streamed."""
        choices = []
        for c in self.choices:
            message = {"role": "assistant", "content": c.content, "tool_calls": c.tool_calls or []}
            if c.reasoning_content:
                message["reasoning_content"] = c.reasoning_content
            choice = {"index": c.index, "finish_reason": c.finish, "stop_reason": c.stop, "message": message}
            choice["logprobs"] = _logprobs(True, c.ids) if self.seen.body.get("logprobs") else None
            if self._with_ids:
                choice["token_ids"] = c.ids
            choices.append(choice)
        prompt = {"prompt_token_ids": self.seen.prompt_ids} if self._with_ids else {}
        return self._envelope("chat.completion", choices, usage=self._usage, **prompt)

    def events(self, *, chat: bool) -> Iterator[dict[str, Any]]:
        """Return the events of a streamed reply."""
        kind, prompt = "chat.completion.chunk" if chat else "text_completion", self.seen.prompt_ids
        for c in self.choices if chat else ():
            delta = {"role": "assistant", "content": ""}
            first = {"index": c.index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self._envelope(kind, [first], **({"prompt_token_ids": prompt} if self._with_ids else {}))
        step = 1 if chat else self.step
        for i in range(0, max(len(c.ids) for c in self.choices), step):
            for c in self.choices:
                ids = c.ids[i : i + step]
                if not ids:
                    continue
                last = i + step >= len(c.ids)
                delta = _delta(c, i, i + step)
                choice: dict[str, Any] = {"index": c.index, "finish_reason": c.finish if last else None}
                choice["stop_reason"] = c.stop if last else None
                choice["delta" if chat else "text"] = delta if chat else delta.get("content", "")
                if self.seen.body.get("logprobs"):
                    choice["logprobs"] = _logprobs(chat, ids)
                if self._with_ids:
                    choice["token_ids"] = ids
                    if not chat and i == 0:
                        choice["prompt_token_ids"] = prompt
                yield self._envelope(kind, [choice])
        if (self.seen.body.get("stream_options") or {}).get("include_usage"):
            yield self._envelope(kind, [], usage=self._usage)


def _logprobs(chat: bool, ids: list[int]) -> dict[str, Any]:
    words, values = [f" w{i}" for i in ids], [logprob_of(i) for i in ids]
    if not chat:
        return {"tokens": words, "token_logprobs": values, "top_logprobs": None, "text_offset": [0] * len(ids)}
    pairs = zip(words, values, strict=True)
    return {"content": [{"token": w, "logprob": v, "bytes": list(w.encode()), "top_logprobs": []} for w, v in pairs]}


def _delta(choice: Sampled, i: int, end: int) -> dict[str, Any]:
    """Return the content of the tokens from ``i`` on: words one by one, the arguments of calls at the end."""
    last, delta = end >= len(choice.ids), dict[str, Any]()
    if i == 0 and choice.reasoning_content:
        delta["reasoning_content"] = choice.reasoning_content
    if not choice.tool_calls:
        pieces = _WORD.findall(choice.content or "")  # put together they are the text, spaces and lines too
        delta["content"] = "".join(pieces[i:] if last else pieces[i:end])
        return delta
    calls = list(enumerate(choice.tool_calls))
    if i == 0:
        if choice.content:
            delta["content"] = choice.content
        begun = {"type": "function"}
        delta["tool_calls"] = [
            {"index": k, "id": c["id"], **begun, "function": {"name": c["function"]["name"], "arguments": ""}}
            for k, c in calls
        ]
    elif last:
        delta["tool_calls"] = [{"index": k, "function": {"arguments": c["function"]["arguments"]}} for k, c in calls]
    return delta
