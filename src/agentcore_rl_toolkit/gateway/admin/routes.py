"""Routes for trainers and operators: sessions (`admin.sessions`), weight versions, pause, servers, metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import AgentCoreRLError, ConfigError, ContractError
from ..config import Engine, UpstreamConfig
from ..errors import RequestError
from ..http.messages import Request, decode_body, error_reply, reply, retry_after
from ..http.structure import check_structure
from .metrics import exposition, snapshot
from .models import ModelRoutes
from .rllm import RLLMRoutes
from .sessions import SessionRoutes

if TYPE_CHECKING:
    from ..http.connection import AgentConnection
    from ..server import Gateway

log = logging.getLogger(__name__)

_to_json = msgspec.json.Encoder().encode
Handler = Callable[["AgentConnection", Request], Awaitable[None]]


class WeightVersion(msgspec.Struct):
    weight_version: int
    sampler: str | None = None


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    arriving: str = "hold"
    in_flight: str = "finish"
    timeout_s: float = 60.0


class AddWorker(msgspec.Struct):
    url: str
    worker_id: str | None = None
    engine: Engine | None = None
    weight: float | None = None
    api_key: str | None = None
    api_path: str | None = None
    model_name: str | None = None


class Admin:
    """Answers everything that is not a model call."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tasks: set[asyncio.Task[None]] = set()
        self._rllm = RLLMRoutes(gateway, self)
        self.sessions = SessionRoutes(gateway, self)
        self.models = ModelRoutes(gateway, self)
        self._routes: dict[tuple[bytes, bytes], Handler] = {
            (b"POST", b"/admin/sessions"): self.sessions.create,
            (b"POST", b"/admin/fetch"): self.sessions.fetch,
            (b"POST", b"/admin/close"): self.sessions.close,
            (b"POST", b"/admin/delete"): self.sessions.delete,
            (b"GET", b"/admin/stats"): self._stats,
            (b"GET", b"/admin/weight_version"): self._get_version,
            (b"POST", b"/admin/weight_version"): self._set_version,
            (b"POST", b"/admin/pause"): self._pause,
            (b"POST", b"/admin/resume"): self._resume,
            (b"POST", b"/admin/finished"): self.sessions.finished,
            (b"GET", b"/admin/workers"): self._workers,
            (b"POST", b"/admin/workers"): self._add_worker,
        }

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def dispatch(self, conn: AgentConnection, request: Request) -> None:
        path = request.path
        if path in (b"/healthz", b"/health"):
            self.answer(conn, request, 200, self._health())
            return
        if not self._gateway.is_admin(request):
            self.refuse(conn, request, RequestError("the admin key is missing or wrong", kind="authentication"))
            return
        try:
            check_structure(request.body)
        except RequestError as e:
            self.refuse(conn, request, e)
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
            self.refuse(conn, request, error)
            return
        self.start(self.run(handler, conn, request), conn)

    def _by_prefix(self, request: Request) -> Handler | None:
        if request.method == b"DELETE" and request.path.startswith(b"/admin/workers/"):
            return self._remove_worker
        return self._rllm.find(request)

    async def run(self, handler: Handler, conn: AgentConnection, request: Request) -> None:
        try:
            await handler(conn, request)
        except RequestError as e:
            self.refuse(conn, request, e)
        except (ContractError, ConfigError) as e:
            self.refuse(conn, request, RequestError(str(e)))
        except (ConnectionResetError, asyncio.CancelledError):
            conn.transport.abort()
        except AgentCoreRLError as e:
            log.error("%s failed: %s", request.path.decode("utf-8", "replace"), e)
            self.refuse(conn, request, RequestError(str(e), kind="internal"))
        except Exception as e:
            log.exception("%s failed", request.path.decode("utf-8", "replace"))
            self.refuse(conn, request, RequestError(f"the gateway failed: {type(e).__name__}: {e}", kind="internal"))
        finally:
            if conn.task is asyncio.current_task():
                conn.task = None

    def answer(self, conn: AgentConnection, request: Request, status: int, value: Any) -> None:
        conn.task = None
        conn.write(reply(status, _to_json(value), keep_alive=request.keep_alive))
        conn.done(keep_alive=request.keep_alive)

    def refuse(self, conn: AgentConnection, request: Request, error: RequestError, *, dialect: str = "chat") -> None:
        """Answer with an error; one that may be over soon says when to ask again."""
        conn.task = None
        headers = retry_after(error)
        conn.write(error_reply(dialect, error, headers=headers, keep_alive=request.keep_alive))
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

    def start(self, work: Awaitable[None], conn: AgentConnection) -> None:
        """Run an answer as a task that ends when its connection does."""
        task = asyncio.ensure_future(work)
        conn.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- weights, pause

    async def _get_version(self, conn: AgentConnection, request: Request) -> None:
        self.answer(conn, request, 200, {"weight_version": self._gateway.weight_version})

    async def _set_version(self, conn: AgentConnection, request: Request) -> None:
        asked = decode_body(request.body, WeightVersion)
        if self._gateway.tinker is not None:
            await self._gateway.tinker.use(asked.sampler, asked.weight_version)
        elif asked.sampler is not None:
            raise RequestError("'sampler' names weights at Tinker; this gateway's engine is another", param="sampler")
        self._gateway.publish(asked.weight_version)
        await self._keep()
        self.answer(conn, request, 200, {"weight_version": self._gateway.weight_version})

    async def _pause(self, conn: AgentConnection, request: Request) -> None:
        asked = decode_body(request.body, Pause)
        if asked.arriving not in ("hold", "reject") or asked.in_flight not in ("finish", "abort", "continue"):
            raise RequestError("arriving is hold or reject; in_flight is finish, abort or continue")
        told = await self._gateway.pause(
            arriving=asked.arriving, in_flight=asked.in_flight, timeout_s=min(asked.timeout_s, 3600.0)
        )
        await self._keep()
        self.answer(conn, request, 200, told)

    async def _resume(self, conn: AgentConnection, request: Request) -> None:
        told = self._gateway.resume()
        await self._keep()
        self.answer(conn, request, 200, told)

    async def _keep(self) -> None:
        """Let what was changed outlive a restart. Raises: RequestError when the disk refuses."""
        try:
            await self._gateway.state.keep(self._gateway)
        except OSError as e:
            raise RequestError(
                f"this holds, but the gateway cannot store it for a restart ({e.strerror or e}); try again",
                kind="overloaded",
            ) from e

    async def _stats(self, conn: AgentConnection, request: Request) -> None:
        self.answer(conn, request, 200, snapshot(self._gateway))

    # -- servers

    async def _workers(self, conn: AgentConnection, request: Request) -> None:
        self.answer(conn, request, 200, self.list_workers())

    def list_workers(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [
            {
                "worker_id": w.id,
                "url": w.config.url,
                "api_path": w.config.api_path,
                "model_name": w.config.model_name,
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
        first = config.upstreams[0].engine if config.upstreams else config.engine
        known = self._gateway.router.at(asked.url)  # what the request leaves out stays as it was
        old = known.config if known is not None else UpstreamConfig(url=asked.url, engine=first)
        upstream = UpstreamConfig(
            url=asked.url,
            engine=asked.engine or old.engine,
            api_key=old.api_key if asked.api_key is None else asked.api_key or None,
            weight=old.weight if asked.weight is None else asked.weight,
            api_path=asked.api_path or old.api_path,
            worker_id=old.worker_id,
            model_name=old.model_name if asked.model_name is None else asked.model_name,
        )
        if upstream.engine != first and "tinker" in (upstream.engine, first):
            raise RequestError("engine tinker shares no gateway with another engine", param="engine")
        if not config.may_add(upstream):
            raise RequestError(
                f"host {upstream.host!r} may not be added: allow it when starting the gateway (--allow-upstream-host)",
                kind="permission",
            )
        worker = self._gateway.router.add(upstream, asked.worker_id)
        told = {"worker_id": worker.id, "url": worker.config.url, "api_path": worker.config.api_path}
        self.answer(conn, request, 200, told)

    async def _remove_worker(self, conn: AgentConnection, request: Request) -> None:
        worker_id = request.path.rpartition(b"/")[2].decode("utf-8", "replace")
        worker = self._gateway.router.drain(worker_id)
        if worker is None:
            raise RequestError(f"there is no upstream {worker_id!r}", kind="not_found")
        self.answer(conn, request, 200, {"worker_id": worker_id, "removed": worker_id, "draining": worker.inflight})
