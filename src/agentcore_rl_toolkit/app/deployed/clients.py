"""Redirects the model calls of HTTP libraries when they are sent, so that clients made earlier, or before a fork, work too.

Each library has one function through which all its requests pass, after authorization and hooks and before a connection is
chosen. That function is replaced. A request that is no model call of a rollout passes through unchanged. The gateway is reached
without the agent's proxies.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import ssl
from typing import Any

from .routes import Body, current_route

trust = functools.cache(ssl.create_default_context)  # reading the certificates takes some milliseconds


@functools.cache
def install() -> None:
    """Replace the functions in the libraries that this environment has. A second call does nothing."""
    patches = {"httpx": _patch_httpx, "httpx2": _patch_httpx, "aiohttp": _patch_aiohttp, "requests": _patch_requests}
    for name, patch in {**patches, "botocore.httpsession": _patch_botocore}.items():
        with contextlib.suppress(ImportError):
            patch(importlib.import_module(name))


def _gateway(request: Any, body: Body) -> str | None:
    """Return the new address of a request, whose headers are changed too. None for a request that is left alone."""
    route, url = current_route(), str(request.url or "")
    return None if route is None else route.redirect(request.method or "", url, request.headers, body)


def _patch_httpx(httpx: Any) -> None:
    for kind in (httpx.Client, httpx.AsyncClient):

        def patched(self: Any, request: Any, kind: Any = kind, send: Any = kind._send_single_request) -> Any:
            def body() -> Any:
                with contextlib.suppress(httpx.RequestNotRead):
                    return request.content

            url = _gateway(request, body)
            if url is not None:
                request.url = httpx.URL(url)
                self = kind(trust_env=False, verify=trust(), limits=httpx.Limits(max_keepalive_connections=0))
            return send(self, request)

        kind._send_single_request = patched


def _patch_aiohttp(aiohttp: Any) -> None:
    connect = aiohttp.BaseConnector.connect

    async def patched(self: Any, req: Any, *args: Any, **options: Any) -> Any:
        # `connect` itself sends the request of a connection to a proxy, so that request does not arrive here.
        url = _gateway(req, lambda: getattr(req.body, "_value", None))
        if url is not None:
            req.url = req.original_url = type(req.url)(url, encoded=True)
            req.proxy = req.proxy_auth = req.proxy_headers = req.server_hostname = None
        return await connect(self, req, *args, **options)

    aiohttp.BaseConnector.connect = patched


def _patch_botocore(httpsession: Any) -> None:
    send = httpsession.URLLib3Session.send

    def patched(self: Any, request: Any) -> Any:
        url = _gateway(request, lambda: request.body)
        if url is not None:
            request.url, self = url, copy.copy(self)
            self._proxy_config = httpsession.ProxyConfiguration()
        return send(self, request)

    httpsession.URLLib3Session.send = patched


def _patch_requests(requests: Any) -> None:
    send = requests.Session.send

    def patched(self: Any, request: Any, **options: Any) -> Any:
        url = _gateway(request, lambda: request.body)
        if url is not None:
            request.url, options["proxies"] = url, {}
        return send(self, request, **options)

    requests.Session.send = patched
