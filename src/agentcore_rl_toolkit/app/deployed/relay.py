"""A relay on the loopback address: the model calls of programs that are led to it by their environment reach the gateway.

The address has a random part, which authorizes a call. Clients that sign for AWS sign with the agent's own credentials, which
must stay what they are for other services, so no signature is checked. Bodies and replies are passed on as they come.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..loopback import serve
from .forwarding import Forwarded
from .routes import SECRET_HEADERS, running_routes

# Wires by the first part of the path, and the provider whose calls they carry.
PROVIDERS = {
    "bedrock": "https://bedrock-runtime.us-east-1.amazonaws.com",
    "v1": "https://api.openai.com/v1",
    "anthropic": "https://api.anthropic.com",
    "gemini": "https://generativelanguage.googleapis.com",
}
WIRES = ("bedrock", "openai", "anthropic", "gemini")
# The variables that clients read, by wire. A value without a slash is a placeholder for a key, which is set only where none is.
_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "bedrock": {
        "AWS_ENDPOINT_URL_BEDROCK_RUNTIME": "/bedrock",
        "ANTHROPIC_BEDROCK_BASE_URL": "/bedrock",
        "AWS_BEDROCK_RUNTIME_ENDPOINT": "/bedrock",
        "AWS_REGION": "us-west-2",
        "AWS_DEFAULT_REGION": "us-west-2",
    },
    "openai": {"OPENAI_BASE_URL": "/v1", "OPENAI_API_BASE": "/v1", "OPENAI_API_KEY": "placeholder"},
    "anthropic": {"ANTHROPIC_BASE_URL": "/anthropic", "ANTHROPIC_API_KEY": "placeholder"},
    "gemini": {"GOOGLE_GEMINI_BASE_URL": "/gemini", "GEMINI_API_KEY": "placeholder"},
}


class Relay:
    """A server on a free port of the loopback address. ``address`` is what clients are given."""

    add_rollouts = False

    def __init__(self) -> None:
        self._token = secrets.token_urlsafe(24)
        self._served = False
        self.port, self._server = serve(self, "model-call-relay")

    @property
    def address(self) -> str:
        """The relay's address, without the part of a wire."""
        return f"http://127.0.0.1:{self.port}/{self._token}"

    def variables(self, wires: tuple[str, ...] = WIRES) -> dict[str, str]:
        """The variables that lead clients of these wires here. Those of the process win over placeholders."""
        found = {"NO_PROXY": ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))}
        for wire in wires:
            for name, value in _VARIABLES[wire].items():
                found[name] = self.address + value if value.startswith("/") else os.environ.get(name) or value
        return found

    def close(self) -> None:
        """End the server."""
        self._server.should_exit = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        response = await self._respond(request)
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        own = (f"127.0.0.1:{self.port}", f"localhost:{self.port}")
        if request.headers.get("host") not in own or "origin" in request.headers:
            return _refusal(403, "this server is for the agent's own process")
        path = request.scope.get("raw_path", request.url.path.encode()).decode("latin-1")
        _, token, wire, rest = (*path.split("/", 3), "", "", "")[:4]
        if not hmac.compare_digest(token.encode(), self._token.encode()) or wire not in PROVIDERS:
            return _refusal(404, "there is nothing here")
        routes = running_routes()
        if len(routes) != 1:
            if len(routes) > 1:
                return _refusal(503, f"{len(routes)} rollouts run in this process, and the relay serves one at a time")
            return _refusal(410, "the rollout is over") if self._served else _refusal(503, "no rollout has begun")
        self._served = True
        body = await request.body()
        query = request.scope.get("query_string", b"").decode("latin-1")
        url = f"{PROVIDERS[wire]}/{rest}" + (f"?{query}" if query else "")
        target = routes[0].target(request.method, url, lambda: body)
        if target is None:
            what = f"{urlsplit(url).hostname}/{rest}"
            return _refusal(404, f"{what} is no chat of the policy; the relay carries no other calls")
        kept = [(k, v) for k, v in request.headers.raw if k.decode("latin-1") not in SECRET_HEADERS]
        headers = [*kept, *((k.encode("latin-1"), v.encode("latin-1")) for k, v in target.headers.items())]
        return Forwarded(request.method, target.url, headers, body, "the gateway cannot be reached")


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "relay"}, "message": message}, status)
