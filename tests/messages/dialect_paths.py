"""Which dialect a path is of."""

from __future__ import annotations

from agentcore_rl_toolkit.messages.dialects import DIALECTS, Dialect

_PATHS = {
    "/chat/completions": "chat",
    "/completions": "completions",
    "/responses": "responses",
    "/messages": "anthropic",
}


def dialect_of(path: str) -> Dialect | None:
    name = _PATHS.get(path.removeprefix("/v1").rstrip("/"))
    return DIALECTS[name] if name else None
