"""A scripted inference server for tests of the gateway: it speaks the wire formats of vLLM and SGLang, and samples nothing.

Replies are random, unless `ScriptedEngine.replies` or a function has them. Faults are taken by the next calls, in order::

    async with ScriptedEngine() as engine:
        engine.faults.append(Fault(status=503))
        gateway = Gateway(GatewayConfig(upstreams=(UpstreamConfig(url=engine.url, engine="vllm"),)))
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from agentcore_rl_toolkit.gateway.testing import END, VOCABULARY, Seen, encode_messages, encode_text, logprob_of
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine as ChatEngine
from agentcore_rl_toolkit.gateway.testing.engine import Sampled, error_body, logprobs, usage

Edit = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one call.

    ``status`` answers with an error body; ``drop_after`` cuts the connection after so many body bytes (0: before the
    head); ``body`` replaces the answer's body; ``delay_s`` waits first, ``gate`` until it is set; ``edit`` changes the reply (or
    each chunk).
    """

    status: int = 200
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    drop_after: int | None = None
    delay_s: float = 0.0
    gate: asyncio.Event | None = None
    edit: Edit | None = None


@dataclass
class Asked(Seen):
    """A request, its fault, and whether its client went away."""

    fault: Fault = field(default_factory=Fault)
    cancelled: bool = False


class ScriptedEngine(ChatEngine):
    """``tokens`` is the length of a random reply, the end token included, unless the request's max_tokens is smaller."""

    requests: list[Asked]  # type: ignore[assignment]

    def __init__(
        self, *, tokens: int = 8, decide: Callable[[Seen], dict[str, Any]] | None = None, **settings: Any
    ) -> None:
        super().__init__(decide=decide or (lambda seen: {}), **settings)
        self.tokens = tokens
        self.first_id, self.last_id = 10, 900  # range of the ids of random replies
        self.replies: deque[dict[str, Any]] = deque()
        self.faults: deque[Fault] = deque()
        self.aborted: list[str] = []  # rids, in SGLang's manner
        self.active = 0
        self._random = random.Random(0)

    @property
    def calls(self) -> list[Asked]:
        return super().calls  # type: ignore[return-value]

    async def _serve(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. A client that goes away meanwhile is what engines take for a cancellation."""
        body = await http.content.read()
        headers = {name.lower(): value for name, value in http.headers.items()}
        seen = Asked(http.method, http.raw_path, headers, json.loads(body) if body else {}, len(self.requests) + 1)
        self.requests.append(seen)
        if self.faults and http.method == "POST" and seen.path != "/abort_request":
            seen.fault = self.faults.popleft()
        self.active += 1
        try:
            return await self._answer(seen, http)
        except asyncio.CancelledError:
            seen.cancelled = True
            raise
        finally:
            self.active -= 1

    async def _answer(self, seen: Asked, http: web.BaseRequest) -> web.StreamResponse:  # type: ignore[override]
        fault, body = seen.fault, seen.body
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.gate is not None:
            await fault.gate.wait()
        if fault.drop_after == 0:
            raise _dropped(http)
        if fault.status != 200 or fault.body is not None:
            return await self._whole(
                seen, http, fault.status, error_body(fault.status) if fault.body is None else fault.body
            )
        if seen.path == "/abort_request":
            self.aborted.append(body["rid"])
            return await self._whole(seen, http, 200, b"")
        if seen.path == "/inference/v1/generate":
            choices = [generated(c) for c in self._sampled(seen, body["token_ids"], body["sampling_params"])]
            version = {} if self.weight_version is None else {"weight_version": self.weight_version}
            return await self._json(seen, http, {"request_id": "generate-1", "choices": choices, **version})
        if seen.path == "/generate":
            return await self._sglang(seen, http)
        if seen.path == "/tokenize" and self.gives_tokens:
            ids = seen.prompt_ids = encode_messages(body["messages"])
            return await self._json(seen, http, {"count": len(ids), "max_model_len": VOCABULARY, "tokens": ids})
        if seen.path == f"{self.api_path}/completions":
            prompt = encode_text(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]
            return await self._events(seen, http, self.text_chunks(seen, self._sampled(seen, prompt, body)))
        return await super()._answer(seen, http)

    async def _whole(self, seen: Asked, http: web.BaseRequest, status: int, body: bytes) -> web.StreamResponse:  # type: ignore[override]
        headers = {"content-type": "application/json", **{name.lower(): value for name, value in seen.fault.headers}}
        if seen.fault.drop_after is None:
            return web.Response(status=status, body=body, headers=headers)
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = len(body)
        await response.prepare(http)
        await response.write(body[: seen.fault.drop_after])
        await asyncio.sleep(0.01)
        raise _dropped(http)

    async def _json(self, seen: Asked, http: web.BaseRequest, value: Any) -> web.StreamResponse:  # type: ignore[override]
        edit = seen.fault.edit
        return await super()._json(seen, http, (edit(value) if edit is not None else None) or value)

    async def _events(  # type: ignore[override]
        self, seen: Asked, http: web.BaseRequest, events: Iterable[dict[str, Any]]
    ) -> web.StreamResponse:
        fault, sent = seen.fault, 0
        if fault.edit is None and fault.drop_after is None:
            return await super()._events(seen, http, events)
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        for event in events:
            event = (fault.edit(event) if fault.edit is not None else None) or event
            data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
            sent += len(data)
            if fault.drop_after is not None and sent > fault.drop_after:
                await asyncio.sleep(0.01)
                raise _dropped(http)
            await response.write(data)
            if self.token_s:
                await asyncio.sleep(self.token_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    def _decide(self, seen: Seen, asked: dict[str, Any]) -> dict[str, Any]:
        reply = self.replies.popleft() if self.replies else self.decide(seen)
        if not reply.keys().isdisjoint(("content", "tool_calls", "token_ids")):
            return reply
        limits = [asked.get(name) for name in ("max_completion_tokens", "max_tokens", "max_new_tokens")]
        limit = next(filter(None, limits), self.tokens)
        ids = [self._random.randrange(self.first_id, self.last_id) for _ in range(min(limit, self.tokens))]
        if self.tokens > limit:
            return {"token_ids": ids, "finish_reason": "length", **reply}
        return {"token_ids": [*ids[:-1], (asked.get("stop_token_ids") or [END])[0]], "finish_reason": "stop", **reply}

    def text_chunks(self, seen: Seen, sampled: list[Sampled], *, step: int = 1) -> Iterator[dict[str, Any]]:
        """The events of a streamed text completion, of so many tokens each."""
        for at in range(0, max(len(c.ids) for c in sampled), step):
            for c in sampled:
                if not (ids := c.ids[at : at + step]):
                    continue
                last = at + step >= len(c.ids)
                choice: dict[str, Any] = {"index": c.index, "text": "x", "finish_reason": c.finish if last else None}
                choice["stop_reason"] = c.stop if last else None
                if seen.body.get("logprobs"):
                    choice["logprobs"] = {"token_logprobs": list(map(logprob_of, ids)), "top_logprobs": None}
                if self._gives_ids(seen):
                    choice |= {"token_ids": ids, **({} if at else {"prompt_token_ids": seen.prompt_ids})}
                yield self._envelope(seen, "text_completion", [choice])
        if (seen.body.get("stream_options") or {}).get("include_usage"):
            yield self._envelope(seen, "text_completion", [], usage=usage(seen))

    async def _sglang(self, seen: Asked, http: web.BaseRequest) -> web.StreamResponse:
        """Answer SGLang's ``/generate``."""
        sampled = self._sampled(seen, seen.body["input_ids"], seen.body["sampling_params"])

        def answer(c: Sampled, count: int) -> dict[str, Any]:
            finish = c.finish if count >= len(c.ids) else None
            return sglang_answer(c.index, c.ids[:count], finish, stop=c.stop, weight_version=self.weight_version)

        if not seen.body.get("stream"):
            answers: Any = [answer(c, len(c.ids)) for c in sampled]
            whole = answers if len(answers) > 1 else answers[0]
            edited = seen.fault.edit(answers[0]) if seen.fault.edit is not None else None
            return await self._whole(seen, http, 200, json.dumps(edited or whole).encode())
        longest = max(len(c.ids) for c in sampled)
        events = (answer(c, count) for count in range(1, longest + 1) for c in sampled if count <= len(c.ids))
        return await self._events(seen, http, events)


def generated(choice: Sampled) -> dict[str, Any]:
    """A choice of vLLM's ``/inference/v1/generate``."""
    about = {"index": choice.index, "logprobs": logprobs(choice.ids), "finish_reason": choice.finish}
    return {**about, "token_ids": choice.ids, "routed_experts": None}


def sglang_answer(
    index: int, ids: list[int], finish: str | None, *, weight_version: int | None, stop: str | None = None
) -> dict[str, Any]:
    """``stop`` is the stop string that ended it; else the last token is what matched."""
    matched = (stop or ids[-1]) if finish == "stop" else None
    meta = {
        "id": "rid",
        "finish_reason": None if finish is None else {"type": finish, "matched": matched},
        "completion_tokens": len(ids),
        "weight_version": "default" if weight_version is None else str(weight_version),
        "output_token_logprobs": [[logprob_of(i), i, None] for i in ids],
    }
    return {"index": index, "text": "", "output_ids": ids, "meta_info": meta}


def _dropped(http: web.BaseRequest) -> ConnectionError:
    """Cut a connection. Returns the error that ends its handler."""
    if http.transport is not None:
        http.transport.abort()
    return ConnectionResetError("a fault cut the connection")
