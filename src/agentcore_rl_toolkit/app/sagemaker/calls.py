"""Answers the model calls of a job's agents: they are handed to the job runtime."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..._installation import require
from ...errors import MissingExtraError
from ..relay import refusal
from .runtime import JobCallError, JobRuntime

if TYPE_CHECKING:
    from .translation import TranslatedCall

_CHAT = "chat/completions"
# The start of a path. Agents with several roles put a tag in it; Google's clients have their own version.
_START = re.compile(r"^(?:v1/)?(?:tag/[^/]+/)?(?:v1/(?=messages))?")
_PIECE = 64 * 2**10


async def answer(runtime: JobRuntime, request: Request, path: str) -> Response:
    """Answer a call of the rollout that the runtime samples for."""
    path = _START.sub("", path)  # a model's id may have %2F
    return await run_in_threadpool(_answer, runtime, path, await request.body())


def _answer(runtime: JobRuntime, path: str, body: bytes) -> Response:
    call: TranslatedCall | None = None
    try:
        call = None if path == _CHAT else _translated(path.encode("latin-1"))
        chat: dict[str, Any] = json.loads(body) if call is None else call.read(body)
        runtime.job.settle(chat)
        stream = chat.get("stream") is True
        reply = runtime.sample(json.dumps(chat).encode(), stream=stream)
    except JobCallError as e:
        if call is None:
            return refusal(e.status, str(e))
        return Response(*call.failure(e), media_type="application/json")
    except MissingExtraError as e:
        return refusal(501, str(e))
    except (ValueError, TypeError, AttributeError) as e:
        return refusal(400, f"the request cannot be read: {e}")
    if call is not None:
        return Response(call.answer(reply), media_type=call.media_type)
    if stream:
        return StreamingResponse(_pieces(reply), media_type="text/event-stream")
    return Response(reply, media_type="application/json")


def _translated(path: bytes) -> TranslatedCall:
    require("msgspec", extra="sagemaker")
    from . import translation  # only these agents need its imports

    return translation.TranslatedCall(path)


def _pieces(reply: Any) -> Iterator[bytes]:
    """Yield the bytes of a streamed reply as they arrive. The connection closes with the generator."""
    with reply as raw:
        yield from raw.stream(_PIECE)
