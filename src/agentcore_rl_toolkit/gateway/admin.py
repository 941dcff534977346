"""Routes for trainers and operators: sessions, weight versions, pause, servers, metrics; and the two small routes of agents.

Each route about sessions handles several. A fetch is written in pieces, and the agents' calls run in between.
The weight version and a pause outlive a restart: a request that changes them gets its response when the change is stored.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote

import msgspec
from aiohttp import web
from msgspec import Meta

from ..errors import GatewayError
from ..messages.errors import NOT_JSON, RequestError
from ..messages.wire import ModelRequest
from ..messages.wire.passthrough import check_session
from .capture.record import FetchedHead
from .config import SAMPLING_SERVICES, UpstreamConfig
from .context import Context
from .engines.errors import upstream_error
from .http.responses import decode_body
from .router import Worker
from .sessions import Session, SessionSettings
from .store.reader import Reader

log = logging.getLogger(__name__)


class Request(NamedTuple):
    """A request of a trainer. ``path`` is as it was sent: ids contain ``/`` and ``%``."""

    method: bytes
    path: bytes
    query: bytes
    body: bytes


Handler = Callable[[Request], Awaitable[Any]]  # returns the input of `http.responses.respond`
_U32 = struct.Struct("<I")

_COUNTERS = (
    "calls",
    "refused",  # before they were sent to an engine
    "retries",  # at another engine
    "turns",
    "turns_error",
    "turns_partial",  # the engine did not complete the reply
    "turns_aborted",  # the agent disconnected
    "turns_invalid",  # the tokens do not fit together
    "turns_joined",  # repeated requests, answered from the record of the first
    "deadlines",
    "tokens_cut",  # a sampling service gave more than was requested
    "store_failures",
)
_NO_ROUTE = (404, 405, 501)


class CreateSessions(msgspec.Struct, forbid_unknown_fields=True):
    """A request for new sessions."""

    session_ids: list[str]
    settings: SessionSettings = SessionSettings()


class Names(msgspec.Struct, forbid_unknown_fields=True):
    """A request about sessions by id."""

    session_ids: list[str]
    close: bool = True


class WeightVersion(msgspec.Struct):
    """A request to set the weight version."""

    weight_version: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # a record has 64 bits
    sampler: str | None = None


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    """A request to pause. Units: seconds."""

    in_flight: Literal["finish", "abort", "continue"] = "finish"
    timeout_s: float = 60.0


class AddWorker(msgspec.Struct):
    """A request to add an engine."""

    url: str
    worker_id: str | None = None
    api_key: str | None = None
    api_path: str = "/v1"
    model_name: str | None = None


class Admin:
    """Answers everything that is not a model call. ``find_more`` finds the routes of other distributions."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sessions = context.sessions
        self._store = context.store
        self.find_more: Callable[[Request], Handler | None] = lambda request: None
        self._routes: dict[tuple[bytes, bytes], Handler] = {
            (b"POST", b"/admin/sessions"): self._create,
            (b"GET", b"/admin/sessions"): self._list,
            (b"POST", b"/admin/fetch"): self._fetch,
            (b"POST", b"/admin/delete"): self._delete,
            (b"GET", b"/admin/stats"): self._stats,
            (b"GET", b"/admin/weight_version"): self._get_version,
            (b"POST", b"/admin/weight_version"): self._set_version,
            (b"POST", b"/admin/pause"): self._pause,
            (b"POST", b"/admin/resume"): self._resume,
            (b"GET", b"/admin/workers"): self._workers,
            (b"POST", b"/admin/workers"): self._add_worker,
            (b"GET", b"/metrics"): self._metrics,
        }

    async def answer(self, request: Request, *, known: bool) -> Any:
        """Answer a request. ``known``: it carries the administrator's key. Raises: RequestError."""
        path = request.path
        if path in (b"/healthz", b"/health"):
            return self._health()
        if not known:
            raise RequestError("the admin key is missing or wrong", kind="authentication")
        handler = self._routes.get((request.method, path)) or self.find_more(request)
        if request.method == b"DELETE" and path.startswith(b"/admin/workers/"):
            handler = self._remove_worker
        if handler is not None:
            return await handler(request)
        if any(p == path for _, p in self._routes):
            raise RequestError(f"{request.method.decode()} is not for this route", kind="method_not_allowed")
        raise RequestError(f"there is no route {path.decode('utf-8', 'replace')[:100]!r}", kind="not_found")

    # -- sessions

    async def _create(self, request: Request) -> dict[str, Any]:
        asked = decode_body(request.body, CreateSessions)
        created = await self.open_sessions(asked.session_ids, asked.settings)
        return {"sessions": [{"session_id": s.id, "api_key": s.key.decode()} for s in created]}

    async def open_sessions(self, session_ids: list[str], settings: SessionSettings) -> list[Session]:
        """Open sessions, all or none. Raises: RequestError on bad settings, or when the disk refuses; ContractError."""
        asked = settings.check()
        if self._context.token_mode is not None:
            self._context.token_mode.check(asked)
        elif self._context.engine == "vllm":
            check_session(settings.sampling_params, self._context.allow_fields)
        return await self._sessions.open(session_ids, settings)

    async def _list(self, request: Request) -> dict[str, Any]:
        """List all sessions in the order they were opened, with their running calls; ``?running=1``: those with calls only."""
        running = b"running=1" in request.query.split(b"&")
        sessions = self._sessions.by_id.values()
        return {"sessions": [_described(session) for session in sessions if session.inflight or not running]}

    async def _delete(self, request: Request) -> dict[str, Any]:
        return {"deleted": await self.delete_sessions(decode_body(request.body, Names).session_ids)}

    async def delete_sessions(self, session_ids: list[str]) -> int:
        """Delete sessions, and return when that is stored. Returns how many there were.

        Raises: RequestError 503 if it cannot be stored: after a crash the sessions would exist again.
        """
        count = self._sessions.delete([s.encode() for s in session_ids])
        error = await self._store.kept()
        if error is not None:
            raise RequestError(f"the deletion could not be stored; try again: {error}", kind="overloaded", status=503)
        return count

    async def _fetch(self, request: Request) -> AsyncGenerator[bytes, None]:
        asked = decode_body(request.body, Names)
        for session_id in asked.session_ids if asked.close else ():
            if (session := self._sessions.by_id.get(session_id.encode())) is not None:
                self._sessions.close(session)
        await self._store.kept()
        return self._store.read(lambda reader: self._frames(reader, asked.session_ids))

    def _frames(self, reader: Reader, session_ids: list[str]) -> Iterator[bytes]:
        """Make the head and the records of each session, each with its length before it. Runs in a thread."""
        for session_id in session_ids:
            session = self._sessions.by_id.get(session_id.encode())
            if session is None:
                yield from _frame(msgspec.msgpack.encode(FetchedHead(session_id=session_id, known=False)))
                continue
            numbers = reader.numbers(session.number)
            head = FetchedHead(
                session_id=session_id,
                known=True,
                closed=session.closed,
                records=len(numbers),
                created_s=session.created_s,
                train=session.settings.train,
                metadata=session.settings.metadata,
            )
            yield from _frame(msgspec.msgpack.encode(head))
            for data in reader.readable(numbers):
                yield from _frame(data)

    # -- weights, pause

    def restore(self) -> None:
        """Restore weight version, pause and sampler, which is a sampling service's path of that version's weights.

        The configuration's sampler replaces the stored sampler.
        """
        config, running, samplers = self._context.config, self._context.running, self._context.samplers
        stored = self._store.reader.value
        running.paused = bool(stored("paused"))
        sampler = stored("sampler")
        # A sampler's version is not that of another engine's weights.
        if config.sampler in (None, sampler) and (samplers is not None or sampler is None):
            running.weight_version = stored("weight_version")
            if samplers is not None and sampler is not None:
                samplers.wanted = (sampler, running.weight_version)
        if config.sampler is not None:
            self._put_state()
            self._store.commit()

    def _put_state(self) -> None:
        samplers = self._context.samplers
        self._store.set("weight_version", self._context.running.weight_version)
        self._store.set("paused", self._context.running.paused)
        self._store.set("sampler", samplers.wanted[0] if samplers is not None and samplers.wanted else None)

    async def _keep(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return ``answer`` when the state is stored. Raises: RequestError when the disk refuses."""
        self._put_state()
        error = await self._store.kept()
        if error is not None:
            why = f"this is set until a restart: the gateway cannot store it ({error}); try again"
            raise RequestError(why, kind="overloaded")
        return answer

    async def _get_version(self, request: Request) -> dict[str, Any]:
        return {"weight_version": self._context.running.weight_version}

    async def _set_version(self, request: Request) -> dict[str, Any]:
        asked, context = decode_body(request.body, WeightVersion), self._context
        if context.samplers is not None:
            await context.samplers.use(asked.sampler, asked.weight_version)
        elif asked.sampler is not None:
            why = "'sampler' is for the engines tinker and sagemaker; this gateway has another engine"
            raise RequestError(why, param="sampler")
        context.running.weight_version = asked.weight_version
        for worker in context.router.workers.values():
            worker.forgot = False
        context.router.ask_weights()
        return await self._keep({"weight_version": asked.weight_version})

    async def _pause(self, request: Request) -> dict[str, Any]:
        asked = decode_body(request.body, Pause)
        running = self._context.running
        return await self._keep(await running.pause(in_flight=asked.in_flight, timeout_s=asked.timeout_s))

    async def _resume(self, request: Request) -> dict[str, Any]:
        return await self._keep(self._context.running.resume())

    # -- servers

    async def _workers(self, request: Request) -> list[dict[str, Any]]:
        return [_described_worker(worker) for worker in self._context.router.workers.values()]

    async def _add_worker(self, request: Request) -> dict[str, Any]:
        asked, router = decode_body(request.body, AddWorker), self._context.router
        kind = self._context.engine
        if kind in SAMPLING_SERVICES:
            raise RequestError(f"engine {kind} has one service, which is set when the gateway starts", param="engine")
        given = msgspec.structs.asdict(asked)
        worker = router.add(UpstreamConfig(engine=kind, **given))
        return {"worker_id": worker.id, "url": worker.config.url, "api_path": worker.config.api_path}

    async def _remove_worker(self, request: Request) -> dict[str, Any]:
        worker_id = unquote(request.path.removeprefix(b"/admin/workers/").decode("utf-8", "replace"))
        worker = self._context.router.drain(worker_id)
        if worker is None:
            raise RequestError(f"there is no upstream {worker_id!r}", kind="not_found")
        return {"worker_id": worker_id, "draining": worker.inflight}

    # -- operation

    def _health(self) -> dict[str, Any]:
        context = self._context
        return {
            "status": "store failing" if self._store.failed is not None else context.router.problem or "ok",
            "sessions": len(self._sessions.by_id),
            "in_flight": len(context.running.calls),
            "paused": context.running.paused,
            "waiting_for_a_server": context.router.waiting,
            "event_loop_lag_s": round(context.lag_s, 4),
        }

    async def _stats(self, request: Request) -> dict[str, Any]:
        """Return all counters. Units: seconds, bytes."""
        context, store, running = self._context, self._store, self._context.running
        return {
            **{name: context.counters[name] for name in _COUNTERS},
            "turns": self._sessions.turns,
            "sessions": len(self._sessions.by_id),
            "in_flight": len(running.calls),
            "held": len(running.waiting),
            "connections": len(context.connections),
            "paused": running.paused,
            "token_mode": context.token_mode is not None,
            "weight_version": running.weight_version,
            "event_loop_lag_s": context.lag_s,
            "event_loop_lag_max_s": context.lag_max_s,
            "store_queue": store.queue_depth,
            "store_bytes": store.total_bytes,
            "workers": await self._workers(request),
        }

    async def _metrics(self, request: Request) -> web.Response:
        """Return all counters in the format of Prometheus."""
        values = await self._stats(request)
        lines: list[str] = []

        def metric(name: str, kind: str, samples: dict[str, Any]) -> None:
            lines.append(f"# TYPE agentcore_rl_gateway_{name} {kind}")
            lines.extend(f"agentcore_rl_gateway_{name}{labels} {value}" for labels, value in samples.items())

        workers = {f'{{worker="{_label(w["worker_id"])}"}}': w for w in values.pop("workers")}
        for name, value in values.items():
            if name in _COUNTERS:
                metric(f"{name}_total", "counter", {"": value})
            elif type(value) in (int, float):
                metric(f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name, "gauge", {"": value})
        metric("upstream_in_flight", "gauge", {label: w["active_requests"] for label, w in workers.items()})
        metric("upstream_healthy", "gauge", {label: int(w["healthy"]) for label, w in workers.items()})
        body = ("\n".join(lines) + "\n").encode()
        return web.Response(body=body, headers={"content-type": "text/plain; version=0.0.4"})

    # -- agents

    async def models(self, session: Session, wanted: str | None) -> dict[str, Any]:
        """Answer `GET /sessions/{id}/v1/models`: the model that this session may ask for, or those that its server lists.

        The response has the members of OpenAI's and of Anthropic's shape. ``wanted`` is the name of a single model.
        """
        own = session.settings.model_id
        held = {"id": own, "created": int(session.created_s), "owned_by": "gateway"}
        listed = [_described_model(model) for model in ([held] if own else await self._served())]
        if wanted is None:
            ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
            return {"object": "list", "data": listed, "has_more": False, **ends}
        found = next((model for model in listed if model["id"] == wanted), None)
        if found is None:
            raise RequestError(f"there is no model {wanted[:100]!r} here", kind="model_not_found", param="model")
        return found

    async def _served(self) -> list[dict[str, Any]]:
        samplers = self._context.samplers
        if samplers is not None:
            return [{"id": samplers.wanted[0], "owned_by": self._context.engine}] if samplers.wanted else []
        status, body = await self._ask(None, b"/v1/models", None, "list its models")
        if status != 200:
            raise upstream_error(status, body)
        try:
            return [model for model in msgspec.json.decode(body)["data"] if isinstance(model["id"], str)]
        except (*NOT_JSON, KeyError, TypeError) as e:
            raise RequestError(f"the engine's list of models cannot be read: {e}", kind="upstream") from e

    async def count_tokens(self, asked: ModelRequest, session: Session) -> int:
        """Return the number of tokens of the prompt as the engine would see it. Nothing is sampled."""
        options, mode = asked.template_options() or None, self._context.token_mode
        if mode is None:
            body = asked.to_chat_body() | ({} if options is None else {"chat_template_kwargs": options})
            return await self._engine_count(body, session)
        asked.leave_out_images()
        loop, count, tools = asyncio.get_running_loop(), mode.renderer.count, asked.tools or None
        async with mode.history(session).order:  # one thread per session, so that no session can use all threads
            return int(await loop.run_in_executor(mode.executor, count, asked.messages, tools, options))

    async def embeddings(self, body: bytes, session: Session) -> web.Response:
        """Relay a request for embeddings. It is not recorded: nothing is sampled. Raises: RequestError."""
        decode_body(body, dict[str, msgspec.Raw])
        status, answer = 404, b""
        if self._context.samplers is None:
            status, answer = await self._ask(session.worker, b"/v1/embeddings", body, "make embeddings")
        if status in _NO_ROUTE or (status == 400 and b"does not support Embeddings" in answer):
            why = "the engine has no embeddings; give the agent's embedding client the base URL of another server"
            raise RequestError(why, kind="not_found")
        return web.Response(status=status, body=answer, content_type="application/json")

    async def _engine_count(self, body: dict[str, Any], session: Session) -> int:
        if session.settings.model_id is not None:
            body["model"] = session.settings.model_id
        asked = msgspec.json.encode(
            {k: body[k] for k in ("model", "messages", "tools", "chat_template_kwargs") if k in body}
        )
        status, answer = await self._ask(session.worker, b"/tokenize", asked, "count tokens")
        if status != 200:
            raise RequestError("this engine cannot count tokens (no /tokenize)", kind="unsupported")
        try:
            return int(msgspec.json.decode(answer)["count"])
        except (*NOT_JSON, KeyError, TypeError, ValueError) as e:
            raise RequestError(f"the engine's count cannot be read: {e}", kind="upstream") from e

    async def _ask(self, at: Worker | None, path: bytes, body: bytes | None, purpose: str) -> tuple[int, bytes]:
        """Ask an engine for an agent, which does not learn its address. Raises: RequestError."""
        worker = self._context.router.pick(at)
        if worker is None:
            raise RequestError("the gateway has no engine", kind="overloaded")
        try:
            return await worker.ask(path, body, timeout_s=30.0)
        except GatewayError as e:
            log.warning("%s did not %s: %s", worker.config.url, purpose, e)
            raise RequestError(f"the engine did not {purpose}", kind="upstream") from e


def _frame(data: bytes) -> tuple[bytes, bytes]:
    return _U32.pack(len(data)), data


def _label(value: str) -> str:
    """Escape a label's value: the name of a server may hold any character. Source: Prometheus' exposition format 0.0.4."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _described(session: Session) -> dict[str, Any]:
    """Describe a session. Units: unix seconds; of calls: seconds since their start, and until their deadline."""
    return {
        "session_id": session.id,
        "created_s": session.created_s,
        "closed_s": session.closed_s,
        "turns": session.turns,
        "errors": session.errors,
        "records": session.records,
        "last_call_s": session.last_call_s,
        "metadata": session.settings.metadata,
        "calls": [
            {
                "state": call.state,
                "seconds": time.time() - call.record.started_s,
                "left_s": None if call.deadline is None else call.deadline - time.monotonic(),
            }
            for call in session.inflight
        ],
        "server": session.worker.config.url if session.worker is not None and session.inflight else None,
    }


def _described_worker(worker: Worker) -> dict[str, Any]:
    return {
        "worker_id": worker.id,
        "url": worker.config.url,
        "api_path": worker.config.api_path,
        "model_name": worker.config.model_name,
        "engine": worker.config.engine,
        "calls": worker.calls,
        "failures": worker.total_failures,
        "healthy": worker.resting_until <= time.monotonic(),
        "active_requests": worker.inflight,
        "draining": worker.draining,
    }


def _described_model(model: dict[str, Any]) -> dict[str, Any]:
    created = model.get("created")
    at = datetime.fromtimestamp(created if isinstance(created, int) and 0 <= created < 2**32 else 0, UTC)
    more = {"object": "model", "type": "model", "display_name": model["id"], "created_at": at.isoformat()}
    return {**model, **more, "created": int(at.timestamp())}
