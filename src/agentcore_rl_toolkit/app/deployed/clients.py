"""Redirects the model calls of HTTP libraries when they are sent, so that clients made earlier, or before a fork, work too.

Each library has one function through which all its requests pass: after authorization and hooks in httpx and httpx2, before
the connection is chosen. That function is replaced. A request that is no model call of a rollout passes through unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, MutableMapping
from typing import Any

from .routes import SECRET_HEADERS, Target, find_target


@functools.cache
def install() -> None:
    """Replace the functions in the libraries that this environment has. A second call does nothing."""
    for name, patch in _LIBRARIES.items():
        with contextlib.suppress(ImportError):
            patch(importlib.import_module(name))


def _authorize(headers: MutableMapping[str, str], target: Target) -> None:
    for name in [name for name in headers if name.lower() in SECRET_HEADERS]:
        del headers[name]
    headers.update(target.headers)


def _patch_httpx(httpx: Any) -> None:
    def redirect(request: Any) -> None:
        def body() -> Any:
            with contextlib.suppress(httpx.RequestNotRead):
                return request.content

        target = find_target(request.method, str(request.url), body)
        if target is not None:
            request.url = httpx.URL(target.url)
            _authorize(request.headers, target)
            request.headers["Host"] = request.url.netloc.decode("ascii")

    send, send_async = httpx.Client._send_single_request, httpx.AsyncClient._send_single_request

    @functools.wraps(send)
    def patched(self: Any, request: Any) -> Any:
        redirect(request)
        return send(self, request)

    @functools.wraps(send_async)
    async def patched_async(self: Any, request: Any) -> Any:
        redirect(request)
        return await send_async(self, request)

    httpx.Client._send_single_request, httpx.AsyncClient._send_single_request = patched, patched_async


def _patch_aiohttp(aiohttp: Any) -> None:
    send = aiohttp.ClientSession._request

    @functools.wraps(send)
    async def patched(self: Any, method: str, address: Any, **options: Any) -> Any:
        def body() -> Any:
            return options["json"] if options.get("json") is not None else options.get("data")

        target = find_target(method, str(self._build_url(address)), body)
        if target is not None:
            headers = self._prepare_headers(options.get("headers"))
            hidden = {name: target.headers["Authorization"] for name in self.headers if name.lower() in SECRET_HEADERS}
            _authorize(headers, target)
            headers.popall("Host", None)
            # A session's own headers are added to those of each request, so they are written over.
            options |= {"headers": {**hidden, **headers}, "auth": None, "proxy": None}
            address = type(self._build_url(address))(target.url, encoded=True)
        return await send(self, method, address, **options)

    aiohttp.ClientSession._request = patched


def _patch_session(session: Any) -> None:
    """Patch botocore's or requests' session, whose `send` takes a prepared request."""
    send = session.send

    @functools.wraps(send)
    def patched(self: Any, request: Any, **options: Any) -> Any:
        target = find_target(request.method or "", request.url or "", lambda: request.body)
        if target is not None:
            request.url = target.url
            _authorize(request.headers, target)
            request.headers.pop("Host", None)
            options.pop("proxies", None)  # those of the other address
        return send(self, request, **options)

    session.send = patched


_LIBRARIES: dict[str, Callable[[Any], None]] = {
    "httpx": _patch_httpx,
    "httpx2": _patch_httpx,
    "aiohttp": _patch_aiohttp,
    "botocore.httpsession": lambda httpsession: _patch_session(httpsession.URLLib3Session),
    "requests": lambda requests: _patch_session(requests.Session),
}
