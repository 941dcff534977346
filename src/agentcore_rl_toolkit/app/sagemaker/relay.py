"""The address that a job's agents call: a server on the session's loopback, which hands their model calls to the job runtime."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..._installation import require
from ...errors import MissingExtraError
from ..loopback import serve
from .runtime import JobCallError, JobRuntime

if TYPE_CHECKING:
    from .translation import TranslatedCall

_CHAT = b"chat/completions"
# The start of a path. Agents with several roles put a tag in it; Google's clients have their own version.
_START = re.compile(rb"/(?:v1/)?(?:tag/[^/]+/)?(?:v1/(?=messages))?")
_KEYS = ("x-api-key", "x-goog-api-key")
_SIGNED = "AWS4-HMAC-SHA256 Credential="  # of AWS's clients, which have the key as their access key id
_PIECE = 64 * 2**10


class Relay:
    """A server on a free port of the loopback, in a thread of its own. Each rollout has a key of its own."""

    def __init__(self) -> None:
        self._rollouts: dict[str, JobRuntime] = {}
        app = Starlette(routes=[Route("/{path:path}", self._call, methods=["POST"])])
        port, _ = serve(app, "sagemaker-relay")
        self.base_url = f"http://127.0.0.1:{port}/v1"

    def open(self, runtime: JobRuntime) -> str:
        """Take calls for a rollout; the key of its agent."""
        key = secrets.token_urlsafe(24)
        self._rollouts[key] = runtime
        return key

    def close(self, key: str) -> None:
        """Take no more calls with this key."""
        del self._rollouts[key]

    async def _call(self, request: Request) -> Response:
        path = _START.sub(b"", request.scope["raw_path"], count=1)  # a model's id may have %2F
        authorization = request.headers.get("authorization", "")
        bearer = authorization.removeprefix("Bearer ").removeprefix(_SIGNED).partition("/")[0]
        segments = path.split(b"/")
        in_path = segments[1].decode("latin-1") if segments[0] == b"bedrock" and len(segments) > 1 else ""
        shown = (bearer, in_path, *(request.headers.get(name, "") for name in _KEYS))
        runtime = next((self._rollouts[key] for key in shown if key in self._rollouts), None)
        if runtime is None:
            return _error("this key belongs to no rollout that runs", 401)
        query = request.scope["query_string"]
        return await run_in_threadpool(_answer, runtime, path, query, await request.body())


def _answer(runtime: JobRuntime, path: bytes, query: bytes, body: bytes) -> Response:
    call: TranslatedCall | None = None
    try:
        call = None if path == _CHAT else _translated(path, query)
        chat: dict[str, Any] = json.loads(body) if call is None else call.read(body)
        runtime.job.settle(chat)
        stream = chat.get("stream") is True
        reply = runtime.sample(json.dumps(chat).encode(), stream=stream)
    except JobCallError as e:
        if call is None:
            return _error(str(e), e.status)
        return Response(*call.failure(e), media_type="application/json")
    except MissingExtraError as e:
        return _error(str(e), 501)
    except (ValueError, TypeError, AttributeError) as e:
        return _error(f"the request cannot be read: {e}", 400)
    if call is not None:
        return Response(call.answer(reply), media_type=call.media_type)
    if stream:
        return StreamingResponse(_pieces(reply), media_type="text/event-stream")
    return Response(reply, media_type="application/json")


def _translated(path: bytes, query: bytes) -> TranslatedCall:
    require("msgspec", extra="sagemaker")
    from . import translation  # only these agents pay for what it loads

    return translation.TranslatedCall(path, query)


def _pieces(reply: Any) -> Iterator[bytes]:
    """The bytes of a streamed reply as they come; its connection closes with the reader."""
    with reply as raw:
        yield from raw.stream(_PIECE)


def _error(message: str, status: int) -> Response:
    """An error in a form that OpenAI's and Anthropic's clients both read."""
    error = {"type": "invalid_request_error" if status < 500 else "api_error", "message": message}
    return JSONResponse({"type": "error", "error": error}, status)
