"""The policy behind HTTP: OpenAI's chat and completion endpoints, vLLM's token endpoints, weights, health and metrics.

Generating endpoints are plain ASGI functions: they watch for the client hanging up while the engine works, and a request that
nobody waits for any more leaves the batch at its next token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..._parsing import parse_json
from ...errors import PolicyError
from ..batch import Generation
from ..engine import Engine, QueueFullError
from .fields import RequestError
from .protocol import Call, read_chat, read_completion, read_generate
from .replies import Reply
from .tokenization import detokenize, tokenize

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = (
    8 * 2**20
)  # a full context of token ids is 6 KB; conversations with long tool results reach some hundred KB
MAX_DEPTH = 200  # a schema of a tool has a few dozen levels at most
MAX_WEIGHTS_BYTES = 256 * 2**20
Reader = Callable[..., Call]


class _GenerateEndpoint:
    """An ASGI endpoint that turns a checked body into completions."""

    def __init__(self, service: PolicyService, read: Reader) -> None:
        self._service = service
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200
        try:
            await self._answer(receive, send)
        except RequestError as e:
            status = e.status
            await _send_error(send, e)
        except _ClientGoneError:
            status = 499  # nginx's number for it; nobody receives it
        finally:
            self._service.count(scope["path"], status)

    async def _answer(self, receive: Receive, send: Send) -> None:
        service = self._service
        body = _json_object(await _read_body(receive, MAX_BODY_BYTES))
        call = self._read(body, service.engine.tokenizer, context=service.engine.context)
        model = service.check_model(body.get("model"))
        reply, changed = service.submit(call, model)
        hung_up = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            if call.stream:
                await self._stream(reply, changed, hung_up, send)
            else:
                await self._whole(reply, changed, hung_up, send)
        finally:
            hung_up.cancel()
            for generation in reply.generations:
                if generation.finish_reason is None:
                    service.engine.cancel(generation)

    async def _whole(self, reply: Reply, changed: asyncio.Event, hung_up: asyncio.Task[None], send: Send) -> None:
        while not reply.finished:
            await _next_news(changed, hung_up)
        reply.raise_if_failed()
        await _send_json(send, 200, reply.to_json())

    async def _stream(self, reply: Reply, changed: asyncio.Event, hung_up: asyncio.Task[None], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        finished = False
        while not finished:
            await _next_news(changed, hung_up)
            finished = reply.finished
            try:
                if finished:
                    reply.raise_if_failed()
                events = [_event(chunk) for chunk in reply.chunks()]
                if finished and (usage := reply.last_chunk()) is not None:
                    events.append(_event(usage))
            except RequestError as e:
                events = [_event(e.to_openai())]
            if finished:
                events.append(b"data: [DONE]\n\n")
            if events:
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": not finished})


class _TokenEndpoint:
    """An ASGI endpoint that needs the tokenizer alone: body to reply at once."""

    def __init__(self, service: PolicyService, answer: Callable[..., dict[str, Any]]) -> None:
        self._service = service
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, engine = 200, self._service.engine
        try:
            body = _json_object(await _read_body(receive, MAX_BODY_BYTES))
            self._service.check_model(body.get("model"))
            # a thread: 8 MiB of new text take the tokenizer a second or more
            await _send_json(
                send, 200, await asyncio.to_thread(self._answer, body, engine.tokenizer, context=engine.context)
            )
        except RequestError as e:
            status = e.status
            await _send_error(send, e)
        except _ClientGoneError:
            status = 499
        finally:
            self._service.count(scope["path"], status)


class PolicyService:
    """State behind the endpoints: the engine, the loop it reports to, counts of requests."""

    def __init__(
        self, engine: Engine, *, served_model: str, request_timeout_s: float | None, stream_interval: int
    ) -> None:
        self.engine = engine
        self.served_model = served_model
        self.request_timeout_s = request_timeout_s
        self.stream_interval = stream_interval
        self.requests: dict[tuple[str, int], int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        engine.dispatch = self._dispatch

    def check_model(self, model: Any) -> str:
        """The name to answer with. Raises: RequestError (404) when another model is asked for."""
        if model is None or model == self.served_model:
            return self.served_model
        raise RequestError(
            f"this server runs the model {self.served_model!r}, not {model!r}",
            param="model",
            code="model_not_found",
            status=404,
        )

    def submit(self, call: Call, model: str) -> tuple[Reply, asyncio.Event]:
        """Queue a call; the event is set whenever there is news. Raises: RequestError (429 when too many wait)."""
        self._loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        deadline = None if self.request_timeout_s is None else time.monotonic() + self.request_timeout_s
        generations = [
            Generation(
                prompt_ids=list(prompt),
                params=call.params_of(k),
                listener=lambda _: changed.set(),
                notify_every=self.stream_interval if call.stream else 0,
                deadline=deadline,
            )
            for prompt in call.prompts
            for k in range(call.n)
        ]
        try:
            self.engine.submit(generations)
        except QueueFullError as e:
            raise RequestError(e.message, code="queue_full", status=429, retry_after_s=e.retry_after_s) from e
        except PolicyError as e:
            raise RequestError(e.message, code="shutting_down", status=503) from e
        return Reply(call, generations, self.engine.tokenizer, model=model), changed

    def count(self, path: str, status: int) -> None:
        """Note an answered request for /metrics."""
        self.requests[path, status] = self.requests.get((path, status), 0) + 1

    def _dispatch(self, news: list[Generation]) -> None:
        loop = self._loop
        if loop is None:
            return
        # one wake-up of the loop per step, not per request; at shutdown the loop may be gone, and everybody with it
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_call_listeners, news)


def create_app(
    engine: Engine,
    *,
    served_model: str = "policy",
    request_timeout_s: float | None = 120.0,
    stream_interval: int = 8,
    admin_key: str | None = None,
) -> Starlette:
    """The ASGI application of a started engine.

    ``admin_key`` is asked for by what changes its state: new weights, pause and resume. None: by nothing.
    ``stream_interval`` is the number of tokens between chunks of a stream (after the first): every chunk costs the client more
    CPU than its tokens cost the policy.
    """
    service = PolicyService(
        engine, served_model=served_model, request_timeout_s=request_timeout_s, stream_interval=stream_interval
    )

    async def health(_: Request) -> Response:
        state = "paused" if engine.paused else "ok"
        body = {"status": state if engine.alive else "failed", "weight_version": engine.weight_version}
        return JSONResponse({**body, "model": served_model}, status_code=200 if engine.alive else 503)

    async def models(_: Request) -> Response:
        card = {"id": served_model, "object": "model", "created": 0, "owned_by": "agentcore-rl-toolkit"}
        return JSONResponse({"object": "list", "data": [{**card, "max_model_len": engine.context}]})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(_prometheus(service), media_type="text/plain; version=0.0.4")

    def check(headers: Headers) -> None:
        given = headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        if admin_key is not None and not hmac.compare_digest(given, admin_key.encode()):
            message = (
                "this needs the server's admin key (Authorization: Bearer KEY): what its admin_key_file holds, see its ready "
                "file and its first lines, or AGENTCORE_RL_POLICY_ADMIN_KEY"
            )
            raise RequestError(message, code="invalid_api_key", status=401)

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return JSONResponse(error.to_openai(), status_code=error.status)

    async def pause(request: Request) -> Response:
        check(request.headers)
        await asyncio.wrap_future(engine.pause())
        return JSONResponse({"status": "paused", "weight_version": engine.weight_version})

    async def resume(request: Request) -> Response:
        check(request.headers)
        await asyncio.wrap_future(engine.resume())
        return JSONResponse({"status": "ok", "weight_version": engine.weight_version})

    async def update_weights(scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        status = 200
        try:
            check(Headers(scope=scope))
            before = engine.weight_version
            state, version = await _read_weights(Request(scope), receive)
            try:
                after = await asyncio.wrap_future(engine.update_weights(state, version))
            except PolicyError as e:
                raise RequestError(e.message, param="weights", code="invalid_weights") from e
            took_s = time.monotonic() - started
            await _send_json(send, 200, {"weight_version": after, "previous_version": before, "seconds": took_s})
        except RequestError as e:
            status = e.status
            await _send_error(send, e)
        except _ClientGoneError:
            status = 499
        finally:
            service.count(scope["path"], status)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", _GenerateEndpoint(service, read_chat), methods=["POST"]),
            Route("/v1/completions", _GenerateEndpoint(service, read_completion), methods=["POST"]),
            Route("/inference/v1/generate", _GenerateEndpoint(service, read_generate), methods=["POST"]),
            Route("/tokenize", _TokenEndpoint(service, tokenize), methods=["POST"]),
            Route("/detokenize", _TokenEndpoint(service, detokenize), methods=["POST"]),
            Route("/update_weights", _Asgi(update_weights), methods=["POST"]),
            Route("/pause", pause, methods=["POST"]),
            Route("/resume", resume, methods=["POST"]),
            Route("/health", health),
            Route("/v1/models", models),
            Route("/metrics", metrics),
        ],
        exception_handlers={RequestError: refused},
    )


class _Asgi:
    """Marks a function as an ASGI application; Starlette takes plain functions for request handlers."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _ClientGoneError(Exception):
    """The client hung up before its request was complete."""


def _call_listeners(news: list[Generation]) -> None:
    for generation in news:
        if generation.listener is not None:
            generation.listener(generation)


async def _next_news(changed: asyncio.Event, hung_up: asyncio.Task[None]) -> None:
    """Wait until something changed. Raises: _ClientGoneError when the client hung up instead."""
    if not changed.is_set():
        news = asyncio.ensure_future(changed.wait())
        try:
            await asyncio.wait((news, hung_up), return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        if not changed.is_set():
            raise _ClientGoneError
    changed.clear()


async def _read_body(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise RequestError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _wait_for_disconnect(receive: Receive) -> None:
    message: Mapping[str, Any] = {}
    while message.get("type") != "http.disconnect":  # the server may repeat the empty end of the body
        message = await receive()


def _json_object(body: bytes) -> Mapping[str, Any]:
    try:
        value = parse_json(body, max_depth=MAX_DEPTH)
    except ValueError as e:
        raise RequestError(f"the body is not valid JSON: {e}", code="invalid_json") from e
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return value


async def _read_weights(request: Request, receive: Receive) -> tuple[dict[str, torch.Tensor], int | None]:
    """Tensors and version of an update: JSON that names a file, or the bytes of a safetensors file with ?version=."""
    body = await _read_body(receive, MAX_WEIGHTS_BYTES)
    if request.headers.get("content-type", "").startswith("application/octet-stream"):
        given = request.query_params.get("version")
        if given is not None and not given.lstrip("-").isdigit():
            raise RequestError(f"version must be an integer, got {given!r}", param="version")
        try:
            return load_tensors(body), None if given is None else int(given)
        except Exception as e:  # safetensors' own error class is not exported as a Python type
            raise RequestError(f"the body is not a safetensors file: {e}", param="weights") from e
    fields = _json_object(body)
    path, version = fields.get("path"), fields.get("version")
    if version is not None and type(version) is not int:
        raise RequestError(f"version must be an integer, got {version!r}", param="version")
    if not isinstance(path, str):
        raise RequestError("path must name a safetensors file on the server's machine", param="path")
    try:
        return await asyncio.to_thread(load_file, path), version
    except Exception as e:  # as above, and OSError
        raise RequestError(f"no weights could be read from {path}: {e}", param="path") from e


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


async def _send_json(
    send: Send, status: int, value: Mapping[str, Any], headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    body = json.dumps(value, separators=(",", ":")).encode()
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})


async def _send_error(send: Send, error: RequestError) -> None:
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if error.retry_after_s is not None:
        headers = ((b"retry-after", str(max(1, round(error.retry_after_s))).encode()),)
    await _send_json(send, error.status, error.to_openai(), headers)


def _prometheus(service: PolicyService) -> str:
    stats = service.engine.stats()
    lines = [f"policy_weight_version {service.engine.weight_version}"]
    gauges = ("running", "waiting")
    for name, value in stats.items():
        if name.startswith("finished_"):
            lines.append(f'policy_finished_total{{reason="{name.removeprefix("finished_")}"}} {value:g}')
        elif name == "busy_s":
            lines.append(f"policy_busy_seconds_total {value:.6f}")
        else:
            lines.append(f"policy_{name}{'' if name in gauges else '_total'} {value:.0f}")
    lines.append(f"policy_process_cpu_seconds_total {time.process_time():.3f}")
    for (path, status), n in sorted(service.requests.items()):
        lines.append(f'policy_requests_total{{path="{path}",status="{status}"}} {n}')
    return "\n".join(lines) + "\n"
