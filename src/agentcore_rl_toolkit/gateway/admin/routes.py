"""Routes for trainers and operators: sessions (`admin.sessions`), weight versions, pause, servers, metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from ...messages.errors import RequestError
from ...messages.wire import ModelRequest
from ...messages.wire.passthrough import check_session
from ..config import SAMPLING_SERVICES, Engine, UpstreamConfig
from ..http.messages import Request, decode_body
from ..sessions.settings import SessionSettings
from .answers import Handler, respond
from .models import ModelRoutes
from .sessions import SessionRoutes
from .state import Parts

_HELP = {
    "calls": "Model calls received from agents",
    "refused": "Calls refused before they were sent on (keys, closed sessions, bad requests)",
    "retries": "Calls sent to another inference server after a failure",
    "turns_error": "Calls that ended in an error, not stored as turns",
    "turns_partial": "Replies that broke off at the engine, not stored as turns",
    "turns_aborted": "Calls the agent gave up on, not stored as turns",
    "turns_invalid": "Replies whose tokens do not fit together, not stored as turns",
    "turns_joined": "Repeated requests answered from the record of the first",
    "deadlines": "Calls ended because they took too long",
    "tokens_cut": "Tokens that a sampling service gave beyond what was asked for, left out of turns",
    "store_failures": "Calls whose record the disk did not take (their agents got an error)",
}


def snapshot(parts: Parts) -> dict[str, Any]:
    """Everything that is counted. Units: seconds, bytes."""
    sessions, store, running = parts.sessions, parts.sessions.store, parts.running
    histories = parts.token_mode.histories if parts.token_mode is not None else None
    return {
        **{name: parts.counters[name] for name in _HELP},
        "turns": sessions.turns,
        "sessions": len(sessions.by_id),
        "in_flight": len(running),
        "held": len(running.waiting),
        "connections": len(parts.connections),
        "paused": running.paused,
        "weight_version": running.weight_version,
        "event_loop_lag_s": parts.lag.now_s,
        "event_loop_lag_max_s": parts.lag.most_s,
        "history_bytes": histories.held_bytes if histories is not None else 0,
        "history_reloads": histories.reloads if histories is not None else 0,
        "store_queue": store.queue_depth,
        "store_bytes": store.total_bytes,
        "store_damaged_calls": len(store.reader.damaged),
        "workers": parts.servers(),
    }


_GAUGES = {
    "sessions": "Sessions held",
    "in_flight": "Model calls under way, held ones included",
    "held": "Model calls waiting for a pause to end",
    "connections": "Open client connections",
    "event_loop_lag_s": "How late the last timer ran",
    "event_loop_lag_max_s": "How late a timer ran at worst",
    "history_bytes": "Tokens and messages of sessions held in memory, where the gateway tokenises",
    "store_queue": "Calls waiting to be committed",
    "store_bytes": "Size of the store",
}


def exposition(parts: Parts) -> bytes:
    """The same for Prometheus."""
    values = snapshot(parts)
    lines: list[str] = []
    for name, text in [*_HELP.items(), ("turns", "Turns stored")]:
        metric = f"agentcore_rl_gateway_{name}_total"
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} counter", f"{metric} {values[name]}"]
    for name, text in _GAUGES.items():
        metric = f"agentcore_rl_gateway_{name.removesuffix('_s')}" + ("_seconds" if name.endswith("_s") else "")
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} gauge", f"{metric} {values[name]}"]
    metric = "agentcore_rl_gateway_upstream_in_flight"
    lines += [f"# HELP {metric} Model calls at an inference server", f"# TYPE {metric} gauge"]
    lines += [f'{metric}{{worker="{_label(w["worker_id"])}"}} {w["active"]}' for w in values["workers"]]
    metric = "agentcore_rl_gateway_upstream_healthy"
    lines += [f"# HELP {metric} 1 while calls to the server succeed", f"# TYPE {metric} gauge"]
    lines += [f'{metric}{{worker="{_label(w["worker_id"])}"}} {int(w["healthy"])}' for w in values["workers"]]
    return ("\n".join(lines) + "\n").encode()


def _label(value: str) -> str:
    """A label's value, escaped: the name of a server may hold any character. Source: Prometheus' exposition format 0.0.4."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class WeightVersion(msgspec.Struct):
    weight_version: int
    sampler: str | None = None


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    in_flight: str = "finish"
    timeout_s: float = 60.0


class AddWorker(msgspec.Struct):
    url: str
    worker_id: str | None = None
    engine: Engine | None = None
    api_key: str | None = None
    api_path: str = "/v1"
    model_name: str | None = None


class Admin:
    """Answers everything that is not a model call."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.sessions = SessionRoutes(parts.sessions, self._check_sampling)
        self.models = ModelRoutes(parts)
        self.find_more: Callable[[Request], Handler | None] = lambda request: None  # routes of other distributions
        self._routes: dict[tuple[bytes, bytes], Handler] = {
            (b"POST", b"/admin/sessions"): self.sessions.create,
            (b"GET", b"/admin/sessions"): self.sessions.list_all,
            (b"POST", b"/admin/fetch"): self.sessions.fetch,
            (b"POST", b"/admin/delete"): self.sessions.delete,
            (b"GET", b"/admin/stats"): self._stats,
            (b"GET", b"/admin/weight_version"): self._get_version,
            (b"POST", b"/admin/weight_version"): self._set_version,
            (b"POST", b"/admin/pause"): self._pause,
            (b"POST", b"/admin/resume"): self._resume,
            (b"GET", b"/admin/workers"): self._workers,
            (b"POST", b"/admin/workers"): self._add_worker,
        }

    async def respond(self, http: web.BaseRequest, request: Request, *, known: bool) -> web.StreamResponse:
        """Answer a request. ``known``: it carries the administrator's key."""
        return await respond(self._answer(request, known), http)

    async def _answer(self, request: Request, known: bool) -> Any:
        path = request.path
        if path in (b"/healthz", b"/health"):
            return self._health()
        if not known:
            raise RequestError("the admin key is missing or wrong", kind="authentication")
        if path == b"/metrics":
            return web.Response(body=exposition(self._parts), headers={"content-type": "text/plain; version=0.0.4"})
        handler = self._routes.get((request.method, path)) or self._by_prefix(request)
        if handler is not None:
            return await handler(request)
        if any(p == path for _, p in self._routes):
            raise RequestError(f"{request.method.decode()} is not for this route", kind="method_not_allowed")
        raise RequestError(f"there is no route {path.decode('utf-8', 'replace')[:100]!r}", kind="not_found")

    def _check_sampling(self, settings: SessionSettings, asked: ModelRequest) -> None:
        """Check that the engine keeps a session's sampling parameters. Raises: RequestError."""
        if self._parts.token_mode is not None:
            self._parts.token_mode.check(asked)
        elif self._parts.config.kind == "vllm":
            check_session(settings.sampling_params, self._parts.config.allow_fields)

    def _by_prefix(self, request: Request) -> Handler | None:
        if request.method == b"DELETE" and request.path.startswith(b"/admin/workers/"):
            return self._remove_worker
        return self.find_more(request)

    def _health(self) -> dict[str, Any]:
        parts = self._parts
        failed = parts.sessions.store.failed
        return {
            "status": "store failing" if failed is not None else parts.outage.problem or "ok",
            "sessions": len(parts.sessions.by_id),
            "in_flight": len(parts.running),
            "paused": parts.running.paused,
            "waiting_for_a_server": len(parts.outage),
            "event_loop_lag_s": round(parts.lag.now_s, 4),
        }

    # -- weights, pause

    async def _get_version(self, request: Request) -> Any:
        return {"weight_version": self._parts.running.weight_version}

    async def _set_version(self, request: Request) -> Any:
        asked = decode_body(request.body, WeightVersion)
        if self._parts.samplers is not None:
            await self._parts.samplers.use(asked.sampler, asked.weight_version)
        elif asked.sampler is not None:
            raise RequestError(
                "'sampler' names weights at a sampling service; this gateway's engine is none", param="sampler"
            )
        self._parts.running.publish(asked.weight_version)
        for worker in self._parts.router.workers.values():
            worker.forgot = False
        self._parts.outage.begin()
        await self._keep()
        return {"weight_version": self._parts.running.weight_version}

    async def _pause(self, request: Request) -> Any:
        asked = decode_body(request.body, Pause)
        if asked.in_flight not in ("finish", "abort", "continue"):
            raise RequestError("in_flight is finish, abort or continue", param="in_flight")
        answer = await self._parts.running.pause(in_flight=asked.in_flight, timeout_s=min(asked.timeout_s, 3600.0))
        await self._keep()
        return answer

    async def _resume(self, request: Request) -> Any:
        answer = self._parts.running.resume()
        await self._keep()
        return answer

    async def _keep(self) -> None:
        """Let what was changed outlive a restart. Raises: RequestError when the disk refuses."""
        try:
            await self._parts.state.keep(self._parts.running, self._parts.samplers)
        except OSError as e:
            raise RequestError(
                f"this holds, but the gateway cannot store it for a restart ({e.strerror or e}); try again",
                kind="overloaded",
            ) from e

    async def _stats(self, request: Request) -> Any:
        return snapshot(self._parts)

    # -- servers

    async def _workers(self, request: Request) -> Any:
        return self._parts.servers()

    async def _add_worker(self, request: Request) -> Any:
        asked = decode_body(request.body, AddWorker)
        kind, known = self._parts.config.kind, self._parts.router.at(asked.url)
        if kind in SAMPLING_SERVICES:
            raise RequestError(f"engine {kind} has one service, named when the gateway starts", param="engine")
        if asked.engine not in (None, kind):
            raise RequestError(f"the servers of this gateway are of engine {kind}", param="engine")
        upstream = UpstreamConfig(
            url=asked.url,
            engine=kind,
            api_key=asked.api_key or (None if known is None else known.config.api_key),
            api_path=asked.api_path,
            model_name=asked.model_name,
        )
        worker = self._parts.router.add(upstream, asked.worker_id)
        return {"worker_id": worker.id, "url": worker.config.url, "api_path": worker.config.api_path}

    async def _remove_worker(self, request: Request) -> Any:
        worker_id = request.path.rpartition(b"/")[2].decode("utf-8", "replace")
        worker = self._parts.router.drain(worker_id)
        if worker is None:
            raise RequestError(f"there is no upstream {worker_id!r}", kind="not_found")
        return {"worker_id": worker_id, "removed": worker_id, "draining": worker.inflight}
