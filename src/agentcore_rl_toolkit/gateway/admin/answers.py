"""Answers administrative requests: values as JSON, and long answers piece by piece."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from ...errors import AgentCoreRLError, ConfigError, ContractError
from ...messages.errors import RequestError
from ..http.messages import JSON, Request, error_response

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Any]]  # returns what `respond` answers with
CALLS_TYPE = "application/vnd.agentcore-rl.calls"
_to_json = msgspec.json.Encoder().encode


async def respond(work: Awaitable[Any], http: web.BaseRequest, *, dialect: str = "chat") -> web.StreamResponse:
    """Answer with what `work` returns: a response, a value, its JSON, or pieces of a long answer."""
    try:
        value = await work
        if isinstance(value, AsyncIterator):
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


async def _stream(pieces: AsyncIterator[bytes], http: web.BaseRequest) -> web.StreamResponse:
    """Write pieces one by one, with a pause for the agents' calls in between."""
    response = web.StreamResponse(headers={"content-type": JSON if http.method == "GET" else CALLS_TYPE})
    await response.prepare(http)
    try:
        async for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
    except Exception as e:  # in the middle of an answer no other answer is possible
        known = isinstance(e, AgentCoreRLError | ConnectionError)
        log.error("%s broke off: %s", http.raw_path, e, exc_info=None if known else e)
        if http.transport is not None:
            http.transport.abort()
        raise ConnectionResetError("the answer broke off") from e
    return response
