"""Programs that are led to the gateway by their environment: the variables that clients read, and the calls that arrive."""

from __future__ import annotations

import os
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from ..relay import refusal
from .forwarding import forward
from .routes import current_route

# Wires by the first part of a path, and the provider whose calls they carry.
PROVIDERS = {
    "bedrock": "https://bedrock-runtime.us-east-1.amazonaws.com",
    "v1": "https://api.openai.com/v1",
    "anthropic": "https://api.anthropic.com",
    "gemini": "https://generativelanguage.googleapis.com",
}
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
WIRES = tuple(_VARIABLES)


def variables(address: str, wires: tuple[str, ...] = WIRES) -> dict[str, str]:
    """Return the variables that lead clients of these wires to an address. Values of the process win over placeholders."""
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")  # most clients prefer the first
    found = dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, (direct, "127.0.0.1,localhost"))))
    for wire in wires:
        for name, value in _VARIABLES[wire].items():
            found[name] = address + value if value.startswith("/") else os.environ.get(name) or value
    return found


async def answer(request: Request, path: str) -> Response:
    """Answer a model call of a program, below an address of a `Relay`: it is passed on along the route of the rollout."""
    wire, _, rest = path.partition("/")
    if wire not in PROVIDERS:
        return refusal(404, "this address does not exist: the address of the relay has a random part")
    route, body = current_route(), await request.body()  # a slow body stays with its rollout
    if route is None:
        return refusal(503, "no rollout has begun: only rollouts may call the model")
    if route.ended:
        return refusal(410, "the rollout has ended: only rollouts may call the model")
    query = request.scope["query_string"].decode("latin-1")
    url = f"{PROVIDERS[wire]}/{rest}" + (f"?{query}" if query else "")
    headers = request.headers.mutablecopy()
    new = route.redirect(request.method, url, headers, lambda: body)
    if new is None:
        return refusal(404, f"{wire}/{rest} is not a chat call to the policy; the relay passes no other calls")
    return await forward(request, new, headers.raw, "the gateway cannot be reached")
