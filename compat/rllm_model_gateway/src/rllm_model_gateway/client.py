"""Clients under the names that rLLM imports.

An admin key is taken from AGENTCORE_RL_GATEWAY_ADMIN_KEY, else from where a gateway of this machine has left the one it made.
"""

from __future__ import annotations

from typing import Any

import httpx

from agentcore_rl_toolkit._servers.keys import key_for

from .models import ADMIN_KEY_ENV, TraceRecord, WorkerInfo


def _headers(url: str) -> dict[str, str]:
    key = key_for("gateway", url, ADMIN_KEY_ENV)
    return {"authorization": f"Bearer {key}"} if key else {}


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _records(answer: Any) -> list[TraceRecord]:
    return [TraceRecord(**trace) for trace in answer]


def _version(answer: dict[str, Any]) -> Any:
    return answer["weight_version"]


class GatewayClient:
    """Synchronous client. Raises: httpx.HTTPStatusError on an answer of 400 and above."""

    def __init__(self, gateway_url: str, timeout: float = 30.0) -> None:
        self.gateway_url = gateway_url.rstrip("/")
        self._http = httpx.Client(base_url=self.gateway_url, timeout=timeout)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> GatewayClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, method: str, path: str, **options: Any) -> Any:
        answer = self._http.request(method, path, headers=_headers(self.gateway_url), **options)
        answer.raise_for_status()
        return answer.json()

    def create_session(
        self,
        session_id: str | None = None,
        metadata: dict[str, Any] | None = None,
        sampling_params: dict[str, Any] | None = None,
    ) -> str:
        body = _given(session_id=session_id, metadata=metadata, sampling_params=sampling_params)
        return str(self._call("POST", "/sessions", json=body)["session_id"])

    def get_session_url(self, session_id: str) -> str:
        return f"{self.gateway_url}/sessions/{session_id}/v1"

    def delete_session(self, session_id: str) -> int:
        return int(self._call("DELETE", f"/sessions/{session_id}")["deleted"])

    def delete_sessions(self, session_ids: list[str]) -> int:
        return int(self._call("POST", "/sessions/batch_delete", json={"session_ids": session_ids})["deleted"])

    def get_session_traces(self, session_id: str) -> list[TraceRecord]:
        return _records(self._call("GET", f"/sessions/{session_id}/traces"))

    def add_worker(self, url: str, api_path: str = "/v1", model_name: str | None = None, weight: int = 1) -> str:
        body = _given(url=url, api_path=api_path, model_name=model_name, weight=weight)
        return str(self._call("POST", "/admin/workers", json=body)["worker_id"])

    def remove_worker(self, worker_id: str) -> None:
        self._call("DELETE", f"/admin/workers/{worker_id}")

    def list_workers(self) -> list[WorkerInfo]:
        return [WorkerInfo(**w) for w in self._call("GET", "/admin/workers")]

    def set_weight_version(self, weight_version: int) -> int:
        return int(_version(self._call("POST", "/admin/weight_version", json={"weight_version": weight_version})))

    def get_weight_version(self) -> int | None:
        return _version(self._call("GET", "/admin/weight_version"))

    def flush(self, timeout: float = 30.0) -> bool:
        return bool(self._call("POST", "/admin/flush", timeout=timeout)["status"] == "flushed")

    def health(self) -> dict[str, Any]:
        return dict(self._call("GET", "/health"))


class AsyncGatewayClient:
    """The same for asyncio."""

    def __init__(self, gateway_url: str, timeout: float = 30.0) -> None:
        self.gateway_url = gateway_url.rstrip("/")
        self._http = httpx.AsyncClient(base_url=self.gateway_url, timeout=timeout)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncGatewayClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        answer = await self._http.request(method, path, headers=_headers(self.gateway_url), **options)
        answer.raise_for_status()
        return answer.json()

    async def create_session(
        self,
        session_id: str | None = None,
        metadata: dict[str, Any] | None = None,
        sampling_params: dict[str, Any] | None = None,
    ) -> str:
        body = _given(session_id=session_id, metadata=metadata, sampling_params=sampling_params)
        return str((await self._call("POST", "/sessions", json=body))["session_id"])

    def get_session_url(self, session_id: str) -> str:
        return f"{self.gateway_url}/sessions/{session_id}/v1"

    async def delete_session(self, session_id: str) -> int:
        return int((await self._call("DELETE", f"/sessions/{session_id}"))["deleted"])

    async def delete_sessions(self, session_ids: list[str]) -> int:
        return int((await self._call("POST", "/sessions/batch_delete", json={"session_ids": session_ids}))["deleted"])

    async def get_session_traces(self, session_id: str) -> list[TraceRecord]:
        return _records(await self._call("GET", f"/sessions/{session_id}/traces"))

    async def add_worker(self, url: str, api_path: str = "/v1", model_name: str | None = None, weight: int = 1) -> str:
        body = _given(url=url, api_path=api_path, model_name=model_name, weight=weight)
        return str((await self._call("POST", "/admin/workers", json=body))["worker_id"])

    async def remove_worker(self, worker_id: str) -> None:
        await self._call("DELETE", f"/admin/workers/{worker_id}")

    async def list_workers(self) -> list[WorkerInfo]:
        return [WorkerInfo(**w) for w in await self._call("GET", "/admin/workers")]

    async def set_weight_version(self, weight_version: int) -> int:
        return int(_version(await self._call("POST", "/admin/weight_version", json={"weight_version": weight_version})))

    async def get_weight_version(self) -> int | None:
        return _version(await self._call("GET", "/admin/weight_version"))

    async def flush(self, timeout: float = 30.0) -> bool:
        return bool((await self._call("POST", "/admin/flush", timeout=timeout))["status"] == "flushed")

    async def health(self) -> dict[str, Any]:
        return dict(await self._call("GET", "/health"))
