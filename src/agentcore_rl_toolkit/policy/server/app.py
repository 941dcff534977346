"""The policy over HTTP: token ids in, token ids and logprobs out, weights in.

The routes are vLLM's (``/inference/v1/generate``, and ``/v1/completions`` with the ids of a prompt), so that clients of vLLM can
sample from the policy: the gateway, which turns messages into ids and back, and the proof after a publish.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

import msgspec
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...errors import PolicyError
from ..batch import Generation
from ..engine import Engine
from ..sampling import SamplingParams

STREAM_INTERVAL = 8  # tokens: each chunk costs the client more CPU than its tokens cost the policy
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Completions(SamplingParams):
    """A body of ``/v1/completions``; also the ``sampling_params`` of the other route. Other fields are ignored."""

    prompt: tuple[int, ...] = ()
    n: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    stream: bool = False


@dataclass(frozen=True, kw_only=True)
class Generate:
    """A body of ``/inference/v1/generate``."""

    token_ids: tuple[int, ...]
    sampling_params: Completions = field(default_factory=Completions)


class Weights(msgspec.Struct):
    """A body of ``/update_weights``: a safetensors file on the server's machine, and the name of its weights."""

    path: str
    version: int | None = None


class _RefusedError(PolicyError):
    """A request that is answered with this status."""

    def __init__(self, message: str = "", *, status: int = 400, code: str | None = None, **ids: Any) -> None:
        super().__init__(message, **ids)
        self.status = status
        self.code = code


def create_app(engine: Engine, *, admin_key: str | None = None) -> Starlette:
    """Return the ASGI application of a started engine. New weights need the ``admin_key``, or no key if it is None."""

    async def completions(request: Request) -> Response:
        asked = _read(await request.body(), Completions)
        return _sample(engine, asked.prompt, asked, stream=asked.stream)

    async def generate(request: Request) -> Response:
        asked = _read(await request.body(), Generate)
        return _sample(engine, asked.token_ids, asked.sampling_params, stream=False)

    async def update_weights(request: Request) -> Response:
        _check_key(request, admin_key)
        asked = _read(await request.body(), Weights)
        try:
            state = await asyncio.to_thread(load_file, asked.path)
        except Exception as e:  # safetensors' own error class is not exported as a Python type
            raise _RefusedError(f"no weights could be read from {asked.path}: {e}") from e
        version = await asyncio.wrap_future(engine.update_weights(state, asked.version))
        return JSONResponse({"weight_version": version, "checksums": engine.checksums})

    async def health(_: Request) -> Response:
        status = "ok" if engine.alive else "failed"
        body = {"status": status, "weight_version": engine.weight_version, "dtype": engine.dtype}
        return JSONResponse(body, status_code=200 if engine.alive else 503)

    async def models(_: Request) -> Response:
        card = {"id": "policy", "object": "model", "created": 0, "max_model_len": engine.context}
        return JSONResponse({"object": "list", "data": [card]})

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, PolicyError)
        status = getattr(error, "status", 400) if engine.alive else 503
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = {"message": error.message, "type": kind, "code": getattr(error, "code", None)}
        return JSONResponse({"error": body}, status_code=status)

    return Starlette(
        routes=[
            Route("/inference/v1/generate", generate, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/update_weights", update_weights, methods=["POST"]),
            Route("/health", health),
            Route("/v1/models", models),
        ],
        exception_handlers={PolicyError: refused},
    )


def _read(body: bytes, kind: type[T]) -> T:
    """Decode a body. Raises: PolicyError that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise _RefusedError(f"the body cannot be read: {e}") from e


def _check_key(request: Request, key: str | None) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
    if key is not None and not hmac.compare_digest(given, key.encode()):
        raise _RefusedError(
            "this needs the server's admin key as `Authorization: Bearer KEY`: that of AGENTCORE_RL_POLICY_ADMIN_KEY, or that in "
            "the file which the server printed when it started",
            status=401,
            code="invalid_api_key",
        )


def _sample(engine: Engine, ids: tuple[int, ...], asked: Completions, *, stream: bool) -> Response:
    """Queue ``n`` completions of a prompt. Raises: PolicyError."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def notify(_: Generation) -> None:
        with contextlib.suppress(RuntimeError):  # at shutdown the loop may have ended
            loop.call_soon_threadsafe(news.set)

    generations = [
        Generation(
            prompt_ids=list(ids),
            # With a seed, each completion gets a different one.
            params=asked if asked.seed is None or k == 0 else replace(asked, seed=asked.seed + k),
            listener=notify,
            notify_every=STREAM_INTERVAL if stream else 0,
        )
        for k in range(asked.n)
    ]
    engine.submit(generations)
    return _Sampling(engine, generations, news, stream=stream)


class _Sampling(Response):
    """The response to a request for tokens. A client that hangs up ends its completions at their next token."""

    def __init__(self, engine: Engine, generations: list[Generation], news: asyncio.Event, *, stream: bool) -> None:
        self._engine = engine
        self._generations = generations
        self._news = news
        self._stream = stream
        self._sent = [0] * len(generations)  # tokens of each

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for ended in self._changes(receive):
                events = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in self._chunks())
                events += b"data: [DONE]\n\n" if ended else b""
                await send({"type": "http.response.body", "body": events, "more_body": not ended})
            return
        async for ended in self._changes(receive):
            if ended:
                failed = next((_error(g) for g in self._generations if g.finish_reason in ("error", "cancelled")), None)
                choices = [self._choice(k, g, ended=True) for k, g in enumerate(self._generations)]
                reply = JSONResponse(failed or {"choices": choices}, status_code=200 if failed is None else 500)
                await reply(scope, receive, send)

    async def _changes(self, receive: Receive) -> AsyncIterator[bool]:
        """Yield at each change if all completions have ended. End early when the client disconnects."""
        hung_up = asyncio.ensure_future(_hung_up(receive))
        ended = False
        try:
            while not ended:
                changed = asyncio.ensure_future(self._news.wait())
                await asyncio.wait((changed, hung_up), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if hung_up.done():
                    return
                self._news.clear()
                ended = all(g.finish_reason is not None for g in self._generations)
                yield ended
        finally:
            hung_up.cancel()
            for generation in self._generations:
                self._engine.cancel(generation)

    def _chunks(self) -> list[dict[str, Any]]:
        """Return the part of each completion that has not been sent."""
        chunks = []
        for k, g in enumerate(self._generations):
            ended = g.finish_reason is not None  # read first: the last token comes before it
            if ended and self._sent[k] < 0:
                continue
            if g.finish_reason in ("error", "cancelled"):
                chunks.append(_error(g))
            elif ended or len(g.logprobs) > self._sent[k]:
                chunks.append({"choices": [self._choice(k, g, ended=ended)]})
            if ended:
                self._sent[k] = -1
        return chunks

    def _choice(self, k: int, g: Generation, *, ended: bool) -> dict[str, Any]:
        first, last = self._sent[k], len(g.logprobs)  # read once: the engine's thread adds tokens meanwhile
        self._sent[k] = last
        choice: dict[str, Any] = {
            "index": k,
            "token_ids": g.token_ids[first:last],
            "logprobs": {"token_logprobs": g.logprobs[first:last]},
            "finish_reason": g.finish_reason if ended else None,
            "weight_version_last": g.weight_version_last,
        }
        if ended:
            choice |= {"stop_reason": g.stop_reason, "weight_version_first": g.weight_version_first}
            if g.params.prompt_logprobs is not None:
                choice["prompt_logprobs"] = [None, *map(self._read_token, g.prompt_ids[1:], g.prompt_logprobs)]
        return choice

    def _read_token(self, token: int, logprob: float) -> dict[str, Any]:
        return {str(token): {"logprob": logprob, "decoded_token": self._engine.text(token)}}


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":  # the server may repeat the empty end of the body
        pass


def _error(generation: Generation) -> dict[str, Any]:
    why = "the policy server is shutting down" if generation.error is None else f"the policy failed: {generation.error}"
    return {"error": {"message": why, "type": "server_error", "code": "engine_error"}}
