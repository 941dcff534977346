"""Responses: errors in the shape that each dialect's clients read, and values as JSON, long ones piece by piece."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from ...errors import AgentCoreRLError, ConfigError, ContractError
from ...messages.errors import NOT_JSON, RequestError
from ...messages.wire import DIALECTS, error_body

log = logging.getLogger(__name__)

JSON = "application/json"
CALLS_TYPE = "application/vnd.agentcore-rl.calls"
# The headers of an engine's reply that reach the agent. The others are about the server's connection.
PASSED_HEADERS = (
    "x-request-id",
    "retry-after",
    "retry-after-ms",
    "openai-processing-ms",
    "cache-control",
)
_PASSING = frozenset({"overloaded", "upstream", "rate_limit"})
_FINAL = frozenset({"turn_limit", "permission"})
_to_json = msgspec.json.Encoder().encode
_T = TypeVar("_T")


def passed(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a server's reply that the agent gets."""
    return {name: headers[name] for name in PASSED_HEADERS if name in headers}


def error_response(dialect: str, error: RequestError, headers: Mapping[str, str] | None = None) -> web.Response:
    """Make an error in the shape that the dialect's clients read. Without ``headers``, a temporary error has a retry-after."""
    status, own = DIALECTS[dialect].error_head(error)
    own |= headers or {}
    if headers is None and (error.kind in _PASSING or error.status == 503):
        own["retry-after"] = "1"
    if error.kind in _FINAL:
        own["x-should-retry"] = "false"  # OpenAI's and Anthropic's clients honor it
    return web.Response(status=status, body=error_body(dialect, error), content_type=JSON, headers=own or None)


def decode_body(body: bytes, kind: type[_T]) -> _T:
    """Decode the JSON body of an administrative request. Raises: RequestError."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except NOT_JSON as e:
        raise RequestError(f"the request body does not have the required form: {e}") from e


async def respond(work: Awaitable[Any], http: web.BaseRequest, *, dialect: str = "chat") -> web.StreamResponse:
    """Answer with the result of `work`: a response, a value, its JSON, or the pieces of a long response."""
    try:
        value = await work
        if isinstance(value, AsyncGenerator):
            return await _stream(value, http)
        if isinstance(value, web.StreamResponse):
            return value
        return web.Response(body=value if isinstance(value, bytes) else _to_json(value), content_type=JSON)
    except RequestError as e:
        error = e
    except (ContractError, ConfigError, RecursionError) as e:
        error = RequestError(str(e))
    except (ConnectionError, asyncio.CancelledError):
        raise
    except BaseException as e:  # a panic in the tokenizer's Rust code is no `Exception`
        known = isinstance(e, AgentCoreRLError)
        log.error("%s failed: %s", http.raw_path, e, exc_info=None if known else e)
        why = str(e) if known else f"the gateway failed: {type(e).__name__}: {e}"
        error = RequestError(why, kind="internal")
    return error_response(dialect, error)


async def _stream(pieces: AsyncGenerator[bytes], http: web.BaseRequest) -> web.StreamResponse:
    """Write pieces one by one, with a pause for the agents' calls in between."""
    response = web.StreamResponse(headers={"content-type": JSON if http.method == "GET" else CALLS_TYPE})
    await response.prepare(http)
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                await response.write(piece)
                await asyncio.sleep(0)
    except Exception as e:  # a part was sent, so an error response is impossible
        known = isinstance(e, AgentCoreRLError | ConnectionError)
        log.error("%s ended early: %s", http.raw_path, e, exc_info=None if known else e)
        if http.transport is not None:
            http.transport.abort()
        raise ConnectionResetError("the response ended early") from e
    return response
