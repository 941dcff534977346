"""Asks a model over HTTP, by OpenAI's chat API: a judge, a model that proposes texts, or a teacher."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from typing import Any, TypeVar

from ..errors import GatewayError, UpstreamError
from ..store import backoff_s

T = TypeVar("T")
TRIES, FIRST_PAUSE_S = 4, 2.0  # up to 14 s in all: endpoints limit requests
TOKENS = ("prompt_tokens", "completion_tokens")
_PASSING = (None, 408, 409, 425, 429)  # these and 500 and above are retried


async def ask(
    url: str,
    body: Mapping[str, Any],
    *,
    key: str | None,
    timeout_s: float,
    usage: dict[str, float],
    read: Callable[[str], T],
) -> T:
    """Send a request and return the result of ``read``, which raises UpstreamError to have the request sent again.

    ``url`` is as https://host/v1. ``usage`` counts ``calls``, ``prompt_tokens`` and ``completion_tokens`` as the endpoint reports
    them.
    Raises: UpstreamError after the last attempt.
    """

    def call() -> Awaitable[bytes]:
        usage["calls"] = usage.get("calls", 0) + 1
        return reply(f"{url.rstrip('/')}/chat/completions", body, key=key, timeout_s=timeout_s)

    return await tried(call, lambda data: read(_text(data, usage)))


async def tried(call: Callable[[], Awaitable[bytes]], read: Callable[[bytes], T]) -> T:
    """Return the result of ``read`` for a reply, after repeated requests if necessary. Raises: UpstreamError."""
    for attempt in count(1):
        try:
            return read(await call())
        except UpstreamError as e:
            if attempt == TRIES or not (e.status in _PASSING or e.status >= 500):
                raise
            await asyncio.sleep(backoff_s(attempt, first_s=FIRST_PAUSE_S, most_s=20.0))
    raise AssertionError


async def reply(url: str, body: Mapping[str, Any] | None, *, key: str | None, timeout_s: float) -> bytes:
    """Return one reply. A body is sent as JSON. Raises: UpstreamError, also on a status other than 200."""
    from ..gateway.http.client import error_message, request

    try:
        method = "GET" if body is None else "POST"
        status, data = await request(method, url, body=body, key=key, timeout_s=timeout_s)
    except GatewayError as e:
        raise UpstreamError(str(e)) from e
    if status != 200:
        said = error_message(data)
        raise UpstreamError(f"status {status}: {said.replace(key, '***') if key else said}", status=status)
    return data


def _text(data: bytes, usage: dict[str, float]) -> str:
    """Return the text of a chat completion, and add its tokens to ``usage``. Raises: UpstreamError."""
    try:
        answer = json.loads(data)
        text = str(answer["choices"][0]["message"]["content"] or "")
    except (ValueError, LookupError, TypeError) as e:
        raise UpstreamError(f"the reply is not a chat completion: {data[:200].decode('utf-8', 'replace')}") from e
    counted = answer.get("usage") or {}  # some endpoints do not count tokens
    for name in TOKENS:
        if isinstance(counted.get(name), int):
            usage[name] = usage.get(name, 0) + counted[name]
    return text
