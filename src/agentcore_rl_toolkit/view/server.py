"""The server behind the page: reads only, answers only what names it, sends nothing that a page elsewhere could use."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from .._servers.bounded_http import BoundedProtocol, Bounds
from .._servers.host_check import HostCheck
from .._servers.this_user import ThisUserOnly
from ..errors import ConfigError
from . import data
from .data import Runs
from .export import MODULES, STATIC

LOOK_S = 0.5
MAX_TOKENS = 20_000  # ids of one question for texts
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


def app(runs: Runs, stopping: asyncio.Event) -> Starlette:
    """The routes."""

    def answer(make: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            try:
                value = await asyncio.to_thread(make, request)
            except ConfigError as e:
                return JSONResponse({"error": {"message": str(e)}}, status_code=404, headers=HEADERS)
            return JSONResponse(value, headers=HEADERS)

        return handle

    def reader(request: Request) -> Any:
        return runs.reader(request.path_params["run"])

    def compared(request: Request) -> Any:
        names = [request.query_params.get(side, "") for side in ("first", "second")]
        readers, sides = [], []
        for name in names:
            run, _, rest = name.rpartition("@")
            phase, _, step = rest.partition(":")
            if step and not step.isdecimal():
                raise ConfigError(f"{name!r} is not RUN@PHASE or RUN@PHASE:STEP")
            readers.append(runs.reader(run))
            sides.append((phase, int(step) if step else None))
        return data.compare(readers[0], readers[1], tuple(sides))

    async def texts(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > 20 * MAX_TOKENS:
                return JSONResponse({"error": {"message": "too many tokens"}}, status_code=413, headers=HEADERS)
        try:
            ids = [int(token) for token in json.loads(body)]
            found = await asyncio.to_thread(lambda: data.token_texts(reader(request), ids))
        except (ValueError, TypeError, ConfigError) as e:
            return JSONResponse({"error": {"message": str(e)}}, status_code=400, headers=HEADERS)
        return JSONResponse(found, headers=HEADERS)

    async def events(request: Request) -> Response:
        def version(name: str) -> tuple[int, ...]:
            return runs.reader(name).version()

        async def changes() -> AsyncIterator[str]:
            known: dict[str, Any] = {}
            yield ": open\n\n"
            while not stopping.is_set():
                for name in await asyncio.to_thread(runs.folders):
                    try:
                        now = await asyncio.to_thread(version, name)
                    except ConfigError:
                        continue
                    if known.setdefault(name, now) != now:
                        known[name] = now
                        yield f"data: {json.dumps({'run': name})}\n\n"
                if await request.is_disconnected():
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), LOOK_S)

        return StreamingResponse(changes(), media_type="text/event-stream", headers=HEADERS)

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in ("index.html", "style.css", *MODULES):
            return JSONResponse({"error": {"message": "not found"}}, status_code=404, headers=HEADERS)
        return Response((STATIC / name).read_bytes(), media_type=_TYPES[Path(name).suffix], headers=HEADERS)

    def number(request: Request) -> int:
        return int(request.path_params["number"])

    return Starlette(
        routes=[
            Route("/", file),
            Route("/static/{name}", file),
            Route("/api/runs", answer(lambda r: data.list_of_runs(runs))),
            Route("/api/runs/{run}", answer(lambda r: data.overview(reader(r)))),
            Route("/api/runs/{run}/facets", answer(lambda r: reader(r).facets())),
            Route("/api/runs/{run}/rollouts", answer(lambda r: data.rows(reader(r), dict(r.query_params)))),
            Route("/api/runs/{run}/rollouts/{number:int}", answer(lambda r: data.rollout(reader(r), number(r)))),
            Route("/api/runs/{run}/groups/{number:int}", answer(lambda r: data.group(reader(r), number(r)))),
            Route("/api/runs/{run}/texts", texts, methods=["POST"]),
            Route("/api/compare", answer(compared)),
            Route("/api/events", events),
        ]
    )


async def serve(
    runs: Runs,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    allowed_hosts: Sequence[str] = (),
    callers: Literal["user", "any"] = "user",
    ready: Callable[[str], None],
    parent_pid: int | None = None,
) -> None:
    """Serve until cancelled or ended by a signal. ``ready`` is called with the address.

    ``callers``: who may read: what runs on this machine as this user or root, or whoever reaches the port.
    Raises: ConfigError when the port is taken.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as e:
        listener.close()
        raise ConfigError(f"{host}:{port} cannot be listened on: {e}; choose another --port") from e
    stopping = asyncio.Event()
    bounds = Bounds(hosts=HostCheck((host, listener.getsockname()[0]), allowed_hosts))
    protocol: Any = functools.partial(BoundedProtocol, bounds=bounds)
    page: Any = app(runs, stopping)
    if callers == "user":
        page = ThisUserOnly(page, advice="`agentcore-rl view --callers any` shows its runs to whoever reaches it")
    config = uvicorn.Config(
        page,
        http=protocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)

    async def watch() -> None:
        while not server.started:  # noqa: ASYNC110  # uvicorn has a flag, no event
            await asyncio.sleep(0.005)
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{listener.getsockname()[1]}")
        while not server.should_exit:
            await asyncio.sleep(0.2)
            if parent_pid is not None:
                try:
                    os.kill(parent_pid, 0)
                except ProcessLookupError:
                    server.should_exit = True
        stopping.set()

    watching = asyncio.create_task(watch())
    try:
        await server.serve(sockets=[listener])
    finally:
        stopping.set()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        runs.close()
