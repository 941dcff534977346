"""Records and settings in the shapes that rLLM reads."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

ADMIN_KEY_ENV = "AGENTCORE_RL_GATEWAY_ADMIN_KEY"
ALLOWED_HOSTS_ENV = "AGENTCORE_RL_ALLOWED_HOSTS"


def split_url(url: str) -> tuple[str, str]:
    """Base and API path of an address: ``http://host/v1`` is ``http://host`` and ``/v1``, as without a path."""
    parts = urlsplit(url.rstrip("/"))
    return (f"{parts.scheme}://{parts.netloc}", parts.path) if parts.path else (url.rstrip("/"), "/v1")


def allowed_hosts() -> list[str]:
    """More names of this gateway, as agents use them: what the environment names, separated by blanks."""
    return os.environ.get(ALLOWED_HOSTS_ENV, "").split()


class TraceRecord(BaseModel):
    """One model call, whole, with as many logprobs as completion tokens."""

    model_config = ConfigDict(extra="allow")

    trace_id: str
    session_id: str
    lineage_id: str | None = None
    model: str = ""
    messages: list[dict[str, Any]] = Field(default_factory=list)
    prompt_token_ids: list[int] = Field(default_factory=list)
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
    raw_request: dict[str, Any] | None = None
    raw_response: dict[str, Any] | None = None


class WorkerConfig(BaseModel):
    """One engine. Without ``api_path`` a path in the URL is that: ``/v1`` where there is none."""

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
    """One engine as the gateway sees it."""

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
    allowed_hosts: list[str] = Field(default_factory=allowed_hosts)
