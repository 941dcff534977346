"""A server whose replies a function decides. It has the wire format of vLLM's chat completions, and samples nothing.

Each event of a stream has one token of the toy tokenizer in `tokens`, so a test knows which tokens must be recorded.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from ..._servers.process import listen, stop_listening, url_of
from .tokens import END, decode_ids, encode_messages, encode_text, logprob_of

_WORD = re.compile(r"\s*\S+|\s+\Z")
_CHUNK = "chat.completion.chunk"


@dataclass
class Seen:
    """A request as the engine received it, and the token ids of its prompt and of the choices of its reply."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    number: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)


@dataclass(kw_only=True)
class Sampled:
    """A choice of a reply. ``stop`` is the stop string that ended it."""

    index: int = 0
    ids: list[int]
    finish: str = "stop"
    stop: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ScriptedEngine:
    """A chat server on a free loopback port. ``requests`` lists its requests.

    ``decide`` returns members of the reply's message, perhaps with ``finish_reason`` and ``stop``, or ``{"token_ids": [...]}``.
    An error that it raises becomes status 400. ``token_s`` is the time per streamed token. Replies have the ``weight_version`` if
    there is one. ``gives_tokens`` False makes it a plain OpenAI endpoint.
    """

    def __init__(
        self,
        *,
        decide: Callable[[Seen], dict[str, Any]],
        model: str = "scripted",
        token_s: float = 0.0,
        weight_version: int | None = None,
        gives_tokens: bool = True,
        api_path: str = "/v1",
    ) -> None:
        self.decide = decide
        self.model = model
        self.token_s = token_s
        self.weight_version = weight_version
        self.gives_tokens = gives_tokens
        self.api_path = api_path
        self.url = ""
        self.requests: list[Seen] = []
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None

    async def start(self, port: int = 0) -> None:
        """Listen on a port."""
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
        body = await http.content.read()
        headers = {name.lower(): value for name, value in http.headers.items()}
        seen = Seen(http.method, http.raw_path, headers, json.loads(body) if body else {}, len(self.requests) + 1)
        self.requests.append(seen)
        return await self._answer(seen, http)

    async def _answer(self, seen: Seen, http: web.BaseRequest) -> web.StreamResponse:
        route = seen.path.removeprefix(f"{self.api_path}/")
        if seen.method == "GET":
            listed = {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "scripted"}]}
            return await self._json(seen, http, listed if route == "models" else {})
        if route != "chat/completions":
            return await self._whole(seen, http, 404, error_body(404))
        try:
            choices = self._sampled(seen, encode_messages(seen.body["messages"]), seen.body)
        except Exception as e:
            return await self._whole(seen, http, 400, error_body(400, f"{type(e).__name__}: {e}"))
        if seen.body.get("stream"):
            return await self._events(seen, http, self._chunks(seen, choices))
        return await self._json(seen, http, self._completion(seen, choices))

    async def _whole(self, seen: Seen, http: web.BaseRequest, status: int, body: bytes) -> web.StreamResponse:
        return web.Response(status=status, body=body, content_type="application/json")

    async def _json(self, seen: Seen, http: web.BaseRequest, value: Any) -> web.StreamResponse:
        return await self._whole(seen, http, 200, json.dumps(value, separators=(",", ":")).encode())

    async def _events(self, seen: Seen, http: web.BaseRequest, events: Iterable[dict[str, Any]]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        for event in events:
            await response.write(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")
            if self.token_s:
                await asyncio.sleep(self.token_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    # -- replies

    def _sampled(self, seen: Seen, prompt_ids: list[int], asked: dict[str, Any]) -> list[Sampled]:
        """Return the choices of a reply to a request for ``asked``."""
        seen.prompt_ids = list(prompt_ids)
        choices = [sampled(index, self._decide(seen, asked)) for index in range(asked.get("n") or 1)]
        seen.completion_ids += [choice.ids for choice in choices]
        return choices

    def _decide(self, seen: Seen, asked: dict[str, Any]) -> dict[str, Any]:
        return self.decide(seen)

    def _gives_ids(self, seen: Seen) -> bool:
        return bool(seen.body.get("return_token_ids")) and self.gives_tokens

    def _envelope(self, seen: Seen, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        name = seen.body.get("model", self.model)
        envelope = {"id": f"cmpl-{seen.number}", "object": kind, "created": 1_700_000_000, "model": name}
        version = {} if self.weight_version is None else {"weight_version": self.weight_version}
        return {**envelope, **version, "choices": choices, **more}

    def _completion(self, seen: Seen, sampled: list[Sampled]) -> dict[str, Any]:
        """Return the body of a chat completion that is not streamed."""
        choices = []
        for c in sampled:
            message = {"role": "assistant", "content": c.content, "tool_calls": c.tool_calls or []}
            if c.reasoning_content:
                message["reasoning_content"] = c.reasoning_content
            choice = {"index": c.index, "finish_reason": c.finish, "stop_reason": c.stop, "message": message}
            choice["logprobs"] = logprobs(c.ids) if seen.body.get("logprobs") else None
            if self._gives_ids(seen):
                choice["token_ids"] = c.ids
            choices.append(choice)
        prompt = {"prompt_token_ids": seen.prompt_ids} if self._gives_ids(seen) else {}
        return self._envelope(seen, "chat.completion", choices, usage=usage(seen), **prompt)

    def _chunks(self, seen: Seen, sampled: list[Sampled]) -> Iterator[dict[str, Any]]:
        """Return the events of a streamed chat completion."""
        prompt = {"prompt_token_ids": seen.prompt_ids} if self._gives_ids(seen) else {}
        for c in sampled:
            first = {"index": c.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            yield self._envelope(seen, _CHUNK, [{**first, "finish_reason": None}], **prompt)
        for i in range(max(len(c.ids) for c in sampled)):
            for c in sampled:
                if i >= len(c.ids):
                    continue
                last = i + 1 == len(c.ids)
                choice: dict[str, Any] = {"index": c.index, "finish_reason": c.finish if last else None}
                choice |= {"stop_reason": c.stop if last else None, "delta": _delta(c, i)}
                if seen.body.get("logprobs"):
                    choice["logprobs"] = logprobs(c.ids[i : i + 1])
                if self._gives_ids(seen):
                    choice["token_ids"] = c.ids[i : i + 1]
                yield self._envelope(seen, _CHUNK, [choice])
        if (seen.body.get("stream_options") or {}).get("include_usage"):
            yield self._envelope(seen, _CHUNK, [], usage=usage(seen))


def error_body(status: int, message: str = "scripted failure") -> bytes:
    """Return the body of an error, in the shape that vLLM gives it."""
    error = {"message": f"{message} {status}", "type": "X", "param": None, "code": status}
    return json.dumps({"error": error}).encode()


def sampled(index: int, reply: dict[str, Any]) -> Sampled:
    """Return a reply that was decided as a choice with its tokens."""
    calls, content, finish = reply.get("tool_calls"), reply.get("content"), reply.get("finish_reason")
    if "token_ids" in reply:
        ids = list(reply["token_ids"])
    else:
        texts = [f"{call['function']['name']} {call['function']['arguments']}" for call in calls or ()]
        ids = [token for text in (content or "", *texts) for token in encode_text(text)]
        if finish != "length" or not ids:  # it came to its end
            ids.append(END)
    return Sampled(
        index=index,
        ids=ids,
        finish=finish or ("tool_calls" if calls else "stop"),
        stop=reply.get("stop"),
        content=reply.get("content", None if calls else decode_ids(ids)),
        reasoning_content=reply.get("reasoning_content"),
        tool_calls=calls,
    )


def usage(seen: Seen) -> dict[str, int]:
    """Return the counted tokens of a reply."""
    prompt, completion = len(seen.prompt_ids), sum(map(len, seen.completion_ids))
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def logprobs(ids: list[int]) -> dict[str, Any]:
    """Return the logprobs of tokens, in the shape of chat completions."""
    words = [f" w{i}" for i in ids]
    pairs = zip(words, map(logprob_of, ids), strict=True)
    return {"content": [{"token": w, "logprob": v, "bytes": list(w.encode()), "top_logprobs": []} for w, v in pairs]}


def _delta(choice: Sampled, i: int) -> dict[str, Any]:
    """Return what token ``i`` says: words one by one, the arguments of calls at the end."""
    last, delta = i + 1 == len(choice.ids), dict[str, Any]()
    if i == 0 and choice.reasoning_content:
        delta["reasoning_content"] = choice.reasoning_content
    if not choice.tool_calls:
        pieces = _WORD.findall(choice.content or "")  # put together they are the text, spaces and lines too
        return {**delta, "content": "".join(pieces[i:] if last else pieces[i : i + 1])}
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
