"""A scripted engine for tests: speaks the wire formats of the engines exactly, samples nothing.

`ScriptedEngine` answers vLLM's chat and text completions (with ``return_token_ids``), whole or streamed token by
token, from a toy tokenizer that is exact in both directions, so a test knows which tokens must be recorded.
Faults are queued and taken by the next calls, in order::

    async with ScriptedEngine() as engine:
        engine.faults.append(Fault(status=503))
        gateway = Gateway(GatewayConfig(upstreams=(UpstreamConfig(url=engine.url, engine="vllm"),)))
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web

from ..._servers.process import listen, stop_listening, url_of
from .openai_shapes import Sampled, SampledReply, vllm_choice
from .tokens import END, VOCABULARY, Fault, Seen, decode_ids, encode_messages, encode_text, error_body


class ScriptedEngine:
    """A server on a free loopback port. ``requests`` lists its requests. ``replies`` may hold texts for its next replies.

    Without them ``decide`` makes the reply, and an error that it raises becomes status 400. A reply to a prompt of token ids is
    ``{"token_ids": [...]}``.

    ``tokens`` is the length of a reply (the end token included) unless the request's max_tokens is smaller;
    ``token_s`` the time per streamed token; ``weight_version`` is put into replies when it is not None;
    ``gives_tokens`` False makes it a plain OpenAI endpoint, whose routes are below ``api_path``.
    """

    def __init__(
        self,
        *,
        tokens: int = 8,
        token_s: float = 0.0,
        weight_version: int | None = None,
        gives_tokens: bool = True,
        seed: int = 0,
        model: str = "scripted",
        api_path: str = "/v1",
        decide: Callable[[Seen], dict[str, Any]] | None = None,
    ) -> None:
        self.tokens = tokens
        self.token_s = token_s
        self.weight_version = weight_version
        self.gives_tokens = gives_tokens
        self.model = model
        self.api_path = api_path
        self.decide = decide
        self.first_id, self.last_id = 10, 900  # range of the ids it samples
        self.url = ""
        self.requests: list[Seen] = []
        self.replies: deque[dict[str, Any]] = deque()
        self.faults: deque[Fault] = deque()
        self.aborted: list[str] = []  # rids, in SGLang's manner
        self.stream_step = 1  # tokens per event of a stream, where the event carries token ids
        self.active = 0
        self._random = random.Random(seed)
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = web.Server(self._serve, handler_cancellation=True, access_log=None)
        listening = listen("127.0.0.1", port)
        self._listener = await asyncio.get_running_loop().create_server(self._server, sock=listening)
        self.url = url_of(listening)

    async def stop(self) -> None:
        """Stop at once: running calls lose their connection, as when the process dies."""
        if self._listener is None or self._server is None:
            return
        await stop_listening(self._listener)
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._server.shutdown(0)

    async def __aenter__(self) -> ScriptedEngine:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @property
    def calls(self) -> list[Seen]:
        """Return the model calls among the requests."""
        return [r for r in self.requests if r.method == "POST" and r.body and r.path != "/abort_request"]

    # -- HTTP

    async def _serve(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. A client that goes away meanwhile is what engines take for a cancellation."""
        body = await http.content.read()
        headers = {name.lower(): value for name, value in http.headers.items()}
        seen = Seen(http.method, http.raw_path, headers, json.loads(body) if body else {})
        self.requests.append(seen)
        model_call = http.method == "POST" and seen.path != "/abort_request"
        fault = self.faults.popleft() if self.faults and model_call else Fault()
        self.active += 1
        try:
            response = await self._answer(seen, fault, http)
            seen.finished = True
            return response
        except asyncio.CancelledError:
            seen.cancelled = True
            raise
        finally:
            self.active -= 1

    async def _answer(self, seen: Seen, fault: Fault, http: web.BaseRequest) -> web.StreamResponse:
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.gate is not None:
            await fault.gate.wait()
        if fault.drop_after == 0:
            raise _dropped(http)
        if fault.status != 200 or fault.body is not None:
            body = fault.body if fault.body is not None else error_body(fault.status)
            return await self._whole(http, fault.status, body, fault)
        path = seen.path.removeprefix(f"{self.api_path}/")
        if seen.method == "GET":
            listed = {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "scripted"}]}
            return await self._whole(http, 200, json.dumps(listed).encode() if path == "models" else b"{}", fault)
        if path == "/abort_request":
            self.aborted.append(seen.body["rid"])
            return await self._whole(http, 200, b"", fault)
        if path == "/inference/v1/generate":
            sampled = self._sampled(seen, seen.body["token_ids"], seen.body["sampling_params"])
            reply: dict[str, Any] = {"request_id": "generate-1", "choices": list(map(vllm_choice, sampled))}
            if self.weight_version is not None:
                reply["weight_version"] = self.weight_version
            return await self._json(http, reply, fault)
        if path == "/tokenize" and self.gives_tokens:
            seen.prompt_ids = encode_messages(seen.body["messages"])
            counted = {"count": len(seen.prompt_ids), "max_model_len": VOCABULARY, "tokens": seen.prompt_ids}
            return await self._whole(http, 200, json.dumps(counted).encode(), fault)
        if path not in ("chat/completions", "completions"):
            return await self._at_other_paths(seen, http, fault)
        chat = path == "chat/completions"
        prompt = encode_messages(seen.body["messages"]) if chat else seen.body["prompt"]
        try:
            choices = self._sampled(seen, encode_text(prompt) if isinstance(prompt, str) else prompt, seen.body)
        except Exception as e:
            if self.decide is None:
                raise
            return await self._whole(http, 400, error_body(400, f"{type(e).__name__}: {e}"), fault)
        sampled_reply = SampledReply(
            seen=seen,
            choices=choices,
            number=len(self.requests),
            model=self.model,
            weight_version=self.weight_version,
            gives_tokens=self.gives_tokens,
            step=self.stream_step,
        )
        if not seen.body.get("stream"):
            return await self._json(http, sampled_reply.whole(), fault)
        return await self._events(http, sampled_reply.events(chat=chat), fault)

    async def _at_other_paths(self, seen: Seen, http: web.BaseRequest, fault: Fault) -> web.StreamResponse:
        return await self._whole(http, 404, error_body(404), fault)

    async def _whole(self, http: web.BaseRequest, status: int, body: bytes, fault: Fault) -> web.StreamResponse:
        headers = {"content-type": "application/json", **{name.lower(): value for name, value in fault.headers}}
        if fault.drop_after is None:
            return web.Response(status=status, body=body, headers=headers)
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = len(body)
        await response.prepare(http)
        await response.write(body[: fault.drop_after])
        await asyncio.sleep(0.01)
        raise _dropped(http)

    async def _json(self, http: web.BaseRequest, reply: dict[str, Any], fault: Fault) -> web.StreamResponse:
        reply = (fault.edit(reply) if fault.edit is not None else None) or reply
        return await self._whole(http, 200, json.dumps(reply, separators=(",", ":")).encode(), fault)

    async def _events(
        self, http: web.BaseRequest, events: Iterable[dict[str, Any]], fault: Fault
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        sent = 0
        for event in events:
            if fault.edit is not None:
                event = fault.edit(event) or event
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

    def _sampled(self, seen: Seen, prompt_ids: list[int], asked: dict[str, Any]) -> list[Sampled]:
        """Make the choices of a reply: scripted, decided by a function, or random."""
        seen.prompt_ids = list(prompt_ids)
        limits = [asked.get(name) for name in ("max_completion_tokens", "max_tokens", "max_new_tokens")]
        limit = next(filter(None, limits), self.tokens)
        choices = []
        for index in range(asked.get("n") or 1):
            scripted = self.replies.popleft() if self.replies else self.decide(seen) if self.decide else {}
            calls, content, finish = scripted.get("tool_calls"), scripted.get("content"), scripted.get("finish_reason")
            if "content" in scripted or "tool_calls" in scripted:
                ids = encode_text(content or "")
                for call in calls or []:
                    ids += encode_text(call["function"]["name"] + " " + call["function"]["arguments"])
                if finish != "length" or not ids:  # it came to its end
                    ids.append(END)
                finish = finish or ("tool_calls" if calls else "stop")
            elif "token_ids" in scripted:
                ids, finish = list(scripted["token_ids"]), finish or "stop"
            else:
                ids = [self._random.randrange(self.first_id, self.last_id) for _ in range(min(limit, self.tokens))]
                finish = "stop" if self.tokens <= limit else "length"
                if finish == "stop":
                    ids[-1] = (asked.get("stop_token_ids") or [END])[0]
            seen.completion_ids.append(ids)
            choices.append(
                Sampled(
                    index=index,
                    ids=ids,
                    finish=finish,
                    stop=scripted.get("stop"),
                    content=scripted.get("content", None if calls else decode_ids(ids)),
                    reasoning_content=scripted.get("reasoning_content"),
                    tool_calls=calls,
                )
            )
        return choices


def _dropped(http: web.BaseRequest) -> ConnectionError:
    """Cut a connection. Returns the error that ends its handler."""
    if http.transport is not None:
        http.transport.abort()
    return ConnectionResetError("a fault cut the connection")
