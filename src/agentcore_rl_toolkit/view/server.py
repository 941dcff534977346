"""The server of the page. It only reads, and answers only requests with its name and its key.

The key is in the printed address. The first request with it gets a cookie, which the page's own requests bring.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from .._servers.host_check import CheckedApp, HostCheck
from .._servers.process import listen, parent_gone, url_of
from ..errors import ConfigError
from ..runs import RunReader
from . import data
from .data import Runs, query_of
from .export import STATIC

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def app(runs: Runs, hosts: HostCheck, key: str) -> Starlette:
    """Return the routes, which need ``key``. Starlette calls their functions on threads."""

    def answer(make: Callable[[Request], Any]) -> Callable[[Request], Any]:
        return lambda request: Response(data.as_json(make(request)), media_type="application/json")

    def of_run(make: Callable[[RunReader, Request], Any]) -> Callable[[Request], Any]:
        def read(request: Request) -> Any:
            with RunReader(runs.folder(request.path_params["run"])) as run:
                return make(run, request)

        return answer(read)

    async def refused(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": {"message": str(error)}}, status_code=404)

    async def guard(request: Request, call_next: RequestResponseEndpoint) -> Response:
        cookie = f"agentcore-rl-view-{request.url.port}"  # a browser sends it to every port of the host
        given = request.query_params.get("key", "")
        if any(hmac.compare_digest(k.encode(), key.encode()) for k in (given, request.cookies.get(cookie, ""))):
            response = await call_next(request)
        else:
            message = "open the address that `agentcore-rl view` printed, with its key"
            response = JSONResponse({"error": {"message": message}}, status_code=401)
        if given == key:
            response.set_cookie(cookie, key, httponly=True, samesite="strict")
        response.headers.update(HEADERS)
        return response

    return Starlette(
        routes=[
            Route("/", lambda _: FileResponse(STATIC / "index.html")),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/api/runs", answer(lambda r: runs.heads())),
            Route("/api/runs/{run}", answer(lambda r: runs.overview(r.path_params["run"]))),
            Route("/api/runs/{run}/inputs", of_run(lambda run, r: data.inputs(run, query_of(r.query_params)))),
            Route("/api/runs/{run}/evaluation", of_run(lambda run, r: data.evaluation(run, query_of(r.query_params)))),
            Route("/api/runs/{run}/facets", of_run(lambda run, r: data.facets(run.steps()))),
            Route("/api/runs/{run}/rollouts", of_run(lambda run, r: data.rows(run, r.query_params))),
            Route("/api/runs/{run}/rollouts/{n:int}", of_run(lambda run, r: data.rollout(run, r.path_params["n"]))),
            Route("/api/runs/{run}/groups/{n:int}", of_run(lambda run, r: data.group(run, r.path_params["n"]))),
            Route("/api/change", answer(lambda r: runs.change(r.query_params))),
            Route("/api/version", answer(lambda r: runs.version(r.query_params.get("run", "")))),
        ],
        exception_handlers={ConfigError: refused, msgspec.ValidationError: refused},
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard), Middleware(CheckedApp, hosts)],
    )


async def serve(
    runs: Runs,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    allowed_hosts: Sequence[str] = (),
    ready: Callable[[str], None],
    parent_pid: int | None = None,
) -> None:
    """Serve until cancelled or ended by a signal. ``ready`` is called with the address and its key.

    Raises: ConfigError when the port is taken.
    """
    listener = listen(host, port)
    key = secrets.token_urlsafe(16)
    hosts = HostCheck((host, listener.getsockname()[0]), allowed_hosts)
    page = app(runs, hosts, key)
    options: dict[str, Any] = {"lifespan": "off", "log_level": "warning", "access_log": False}
    server = uvicorn.Server(uvicorn.Config(page, http="h11", timeout_graceful_shutdown=2, **options))

    ready(f"{url_of(listener)}/?key={key}")
    ended = asyncio.create_task(parent_gone(parent_pid) if parent_pid is not None else asyncio.Event().wait())
    ended.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        await server.serve(sockets=[listener])
    finally:
        ended.cancel()
