"""Finished and growing completions as the JSON of OpenAI's API, with vLLM's fields for exact tokens."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..batch import Generation
from ..tokens import ChatTokenizer
from ..tool_calls import ParsedText, StreamParser, parse_tool_calls
from .fields import RequestError
from .protocol import Call

_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-", "generate": "gen-"}
_OBJECT = {"chat": "chat.completion", "completion": "text_completion", "generate": "generate"}


class Reply:
    """The reply to one call, whole (`to_json`) or in pieces (`chunks`)."""

    def __init__(self, call: Call, generations: Sequence[Generation], tokenizer: ChatTokenizer, *, model: str) -> None:
        self.call = call
        self.generations = generations
        self.tokenizer = tokenizer
        self.model = model
        self.id = call.request_id or _PREFIX[call.kind] + secrets.token_hex(12)
        self.created = int(time.time())
        self._streams = [_ChoiceStream(self, k, g) for k, g in enumerate(generations)] if call.stream else []
        self._opened = False

    def raise_if_failed(self) -> None:
        """Raises: RequestError when a completion did not end by itself (deadline, failure, shutdown)."""
        for g in self.generations:
            if g.finish_reason == "timeout":
                raise RequestError("the request's deadline has passed", code="request_timeout", status=504)
            if g.finish_reason == "error":
                raise RequestError(f"the policy failed: {g.error}", code="engine_error", status=500)
            if g.finish_reason == "cancelled":
                raise RequestError("the policy server is shutting down", code="shutting_down", status=503)

    def to_json(self) -> dict[str, Any]:
        """The whole reply. All generations must have ended well."""
        call = self.call
        body = self._head(_OBJECT[call.kind])
        body["choices"] = [self._whole_choice(k, g) for k, g in enumerate(self.generations)]
        body["usage"] = self._usage()
        firsts = [g.weight_version_first for g in self.generations if g.weight_version_first is not None]
        lasts = [g.weight_version_last for g in self.generations if g.weight_version_last is not None]
        body["weight_version"] = body["weight_version_last"] = max(lasts)
        body["weight_version_first"] = min(firsts)
        if call.return_token_ids and len(call.prompts) == 1:
            body["prompt_token_ids"] = list(call.prompts[0])
        return body

    def chunks(self) -> Iterator[dict[str, Any]]:
        """What can be sent now and has not been; call again after every notification until `finished`."""
        if not self._opened:
            self._opened = True
            if self.call.kind == "chat":
                head = self._head("chat.completion.chunk")
                if self.call.return_token_ids:
                    head["prompt_token_ids"] = list(self.call.prompts[0])
                for k in range(len(self.generations)):
                    delta = {"role": "assistant", "content": ""}
                    yield {**head, "choices": [{"index": k, "delta": delta, "logprobs": None, "finish_reason": None}]}
        for stream in self._streams:
            yield from stream.chunks()

    def last_chunk(self) -> dict[str, Any] | None:
        """The usage chunk, when asked for."""
        if not self.call.include_usage:
            return None
        kind = "chat.completion.chunk" if self.call.kind == "chat" else _OBJECT[self.call.kind]
        return {**self._head(kind), "choices": [], "usage": self._usage()}

    @property
    def finished(self) -> bool:
        return all(g.finish_reason is not None for g in self.generations)

    def text_of(self, g: Generation, n: int | None = None) -> str:
        """The text of the first ``n`` tokens, cut at a stop string."""
        text = self.tokenizer.decode(g.token_ids if n is None else g.token_ids[:n])
        return text if g.stop_at is None else text[: g.stop_at]

    def finish_reason(self, g: Generation, parsed: ParsedText | None) -> str:
        if parsed is not None and parsed.calls and g.finish_reason == "stop":
            return "tool_calls"
        return str(g.finish_reason)

    def logprobs(self, g: Generation, first: int, last: int) -> dict[str, Any] | None:
        """Logprobs of tokens first..last-1 in the form of the call's endpoint; None unless asked for."""
        if not self.call.logprobs:
            return None
        if self.call.kind == "completion":
            return self._flat_logprobs(g, first, last)
        content = [self._token_entry(g.token_ids[k], g.logprobs[k]) for k in range(first, last)]
        for k, entry in enumerate(content, first):
            tops = g.top_logprobs[k] if g.params.top_logprobs else ()
            entry["top_logprobs"] = [self._token_entry(i, value) for i, value in tops]
        return {"content": content}

    def _flat_logprobs(self, g: Generation, first: int, last: int) -> dict[str, Any]:
        texts = [self._token_name(i) for i in g.token_ids[first:last]]
        offset = len(self.text_of(g, first)) if first else 0
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        tops = None
        if g.params.top_logprobs:
            tops = [{self._token_name(i): value for i, value in g.top_logprobs[k]} for k in range(first, last)]
        return {
            "tokens": texts,
            "token_logprobs": g.logprobs[first:last],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _whole_choice(self, k: int, g: Generation) -> dict[str, Any]:
        call = self.call
        choice: dict[str, Any] = {"index": k, "logprobs": self.logprobs(g, 0, len(g.token_ids))}
        parsed: ParsedText | None = None
        if call.kind == "chat":
            message, parsed = self._message(g)
            choice["message"] = message
            choice["parse_status"] = "none" if parsed is None else parsed.status
        elif call.kind == "completion":
            choice["text"] = self.text_of(g)
        choice["finish_reason"] = self.finish_reason(g, parsed)
        choice["stop_reason"] = g.stop_reason
        if call.return_token_ids:
            choice["token_ids"] = list(g.token_ids)
            if len(call.prompts) > 1:
                choice["prompt_token_ids"] = list(g.prompt_ids)
        choice["weight_version_first"] = g.weight_version_first
        choice["weight_version_last"] = g.weight_version_last
        return choice

    def _message(self, g: Generation) -> tuple[dict[str, Any], ParsedText | None]:
        text = self.text_of(g)
        if not self.call.parse_tools:
            return {"role": "assistant", "content": text}, None
        parsed = parse_tool_calls(text)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            calls = parsed.calls[:1] if self.call.one_call_only else parsed.calls
            message["content"] = parsed.content or None
            message["tool_calls"] = [c.to_openai() for c in calls]
        return message, parsed

    def _head(self, kind: str) -> dict[str, Any]:
        head: dict[str, Any] = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        if self.call.kind == "generate":
            head["request_id"] = self.id
        return head

    def _usage(self) -> dict[str, Any]:
        prompt = sum(map(len, self.call.prompts))
        completion = sum(len(g.token_ids) for g in self.generations)
        cached = sum(g.cached_tokens for g in self.generations[:: self.call.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _token_name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.call.token_ids_as_text else self.tokenizer.token_text(token_id)

    def _token_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        if self.call.kind != "chat":
            return {"token": self._token_name(token_id), "logprob": logprob}
        text, its_bytes = self.tokenizer.token_json(token_id)
        if self.call.token_ids_as_text:
            text = f"token_id:{token_id}"
        return {"token": text, "logprob": logprob, "bytes": its_bytes}


class _ChoiceStream:
    """What of one growing completion has been sent."""

    def __init__(self, reply: Reply, index: int, generation: Generation) -> None:
        self._reply = reply
        self._index = index
        self._generation = generation
        self._sent_tokens = 0
        self._sent_characters = 0
        self._parser = StreamParser(stops=generation.params.stop, tools=reply.call.parse_tools)
        self._closed = False

    def chunks(self) -> Iterator[dict[str, Any]]:
        if self._closed:
            return
        g, reply = self._generation, self._reply
        ended = g.finish_reason is not None  # read first: after it no token is added
        n = min(len(g.token_ids), len(g.logprobs))
        if not ended:
            fresh = self._parser.feed(reply.text_of(g, n)) if reply.call.kind != "generate" else ""
            if n > self._sent_tokens and (fresh or reply.call.kind == "generate"):
                yield self._chunk(n, fresh, None, None, None)
            return
        self._closed = True
        if reply.call.kind == "generate":
            yield self._chunk(n, "", None, self._reason(None), None)
            return
        rest, parsed = self._parser.finish(reply.text_of(g))
        yield self._chunk(n, rest, parsed.calls or None, self._reason(parsed), parsed.status)

    def _reason(self, parsed: ParsedText | None) -> str:
        return self._reply.finish_reason(self._generation, parsed)

    def _chunk(
        self, n: int, text: str, calls: list[Any] | None, reason: str | None, status: str | None
    ) -> dict[str, Any]:
        reply, g = self._reply, self._generation
        call = reply.call
        choice: dict[str, Any] = {
            "index": self._index,
            "logprobs": reply.logprobs(g, self._sent_tokens, n),
            "finish_reason": reason,
        }
        if call.kind == "chat":
            delta: dict[str, Any] = {"content": text} if text else {}
            if calls:
                shown = calls[:1] if call.one_call_only else calls
                delta["tool_calls"] = [{"index": k, **c.to_openai()} for k, c in enumerate(shown)]
            choice["delta"] = delta
        elif call.kind == "completion":
            choice["text"] = text
        if call.return_token_ids:
            choice["token_ids"] = g.token_ids[self._sent_tokens : n]
        kind = "chat.completion.chunk" if call.kind == "chat" else _OBJECT[call.kind]
        chunk = {**reply._head(kind), "choices": [choice], "weight_version": g.weight_version_last}
        if call.return_token_ids and call.kind != "chat" and self._sent_tokens == 0:
            choice["prompt_token_ids"] = list(g.prompt_ids)
        if reason is not None:
            choice["stop_reason"] = g.stop_reason
            if call.kind == "chat":
                choice["parse_status"] = status
            for name in ("weight_version_first", "weight_version_last"):
                choice[name] = chunk[name] = getattr(g, name)
        self._sent_tokens = n
        return chunk
