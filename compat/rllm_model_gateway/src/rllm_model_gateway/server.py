"""`create_app`: the gateway as an ASGI application, for trainers that run it in a thread of their own (uvicorn).

The gateway itself listens on a loopback port of its own inside the same event loop; the application hands requests on
to it. Agents of a large run should be given the command line's gateway instead, which has no such step in between.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

from agentcore_rl_toolkit._servers.host_check import HostCheck
from agentcore_rl_toolkit.gateway import Gateway, UpstreamConfig
from agentcore_rl_toolkit.gateway import GatewayConfig as OurConfig

from .models import ADMIN_KEY_ENV, GatewayConfig
from .routes import add_routes

log = logging.getLogger(__name__)

LocalHandler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def our_config(config: GatewayConfig, *, port: int, host: str, upstreams: tuple[UpstreamConfig, ...]) -> OurConfig:
    """Their settings as ours. Raises: ConfigError."""
    kind = config.store_worker or config.store
    if kind not in ("memory", "sqlite", "compact"):
        raise ValueError(f"store {kind!r} is none of memory, sqlite, compact")
    if config.routing_policy is not None:
        raise ValueError(
            f"routing_policy {config.routing_policy!r} cannot be used: this gateway has a router of its own"
        )
    # rllm-model-gateway's SGLang mode always speaks token ids to the server.
    rendered = config.cumulative_token_mode or config.engine == "sglang"
    rendered = rendered and config.model is not None and Path(config.model).is_dir()
    if config.cumulative_token_mode and not rendered:
        raise ValueError("cumulative_token_mode needs `model` to be a directory with tokenizer and chat template")
    return OurConfig(
        upstreams=upstreams,
        engine=engine_of(config),  # type: ignore[arg-type]  # checked when a server is added
        host=host,
        port=port,
        admin_key=os.environ.get(ADMIN_KEY_ENV) or None,
        store_dir=store_folder(config.db_path) if kind == "sqlite" else None,
        model_id=config.model or None,
        session_keys=False,
        allowed_hosts=tuple(config.allowed_hosts),
        model_dir=config.model if rendered else None,
    )


def store_folder(db_path: str | None) -> str:
    """Where calls are kept: ``db_path``, a folder here, or ``gateway_traces`` below ``~/.rllm``."""
    if db_path is None:
        db_path = "~/.rllm/gateway_traces"
        log.warning("store sqlite without db_path: calls are kept in %s", db_path)
    folder = os.path.expanduser(db_path)
    if os.path.isfile(folder):
        raise ValueError(f"db_path {db_path} is a file, and this gateway keeps calls in a folder: name another")
    return folder


def upstreams_of(config: GatewayConfig) -> tuple[UpstreamConfig, ...]:
    return tuple(
        UpstreamConfig(
            url=w.url,
            engine=engine_of(config),  # type: ignore[arg-type]  # checked by the class
            api_path=w.api_path,
            worker_id=w.worker_id or None,
            model_name=w.model_name,
        )
        for w in config.workers
    )


def engine_of(config: GatewayConfig) -> str:
    return config.engine if config.add_return_token_ids else "openai"


class LocalServer:
    """A sampler in this process as an engine on loopback; a streamed reply is one chunk."""

    def __init__(self, handler: LocalHandler, engine: str) -> None:
        self._handler = handler
        self._engine = engine
        self._hosts = HostCheck()
        app = web.Application(client_max_size=0)  # the gateway has a limit
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def start(self) -> UpstreamConfig:
        """Listen. Returns the server as the gateway is told of it."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return UpstreamConfig(url=url, engine=self._engine)  # type: ignore[arg-type]  # checked by the class

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        given = {name: request.headers.get(name) for name in ("host", "origin")}
        host, origin = (None if value is None else value.encode("latin-1") for value in given.values())
        if self._hosts.refusal(host, origin) is not None:
            raise web.HTTPForbidden  # a web page
        asked = json.loads(await request.read() or b"{}")
        streamed = bool(asked.pop("stream", False))
        asked.pop("stream_options", None)
        try:
            told = await self._handler(asked)
        except Exception as e:
            error = {"message": f"{type(e).__name__}: {e}", "type": "server_error"}
            return web.json_response({"error": error}, status=500)
        return (
            web.Response(body=_as_stream(told), content_type="text/event-stream")
            if streamed
            else web.json_response(told)
        )


_OWN = (b"host", b"origin", b"content-length", b"transfer-encoding")  # checked here, or of this connection


class _App:
    """One ASGI application.

    ``local_handler`` takes a chat completion request and returns the reply, tokens included.
    """

    def __init__(self, config: GatewayConfig, local_handler: LocalHandler | None) -> None:
        self._config = config
        self._local = LocalServer(local_handler, engine_of(config)) if local_handler is not None else None
        self._gateway: Gateway | None = None
        self._hosts = HostCheck((config.host,), config.allowed_hosts)
        self._http: httpx.AsyncClient | None = None
        self._starting = asyncio.Lock()  # without a lifespan the first requests start the gateway, once

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._request(scope, receive, send)

    async def _lifespan(self, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.start()
                except Exception as e:
                    await send({"type": "lifespan.startup.failed", "message": str(e)})
                    return
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def start(self) -> None:
        upstreams = upstreams_of(self._config)
        if self._local is not None:
            upstreams = (*upstreams, await self._local.start())
        # Whoever reaches the application reaches the gateway behind it, so what holds for its own address holds here.
        outside = our_config(self._config, port=0, host=self._config.host, upstreams=upstreams)
        self._gateway = Gateway(dataclasses.replace(outside, host="127.0.0.1"))
        add_routes(self._gateway)
        await self._gateway.start()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=self._gateway.url, timeout=None, limits=limits)

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.aclose()
        if self._gateway is not None:
            await self._gateway.stop()
        if self._local is not None:
            await self._local.stop()

    async def _request(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        async with self._starting:
            if self._http is None:
                await self.start()
        assert self._http is not None
        given = dict(scope["headers"])
        refusal = self._hosts.refusal(given.get(b"host"), given.get(b"origin"))
        if refusal is not None:
            await _refuse(send, refusal.status, refusal.message)
            return
        assert self._gateway is not None
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._gateway.config.limits.body_bytes:
                await _refuse(send, 413, f"a request body may have {self._gateway.config.limits.body_bytes} bytes")
                return
            more = message.get("more_body", False)
        query = scope.get("query_string") or b""
        url = scope["path"] + (f"?{query.decode()}" if query else "")
        headers = [(k, v) for k, v in scope["headers"] if k not in _OWN]
        async with self._http.stream(scope["method"], url, content=b"".join(parts), headers=headers) as answer:
            kept = [(k, v) for k, v in answer.headers.raw if k.lower() not in (b"transfer-encoding", b"connection")]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for piece in answer.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _refuse(send: Any, status: int, message: str) -> None:
    kind = {413: "invalid_request_error"}.get(status, "permission_error")
    body = json.dumps({"error": {"message": message, "type": kind}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _as_stream(reply: dict[str, Any]) -> bytes:
    chunk = {**reply, "object": "chat.completion.chunk", "choices": []}
    chunk.pop("usage", None)
    for choice in reply.get("choices", []):
        message = dict(choice.get("message") or {})
        if message.get("tool_calls"):
            message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        rest = {k: v for k, v in choice.items() if k != "message"}
        chunk["choices"].append({**rest, "delta": message})
    return b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"


def create_app(config: GatewayConfig | None = None, local_handler: LocalHandler | None = None) -> _App:
    """The ASGI application. With ``local_handler`` calls go to that coroutine as well as to the configured servers."""
    return _App(config or GatewayConfig(), local_handler)
