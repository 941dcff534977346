"""Redirects the model calls of HTTP libraries when they are sent, so that clients made earlier, or before a fork, work too.

Each library has one function through which all its requests pass, after authorization and hooks and before a connection is
chosen. That function is replaced. A request that is no model call of a rollout passes through unchanged. The gateway is reached
without the agent's proxies.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from .routes import SECRET_HEADERS, Target, carried, find_target


@functools.cache
def install() -> None:
    """Replace the functions in the libraries that this environment has. A second call does nothing."""
    for name, patch in _LIBRARIES.items():
        with contextlib.suppress(ImportError):
            patch(importlib.import_module(name))


def _authorize(headers: MutableMapping[str, str], target: Target) -> None:
    for name in {name.lower() for name in headers} & SECRET_HEADERS:
        del headers[name]
    headers.update(target.headers)


def _patch_httpx(httpx: Any) -> None:
    class Direct(httpx.URL):  # type: ignore[misc]
        """An address that is reached without the client's proxies."""

    def redirect(request: Any) -> None:
        def body() -> Any:
            with contextlib.suppress(httpx.RequestNotRead):
                return request.content

        target = find_target(request.method, str(request.url), body)
        if target is not None:
            request.url = Direct(target.url)
            _authorize(request.headers, target)
            request.headers["Host"] = request.url.netloc.decode("ascii")

    def without_proxies(client: Any, transport: Any) -> Any:
        choose = client._transport_for_url

        @functools.wraps(choose)
        def patched(self: Any, url: Any) -> Any:
            if not isinstance(url, Direct):
                return choose(self, url)
            if "Proxy" not in type(getattr(self._transport, "_pool", None)).__name__:
                return self._transport
            if not hasattr(self, "_agentcore_rl_direct"):
                self._agentcore_rl_direct = transport(trust_env=False)
                # The client closes it with its mounts.
                self._mounts[httpx._utils.URLPattern("all://gateway.invalid")] = self._agentcore_rl_direct
            return self._agentcore_rl_direct

        return patched

    httpx.Client._transport_for_url = without_proxies(httpx.Client, httpx.HTTPTransport)
    httpx.AsyncClient._transport_for_url = without_proxies(httpx.AsyncClient, httpx.AsyncHTTPTransport)
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
    connect = aiohttp.BaseConnector.connect

    @functools.wraps(connect)
    async def patched(self: Any, req: Any, *args: Any, **options: Any) -> Any:
        # `connect` itself sends the request of a connection to a proxy, so that request does not arrive here.
        target = find_target(req.method, str(req.url), lambda: getattr(req.body, "_value", None))
        if target is not None:
            req.url = req.original_url = type(req.url)(target.url, encoded=True)
            _authorize(req.headers, target)
            req.headers["Host"] = urlsplit(target.url).netloc
            req.proxy = req.proxy_auth = req.proxy_headers = req.server_hostname = None
        return await connect(self, req, *args, **options)

    aiohttp.BaseConnector.connect = patched


def _patch_session(session: Any, address: Callable[[str], str] = str, **given: Any) -> None:
    """Patch botocore's or requests' session, whose `send` takes a prepared request, and is ``given`` options."""
    send = session.send

    @functools.wraps(send)
    def patched(self: Any, request: Any, **options: Any) -> Any:
        target = find_target(request.method or "", request.url or "", lambda: request.body)
        if target is not None:
            request.url = address(target.url)
            _authorize(request.headers, target)
            request.headers.pop("Host", None)
            options |= given
        return send(self, request, **options)

    session.send = patched


def _patch_botocore(httpsession: Any) -> None:
    class Direct(str):
        """An address that is reached without the client's proxies."""

    proxy_for = httpsession.ProxyConfiguration.proxy_url_for

    @functools.wraps(proxy_for)
    def patched(self: Any, url: str) -> Any:
        return None if isinstance(url, Direct) else proxy_for(self, url)

    httpsession.ProxyConfiguration.proxy_url_for = patched
    _patch_session(httpsession.URLLib3Session, Direct)


def _patch_threads(threads: Any) -> None:
    """Let a pool's threads, which outlive rollouts, know to which one each piece of work belongs."""
    submit = threads.ThreadPoolExecutor.submit

    @functools.wraps(submit)
    def patched(self: Any, fn: Any, /, *args: Any, **options: Any) -> Any:
        return submit(self, carried(fn), *args, **options)

    threads.ThreadPoolExecutor.submit = patched


_LIBRARIES: dict[str, Callable[[Any], None]] = {
    "httpx": _patch_httpx,
    "httpx2": _patch_httpx,
    "aiohttp": _patch_aiohttp,
    "botocore.httpsession": _patch_botocore,
    "requests": lambda requests: _patch_session(requests.Session, proxies={}),
    "concurrent.futures.thread": _patch_threads,
}
