"""Small requests by httpx: one connection each, whole or streamed answers. ``timeout_s`` bounds the wait for each step."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import ConfigError, GatewayError
from ...messages.errors import NOT_JSON

if TYPE_CHECKING:
    import httpx


async def request(
    method: str, url: str, *, body: Any = None, key: str | None = None, timeout_s: float = 30.0
) -> tuple[int, bytes]:
    """Return status and body. Raises: GatewayError when the gateway cannot be reached or does not answer in time."""
    async with _exchange(method, url, body, key, timeout_s) as answer:
        return answer.status_code, await answer.aread()


async def stream(
    method: str, url: str, *, body: Any = None, key: str | None = None, timeout_s: float = 30.0
) -> AsyncGenerator[bytes, None]:
    """Yield the body piece by piece. Raises: GatewayError, also on a status of 400 and above."""
    async with _exchange(method, url, body, key, timeout_s) as answer:
        if answer.status_code >= 400:
            why = error_message(await answer.aread())
            raise GatewayError(f"{method} {url}: {why}", status=answer.status_code)
        async for piece in answer.aiter_bytes():
            yield piece


def error_message(data: bytes) -> str:
    """Return the message in an error's body."""
    try:
        return str(msgspec.json.decode(data)["error"]["message"])
    except (*NOT_JSON, KeyError, TypeError):
        return data[:300].decode("utf-8", "replace")


@contextlib.asynccontextmanager
async def _exchange(
    method: str, url: str, body: Any, key: str | None, timeout_s: float
) -> AsyncIterator[httpx.Response]:
    """Send a request; the caller reads the body of the response. Raises: GatewayError, ConfigError."""
    import httpx  # here: it takes a tenth of a second

    headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    data = None if body is None else msgspec.json.encode(body)
    verify: Any = ssl.create_default_context() if url.startswith("https:") else False
    try:
        async with (
            httpx.AsyncClient(verify=verify, trust_env=False, timeout=timeout_s) as client,
            client.stream(method, url, content=data, headers=headers) as answer,
        ):
            yield answer
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as e:
        raise ConfigError(f"{url!r} is not an http(s) URL") from e
    except httpx.TimeoutException as e:
        raise GatewayError(f"{method} {url}: no answer within {timeout_s} s") from e
    except httpx.HTTPError as e:
        raise GatewayError(f"{method} {url}: there is no answer, or it ended early: {str(e) or repr(e)}") from e
