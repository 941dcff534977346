"""Routes for trainers and operators: open, fetch, close and delete sessions, weight versions, pause, servers, metrics.

Bulk routes take and give many sessions at once; what can be long (a fetch) is written piece by piece with a pause for
the agents' calls in between.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..errors import AgentCoreRLError, ConfigError, ContractError
from .config import Engine, UpstreamConfig
from .dialects.anthropic import encode_count, parse_request
from .dialects.errors import RequestError
from .fetching import get, post
from .metrics import exposition, snapshot
from .rllm import RLLMRoutes
from .sessions import Session, SessionSettings
from .wire import LAST_CHUNK, Request, error_reply, reply, stream_head

if TYPE_CHECKING:
    from .listener import AgentConnection
    from .server import Gateway

log = logging.getLogger(__name__)

CALLS_TYPE = b"application/vnd.agentcore-rl.calls"
_to_json = msgspec.json.Encoder().encode
_U32 = struct.Struct("<I")
_SLICE_S = 0.004  # a fetch lets agents' calls go first after this long
Handler = Callable[["AgentConnection", Request], Awaitable[None]]


class CreateSessions(msgspec.Struct, forbid_unknown_fields=True):
    session_ids: list[str]
    settings: SessionSettings = SessionSettings()


class Names(msgspec.Struct, forbid_unknown_fields=True):
    session_ids: list[str]
    close: bool = True


class Finished(msgspec.Struct, forbid_unknown_fields=True):
    """``after`` is the place in the list of finished sessions to go on from, ``wait_s`` how long to wait for a new
    one.
    """

    after: int = 0
    wait_s: float = 0.0
    limit: int = 1000


class WeightVersion(msgspec.Struct):
    weight_version: int


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    arriving: str = "hold"
    in_flight: str = "finish"
    timeout_s: float = 60.0


class AddWorker(msgspec.Struct):
    url: str
    worker_id: str | None = None
    engine: Engine | None = None
    weight: float = 1.0
    api_key: str | None = None


class FetchedHead(msgspec.Struct):
    """Precedes a session's records in a bulk fetch."""

    session_id: str
    known: bool
    closed: bool = False
    records: int = 0
    created_s: float = 0.0
    metadata: dict[str, Any] = {}


_T = TypeVar("_T")


def decode_body(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.DecodeError as e:
        raise RequestError(f"the request body does not fit: {e}") from e


class Admin:
    """Answers everything that is not a model call."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tasks: set[asyncio.Task[None]] = set()
        self._rllm = RLLMRoutes(gateway, self)
        self._routes: dict[tuple[bytes, bytes], Handler] = {
            (b"POST", b"/admin/sessions"): self._create,
            (b"POST", b"/admin/fetch"): self._fetch,
            (b"POST", b"/admin/close"): self._close,
            (b"POST", b"/admin/delete"): self._delete,
            (b"GET", b"/admin/stats"): self._stats,
            (b"GET", b"/admin/weight_version"): self._get_version,
            (b"POST", b"/admin/weight_version"): self._set_version,
            (b"POST", b"/admin/pause"): self._pause,
            (b"POST", b"/admin/resume"): self._resume,
            (b"POST", b"/admin/finished"): self._finished,
            (b"GET", b"/admin/workers"): self._workers,
            (b"POST", b"/admin/workers"): self._add_worker,
        }

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def dispatch(self, conn: AgentConnection, request: Request) -> None:
        path = request.path
        if path in (b"/healthz", b"/health"):
            self._answer(conn, request, 200, self._health())
            return
        if not self._gateway.is_admin(request):
            self._refuse(conn, request, RequestError("the admin key is missing or wrong", kind="authentication"))
            return
        shard = self._gateway.shard
        if shard is not None and not conn.private and shard.administers(path):
            self.start(self._run(shard.administer, conn, request), conn)
            return
        if path == b"/metrics":
            text = exposition(self._gateway)
            conn.write(reply(200, text, content_type=b"text/plain; version=0.0.4", keep_alive=request.keep_alive))
            conn.done(keep_alive=request.keep_alive)
            return
        handler = self._routes.get((request.method, path)) or self._by_prefix(request)
        if handler is None:
            known = any(p == path for _, p in self._routes)
            error = (
                RequestError(f"{request.method.decode()} is not for this route", kind="method_not_allowed")
                if known
                else RequestError(f"there is no route {path.decode('utf-8', 'replace')[:100]!r}", kind="not_found")
            )
            self._refuse(conn, request, error)
            return
        task = asyncio.get_running_loop().create_task(self._run(handler, conn, request))
        conn.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _by_prefix(self, request: Request) -> Handler | None:
        if request.method == b"DELETE" and request.path.startswith(b"/admin/workers/"):
            return self._remove_worker
        return self._rllm.find(request)

    async def _run(self, handler: Handler, conn: AgentConnection, request: Request) -> None:
        try:
            await handler(conn, request)
        except RequestError as e:
            self._refuse(conn, request, e)
        except (ContractError, ConfigError) as e:
            self._refuse(conn, request, RequestError(str(e)))
        except (ConnectionResetError, asyncio.CancelledError):
            conn.transport.abort()
        except AgentCoreRLError as e:
            log.error("%s failed: %s", request.path.decode("utf-8", "replace"), e)
            self._refuse(conn, request, RequestError(str(e), kind="internal"))
        except Exception as e:
            log.exception("%s failed", request.path.decode("utf-8", "replace"))
            self._refuse(conn, request, RequestError(f"the gateway failed: {type(e).__name__}: {e}", kind="internal"))
        finally:
            if conn.task is asyncio.current_task():
                conn.task = None

    def _answer(self, conn: AgentConnection, request: Request, status: int, value: Any) -> None:
        conn.task = None
        conn.write(reply(status, _to_json(value), keep_alive=request.keep_alive))
        conn.done(keep_alive=request.keep_alive)

    def _refuse(self, conn: AgentConnection, request: Request, error: RequestError) -> None:
        conn.task = None
        conn.write(error_reply("chat", error, keep_alive=request.keep_alive))
        conn.done(keep_alive=request.keep_alive)

    def _health(self) -> dict[str, Any]:
        gateway = self._gateway
        failed = gateway.journal.failed
        return {
            "status": "ok" if failed is None else "store failing",
            "sessions": len(gateway.sessions.by_id),
            "in_flight": len(gateway.running),
            "paused": gateway.paused is not None,
            "event_loop_lag_s": round(gateway.lag_s, 4),
        }

    # -- sessions

    async def _create(self, conn: AgentConnection, request: Request) -> None:
        asked = decode_body(request.body, CreateSessions)
        sessions = self._gateway.sessions
        created = [sessions.create(session_id, asked.settings) for session_id in asked.session_ids]
        self._answer(
            conn, request, 200, {"sessions": [{"session_id": s.id, "api_key": s.key.decode()} for s in created]}
        )

    async def _close(self, conn: AgentConnection, request: Request) -> None:
        asked = decode_body(request.body, Names)
        closed = 0
        for session_id in asked.session_ids:
            session = self._gateway.sessions.by_id.get(session_id.encode())
            if session is not None:
                closed += self.close_session(session)
        self._answer(conn, request, 200, {"closed": closed})

    def close_session(self, session: Session) -> bool:
        """Close a session and end its running calls: what arrives now is too late. True if it was open."""
        was_open = not session.closed
        running = list(session.inflight)
        for call in running:
            call.abort(RequestError(f"session {session.id} was closed", kind="permission"))
        self._gateway.sessions.close(session)
        return was_open

    async def _delete(self, conn: AgentConnection, request: Request) -> None:
        asked = decode_body(request.body, Names)
        self._answer(conn, request, 200, {"deleted": self.delete_sessions(asked.session_ids)})

    def delete_sessions(self, session_ids: list[str]) -> int:
        sessions = self._gateway.sessions
        names = [s.encode() for s in session_ids]
        for name in names:
            session = sessions.by_id.get(name)
            if session is not None:
                self.close_session(session)
        return len(sessions.delete(names))

    async def _fetch(self, conn: AgentConnection, request: Request) -> None:
        asked = decode_body(request.body, Names)
        gateway = self._gateway
        found = [gateway.sessions.by_id.get(session_id.encode()) for session_id in asked.session_ids]
        conn.write(stream_head(200, ((b"content-type", CALLS_TYPE),), keep_alive=request.keep_alive))
        started = time.monotonic()
        out: list[bytes] = []
        for session_id, session in zip(asked.session_ids, found, strict=True):
            head = FetchedHead(session_id=session_id, known=session is not None)
            payloads: list[bytes] = []
            if session is not None:
                if asked.close:
                    self.close_session(session)
                payloads = gateway.sessions.payloads(session)
                head = FetchedHead(
                    session_id=session_id,
                    known=True,
                    closed=session.closed,
                    records=len(payloads),
                    created_s=session.created_s,
                    metadata=session.settings.metadata,
                )
            out.append(_framed(msgspec.msgpack.encode(head)))
            out.extend(map(_framed, payloads))
            if time.monotonic() - started > _SLICE_S:
                _chunk(conn, out)
                await conn.drain()
                await asyncio.sleep(0)
                started = time.monotonic()
        _chunk(conn, out)
        conn.task = None
        conn.write(LAST_CHUNK)
        conn.done(keep_alive=request.keep_alive)

    async def _finished(self, conn: AgentConnection, request: Request) -> None:
        """Sessions in the order they were closed: a trainer asks again with `next` and misses none."""
        asked = decode_body(request.body, Finished)
        sessions = self._gateway.sessions
        if len(sessions.finished) <= asked.after and asked.wait_s > 0:
            changed = asyncio.Event()
            sessions.waiting.add(changed)
            try:
                async with asyncio.timeout(min(asked.wait_s, 60.0)):
                    await changed.wait()
            except TimeoutError:
                pass
            finally:
                sessions.waiting.discard(changed)
        names = sessions.finished[asked.after : asked.after + asked.limit]
        self._answer(conn, request, 200, {"session_ids": names, "next": asked.after + len(names)})

    async def count_tokens(self, conn: AgentConnection, request: Request, session: Session) -> None:
        """Anthropic's count_tokens: the prompt as the engine would see it, counted and not sampled."""
        try:
            asked = parse_request(request.body, counting=True)
            mode = self._gateway.token_mode
            if mode is not None:
                count = await asyncio.get_running_loop().run_in_executor(
                    mode.executor,
                    mode.renderer.count,
                    asked.messages,
                    asked.tools or None,
                    asked.template_options() or None,
                )
            else:
                count = await self._engine_count(asked.to_chat_body(), session)
            conn.task = None
            conn.write(reply(200, encode_count(count), keep_alive=request.keep_alive))
        except RequestError as e:
            conn.task = None
            conn.write(error_reply("anthropic", e, keep_alive=request.keep_alive))
        conn.done(keep_alive=request.keep_alive)

    async def _engine_count(self, body: dict[str, Any], session: Session) -> int:
        worker = self._gateway.router.pick(session.worker)
        if worker is None:
            raise RequestError("the gateway has no inference server", kind="overloaded")
        asked = _to_json({k: body[k] for k in ("model", "messages", "tools") if k in body})
        try:
            status, told = await post(worker, b"/tokenize", asked, timeout_s=30.0)
        except (OSError, TimeoutError) as e:
            raise RequestError(f"the inference server did not count: {e}", kind="upstream") from e
        if status != 200:
            raise RequestError("this inference server cannot count tokens (no /tokenize)", kind="unsupported")
        return int(msgspec.json.decode(told)["count"])

    def start(self, work: Awaitable[None], conn: AgentConnection) -> None:
        """Run an answer as a task that ends when its connection does."""
        task = asyncio.ensure_future(work)
        conn.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- models

    def models(self, conn: AgentConnection, request: Request, session: Session) -> None:
        """`GET /sessions/{id}/v1/models`: the models this session may ask for, or what its server lists."""
        settings = session.settings
        names = settings.allowed_models or ([settings.model_id] if settings.model_id else [])
        if names:
            data = [
                {"id": n, "object": "model", "created": int(session.created_s), "owned_by": "gateway"} for n in names
            ]
            self._answer(conn, request, 200, {"object": "list", "data": data})
            return
        task = asyncio.get_running_loop().create_task(self._run(self._relay_models, conn, request))
        conn.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay_models(self, conn: AgentConnection, request: Request) -> None:
        worker = self._gateway.router.pick(None)
        if worker is None:
            raise RequestError("the gateway has no inference server", kind="overloaded")
        try:
            status, body = await get(worker, b"/v1/models", timeout_s=10.0)
        except (OSError, TimeoutError) as e:
            raise RequestError(f"the inference server did not list its models: {e}", kind="upstream") from e
        conn.task = None
        conn.write(reply(status, body, keep_alive=request.keep_alive))
        conn.done(keep_alive=request.keep_alive)

    # -- weights, pause

    async def _get_version(self, conn: AgentConnection, request: Request) -> None:
        self._answer(conn, request, 200, {"weight_version": self._gateway.weight_version})

    async def _set_version(self, conn: AgentConnection, request: Request) -> None:
        self._gateway.weight_version = decode_body(request.body, WeightVersion).weight_version
        self._answer(conn, request, 200, {"weight_version": self._gateway.weight_version})

    async def _pause(self, conn: AgentConnection, request: Request) -> None:
        asked = decode_body(request.body, Pause)
        if asked.arriving not in ("hold", "reject") or asked.in_flight not in ("finish", "abort", "continue"):
            raise RequestError("arriving is hold or reject; in_flight is finish, abort or continue")
        told = await self._gateway.pause(
            arriving=asked.arriving, in_flight=asked.in_flight, timeout_s=min(asked.timeout_s, 3600.0)
        )
        self._answer(conn, request, 200, told)

    async def _resume(self, conn: AgentConnection, request: Request) -> None:
        self._answer(conn, request, 200, self._gateway.resume())

    async def _stats(self, conn: AgentConnection, request: Request) -> None:
        self._answer(conn, request, 200, snapshot(self._gateway))

    # -- servers

    async def _workers(self, conn: AgentConnection, request: Request) -> None:
        self._answer(conn, request, 200, self.list_workers())

    def list_workers(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [
            {
                "worker_id": w.id,
                "url": w.config.url,
                "api_path": "/v1",
                "engine": w.config.engine,
                "weight": w.config.weight,
                "active": w.inflight,
                "calls": w.calls,
                "failures": w.total_failures,
                "healthy": w.resting_until <= now,
                "active_requests": w.inflight,
                "draining": w.draining,
            }
            for w in self._gateway.router.workers.values()
        ]

    async def _add_worker(self, conn: AgentConnection, request: Request) -> None:
        asked = decode_body(request.body, AddWorker)
        config = self._gateway.config
        first = config.upstreams[0].engine if config.upstreams else "vllm"
        upstream = UpstreamConfig(
            url=asked.url, engine=asked.engine or first, api_key=asked.api_key, weight=asked.weight
        )
        if not config.may_add(upstream):
            raise RequestError(
                f"host {upstream.host!r} may not be added: allow it when starting the gateway (--allow-upstream-host)",
                kind="permission",
            )
        worker = self._gateway.router.add(upstream, asked.worker_id)
        self._answer(conn, request, 200, {"worker_id": worker.id, "url": worker.config.url})

    async def _remove_worker(self, conn: AgentConnection, request: Request) -> None:
        worker_id = request.path.rpartition(b"/")[2].decode("utf-8", "replace")
        worker = self._gateway.router.drain(worker_id)
        if worker is None:
            raise RequestError(f"there is no upstream {worker_id!r}", kind="not_found")
        self._answer(conn, request, 200, {"worker_id": worker_id, "removed": worker_id, "draining": worker.inflight})


def _framed(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


def _chunk(conn: AgentConnection, out: list[bytes]) -> None:
    if out:
        body = b"".join(out)
        out.clear()
        conn.write(b"%x\r\n" % len(body) + body + b"\r\n")
