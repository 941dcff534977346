"""The session, trace and admin routes that rLLM and the toolkit's earlier backends call on `rllm-model-gateway`.

Only whole replies with consistent tokens are listed as traces, in the order the calls were started; failed calls are in
our own routes. A session must be created before it is called, and a deleted one stays deleted.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
from typing import Annotated, Any
from urllib.parse import parse_qs, unquote_to_bytes

import msgspec

from ...contract import new_session_id
from ...messages.errors import RequestError
from ...trajectory import Turn
from ...trajectory.experts import int32_of, shape_of
from ..capture.record import OK, UNTRAINABLE, CallRecord, ChoiceRecord, decode, expand, whole_messages
from ..http.messages import Request, decode_body
from ..sessions.session import Session
from ..sessions.settings import SessionSettings
from .answers import Handler
from .sessions import SessionRoutes
from .state import Parts

_to_json = msgspec.json.Encoder().encode


class _Create(msgspec.Struct):
    session_id: str | None = None
    metadata: dict[str, Any] | None = None
    sampling_params: dict[str, Any] | None = None


class Query(msgspec.Struct):
    session_ids: list[str] = []
    since: float | None = None
    limit: Annotated[int, msgspec.Meta(ge=0)] | None = None


class RLLMRoutes:
    """Handlers, found by method and path."""

    def __init__(self, parts: Parts, routes: SessionRoutes) -> None:
        self._parts = parts
        self._sessions = parts.sessions
        self._routes = routes
        self._exact: dict[tuple[bytes, bytes], Handler] = {
            (b"POST", b"/sessions"): self._create,
            (b"GET", b"/sessions"): self._list,
            (b"POST", b"/sessions/batch_delete"): self._batch_delete,
            (b"POST", b"/traces/query"): self._query,
            (b"GET", b"/health/workers"): self._workers,
            (b"POST", b"/admin/flush"): self._flush,
            (b"POST", b"/admin/reload"): self._reload,
        }

    def find(self, request: Request) -> Handler | None:
        method, path = request.method, request.path
        handler = self._exact.get((method, path))
        if handler is not None:
            return handler
        if path.startswith(b"/traces/") and method == b"GET":
            return self._trace
        if not path.startswith(b"/sessions/"):
            return None
        if path.endswith(b"/traces"):
            return self._traces if method == b"GET" else None
        return {b"GET": self._info, b"DELETE": self._delete}.get(method)

    # -- sessions

    async def _create(self, request: Request) -> Any:
        asked = decode_body(request.body, _Create)
        settings = SessionSettings(sampling_params=asked.sampling_params or {}, metadata=asked.metadata or {})
        [session] = await self._routes.open([asked.session_id or new_session_id()], settings)
        return {"session_id": session.id, "url": f"/sessions/{session.id}/v1", "api_key": session.key.decode()}

    async def _list(self, request: Request) -> Any:
        since, limit = _bounds(request)
        found = [s for s in self._sessions.by_id.values() if s.records and s.created_s >= (since or 0.0)]
        return [_info(s) for s in found[:limit]]

    async def _info(self, request: Request) -> Any:
        return _info(self._session(request.path[10:]))

    async def _delete(self, request: Request) -> Any:
        name = unquote_to_bytes(request.path[10:])
        session = self._sessions.by_id.get(name)
        records = session.records if session is not None else 0
        await self._routes.delete_sessions([name.decode("utf-8", "replace")])
        return {"deleted": records}

    async def _batch_delete(self, request: Request) -> Any:
        names = decode_body(request.body, Query).session_ids
        by_id = self._sessions.by_id
        records = sum(by_id[n.encode()].records for n in names if n.encode() in by_id)
        await self._routes.delete_sessions(names)
        return {"deleted": records}

    # -- traces

    async def _traces(self, request: Request) -> Any:
        """The session's traces. An unknown session has none: it may have been deleted, or not have called yet."""
        session = self._sessions.by_id.get(unquote_to_bytes(request.path[10:-7]))
        since, limit = _bounds(request)
        sessions = [] if session is None else [session]
        return await self._json(sessions, since, limit)

    async def _query(self, request: Request) -> Any:
        asked = decode_body(request.body, Query)
        by_id = self._sessions.by_id
        found = [s for s in (by_id.get(name.encode()) for name in asked.session_ids) if s is not None]
        return await self._json(found, asked.since, asked.limit)

    async def _trace(self, request: Request) -> Any:
        wanted = unquote_to_bytes(request.path[8:]).decode("utf-8", "replace")
        for session in await self._naming(wanted):
            for trace in await self._read(session):
                if trace["trace_id"] == wanted:
                    return trace
        raise RequestError(f"there is no trace {wanted!r}", kind="not_found")

    async def _naming(self, trace_id: str) -> list[Session]:
        """Sessions with a stored call of this name; looked for in a thread."""
        await self._sessions.store.kept()
        call_id = trace_id.partition(".")[0]
        numbers = set(await asyncio.to_thread(self._sessions.store.reader.naming, call_id))
        return [s for s in self._sessions.by_id.values() if s.number in numbers]

    async def _json(self, sessions: list[Session], since: float | None, limit: int | None) -> bytes:
        """The traces of all sessions, at most ``limit`` of each, as `rllm-model-gateway` counts them."""
        traces: list[dict[str, Any]] = []
        for session in sessions:
            traces += [t for t in await self._read(session) if since is None or t["timestamp"] >= since][:limit]
        return await asyncio.to_thread(_to_json, traces)

    async def _read(self, session: Session) -> list[dict[str, Any]]:
        """A session's traces; decoded in a thread, so that agents' calls go on meanwhile."""
        await self._sessions.store.kept()
        read, metadata = self._sessions.store.reader.readable, session.settings.metadata
        return await asyncio.to_thread(lambda: traces_of(session.id, read(session.number), metadata))

    # -- the rest

    async def _workers(self, request: Request) -> Any:
        workers = self._parts.servers()
        return {"workers": workers, "healthy": sum(w["healthy"] for w in workers), "total": len(workers)}

    async def _flush(self, request: Request) -> Any:
        await self._sessions.store.kept()
        return {"status": "flushed"}

    async def _reload(self, request: Request) -> Any:
        return {"status": "ok"}

    def _session(self, name: bytes) -> Session:
        session = self._sessions.by_id.get(unquote_to_bytes(name))
        if session is None:
            raise RequestError(f"there is no session {name.decode('utf-8', 'replace')[:120]!r}", kind="not_found")
        return session


def traces_of(session_id: str, payloads: list[bytes], metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns of a session as rLLM's trace records."""
    records = [decode(p) for p in payloads]
    messages = {record.call_id: text for record, text in zip(records, whole_messages(records), strict=True)}
    retried = {record.retry_of for record in records}
    continued = {record.prompt_base.call_id for record in records if record.prompt_base.choice >= 0}
    whole = expand(records)
    turns = iter(whole.turns)
    traces = []
    for record in whole.records:
        own = list(itertools.islice(turns, len(record.choices))) if record.status in (OK, UNTRAINABLE) else []
        if record.call_id not in continued and (not record.delivered or record.call_id in retried):
            continue  # its agent did not get it whole
        if record.status == OK:
            asked = msgspec.json.decode(messages[record.call_id] or b"[]")
            for turn, choice in zip(own, record.choices, strict=True):
                traces.append({**_trace(record, turn, choice, asked), "session_id": session_id, "metadata": metadata})
    return traces


def _trace(record: CallRecord, turn: Turn, choice: ChoiceRecord, asked: Any) -> dict[str, Any]:
    return {
        "trace_id": turn.turn_id,
        "model": record.model or "",
        "messages": asked if isinstance(asked, list) and asked and isinstance(asked[0], dict) else [],
        "prompt_token_ids": turn.prompt_ids,
        "response_message": msgspec.json.decode(choice.message),
        "completion_token_ids": turn.completion_ids,
        "logprobs": None if choice.logprobs is None else turn.logprobs,
        "routing_matrices": _routing(choice.routed_experts),
        "finish_reason": choice.finish_reason,
        "weight_version": record.weight_version_first,
        "latency_ms": (record.finished_s - record.started_s) * 1000,
        "token_counts": {"prompt": len(turn.prompt_ids), "completion": len(turn.completion_ids)},
        "timestamp": record.finished_s,
        "raw_request": None,
        "raw_response": None,
    }


def _info(session: Session) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "trace_count": session.turns,
        "created_at": session.created_s,
        "last_accessed_at": session.closed_s or session.created_s,
        "metadata": session.settings.metadata,
    }


def _asked(request: Request, name: str) -> str | None:
    """A parameter of the query."""
    return parse_qs(request.query.decode("ascii", "replace")).get(name, [None])[0]


def _bounds(request: Request) -> tuple[float | None, int | None]:
    since_text, limit_text = _asked(request, "since"), _asked(request, "limit")
    try:
        since = float(since_text) if since_text is not None else None
        limit = int(limit_text) if limit_text is not None else None
    except ValueError as e:
        raise RequestError(f"since is a number, limit a whole one: {e}") from e
    if limit is not None and limit < 0:
        raise RequestError("limit is 0 or more", param="limit")
    return since, limit


def _routing(experts: bytes | None) -> list[str] | None:
    """As rLLM reads it: the shape of a token's part and the type as JSON, then the numbers in base64.

    None as well where the engine gave numbers without a shape (SGLang): which are whose only the model's owner knows.
    """
    shape = shape_of(experts) if experts else None
    if experts is None or shape is None or len(shape) != 3:
        return None
    shown = {"shape": list(shape[1:]), "dtype": "int32"}
    return [msgspec.json.encode(shown).decode(), base64.b64encode(int32_of(experts)).decode()]
