"""Sessions as pods of a Kubernetes cluster, behind the interface of the router's other clusters: one SandboxClaim per session.

Theory of operation. A new session claims a sandbox from its agent's warm pool and is ready when the claim is; the router then
talks HTTP to the pod's own address. One LIST every few seconds tells which pods are gone: a claim that vanished, is being deleted
by somebody else, or was not ready for a while is a lost session, one that finished is a process that ended. Stopping deletes the
claim, with the grace. Every claim has a shutdown time, so that the cluster removes it also when no router is left; a router
that comes back with its state folder removes what its predecessor left.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import AgentLoadError, ConfigError, LocalRuntimeError
from ..agents.agent import Agent
from ..config import RuntimeConfig
from ..sessions.connection import UpstreamLostError
from ..sessions.node import SessionOrder
from ..wire import WireError
from .kubernetes import (
    Claim,
    ClaimExistsError,
    ClaimFailedError,
    ClaimNotFoundError,
    KubernetesError,
    QuotaError,
    SandboxClient,
    claim_name,
)

log = logging.getLogger(__name__)

ROUTER_LABEL = "agentcore-rl/router"
AGENT_PORT = 8080
CONNECT_TIMEOUT_S = 10.0
CAUSE_WAIT_S = 5.0
DELETE_TRIES = 6
GONE_AFTER_GRACE_S = 30.0
FULL_S = 2.0  # for so long after a refusal by the namespace's quota new sessions are refused at once
STARTS_AT_ONCE = 64  # they start on other machines: the router only waits


@dataclass(frozen=True, kw_only=True)
class PodSettings:
    """Which pods, and when one counts as gone. ``pools``: agent name -> warm pool. Units: seconds."""

    pools: Mapping[str, str]
    poll_s: float = 2.0
    not_ready_s: float = 15.0

    def __post_init__(self) -> None:
        if not self.pools:
            raise ConfigError("sessions on Kubernetes need a --warm-pool AGENT=POOL for each agent")
        for name in ("poll_s", "not_ready_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}")


class PodProcess:
    """A session's pod: the futures and verbs of `SessionProcess`. ``lost``: why it is gone, unless its own process ended."""

    pid: int | None = None  # that of a pod says nothing here
    cpu_s: float | None = None
    max_rss_bytes: int | None = None

    def __init__(self, pods: KubernetesPods, identity: str, pool: str, lifetime_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.name = ""
        self.pool = pool
        self.node_id: str | None = None
        self.lost: str | None = None
        self.unready_since_s: float | None = None
        self.started: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[int | None] = loop.create_future()
        self._pods = pods
        self._host: str | None = None
        self._deleting = False
        self._created = asyncio.Event()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        pods.run(self._start(identity, lifetime_s))

    async def _start(self, identity: str, lifetime_s: float) -> None:
        client = self._pods.client
        try:
            try:
                claim = await self._claim(identity, lifetime_s)
            finally:
                self._created.set()
            self.name = claim.name
            ready = await client.wait_ready_async(claim.name, timeout_s=self._pods.init_timeout_s)
            self._host, self.node_id = ready.pod_ips[0], ready.sandbox or ready.name
        except QuotaError as e:
            self._pods.full_until_s = time.monotonic() + FULL_S
            error = WireError(
                "ServiceQuotaExceededException", "The cluster has no room for another session.", localDetail=str(e)
            )
            self._fail(error)
        except KubernetesError as e:
            self._fail(e)
        except Exception as e:  # such as an answer of another form; whoever waits for the pod must hear of it
            log.exception("the pod of session %s could not be had", identity)
            self._fail(LocalRuntimeError(f"its pod could not be had: {type(e).__name__}: {e}"))
        else:
            if not self.started.done():
                self.started.set_result(0)

    async def _claim(self, identity: str, lifetime_s: float) -> Claim:
        """Make the claim; again when the API server was not reached or not well, until the start times out."""
        client = self._pods.client
        deadline, pause_s = time.monotonic() + self._pods.init_timeout_s, 0.2
        while True:
            try:
                return await client.create_async(
                    identity, warm_pool=self.pool, max_lifetime_s=lifetime_s, labels=self._pods.labels
                )
            except ClaimExistsError:  # an earlier try arrived, its answer did not
                return await client.get_async(claim_name(identity))
            except KubernetesError as e:
                passing = e.status is None or e.status == 429 or e.status >= 500
                if self._deleting or not passing or time.monotonic() + pause_s > deadline:
                    raise
                await asyncio.sleep(max(pause_s, getattr(e, "retry_after_s", None) or 0.0))
                pause_s = min(2.0, 2 * pause_s)

    def _fail(self, error: Exception) -> None:
        if not self.started.done():
            self.started.set_exception(error)
            self.started.exception()  # retrieved: a caller that gave up waiting is no reason for a warning
        self.stop(0.0)

    # -- use
    async def dial(self) -> socket.socket:
        """A connection to the pod's server. Raises: UpstreamLostError."""
        if self.lost is not None or self._host is None:
            raise UpstreamLostError(self.lost or "the pod has no address")
        sock = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(sock, (self._host, AGENT_PORT))
        except BaseException as e:  # cancelled, for instance
            sock.close()
            if isinstance(e, (OSError, TimeoutError)):
                raise UpstreamLostError(f"cannot connect to pod {self.node_id} at {self._host}: {e}") from e
            raise
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets.add(sock)
        return sock

    async def cause(self) -> str | None:
        """After a connection broke: why, when it was the pod that went. Waits a little for that to show."""
        if self.lost is None and not self.ended.done():
            self._pods.look_now()
            await asyncio.wait([self.ended], timeout=CAUSE_WAIT_S)
        return self.lost

    async def read_log(self, offset: int) -> bytes:
        """Raises: LocalRuntimeError: a pod's output is the cluster's."""
        raise LocalRuntimeError(
            f"kubectl -n {self._pods.client.server.namespace} logs {self.node_id} has the output of a pod"
        )

    def command(self, command_id: str, text: str, socket_path: str) -> NoCommand:
        return NoCommand()

    # -- ending
    def stop(self, grace_s: float) -> None:
        """Delete the claim; its pod gets SIGTERM, and SIGKILL after the grace. A second, shorter grace counts too."""
        if self.ended.done():
            return
        self._deleting = True
        self._pods.run(self._delete(grace_s))

    def gone(self, why: str | None) -> None:
        """The pod is no more; ``why`` None: because its own process ended."""
        if self.ended.done() or self._deleting:
            return
        self.lost = why
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if not self.started.done():
            self.started.set_exception(LocalRuntimeError(why or "the pod's process ended while it started"))
            self.started.exception()
        self._deleting = True
        self.ended.set_result(None)
        self._pods.run(self._delete(0.0))

    async def _delete(self, grace_s: float) -> None:
        await self._created.wait()
        client, pause_s = self._pods.client, 0.2
        for attempt in range(DELETE_TRIES):
            try:
                if not self.name or not await client.delete_async(self.name, grace_s=round(grace_s)):
                    break
                await self._until_gone(grace_s + GONE_AFTER_GRACE_S)
                break
            except KubernetesError as e:
                if attempt == DELETE_TRIES - 1:
                    log.warning("claim %s may still be there, until its shutdown time: %s", self.name, e)
                    break
                await asyncio.sleep(pause_s)
                pause_s *= 2
        self._pods.forget_process(self)
        if not self.ended.done():
            self.ended.set_result(None)

    async def _until_gone(self, limit_s: float) -> None:
        """Until the API server does not know the claim any more. Raises: KubernetesError when that takes too long."""
        deadline, pause_s = time.monotonic() + limit_s, 0.1
        while await self._pods.exists(self.name):
            if time.monotonic() > deadline:
                raise ClaimFailedError(f"claim {self.name} was deleted, but is still there after {limit_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(1.0, 1.5 * pause_s)


class NoCommand:
    """What a command beside a pod's agent is: refused. It would need the exec interface of the API server."""

    def __init__(self) -> None:
        self.error: str | None = "commands are not supported in sessions on Kubernetes"
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.ended.set_result(-1)

    def kill(self) -> None:
        return None


class KubernetesPods:
    """The router's view of a namespace. Made before the runtime, which starts and closes it."""

    tier = "pods"

    def __init__(self, config: RuntimeConfig, client: SandboxClient, settings: PodSettings) -> None:
        self.client = client
        self.on_room: Callable[[int], None] = lambda more: None
        self.full_until_s = 0.0
        self.init_timeout_s = config.times.init_timeout_s
        state = str(config.state_dir) if config.state_dir is not None else secrets.token_hex(16)
        self.labels = {ROUTER_LABEL: hashlib.sha256(state.encode()).hexdigest()[:16]}
        self._run_id = secrets.token_hex(6)
        self._config = config
        self._settings = settings
        self._processes: dict[str, PodProcess] = {}
        self._draining: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._look = asyncio.Event()

    async def start(self) -> None:
        """See that the cluster answers, and remove claims of this router's predecessor. Raises: ConfigError."""
        try:
            left = [c for c in await self.client.list_async(self.labels) if not c.deleting]
            await asyncio.gather(*(self.client.delete_async(claim.name, grace_s=0) for claim in left))
        except KubernetesError as e:
            raise ConfigError(f"the Kubernetes cluster cannot be used: {e}") from e
        if left:
            log.warning("removed %d claims that an earlier run left", len(left))
        self.on_room(STARTS_AT_ONCE)
        self._watcher = asyncio.create_task(self._watch())

    # -- the runtime's side
    def admit(self, live: int) -> None:
        """Refuse a new session while the namespace's quota is used up. Raises: WireError 402."""
        if time.monotonic() < self.full_until_s:
            raise WireError("ServiceQuotaExceededException", "The cluster has no room for another session.")

    async def prepare(self, agent: Agent) -> None:
        """Raises: AgentLoadError when the agent has no pool."""
        self._pool(agent)

    def _pool(self, agent: Agent) -> str:
        pool = self._settings.pools.get(agent.name)
        if pool is None:
            raise AgentLoadError(
                f"agent {agent.name} has no pods: start the runtime with --warm-pool {agent.name}=POOL"
            )
        return pool

    async def start_session(self, order: SessionOrder) -> PodProcess:
        """Claim a pod. Raises: AgentLoadError; WireError 402 when its pool is being drained."""
        pool = self._pool(order.agent)
        if pool in self._draining:
            raise WireError(
                "ServiceQuotaExceededException", f"The pool {pool} takes no new sessions: it is being drained."
            )
        identity = f"{self._run_id}-{order.session_id}"
        lifetime_s = order.agent.max_lifetime_s or self._config.times.max_lifetime_s
        process = PodProcess(self, identity, pool, lifetime_s + self._config.times.stop_grace_s)
        self._processes[claim_name(identity)] = process
        return process

    async def forget(self, agent: Agent) -> None:
        """Nothing is kept per agent: its pool is the cluster's."""

    async def forget_if_unused(self, agent: Agent) -> None:
        """Nothing is kept per agent: its pool is the cluster's."""

    def describe(self) -> list[dict[str, Any]]:
        """No templates: pods are kept warm by the cluster."""
        return []

    async def close(self) -> None:
        """Delete what is left, and stop looking."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        for process in list(self._processes.values()):
            process.stop(0.0)
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.client.close()

    # -- for whoever looks after the cluster
    def nodes(self) -> list[dict[str, Any]]:
        """The pools: which machines their pods are on is the cluster's business."""
        found = []
        for pool in sorted(set(self._settings.pools.values())):
            count = sum(p.pool == pool for p in self._processes.values())
            state = "ready" if pool not in self._draining else "draining" if count else "drained"
            found.append({"node_id": pool, "state": state, "sessions": count, "isolation": self.tier})
        return found

    def drain(self, node_id: str) -> dict[str, Any] | None:
        """Start no more sessions in this pool. None: there is none of this name."""
        if node_id not in self._settings.pools.values():
            return None
        self._draining.add(node_id)
        return next(n for n in self.nodes() if n["node_id"] == node_id)

    # -- the processes' side
    async def exists(self, name: str) -> bool:
        try:
            await self.client.get_async(name)
        except ClaimNotFoundError:
            return False
        return True

    def look_now(self) -> None:
        self._look.set()

    def forget_process(self, process: PodProcess) -> None:
        self._processes = {name: p for name, p in self._processes.items() if p is not process}

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        while True:
            self._look.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.poll_s):
                    await self._look.wait()
            watched = {name: p for name, p in self._processes.items() if p.started.done() and not p.ended.done()}
            if not watched:
                continue
            try:
                claims = {c.name: c for c in await self.client.list_async(self.labels)}
            except KubernetesError as e:  # sessions go on without it
                log.warning("the API server does not say which pods are there: %s", e)
                continue
            except Exception:  # such as an answer that cannot be read: lost pods are to be found all the same
                log.exception("looking for the pods failed, and is tried again")
                continue
            now = time.monotonic()
            for name, process in watched.items():
                self._judge(process, claims.get(name), now)

    def _judge(self, process: PodProcess, claim: Claim | None, now: float) -> None:
        if claim is None:
            process.gone("the pod is lost: its claim is gone")
        elif claim.finished:
            process.gone(None)
        elif claim.deleting:
            process.gone("the pod is lost: its claim is being deleted")
        elif claim.ready:
            process.unready_since_s = None
        elif process.unready_since_s is None:
            process.unready_since_s = now
        elif now - process.unready_since_s >= self._settings.not_ready_s:
            process.gone(
                f"the pod is lost: not ready for {self._settings.not_ready_s:g} s ({'; '.join(claim.conditions)})"
            )
