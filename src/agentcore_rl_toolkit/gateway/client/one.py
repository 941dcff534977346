"""One gateway: its routes, and its state as the client knows it. `client` chooses the gateway of a request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..._servers.keys import key_for
from ...errors import GatewayError
from ...messages.errors import NOT_JSON
from ..http.client import error_message, request, stream
from .captures import SessionCapture, read_captures

ADMIN_KEY_ENV = "AGENTCORE_RL_GATEWAY_ADMIN_KEY"
FETCH_AT_ONCE = 256  # sessions per request: bounds what one answer holds in memory on both sides
_SAMPLER_S = 600.0  # opening new weights at a sampling service takes longer than other requests


@dataclass(frozen=True, kw_only=True)
class SessionHandle:
    """A session for an agent: ``base_url`` for its OpenAI or Anthropic client, and the key that goes with it.

    ``gateway`` is the URL of the gateway that has the session, as the trainer sees it.
    """

    session_id: str
    base_url: str
    api_key: str = field(repr=False)
    gateway: str = ""


class OneGateway:
    """The routes that a trainer uses. ``timeout_s`` bounds each request, and each read of a bulk fetch.

    ``open`` are the sessions that this client opened there and has not ended; ``away_since_s`` is when it first did not answer,
    by the monotonic clock, None while it does; ``look_at_s`` is when to look again. ``undeleted`` are sessions to delete then.

    Raises: GatewayError (its ``status`` is the HTTP status, None when the gateway could not be reached in time).
    """

    def __init__(self, url: str, *, public_url: str, admin_key: str | None, timeout_s: float) -> None:
        self.url = url
        self.public_url = public_url
        self.timeout_s = timeout_s
        self._admin_key = admin_key
        self.open: set[str] = set()
        self.undeleted: set[str] = set()
        self.away_since_s: float | None = None
        self.look_at_s = 0.0

    @property
    def key(self) -> str | None:
        """Looked up for each request: a gateway that was started again has made another one."""
        return self._admin_key if self._admin_key is not None else key_for("gateway", self.url, ADMIN_KEY_ENV)

    async def call(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        status, data = await request(method, self.url + path, body=body, key=self.key, timeout_s=limit_s)
        return _checked(status, data, f"{method} {path}")

    # -- sessions

    async def create(self, session_ids: Sequence[str], settings: Mapping[str, Any]) -> list[SessionHandle]:
        answer = await self.call("POST", "/admin/sessions", {"session_ids": list(session_ids), "settings": settings})
        return [
            SessionHandle(
                session_id=s["session_id"],
                base_url=f"{self.public_url}/sessions/{s['session_id']}/v1",
                api_key=s["api_key"],
                gateway=self.url,
            )
            for s in answer["sessions"]
        ]

    async def fetch(self, session_ids: Sequence[str], *, close: bool) -> dict[str, SessionCapture]:
        found: dict[str, SessionCapture] = {}
        for at in range(0, len(session_ids), FETCH_AT_ONCE):
            async for capture in self.read(session_ids[at : at + FETCH_AT_ONCE], close=close):
                found[capture.session_id] = capture
        return found

    async def read(self, session_ids: Sequence[str], *, close: bool) -> AsyncIterator[SessionCapture]:
        """Sessions one by one, as they come in the answer to one request."""
        body = {"session_ids": list(session_ids), "close": close}
        answer = stream("POST", self.url + "/admin/fetch", body=body, key=self.key, timeout_s=self.timeout_s)
        async for capture in read_captures(answer):
            yield capture

    async def delete(self, session_ids: Sequence[str]) -> int:
        return int((await self.call("POST", "/admin/delete", {"session_ids": list(session_ids)}))["deleted"])

    # -- weights

    async def publish(self, version: int, sampler: str | None) -> None:
        body = {"weight_version": version} | ({} if sampler is None else {"sampler": sampler})
        limit_s = self.timeout_s if sampler is None else _SAMPLER_S
        await self.call("POST", "/admin/weight_version", body, timeout_s=limit_s)

    async def pause(self, in_flight: str, timeout_s: float) -> dict[str, Any]:
        body = {"in_flight": in_flight, "timeout_s": timeout_s}
        return dict(await self.call("POST", "/admin/pause", body, timeout_s=timeout_s + self.timeout_s))

    async def resume(self) -> None:
        await self.call("POST", "/admin/resume", {})


def _checked(status: int, data: bytes, what: str) -> Any:
    if status >= 400:
        raise GatewayError(f"{what}: {error_message(data)}", status=status)
    try:
        return msgspec.json.decode(data)
    except NOT_JSON as e:
        raise GatewayError(f"{what}: the answer is not JSON ({e}); is this a gateway?", status=status) from e
