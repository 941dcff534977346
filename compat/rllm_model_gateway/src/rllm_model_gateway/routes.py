"""The session, trace and admin routes by which rLLM and the toolkit's earlier backends use `rllm-model-gateway`.

Only whole replies with consistent tokens are listed as traces, in the order the calls were started; failed calls are in
our own routes. A session must be created before it is called, and a deleted one stays deleted.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway
from agentcore_rl_toolkit.gateway.admin import Admin, Handler, Names, Request
from agentcore_rl_toolkit.gateway.capture.record import (
    OK,
    UNTRAINABLE,
    CallRecord,
    ChoiceRecord,
    decode,
)
from agentcore_rl_toolkit.gateway.capture.turns import expand, message_lists
from agentcore_rl_toolkit.gateway.http.responses import decode_body
from agentcore_rl_toolkit.gateway.sessions import Session, Sessions, SessionSettings
from agentcore_rl_toolkit.gateway.store.reader import Reader
from agentcore_rl_toolkit.trajectory import Turn
from agentcore_rl_toolkit.trajectory import experts as routing

_NUMBERS_BYTES = 3 * 2**18  # of expert routing that are written at a time; base64 takes three bytes at a time


class _Create(msgspec.Struct):
    session_id: str | None = None
    metadata: dict[str, Any] | None = None
    sampling_params: dict[str, Any] | None = None


def add_routes(gateway: Gateway) -> None:
    """Let a gateway serve rLLM's routes beside its own."""
    gateway.admin.find_more = RLLMRoutes(gateway.sessions, gateway.admin).find


class RLLMRoutes:
    """Handlers, found by method and path."""

    def __init__(self, sessions: Sessions, admin: Admin) -> None:
        self._sessions = sessions
        self._admin = admin

    def find(self, request: Request) -> Handler | None:
        kind = (request.method, request.path)
        if request.path.startswith(b"/sessions/") and kind != (b"POST", b"/sessions/batch_delete"):
            traces = request.path.endswith(b"/traces")
            return {(b"GET", True): self._traces, (b"DELETE", False): self._delete}.get((request.method, traces))
        return {
            (b"POST", b"/sessions"): self._create,
            (b"POST", b"/sessions/batch_delete"): self._batch_delete,
            (b"POST", b"/admin/flush"): self._flush,
        }.get(kind)

    async def _create(self, request: Request) -> Any:
        asked = decode_body(request.body, _Create)
        settings = SessionSettings(sampling_params=asked.sampling_params or {}, metadata=asked.metadata or {})
        [session] = await self._admin.open_sessions([asked.session_id or new_session_id()], settings)
        return {"session_id": session.id, "url": f"/sessions/{session.id}/v1", "api_key": session.key.decode()}

    async def _delete(self, request: Request) -> Any:
        return await self._deleted([unquote_to_bytes(request.path[10:]).decode("utf-8", "replace")])

    async def _batch_delete(self, request: Request) -> Any:
        return await self._deleted(decode_body(request.body, Names).session_ids)

    async def _deleted(self, names: list[str]) -> dict[str, int]:
        by_id = self._sessions.by_id
        records = sum(by_id[n.encode()].records for n in names if n.encode() in by_id)
        await self._admin.delete_sessions(names)
        return {"deleted": records}

    async def _traces(self, request: Request) -> Any:
        """The session's traces. An unknown session has none: it may have been deleted, or not have called yet."""
        session = self._sessions.by_id.get(unquote_to_bytes(request.path[10:-7]))
        if session is None:
            return []
        store = self._sessions.store
        await store.kept()
        return store.read(lambda reader: traces_of(session, reader))

    async def _flush(self, request: Request) -> Any:
        await self._sessions.store.kept()
        return {"status": "flushed"}


def traces_of(session: Session, reader: Reader) -> Iterator[bytes]:
    """The turns of a session as rLLM's trace records, in JSON. The expert routing of one call is in memory at a time."""
    numbers = reader.numbers(session.number)
    records = [_without_routing(decode(payload)) for payload in reader.readable(numbers)]
    number_of = {record.call_id: number for record, number in zip(records, numbers, strict=True)}
    messages = dict(zip((record.call_id for record in records), message_lists(records), strict=True))
    continued = {record.prompt_base.call_id for record in records if record.prompt_base.choice >= 0}
    whole = expand(records)
    turns = iter(whole.turns)
    separator = b"["
    for record in whole.records:
        own = list(itertools.islice(turns, len(record.choices))) if record.status in (OK, UNTRAINABLE) else []
        if record.call_id not in continued and not record.delivered:
            continue  # its agent did not get it whole
        if record.status == OK:
            asked = messages[record.call_id]
            choices = record.choices
            if any(choice.routed_experts is not None for choice in choices):
                choices = decode(reader.call(number_of[record.call_id])).choices
            for turn, choice in zip(own, choices, strict=True):
                told = {"session_id": session.id, "metadata": session.settings.metadata}
                trace = msgspec.json.encode(_trace(record, turn, choice, asked) | told)
                yield separator + trace.removesuffix(b"}") + b',"routing_matrices":'
                yield from _routing(choice.routed_experts)
                yield b"}"
                separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _without_routing(record: CallRecord) -> CallRecord:
    for choice in record.choices:
        choice.routed_experts = None if choice.routed_experts is None else b""
    return record


def _trace(record: CallRecord, turn: Turn, choice: ChoiceRecord, asked: Any) -> dict[str, Any]:
    return {
        "trace_id": turn.turn_id,
        "model": record.model or "",
        "messages": asked if isinstance(asked, list) and asked and isinstance(asked[0], dict) else [],
        "prompt_token_ids": turn.prompt_ids,
        "response_message": msgspec.json.decode(choice.message),
        "completion_token_ids": turn.completion_ids,
        "logprobs": None if choice.logprobs is None else turn.logprobs,
        "finish_reason": choice.finish_reason,
        "weight_version": record.weight_version_first,
        "latency_ms": (record.finished_s - record.started_s) * 1000,
        "token_counts": {"prompt": len(turn.prompt_ids), "completion": len(turn.completion_ids)},
        "timestamp": record.finished_s,
        "raw_request": None,
        "raw_response": None,
    }


def _routing(experts: bytes | None) -> Iterator[bytes]:
    """As rLLM reads it: the shape of a token's part and the type as JSON, then the numbers in base64.

    It is null as well where the engine gave numbers without a shape (SGLang): which are whose only the model's owner knows.
    """
    shape, numbers = routing.read(experts or b"")
    if shape is None or len(shape) != 3:
        yield b"null"
        return
    shown = {"shape": list(shape[1:]), "dtype": "int32"}
    yield b'[%b,"' % msgspec.json.encode(msgspec.json.encode(shown).decode())
    for at in range(0, len(numbers), _NUMBERS_BYTES):
        yield base64.b64encode(memoryview(numbers)[at : at + _NUMBERS_BYTES])
    yield b'"]'
