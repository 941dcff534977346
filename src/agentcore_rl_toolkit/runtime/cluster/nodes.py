"""The machines of a cluster behind the one interface the runtime knows: sessions are started, somewhere, and say when they end.

Theory of operation. The provider's machines are looked at every ``poll_s``. A new one gets a node agent and every known agent's
code and template, then sessions. A session goes to the open node with the largest free share of its capacity and stays there;
when none has room, its start waits, within its init timeout. A machine that is gone, or whose agent hangs up or falls silent, is
lost: its sessions end at once with that as their reason, and it may come back as a new node. A draining node gets no new
sessions, and is let go for good once its last one has ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ...errors import AgentCoreRLError, AgentLoadError, ConfigError, LocalRuntimeError
from ..agents.agent import Agent
from ..config import RuntimeConfig
from ..sessions.node import SessionOrder
from ..wire import WireError
from . import bundles
from .link import NodeLink
from .machines import ClusterConfig, Machine, MachineProvider
from .process import RemoteProcess

log = logging.getLogger(__name__)
RETRY_S = (1.0, 30.0)  # after a failed start of a node agent: first and longest pause


class Cluster:
    """Nodes of a provider. Made before the runtime, which starts and closes it."""

    def __init__(self, config: RuntimeConfig, provider: MachineProvider, settings: ClusterConfig | None = None) -> None:
        self.on_room: Callable[[int], None] = lambda more: None  # so many more sessions may start at once
        self._starts = 0
        self._config = config
        self._provider = provider
        self._settings = settings or ClusterConfig()
        self._token = secrets.token_urlsafe(32)
        self._links: dict[str, NodeLink] = {}
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._drained: dict[str, dict[str, Any]] = {}
        self._failures: dict[str, tuple[int, float, str]] = {}  # how often, not again before, why
        self._gone: list[dict[str, Any]] = []
        self._agents: dict[tuple[str, int], Agent] = {}
        self._bundles: dict[tuple[str, int], asyncio.Task[bundles.Bundle]] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leaving: dict[str, asyncio.Task[None]] = {}  # nodes whose agent is being removed

    @property
    def tier(self) -> str:
        """Isolation of the nodes' sessions."""
        return ", ".join(sorted({link.tier for link in self._links.values() if link.tier})) or "unknown"

    async def start(self) -> None:
        """Connect and wait for a first node. Raises: ConfigError when there is none in time."""
        await self._provider.open()
        self._tasks.add(asyncio.create_task(self._watch()))
        try:
            async with asyncio.timeout(self._settings.join_timeout_s):
                while not self._open_links():
                    await self._change()
        except TimeoutError:
            reasons = "; ".join(f"{node_id}: {why}" for node_id, (_, _, why) in self._failures.items())
            raise ConfigError(
                f"no node of the cluster could run sessions within {self._settings.join_timeout_s:g} s"
                + (f" ({reasons})" if reasons else ": it has none with a free CPU share")
            ) from None

    # -- the runtime's side
    def admit(self, live: int) -> None:
        """Refuse a new session when all nodes are full and none is on its way. Raises: WireError 402."""
        capacity = sum(link.capacity for link in self._open_links())
        leaving = sum(link.load for link in self._links.values() if link.draining)
        if live >= capacity + leaving and not self._joining:
            raise WireError(
                "ServiceQuotaExceededException",
                "The cluster has no room for another session.",
                localDetail=f"{live} sessions, room for {capacity} on {len(self._open_links())} nodes",
            )

    async def prepare(self, agent: Agent) -> None:
        """Load the agent on every node. Raises: AgentLoadError, LocalRuntimeError when that works on none."""
        self._agents[agent.runtime_id, agent.version] = agent
        links = self._open_links()
        results = await asyncio.gather(*(link.prepare(agent, self._packed) for link in links), return_exceptions=True)
        errors = [e for e in results if isinstance(e, BaseException)]
        for link, error in zip(links, results, strict=True):
            if isinstance(error, BaseException) and link.lost is None:
                log.warning("agent %s did not load on node %s: %s", agent.name, link.machine.node_id, error)
        if errors and len(errors) == len(results):
            raise next((e for e in errors if isinstance(e, AgentLoadError)), errors[0])

    async def start_session(self, order: SessionOrder) -> RemoteProcess:
        """Place a session; waits for room. Raises: AgentLoadError, LocalRuntimeError."""
        while True:
            link = await self._reserve()
            try:
                await link.prepare(order.agent, self._packed)
                if link.lost is None:
                    return link.spawn(order)
            except LocalRuntimeError:
                if link.lost is None:
                    raise
            finally:
                link.reserved -= 1
                self._changed.set()

    async def forget(self, agent: Agent) -> None:
        """End an agent version's templates and with them its sessions."""
        key = (agent.runtime_id, agent.version)
        self._agents.pop(key, None)
        self._bundles.pop(key, None)
        await asyncio.gather(*(link.forget(agent, only_unused=False) for link in self._links.values()))

    async def forget_if_unused(self, agent: Agent) -> None:
        """End its templates where it has no sessions."""
        await asyncio.gather(*(link.forget(agent, only_unused=True) for link in self._links.values()))

    def describe(self) -> list[dict[str, Any]]:
        """The loaded agents, as the nodes last reported."""
        return [{"node_id": node_id, **t} for node_id, link in self._links.items() for t in link.templates]

    async def close(self) -> None:
        """Release every node."""
        for task in [*self._tasks, *self._joining.values(), *self._bundles.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._joining.values(), *self._bundles.values(), return_exceptions=True)
        links, self._links = list(self._links.values()), {}
        leaving = list(self._leaving.values())
        await asyncio.gather(*(self._abandon(link.machine.node_id, link) for link in links), *leaving)
        await self._provider.close()

    # -- for whoever looks after the cluster
    def nodes(self) -> list[dict[str, Any]]:
        """Every node: ready, draining, joining, failed, drained; and those lost."""
        joining = [{"node_id": n, "state": "joining"} for n in self._joining if n not in self._links]
        failed = [
            {"node_id": n, "state": "failed", "reason": why}
            for n, (_, _, why) in self._failures.items()
            if n not in self._joining and n not in self._links
        ]
        return [
            *(link.describe() for link in self._links.values()),
            *joining,
            *failed,
            *self._drained.values(),
            *self._gone,
        ]

    def drain(self, node_id: str) -> dict[str, Any] | None:
        """Send no more sessions there and release it once its last one has ended. None: there is no such node."""
        link = self._links.get(node_id)
        if link is None:
            return self._drained.get(node_id)
        link.draining = True
        if link.load:
            return link.describe()
        self._let_go(link)
        return self._drained[node_id]

    # -- placing
    def _open_links(self) -> list[NodeLink]:
        return [link for link in self._links.values() if link.open_for_sessions]

    async def _reserve(self) -> NodeLink:
        while True:
            free = [link for link in self._open_links() if link.load < link.capacity]
            if free:
                link = min(free, key=lambda link: (link.load / link.capacity, link.load))
                link.reserved += 1
                return link
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _packed(self, agent: Agent) -> bundles.Bundle:
        key = (agent.runtime_id, agent.version)
        task = self._bundles.get(key)
        if task is None:
            task = self._bundles[key] = asyncio.create_task(asyncio.to_thread(bundles.pack, agent.script.parent))
            task.add_done_callback(lambda t: None if t.cancelled() else t.exception())
        return await asyncio.shield(task)

    # -- joining and leaving
    async def _watch(self) -> None:
        while True:
            try:
                self._compare(await self._provider.machines())
            except LocalRuntimeError as e:
                log.warning("the cluster does not say which machines it has: %s", e)
            except Exception:  # nodes come and go all the same
                log.exception("looking for the cluster's machines failed, and is tried again")
            await asyncio.sleep(self._settings.poll_s)

    def _compare(self, machines: list[Machine]) -> None:
        alive = {machine.node_id for machine in machines}
        for node_id, link in list(self._links.items()):
            if node_id not in alive:
                link.lose("its machine left the cluster")
        for node_id in [n for n in self._failures if n not in alive]:
            del self._failures[node_id]
        now = time.monotonic()
        for machine in machines:
            node_id = machine.node_id
            # One that is being left is no candidate yet: leaving it would remove the agent that is placed there now.
            places = (self._links, self._joining, self._drained, self._leaving)
            known = any(node_id in place for place in places)
            if not known and self._failures.get(node_id, (0, 0.0, ""))[1] <= now:
                task = self._joining[node_id] = asyncio.create_task(self._join(machine), name=f"join {node_id}")
                task.add_done_callback(lambda _, node_id=node_id: self._joined(node_id))  # type: ignore[misc]  # a default makes it bind now

    def _joined(self, node_id: str) -> None:
        self._joining.pop(node_id, None)
        self._changed.set()

    async def _join(self, machine: Machine) -> None:
        link: NodeLink | None = None
        try:
            async with asyncio.timeout(self._settings.join_timeout_s):
                address = await self._provider.place(machine, self._token)
                capacity = self._settings.capacity(machine, self._config.isolation.memory_bytes)
                link = NodeLink(machine, address, self._token, capacity=capacity, silence_s=self._settings.silence_s)
                await link.open(self._configuration())
            for agent in list(self._agents.values()):
                await link.prepare(agent, self._packed)
            if link.lost is not None:
                raise LocalRuntimeError(link.lost)
        except (AgentCoreRLError, OSError, TimeoutError) as e:
            why = str(e) or f"it did not start within {self._settings.join_timeout_s:g} s"
            log.warning("node %s cannot run sessions: %s", machine.node_id, why)
            count = self._failures.get(machine.node_id, (0, 0.0, ""))[0]
            pause_s = min(RETRY_S[1], RETRY_S[0] * 2**count)
            self._failures[machine.node_id] = (count + 1, time.monotonic() + pause_s, why)
            await self._abandon(machine.node_id, link)
            return
        except asyncio.CancelledError:
            await self._abandon(machine.node_id, link)
            raise
        self._failures.pop(machine.node_id, None)
        link.on_freed = lambda: self._on_freed(link)
        link.on_lost = lambda: self._on_lost(link)
        self._links[machine.node_id] = link
        starts = sum(max(4, int(2 * each.machine.cpus)) for each in self._links.values())
        if starts > self._starts:
            self.on_room(starts - self._starts)
            self._starts = starts
        self._changed.set()

    async def _abandon(self, node_id: str, link: NodeLink | None) -> None:
        if link is not None:
            await link.close()
        try:
            await self._provider.remove(node_id)
        except LocalRuntimeError as e:
            log.warning("the node agent on %s may still be there: %s", node_id, e)

    def _configuration(self) -> dict[str, Any]:
        c = self._config
        isolation = asdict(c.isolation)
        for name in ("writable", "readable"):
            isolation[name] = [str(path) for path in isolation[name]]
        isolation["store"] = None if isolation["store"] is None else str(isolation["store"])
        return {
            "config": {
                "region": c.region,
                "account_id": c.account_id,
                "session_env": dict(c.session_env),
                "start_mode": c.start_mode,
                "strict_snapshot": c.strict_snapshot,
            },
            "isolation": isolation,
        }

    def _on_freed(self, link: NodeLink) -> None:
        self._changed.set()
        if link.draining and not link.load and self._links.get(link.machine.node_id) is link:
            self._let_go(link)

    def _let_go(self, link: NodeLink) -> None:
        del self._links[link.machine.node_id]
        self._drained[link.machine.node_id] = {**link.describe(), "state": "drained"}
        self._leave(link)

    def _on_lost(self, link: NodeLink) -> None:
        if self._links.get(link.machine.node_id) is not link:
            return
        del self._links[link.machine.node_id]
        self._changed.set()
        log.warning("%s", link.lost)
        self._gone = [*self._gone[-99:], {**link.describe(), "state": "lost", "reason": link.lost, "sessions": 0}]
        self._leave(link)

    def _leave(self, link: NodeLink) -> None:
        node_id = link.machine.node_id
        task = self._leaving[node_id] = asyncio.create_task(self._abandon(node_id, link))
        task.add_done_callback(lambda _: self._leaving.pop(node_id, None))
