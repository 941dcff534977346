"""The agent-sandbox resources of a Kubernetes cluster, through kubernetes-asyncio: one SandboxClaim per session.

A claim takes a ready pod from a SandboxWarmPool; the pod's container serves the AgentCore contract on its port 8080. What is here
speaks to the API server only: claims are created, awaited, listed and deleted.

Source: kubernetes-sigs/agent-sandbox, API reference of extensions.agents.x-k8s.io/v1beta1 (SandboxClaim: spec.warmPoolRef,
spec.lifecycle, status.conditions Ready and Finished, status.sandbox.name and podIPs); Kubernetes API conventions (Status errors).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import json
import re
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..._installation import missing_extra
from ...errors import ConfigError, LocalRuntimeError

GROUP, VERSION = "extensions.agents.x-k8s.io", "v1beta1"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MANAGED = "app.kubernetes.io/managed-by"
MANAGER = "agentcore-rl"
SESSION_ANNOTATION = "agentcore-rl/session-id"
LIST_LIMIT = 500
POLL_S = (0.1, 1.0)


class KubernetesError(LocalRuntimeError):
    """The API server refused or failed. ``status`` is its HTTP status, None when it was not reached; ``reason`` its own word."""

    status: int | None = None
    reason: str = ""


class ClaimNotFoundError(KubernetesError):
    """There is no such claim, or no such kind of resource: is agent-sandbox installed?"""


class ClaimExistsError(KubernetesError):
    """A claim of this name is there already."""


class ForbiddenError(KubernetesError):
    """The token is not valid or may not do this."""


class QuotaError(KubernetesError):
    """The cluster wants fewer requests, or the namespace's quota is used up. ``retry_after_s`` as the server wrote it."""

    retry_after_s: float | None = None


class ClaimFailedError(KubernetesError):
    """The sandbox ended, or the claim is being deleted, before it was ready."""


class ClaimTimeoutError(KubernetesError, TimeoutError):
    """The sandbox was not ready in time; the message holds its last conditions."""


@dataclass(frozen=True, kw_only=True)
class ApiServer:
    """How to reach an API server. ``ca_file`` None: the system's authorities.

    ``token_file`` is read anew for each request, because the token in a pod changes.
    """

    url: str
    namespace: str
    token_file: Path | None = None
    ca_file: Path | None = None
    timeout_s: float = 15.0

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the API server's address must be http(s)://host[:port], got {self.url!r}")
        if (
            parts.scheme == "http"
            and self.token_file is not None
            and parts.hostname not in ("127.0.0.1", "::1", "localhost")
        ):
            raise ConfigError("a token is not sent over plain http to another machine; use https")

    @classmethod
    def in_pod(cls, environment: Mapping[str, str], *, folder: Path = SERVICE_ACCOUNT) -> ApiServer:
        """The cluster this pod runs in. Raises: ConfigError outside of one."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if host is None or not (folder / "namespace").exists():
            raise ConfigError(
                "this is not a pod of a Kubernetes cluster (no KUBERNETES_SERVICE_HOST or service account)"
            )
        return cls(
            url=f"https://{f'[{host}]' if ':' in host else host}:{port}",
            namespace=(folder / "namespace").read_text().strip(),
            token_file=folder / "token",
            ca_file=folder / "ca.crt",
        )


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A SandboxClaim as last seen. ``pod_ips`` is empty until a sandbox is bound; ``session_id`` None: not one of ours."""

    name: str
    session_id: str | None
    ready: bool
    finished: bool
    deleting: bool
    sandbox: str | None
    pod_ips: tuple[str, ...] = ()
    conditions: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def parse(cls, item: Mapping[str, Any]) -> Claim:
        """From the API's JSON. Raises: KubernetesError when that is no claim."""
        try:
            metadata, status = item["metadata"], item.get("status") or {}
            conditions = status.get("conditions") or []
            true = {c["type"] for c in conditions if c["status"] == "True"}
            sandbox = status.get("sandbox") or {}
            return cls(
                name=metadata["name"],
                session_id=(metadata.get("annotations") or {}).get(SESSION_ANNOTATION),
                ready="Ready" in true,
                finished="Finished" in true,
                deleting=metadata.get("deletionTimestamp") is not None,
                sandbox=sandbox.get("name"),
                pod_ips=tuple(sandbox.get("podIPs") or ()),
                conditions=tuple(
                    f"{c['type']}={c['status']} ({c.get('reason', '')}: {c.get('message', '')})" for c in conditions
                ),
            )
        except (KeyError, TypeError, AttributeError) as e:
            raise KubernetesError(f"the API server sent something that is no SandboxClaim: {e!r}") from e


def claim_name(session_id: str) -> str:
    """A DNS label for a session: what of its id may stand in one, and a hash of all of it."""
    readable = re.sub(r"[^a-z0-9-]+", "-", session_id.lower()).strip("-")[:40].strip("-")
    return f"s-{readable}-{hashlib.sha256(session_id.encode()).hexdigest()[:10]}".replace("--", "-")


class SandboxClient:
    """Claims in one namespace. Every call has the server's ``timeout_s``; none is repeated by itself. `close` when done.

    Raises: MissingExtraError without kubernetes-asyncio.
    """

    def __init__(self, server: ApiServer) -> None:
        try:
            from kubernetes_asyncio import client
        except ImportError as e:
            raise missing_extra("sessions on Kubernetes need kubernetes-asyncio", "kubernetes") from e
        self.server = server
        configuration = client.Configuration(host=server.url)
        if server.ca_file is not None:
            configuration.ssl_ca_cert = str(server.ca_file)
        if server.token_file is not None:
            configuration.api_key["BearerToken"] = ""  # the hook is asked for keys that are there only
            configuration.refresh_api_key_hook = self._read_token
        self._configuration = configuration
        self._api: Any = None
        self._which = {
            "group": GROUP,
            "version": VERSION,
            "namespace": server.namespace,
            "plural": "sandboxclaims",
            "_request_timeout": server.timeout_s,
        }

    def _read_token(self, configuration: Any) -> None:
        if self.server.token_file is not None:
            configuration.api_key["BearerToken"] = f"Bearer {self.server.token_file.read_text().strip()}"

    async def close(self) -> None:
        """Close its connections."""
        if self._api is not None:
            await self._api.api_client.close()

    async def create_async(
        self,
        session_id: str,
        *,
        warm_pool: str,
        max_lifetime_s: float | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Claim:
        """Claim a sandbox for a session. After ``max_lifetime_s`` the cluster deletes it by itself, also when we are gone.

        Raises: ClaimExistsError, ForbiddenError, QuotaError, KubernetesError.
        """
        spec: dict[str, Any] = {"warmPoolRef": {"name": warm_pool}}
        if max_lifetime_s is not None:
            end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=max_lifetime_s)
            spec["lifecycle"] = {"shutdownTime": end.strftime("%Y-%m-%dT%H:%M:%SZ"), "shutdownPolicy": "Delete"}
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "SandboxClaim",
            "metadata": {
                "name": claim_name(session_id),
                "labels": {**(labels or {}), MANAGED: MANAGER},
                "annotations": {SESSION_ANNOTATION: session_id},
            },
            "spec": spec,
        }
        return Claim.parse(await self._ask("create", body=body))

    async def get_async(self, name: str) -> Claim:
        """Raises: ClaimNotFoundError, ForbiddenError, QuotaError, KubernetesError."""
        return Claim.parse(await self._ask("get", name=name))

    async def wait_ready_async(self, name: str, *, timeout_s: float) -> Claim:
        """Until the sandbox is ready and has an address. 0: look once.

        Raises: ClaimTimeoutError, ClaimFailedError, ClaimNotFoundError, ForbiddenError.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = POLL_S[0]
        seen: Sequence[str] = ()
        while True:
            wait_s = pause_s
            try:
                claim = await self.get_async(name)
            except QuotaError as e:
                wait_s = max(pause_s, e.retry_after_s or 0.0)
            except KubernetesError as e:
                if e.status is not None and e.status < 500:
                    raise
                seen = (str(e),)  # not reached, or not well: it may be the next time
            else:
                seen = claim.conditions
                if claim.finished or claim.deleting:
                    raise ClaimFailedError(
                        f"claim {name} ended before it was ready: {'; '.join(seen) or 'it is being deleted'}"
                    )
                if claim.ready and claim.pod_ips:
                    return claim
            if time.monotonic() + wait_s > deadline:
                raise ClaimTimeoutError(
                    f"claim {name} was not ready within {timeout_s:g} s; its conditions: {'; '.join(seen) or 'none yet'}"
                )
            await asyncio.sleep(wait_s)
            pause_s = min(POLL_S[1], pause_s * 1.5)

    async def list_async(self, labels: Mapping[str, str] | None = None) -> list[Claim]:
        """All claims made by this toolkit, of all pages; only those that have these ``labels``.

        Raises: ForbiddenError, QuotaError, KubernetesError.
        """
        selector = ",".join(f"{k}={v}" for k, v in {MANAGED: MANAGER, **(labels or {})}.items())
        found: list[Claim] = []
        following = ""
        while True:
            page = await self._ask("list", label_selector=selector, limit=LIST_LIMIT, _continue=following or None)
            if not isinstance(page, dict):
                raise KubernetesError(f"the API server sent something that is no list: {str(page)[:300]}")
            found += [Claim.parse(item) for item in page.get("items") or []]
            following = (page.get("metadata") or {}).get("continue") or ""
            if not following:
                return found

    async def delete_async(self, name: str, *, grace_s: int | None = None) -> bool:
        """Delete a claim and with it its sandbox. False: it was gone already.

        Raises: ForbiddenError, QuotaError, KubernetesError.
        """
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        body = options if grace_s is None else {**options, "gracePeriodSeconds": grace_s}
        try:
            await self._ask("delete", name=name, body=body)
        except ClaimNotFoundError:
            return False
        return True

    async def _ask(self, verb: str, **more: Any) -> Any:
        """One request; the reply's JSON. Raises: KubernetesError."""
        import aiohttp
        from kubernetes_asyncio import client

        if self._api is None:
            self._api = client.CustomObjectsApi(client.ApiClient(self._configuration))
        try:
            return await getattr(self._api, f"{verb}_namespaced_custom_object")(**self._which, **more)
        except client.ApiException as e:
            raise _error(verb, e) from e
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            raise KubernetesError(f"the API server at {self.server.url} was not reached: {e}") from e


def _error(verb: str, failure: Any) -> KubernetesError:
    status: int = failure.status
    try:
        answer = json.loads(failure.body)
    except ValueError:
        answer = {"message": str(failure.body)[:300]}
    message = str(answer.get("message", ""))
    reason = str(answer.get("reason", ""))
    text = f"{verb} SandboxClaim: {status} {reason}: {message}"
    kinds: dict[int, type[KubernetesError]] = {
        401: ForbiddenError,
        403: ForbiddenError,
        404: ClaimNotFoundError,
        429: QuotaError,
    }
    kind = kinds.get(status, KubernetesError)
    if status == 409 and reason == "AlreadyExists":
        kind = ClaimExistsError
    if status == 403 and "exceeded quota" in message:
        kind = QuotaError
    error = kind(text)
    error.status, error.reason = status, reason
    if isinstance(error, QuotaError):
        with contextlib.suppress(KeyError, ValueError):
            error.retry_after_s = float(failure.headers["Retry-After"])
    return error
