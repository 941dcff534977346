"""Clients under the names that rLLM imports.

An admin key is taken from AGENTCORE_RL_GATEWAY_ADMIN_KEY, else from where a gateway of this machine has left the one it made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from agentcore_rl_toolkit._servers.keys import key_for

from .models import ADMIN_KEY_ENV, TraceRecord, WorkerInfo


def _headers(url: str) -> dict[str, str]:
    key = key_for("gateway", url, ADMIN_KEY_ENV)
    return {"authorization": f"Bearer {key}"} if key else {}


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class _Calls:
    """The gateway's calls. `_call` returns the result, or an awaitable of it."""

    def __init__(self, gateway_url: str, timeout: float = 30.0) -> None:
        self.gateway_url = gateway_url.rstrip("/")
        self._options = {"base_url": self.gateway_url, "timeout": timeout}

    def _call(self, read: Callable[[Any], Any], method: str, path: str, **options: Any) -> Any:
        raise NotImplementedError

    def create_session(
        self,
        session_id: str | None = None,
        metadata: dict[str, Any] | None = None,
        sampling_params: dict[str, Any] | None = None,
    ) -> Any:
        body = _given(session_id=session_id, metadata=metadata, sampling_params=sampling_params)
        return self._call(lambda answer: str(answer["session_id"]), "POST", "/sessions", json=body)

    def get_session_url(self, session_id: str) -> str:
        return f"{self.gateway_url}/sessions/{session_id}/v1"

    def delete_session(self, session_id: str) -> Any:
        return self._call(lambda answer: int(answer["deleted"]), "DELETE", f"/sessions/{session_id}")

    def delete_sessions(self, session_ids: list[str]) -> Any:
        body = {"session_ids": session_ids}
        return self._call(lambda answer: int(answer["deleted"]), "POST", "/sessions/batch_delete", json=body)

    def get_session_traces(self, session_id: str) -> Any:
        path = f"/sessions/{session_id}/traces"
        return self._call(lambda answer: [TraceRecord(**trace) for trace in answer], "GET", path)

    def add_worker(self, url: str, api_path: str = "/v1", model_name: str | None = None, weight: int = 1) -> Any:
        body = _given(url=url, api_path=api_path, model_name=model_name, weight=weight)
        return self._call(lambda answer: str(answer["worker_id"]), "POST", "/admin/workers", json=body)

    def remove_worker(self, worker_id: str) -> Any:
        return self._call(lambda answer: None, "DELETE", f"/admin/workers/{worker_id}")

    def list_workers(self) -> Any:
        return self._call(lambda answer: [WorkerInfo(**worker) for worker in answer], "GET", "/admin/workers")

    def set_weight_version(self, weight_version: int) -> Any:
        body = {"weight_version": weight_version}
        return self._call(lambda answer: int(answer["weight_version"]), "POST", "/admin/weight_version", json=body)

    def get_weight_version(self) -> Any:
        return self._call(lambda answer: answer["weight_version"], "GET", "/admin/weight_version")

    def flush(self, timeout: float = 30.0) -> Any:
        return self._call(lambda answer: answer["status"] == "flushed", "POST", "/admin/flush", timeout=timeout)

    def health(self) -> Any:
        return self._call(dict, "GET", "/health")


class GatewayClient(_Calls):
    """Synchronous client. Raises: httpx.HTTPStatusError on an answer of 400 and above."""

    def __init__(self, gateway_url: str, timeout: float = 30.0) -> None:
        super().__init__(gateway_url, timeout)
        self._http = httpx.Client(**self._options)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> GatewayClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, read: Callable[[Any], Any], method: str, path: str, **options: Any) -> Any:
        answer = self._http.request(method, path, headers=_headers(self.gateway_url), **options)
        return read(answer.raise_for_status().json())


class AsyncGatewayClient(_Calls):
    """The same for asyncio."""

    def __init__(self, gateway_url: str, timeout: float = 30.0) -> None:
        super().__init__(gateway_url, timeout)
        self._http = httpx.AsyncClient(**self._options)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncGatewayClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _call(self, read: Callable[[Any], Any], method: str, path: str, **options: Any) -> Any:
        answer = await self._http.request(method, path, headers=_headers(self.gateway_url), **options)
        return read(answer.raise_for_status().json())
