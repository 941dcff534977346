"""An agent's own ASGI app that also takes rollouts: each is one call of its `/invocations`, whose answer is stored.

The agent runs as in production, on the server's event loop. Rollouts, with heartbeats and records, are on another loop, so
an agent that blocks its loop delays no heartbeat.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

from bedrock_agentcore.runtime import BedrockAgentCoreApp
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from ...contract import (
    ANSWER_FIELD,
    PROBE_FIELD,
    REFERENCE_FIELD,
    ROLLOUT_FIELD,
    ROLLOUTS_OFF,
    RolloutConfig,
    advise_on_calls,
)
from ...errors import AgentError, text_of
from ..engine import Engine
from ..rollout import RolloutFunction
from ..runner import AgentRunner
from ..settings import AgentSettings
from .routes import Route, routed, unroute

logger = logging.getLogger(__name__)

SESSION_HEADER = b"x-amzn-bedrock-agentcore-runtime-session-id"
LONGEST_TEXT = 2_000  # characters of an error response in an error
_REPLACED = (b"content-length", b"accept", b"accept-encoding")  # headers of the call that are not the agent's to read
# What the SDK's app did while it answered a rollout: the ``error`` that it caught, and ``encodes`` if it wrote events as JSON.
_seen: ContextVar[dict[str, Any]] = ContextVar("agentcore_rl_seen")


@functools.cache
def _watch_sdk() -> None:
    """Observe the SDK's app. A second call does nothing."""
    sdk: Any = BedrockAgentCoreApp
    invoke, write_event, runner = sdk._invoke_handler, sdk._convert_to_sse, AgentRunner()
    sdk._ensure_worker_loop = lambda self: runner.loop()  # the SDK's own loop ends at a SystemExit

    async def watched(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return await invoke(self, *args, **options)
        except HTTPException:  # a response that the agent chose
            raise
        except Exception as e:
            _seen.get({})["error"] = e
            raise

    def watched_event(self: Any, value: Any) -> Any:
        seen, error = _seen.get({}), sys.exc_info()[1]
        seen["encodes"] = True
        if isinstance(error, Exception):  # the SDK writes it as an event, while it handles it
            seen["error"] = error
        return write_event(self, value)

    sdk._invoke_handler, sdk._convert_to_sse = watched, watched_event


def _answer_in(text: str, content_type: str, *, encodes: bool) -> Any:
    """Return an entrypoint's result. Streamed texts are joined, other streamed values become a list.

    ``encodes``: each event of a stream is JSON. Otherwise it may be plain text, and one such as 42 is no number.
    """
    kind = content_type.partition(";")[0].strip()
    if kind != "text/event-stream":
        return _decoded(text) if not kind or kind == "application/json" or kind.endswith("+json") else text
    events: list[Any] = _events(text)
    if encodes or all(event[:1] in ("{", "[", '"') for event in events):
        events = [_decoded(event) for event in events]
    return "".join(events) if all(isinstance(event, str) for event in events) else events


def _events(text: str) -> list[str]:
    """Return the data of server-sent events. A line ends with CR, LF or both, and with no other character."""
    found = []
    for event in re.sub("\r\n?", "\n", text).split("\n\n"):
        lines = [line[5:].removeprefix(" ") for line in event.split("\n") if line.startswith("data:")]
        if re.search(r"^event: ?error$", event, re.M):
            raise AgentError(f"the agent's stream ended with an error: {' '.join(lines)[:LONGEST_TEXT]}")
        if lines and lines != ["[DONE]"]:
            found.append("\n".join(lines))
    return found


def _decoded(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class DeployedApp:
    """The ASGI app of an agent, and rollouts of it. Requests that are no rollouts reach the agent unchanged."""

    add_rollouts = False  # it has them

    def __init__(self, app: Any) -> None:
        self._app = app
        self._engine = Engine(settings=AgentSettings.from_env)
        self._function = RolloutFunction(call=self._answer, name="invocation", takes_context=True)
        self._loop: Any = None  # the server's
        self._calls = self._accepting = 0  # production calls that run, and rollouts that will
        _watch_sdk()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request: run a rollout, or pass it to the agent's app."""
        path = (scope.get("path"), scope.get("method"))
        if path == ("/ping", "GET") and self._engine.busy:
            status = {"status": "HealthyBusy", "time_of_last_update": int(time.time())}
            await JSONResponse(status)(scope, receive, send)
        elif path == ("/invocations", "POST"):
            await self._invoke(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _invoke(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        payload = _decoded(body)  # as the agent reads it: keys may have escapes, and the body another encoding
        rollout = isinstance(payload, Mapping) and (payload.get(ROLLOUT_FIELD) is not None or PROBE_FIELD in payload)
        if self._calls if rollout else self._accepting or self._engine.busy:
            error = "this process serves either one rollout or production calls at a time"
            await JSONResponse({"error": error}, 503)(scope, receive, send)
        elif not rollout:
            unroute()
            self._calls += 1
            try:
                await self._app(scope, _replayed(body, receive), send)
            finally:
                self._calls -= 1
        elif self._engine.settings.rollouts is False:
            await JSONResponse({"error": ROLLOUTS_OFF}, 403)(scope, receive, send)
        else:
            await self._accept(payload, scope, receive, send)

    async def _accept(self, payload: Mapping[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._engine.interrupt_on_sigterm()
        session_id = dict(scope["headers"]).get(SESSION_HEADER, b"").decode("latin-1") or None
        context = SimpleNamespace(session_id=session_id, scope=scope, replied=threading.Event())
        accepted = self._engine.accept(self._function, payload, context)
        self._accepting += 1
        try:
            reply = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(accepted, self._engine.runner.loop()))
            await JSONResponse(reply)(scope, receive, send)
        except Exception as e:
            await JSONResponse({"error": text_of(e), "error_type": type(e).__name__}, 500)(scope, receive, send)
        finally:
            self._accepting -= 1
            context.replied.set()

    def _answer(self, payload: Mapping[str, Any], context: Any) -> dict[str, Any]:
        """Return the agent's result of a rollout, in a thread of it. Raises: its exception; AgentError for an error response."""
        context.replied.wait()  # the agent may block the server's loop
        config, settings = RolloutConfig.from_payload(payload) or RolloutConfig(), self._engine.settings
        row = {name: value for name, value in payload.items() if name not in (ROLLOUT_FIELD, REFERENCE_FIELD)}
        route = None
        if config.base_url:
            given: dict[str, Any] = {"hosts": settings.model_hosts, "models": settings.policy_models}
            route = Route(base_url=config.base_url.rstrip("/"), api_key=config.api_key or "none", **given)
        with routed(route):
            try:
                asked = _request(self._app, context.scope, json.dumps(row).encode())
                status, content_type, text, seen = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
                if "error" in seen:
                    raise seen["error"]
                if status >= 400:
                    message = f"the agent answered with HTTP {status}: {text[:LONGEST_TEXT]}"
                    raise AgentError(message, error_type=f"HTTP {status}")
                answer = _answer_in(text, content_type, encodes="encodes" in seen)
            except Exception as e:
                e.__traceback__ = _from_agent(e.__traceback__)
                advice = advise_on_calls([route.calls]) if route is not None and route.elsewhere else ""
                if not advice:
                    raise
                raise AgentError(f"{text_of(e)} ({advice})", error_type=type(e).__name__) from e
        return {ANSWER_FIELD: answer, **(route.calls if route is not None else {})}

    async def end_rollouts(self) -> None:
        """End all rollouts. The server calls it before it ends the app."""
        ending = self._engine.close("the server shut down before the agent had finished")
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ending, self._engine.runner.loop()))


async def _request(app: Any, scope: Mapping[str, Any], body: bytes) -> tuple[int, str, str, dict[str, Any]]:
    """Send a body to an ASGI app. Returns status, content type, text, and what the SDK did meanwhile, or the app's ``error``."""
    seen: dict[str, Any] = {}
    _seen.set(seen)
    started: Message = {"status": 500, "headers": ()}
    parts: list[bytes] = []
    complete = False

    async def send(message: Message) -> None:
        nonlocal complete
        if message["type"] == "http.response.start":
            started.update(message)
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))
            # An app may also end its answer while it handles an exception.
            complete = started["status"] < 400 and not message.get("more_body") and sys.exc_info()[1] is None

    kept = [(name, value) for name, value in scope["headers"] if name.lower() not in _REPLACED]
    # AgentCore's SDK for TypeScript streams only to callers that ask for it.
    own = [(b"content-length", b"%d" % len(body)), (b"accept", b"text/event-stream, application/json, */*")]
    given = {**scope, "headers": [*kept, *own], "state": dict(scope.get("state", {}))}
    try:
        await app(given, _replayed(body, asyncio.Event().wait), send)
    except (Exception, SystemExit) as e:
        codes = [frame.f_code for frame, _ in traceback.walk_tb(e.__traceback__)]
        # Starlette's middleware also completes an answer whose stream broke, but only then do background tasks run.
        broken = any(code.co_filename.endswith("starlette/middleware/base.py") for code in codes)
        background = any(
            caller.co_qualname.endswith("Response.__call__") and code.co_filename.endswith("starlette/background.py")
            for caller, code in itertools.pairwise(codes)
        )
        if background or (complete and not broken):
            logger.error("the agent raised after its answer, which counts", exc_info=e)
        elif isinstance(e, SystemExit):  # asyncio would end the server's loop
            seen["error"] = AgentError(f"the agent called sys.exit: {e}", error_type="SystemExit")
            seen["error"].__cause__ = e
        else:
            seen["error"] = e
    import httpx

    kind = next((value for name, value in started["headers"] if name.lower() == b"content-type"), b"").lower()
    text = httpx.Response(200, headers={b"content-type": kind}, content=b"".join(parts)).text
    return started["status"], kind.decode("latin-1"), text, seen


def _replayed(body: bytes, then: Callable[[], Awaitable[Any]]) -> Receive:
    pending = [body]

    async def receive() -> Any:
        return {"type": "http.request", "body": pending.pop(), "more_body": False} if pending else await then()

    return receive


def _from_agent(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the agent's code, or all of it if no such part exists."""
    others = re.compile(rf"{re.escape(str(Path(__file__).resolve().parents[2]))}|<|.*(?:site-packages|/lib/python)")
    first = trace
    while first is not None and others.match(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first or trace
