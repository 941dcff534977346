"""Answers what runs on this machine as this user or root, and refuses everybody else: for servers whose clients have no key."""

from __future__ import annotations

import json
from typing import Any

from .callers import stranger


class ThisUserOnly:
    """An ASGI application behind the question whose connection it is. ``advice``: what another caller's user can do.

    It sees no sessions: what runs as this user passes, confined or not.
    """

    def __init__(self, app: Any, *, advice: str) -> None:
        self._app, self._advice = app, advice

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        reason = stranger(scope["client"], scope["server"]) if scope["type"] == "http" else None
        if reason is None:
            await self._app(scope, receive, send)
            return
        body = json.dumps({"error": {"message": f"this server is not open to {reason}: {self._advice}"}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": body})
