"""The address that a job's agents call: a server on the session's loopback, which hands their model calls to the job runtime."""

from __future__ import annotations

import json
import re
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..._installation import require
from ...errors import MissingExtraError
from .runtime import JobCallError, JobRuntime

if TYPE_CHECKING:
    from .translation import TranslatedCall

# The paths of agents' clients, and the dialect of each. Agents with several roles put a tag in front.
_DIALECTS = {"chat/completions": "chat", "messages": "anthropic", "responses": "responses"}
_TAG = re.compile(r"tag/[^/]+/")
_PIECE = 64 * 2**10


class Relay:
    """A server on a free port of the loopback, in a thread of its own. Each rollout has a key of its own."""

    def __init__(self) -> None:
        self._rollouts: dict[str, JobRuntime] = {}
        listener = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        app = Starlette(routes=[Route("/v1/{path:path}", self._call, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="sagemaker-relay", daemon=True).start()

    def open(self, runtime: JobRuntime) -> str:
        """Take calls for a rollout; the key of its agent."""
        key = secrets.token_urlsafe(24)
        self._rollouts[key] = runtime
        return key

    def close(self, key: str) -> None:
        """Take no more calls with this key."""
        del self._rollouts[key]

    async def _call(self, request: Request) -> Response:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        runtime = self._rollouts.get(request.headers.get("x-api-key") or bearer)
        if runtime is None:
            return _error("this key belongs to no rollout that runs", 401)
        path = _TAG.sub("", request.path_params["path"], count=1)
        if path not in _DIALECTS:
            return _error(f"a multi-turn RL job has no {request.url.path}", 404)
        return await run_in_threadpool(_answer, runtime, _DIALECTS[path], await request.body())


def _answer(runtime: JobRuntime, dialect: str, body: bytes) -> Response:
    try:
        call = None if dialect == "chat" else _translated(dialect, body)
        chat: dict[str, Any] = json.loads(body) if call is None else call.chat
        runtime.job.settle(chat)
        stream = chat.get("stream") is True
        reply = runtime.sample(json.dumps(chat).encode(), stream=stream)
    except JobCallError as e:
        return _error(str(e), e.status)
    except MissingExtraError as e:
        return _error(str(e), 501)
    except (ValueError, TypeError, AttributeError) as e:
        return _error(f"the request cannot be read: {e}", 400)
    if call is not None:
        return Response(call.answer(reply), media_type=call.media_type)
    if stream:
        return StreamingResponse(_pieces(reply), media_type="text/event-stream")
    return Response(reply, media_type="application/json")


def _translated(dialect: str, body: bytes) -> TranslatedCall:
    require("msgspec", extra="sagemaker")
    from . import translation  # only these agents pay for what it loads

    return translation.TranslatedCall(dialect, body)


def _pieces(reply: Any) -> Iterator[bytes]:
    """The bytes of a streamed reply as they come; its connection closes with the reader."""
    with reply as raw:
        yield from raw.stream(_PIECE)


def _error(message: str, status: int) -> Response:
    """An error in a form that OpenAI's and Anthropic's clients both read."""
    error = {"type": "invalid_request_error" if status < 500 else "api_error", "message": message}
    return JSONResponse({"type": "error", "error": error}, status)
