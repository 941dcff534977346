"""Answers of vLLM with ``return_token_ids``: chat completions, whole or one event per token; text completions, streamed; and
what ``/inference/v1/generate`` gives for token ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .tokens import Seen, logprob_of

_WORD = re.compile(r"\s*\S+|\s+\Z")


def vllm_choice(index: int, ids: list[int], finish: str) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{i}", "logprob": logprob_of(i), "bytes": None, "top_logprobs": []} for i in ids
    ]
    return {
        "index": index,
        "logprobs": {"content": content},
        "finish_reason": finish,
        "token_ids": ids,
        "routed_experts": None,
    }


@dataclass(frozen=True, kw_only=True)
class SampledReply:
    """A sampled reply and what its envelope says.

    ``choices`` hold index, ids, logprobs, content, reasoning_content, tool_calls, finish and stop. ``step`` is how many
    tokens an event of a text completion carries.
    """

    seen: Seen
    choices: list[dict[str, Any]]
    number: int
    model: str
    weight_version: int | None
    gives_tokens: bool
    step: int = 1

    @property
    def with_ids(self) -> bool:
        return bool(self.seen.body.get("return_token_ids")) and self.gives_tokens

    @property
    def usage(self) -> dict[str, int]:
        prompt, completion = len(self.seen.prompt_ids), sum(len(c["ids"]) for c in self.choices)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def top(self, kind: str) -> dict[str, Any]:
        top: dict[str, Any] = {
            "id": f"cmpl-{self.number}",
            "object": kind,
            "created": 1_700_000_000,
            "model": self.seen.body.get("model", self.model),
        }
        if self.weight_version is not None:
            top["weight_version"] = self.weight_version
        return top


def whole(answered: SampledReply) -> dict[str, Any]:
    """The body of a chat completion that is not streamed."""
    seen = answered.seen
    reply = answered.top("chat.completion")
    reply["choices"] = []
    for c in answered.choices:
        message = {"role": "assistant", "content": c["content"], "tool_calls": c["tool_calls"] or []}
        if c["reasoning_content"]:
            message["reasoning_content"] = c["reasoning_content"]
        choice = {"index": c["index"], "finish_reason": c["finish"], "stop_reason": c["stop"], "message": message}
        choice["logprobs"] = _logprobs(True, c["ids"], c["logprobs"]) if seen.body.get("logprobs") else None
        if answered.with_ids:
            choice["token_ids"] = c["ids"]
        reply["choices"].append(choice)
    reply["usage"] = answered.usage
    if answered.with_ids:
        reply["prompt_token_ids"] = seen.prompt_ids
    return reply


def chunks(answered: SampledReply, chat: bool) -> Iterable[dict[str, Any]]:
    """The events of a streamed reply."""
    seen = answered.seen
    kind = "chat.completion.chunk" if chat else "text_completion"
    if chat:
        for c in answered.choices:
            first = answered.top(kind)
            delta = {"role": "assistant", "content": ""}
            first["choices"] = [{"index": c["index"], "delta": delta, "logprobs": None, "finish_reason": None}]
            if answered.with_ids:
                first["prompt_token_ids"] = seen.prompt_ids
            yield first
    step = 1 if chat else answered.step
    for i in range(0, max(len(c["ids"]) for c in answered.choices), step):
        for c in answered.choices:
            ids, logprobs = c["ids"][i : i + step], c["logprobs"][i : i + step]
            if not ids:
                continue
            last = i + step >= len(c["ids"])
            delta = _delta(c, i, i + step)
            choice: dict[str, Any] = {"index": c["index"], "finish_reason": c["finish"] if last else None}
            choice["stop_reason"] = c["stop"] if last else None
            choice["delta" if chat else "text"] = delta if chat else delta.get("content", "")
            if seen.body.get("logprobs"):
                choice["logprobs"] = _logprobs(chat, ids, logprobs)
            if answered.with_ids:
                choice["token_ids"] = ids
                if not chat and i == 0:
                    choice["prompt_token_ids"] = seen.prompt_ids
            chunk = answered.top(kind)
            chunk["choices"] = [choice]
            yield chunk
    if (seen.body.get("stream_options") or {}).get("include_usage"):
        final = answered.top(kind)
        final["choices"] = []
        final["usage"] = answered.usage
        yield final


def _logprobs(chat: bool, ids: list[int], values: list[float]) -> dict[str, Any]:
    if not chat:
        words = [f"w{i}" for i in ids]
        return {"tokens": words, "token_logprobs": values, "top_logprobs": None, "text_offset": [0] * len(ids)}
    return {
        "content": [
            {"token": f" w{i}", "logprob": v, "bytes": list(f" w{i}".encode()), "top_logprobs": []}
            for i, v in zip(ids, values, strict=True)
        ]
    }


def _delta(choice: dict[str, Any], i: int, end: int) -> dict[str, Any]:
    last = end >= len(choice["ids"])
    calls, reasoning = choice["tool_calls"], choice["reasoning_content"]
    if calls and i == 0:
        begun = [
            {
                "index": k,
                "id": c["id"],
                "type": "function",
                "function": {"name": c["function"]["name"], "arguments": ""},
            }
            for k, c in enumerate(calls)
        ]
        return {"tool_calls": begun, **({"reasoning_content": reasoning} if reasoning else {})}
    if calls and last:
        ended = [{"index": k, "function": {"arguments": c["function"]["arguments"]}} for k, c in enumerate(calls)]
        return {"tool_calls": ended}
    if calls:
        return {}
    pieces = _WORD.findall(choice["content"] or "")  # put together they are the text, spaces and lines too
    delta: dict[str, Any] = {"content": "".join(pieces[i:] if last else pieces[i:end])}
    if i == 0 and reasoning:
        delta["reasoning_content"] = reasoning
    return delta
