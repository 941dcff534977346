"""Records and settings in the shapes that rLLM reads."""

from __future__ import annotations

import os
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

ADMIN_KEY_ENV = "AGENTCORE_RL_GATEWAY_ADMIN_KEY"
UPSTREAM_HOSTS_ENV = "AGENTCORE_RL_GATEWAY_UPSTREAM_HOSTS"
ALLOWED_HOSTS_ENV = "AGENTCORE_RL_ALLOWED_HOSTS"
_LOOPBACK = ["localhost", "127.0.0.0/8", "::1/128"]
_PRIVATE = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fd00::/8"]


def upstream_hosts() -> list[str]:
    """Hosts of servers that a trainer may register: this machine; with an admin key, which agents lack, private networks;
    and what the environment names, separated by commas.
    """
    named = [host.strip() for host in os.environ.get(UPSTREAM_HOSTS_ENV, "").split(",") if host.strip()]
    return [*_LOOPBACK, *(_PRIVATE if os.environ.get(ADMIN_KEY_ENV) else []), *named]


def split_url(url: str) -> tuple[str, str]:
    """Base and API path of an address: ``http://host/v1`` is ``http://host`` and ``/v1``, as without a path."""
    parts = urlsplit(url.rstrip("/"))
    return (f"{parts.scheme}://{parts.netloc}", parts.path) if parts.path else (url.rstrip("/"), "/v1")


def allowed_hosts() -> list[str]:
    """More names of this gateway, as agents use them: what the environment names, separated by blanks."""
    return os.environ.get(ALLOWED_HOSTS_ENV, "").split()


class _Call(BaseModel):
    """What a call says about itself in either form."""

    model_config = ConfigDict(extra="allow")

    trace_id: str
    session_id: str
    lineage_id: str | None = None
    model: str = ""
    response_message: dict[str, Any] = Field(default_factory=dict)
    completion_token_ids: list[int] = Field(default_factory=list)
    logprobs: list[float] | None = None
    routing_matrices: list[str] | None = None
    finish_reason: str | None = None
    weight_version: int | None = None
    latency_ms: float = 0.0
    token_counts: dict[str, int] = Field(default_factory=dict)
    timestamp: float = 0.0
    metadata: dict[str, Any] = Field(default_factory=dict)


class TraceRecord(_Call):
    """One model call, whole, with as many logprobs as completion tokens."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    prompt_token_ids: list[int] = Field(default_factory=list)
    raw_request: dict[str, Any] | None = None
    raw_response: dict[str, Any] | None = None


class TraceDelta(_Call):
    """One model call as what comes after its parent: the call whose messages, prompt and reply it goes on from."""

    parent_trace_id: str | None
    messages_suffix: list[dict[str, Any]]
    prompt_ids_suffix: list[int]


class TraceGraph(BaseModel):
    """The calls of one session, parents before children. Raises: ValueError on an unknown parent or a repeated id."""

    format: Literal["compact"]
    version: Literal[1]
    deltas: list[TraceDelta]

    @model_validator(mode="after")
    def _in_order(self) -> TraceGraph:
        seen: set[str] = set()
        for delta in self.deltas:
            if delta.trace_id in seen:
                raise ValueError(f"trace {delta.trace_id!r} is there twice")
            if delta.parent_trace_id is not None and delta.parent_trace_id not in seen:
                raise ValueError(f"the parent of trace {delta.trace_id!r} does not come before it")
            seen.add(delta.trace_id)
        return self

    def delta(self, trace_id: str) -> TraceDelta | None:
        return next((d for d in self.deltas if d.trace_id == trace_id), None)

    def resolve(self, trace_id: str) -> TraceRecord:
        """One call, whole. Raises: ValueError if it is not here."""
        found = next((r for r in self.flatten() if r.trace_id == trace_id), None)
        if found is None:
            raise ValueError(f"unknown trace {trace_id!r}")
        return found

    def flatten(self) -> list[TraceRecord]:
        """Every call, whole."""
        whole: dict[str, TraceRecord] = {}
        for delta in self.deltas:
            messages, prompt = list(delta.messages_suffix), list(delta.prompt_ids_suffix)
            if delta.parent_trace_id is not None:
                parent = whole[delta.parent_trace_id]
                messages = [*parent.messages, parent.response_message, *messages]
                prompt = [*parent.prompt_token_ids, *parent.completion_token_ids, *prompt]
            # Checked when the delta was made; millions of token ids are not gone through once more.
            whole[delta.trace_id] = TraceRecord.model_construct(
                messages=messages, prompt_token_ids=prompt, **_fields(delta)
            )
        return list(whole.values())

    def slice(self, trace_ids: list[str]) -> TraceGraph:
        """These calls alone; one whose parent is left out is whole."""
        kept = {delta.trace_id: delta for delta in self.deltas}
        lost = {i for i in trace_ids if i in kept and kept[i].parent_trace_id not in {None, *trace_ids}}
        whole = {r.trace_id: r for r in self.flatten()} if lost else {}
        deltas = [kept[i] for i in trace_ids if i in kept]
        for place, delta in enumerate(deltas):
            if delta.trace_id in lost:
                record = whole[delta.trace_id]
                deltas[place] = delta.model_copy(
                    update={
                        "parent_trace_id": None,
                        "messages_suffix": record.messages,
                        "prompt_ids_suffix": record.prompt_token_ids,
                    }
                )
        return TraceGraph(format="compact", version=1, deltas=deltas)


def _fields(delta: TraceDelta) -> dict[str, Any]:
    return {name: getattr(delta, name) for name in _Call.model_fields}


class WorkerConfig(BaseModel):
    """One inference server. Without ``api_path`` a path in the URL is that: ``/v1`` where there is none."""

    worker_id: str = ""
    url: str
    api_path: str = "/v1"
    model_name: str | None = None
    weight: int = 1

    @model_validator(mode="before")
    @classmethod
    def _split(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("url"), str) and "api_path" not in values:
            base, path = split_url(values["url"])
            return {**values, "url": base, "api_path": path}
        return values


class WorkerInfo(WorkerConfig):
    """One inference server as the gateway sees it."""

    model_config = ConfigDict(extra="allow")

    weight: float = 1.0  # type: ignore[assignment]  # the gateway takes fractions
    healthy: bool = True
    active_requests: int = 0

    @property
    def api_url(self) -> str:
        """Where the OpenAI routes are."""
        return self.url.rstrip("/") + self.api_path


class GatewayConfig(BaseModel):
    """Settings under the names that rLLM uses.

    Without ``add_return_token_ids`` the workers are plain OpenAI endpoints (rLLM's evaluation runs), whose calls are no
    traces. ``model`` replaces the model name of every call, and is where the tokenizer lies in cumulative mode.
    ``add_logprobs``, ``strip_vllm_fields`` and ``sync_traces`` are accepted and always on: this gateway asks for tokens in
    every call, gives agents only what they asked for, and stores before it answers. ``health_check_interval`` has no effect:
    a server is judged by what happens to calls. ``store_worker`` wins over ``store``.
    """

    model_config = ConfigDict(extra="allow")

    host: str = "127.0.0.1"
    port: int = 9090
    workers: list[WorkerConfig] = Field(default_factory=list)
    db_path: str | None = None
    store: str = "memory"
    store_worker: str | None = None
    add_logprobs: bool = True
    add_return_token_ids: bool = True
    strip_vllm_fields: bool = True
    routing_policy: str | None = None
    health_check_interval: float = 10.0
    log_level: str = "WARNING"
    sync_traces: bool = False
    model: str | None = None
    cumulative_token_mode: bool = False
    renderer_family: str = "auto"
    renderer_name: str | None = None
    engine: str = "vllm"
    allow_upstream_hosts: list[str] = Field(default_factory=upstream_hosts)
    allowed_hosts: list[str] = Field(default_factory=allowed_hosts)
