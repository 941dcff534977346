"""The launcher of a cluster: chooses a node for each session, and starts it there.

Theory of operation. Ray's machines are listed every `POLL_S`. Each new one gets an actor, which runs the launcher of a single
machine. The front has all sessions in its own table; a session's process is a `RemoteProcess`, which is reached through the
node's port. A session is placed on the node with the largest free share of its capacity. When Ray reports an actor or its machine
as dead, its sessions end as lost. The machine may come back as a new node.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..._servers.tasks import Tasks
from ...errors import AgentLoadError, ConfigError, LocalRuntimeError
from ..agents.agent import Agent
from ..config import RuntimeConfig
from ..launcher.place import CommandEnd, Place, Streams, Write
from ..wire import WireError
from .bundle import pack_project
from .ray_nodes import Machine, RayNodes, result_of

log = logging.getLogger(__name__)
RETRY_S = 10.0  # after a failed start of a node
CLOSE_S = 15.0
POLL_S, JOIN_TIMEOUT_S = 1.0, 120.0
SESSIONS_PER_CPU = 50
SESSION_BYTES = 64 * 2**20  # where no limit is set; a forked Strands session needs a fraction of it
USABLE_MEMORY = 0.8


@dataclass(eq=False)
class Node:
    """A machine whose actor takes sessions. ``lost``: why it takes none any more."""

    machine: Machine
    capacity: int
    actor: Any
    port: int
    pid: int
    tier: str
    logs: str  # the folder
    lost: str | None = None
    # The sessions placed here, by the folders of their agents and their names. None: it is starting.
    sessions: dict[tuple[str, str], RemoteProcess | None] = field(default_factory=dict)
    agents: dict[tuple[str, int], asyncio.Task[Agent]] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """The node as `/_local/nodes` shows it."""
        about = {"node_id": self.machine.node_id, "host": self.machine.host, "pid": self.pid, "isolation": self.tier}
        state = "ready" if self.lost is None else "lost"
        return {**about, "state": state, "capacity": self.capacity, "sessions": len(self.sessions), "reason": self.lost}


class RemoteProcess:
    """A session on a node, as `SessionProcess` describes it."""

    lost = False
    death: str | None = None
    cpu_s: float | None = None
    max_rss_bytes: int | None = None

    def __init__(self, node: Node, started: Mapping[str, Any]) -> None:
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.pid: int | None = started["pid"]
        self._node, self._token = node, started["token"]

    async def wait(self) -> None:
        """Wait for its end, and resolve ``ended``."""
        try:
            found = await result_of(self._node.actor.ended.remote(self._token))
        except LocalRuntimeError as e:
            self.set_lost(f"node {self._node.machine.node_id} was lost: {e}")
            return
        self.cpu_s, self.max_rss_bytes, self.death = found["cpu_s"], found["max_rss_bytes"], found["death"]
        if not self.ended.done():
            self.ended.set_result(found["status"])

    def set_lost(self, why: str) -> None:
        """End it, because its node is gone."""
        if not self.ended.done():
            self.lost, self.death = True, why
            self.ended.set_result(None)

    async def dial(self) -> Streams:
        """Connect to the session's server. Raises: OSError."""
        reader, writer = await asyncio.open_connection(self._node.machine.host, self._node.port)
        writer.write(self._token.encode() + b"\n")
        return reader, writer

    async def cause(self) -> str | None:
        """Return None: the cause is known when Ray has reported it, and this does not wait for that."""
        return self.death

    async def command(self, text: str, write: Write, timeout_s: float) -> CommandEnd:
        """Run a shell command beside the session's server, on its node."""
        method = self._node.actor.command.options(num_returns="streaming")
        try:
            async for reference in method.remote(self._token, text, timeout_s):
                item = await result_of(reference)
                if isinstance(item, CommandEnd):
                    return item
                await write(*item)
        except Exception as e:  # Ray's errors have no common base
            return CommandEnd(-1, error=str(e))
        return CommandEnd(-signal.SIGKILL)

    def stop(self, grace_s: float) -> None:
        """SIGTERM now and SIGKILL after the grace."""
        if not self.ended.done():
            self._node.actor.stop.remote(self._token, grace_s)


class Cluster:
    """The nodes of a Ray cluster as one launcher. The runtime starts it and closes it."""

    writable = None  # the nodes' own

    def __init__(self, config: RuntimeConfig, machines: RayNodes) -> None:
        self._config, self._ray = config, machines
        self._nodes: dict[str, Node] = {}
        self._lost: deque[dict[str, Any]] = deque(maxlen=100)
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, tuple[float, str]] = {}  # not again before, why
        self._agents: dict[tuple[str, int], tuple[Agent, str, bytes]] = {}  # with the path in its bundle
        self._joined = asyncio.Event()
        self._tasks = Tasks()

    @property
    def tier(self) -> str:
        """Isolation of the nodes' sessions."""
        return ", ".join(sorted({node.tier for node in self._nodes.values()})) or "unknown"

    async def start(self) -> None:
        """Connect, and wait for a first node. Raises: ConfigError, MissingExtraError."""
        await self._ray.connect(JOIN_TIMEOUT_S * 0.65)
        self._tasks.start(self._watch())
        try:
            await asyncio.wait_for(self._joined.wait(), JOIN_TIMEOUT_S)
        except TimeoutError:
            reasons = "; ".join(f"{node_id}: {why}" for node_id, (_, why) in self._failures.items())
            raise ConfigError(
                f"no node of the cluster could run sessions within {JOIN_TIMEOUT_S:g} s"
                + (f" ({reasons})" if reasons else ": it has none with a free CPU share")
            ) from None

    async def close(self) -> None:
        """End every node's sessions."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._ray.remove(node.actor, CLOSE_S) for node in self._nodes.values()))
        await self._ray.close()

    # -- agents
    async def prepare(self, agent: Agent) -> None:
        """Load an agent version on every node. Raises: AgentLoadError when that works on none."""
        if agent.image is not None:
            raise ConfigError("container images run on a single machine's runtime only, not on a cluster")
        path, bundle = await asyncio.to_thread(pack_project, agent.script, self._config.isolation.hidden)
        self._agents[agent.key] = agent, path, bundle
        nodes = list(self._nodes.values())
        results = await asyncio.gather(*(self._load(node, agent) for node in nodes), return_exceptions=True)
        errors = [(node, e) for node, e in zip(nodes, results, strict=True) if isinstance(e, BaseException)]
        if errors and len(errors) == len(nodes):
            raise AgentLoadError(str(errors[0][1]))
        for node, error in errors:
            log.warning("agent %s did not load on node %s: %s", agent.name, node.machine.node_id, error)

    async def _load(self, node: Node, agent: Agent) -> Agent:
        """The agent as it is on a node, where it is loaded first if it is not. Raises: LocalRuntimeError."""
        task = node.agents.get(agent.key)
        if task is None or (task.done() and not _succeeded(task)):
            _, path, bundle = self._agents[agent.key]
            task = self._tasks.start(result_of(node.actor.prepare.remote(agent, path, bundle)))
            node.agents[agent.key] = task
        return await asyncio.shield(task)

    async def forget(self, agent: Agent) -> None:
        """Remove an agent version from the nodes, and with it its sessions."""
        self._agents.pop(agent.key, None)
        for node in self._nodes.values():
            task = node.agents.pop(agent.key, None)
            if task is not None and _succeeded(task):
                node.actor.forget.remote(task.result())

    async def forget_if_unused(self, agent: Agent) -> None:
        """Remove an agent version, unless it has sessions."""
        if not any(folder == agent.folder for node in self._nodes.values() for folder, _ in node.sessions):
            await self.forget(agent)

    def describe(self) -> list[dict[str, Any]]:
        """The loaded agent versions, on each node."""
        return [
            {"runtime_id": key[0], "version": key[1], "start": "ray", "reason": f"node {node.machine.node_id}"}
            for node in self._nodes.values()
            for key, task in node.agents.items()
            if _succeeded(task)
        ]

    # -- sessions
    def place(self, agent: Agent, name: str, log: str) -> Place:
        """Choose the node with the largest free share. Raises: WireError 402 if none has room."""
        free = [node for node in self._nodes.values() if len(node.sessions) < node.capacity]
        if not free:
            capacity = sum(node.capacity for node in self._nodes.values())
            message = "The cluster has no room for another session."
            detail = f"{len(self._nodes)} nodes with room for {capacity} sessions"
            raise WireError("ServiceQuotaExceededException", message, localDetail=detail)
        node = min(free, key=lambda node: (len(node.sessions) / node.capacity, len(node.sessions)))
        node.sessions[agent.folder, name] = None
        return Place(name, Path(agent.folder), Path(node.logs, agent.name, log), "", node.machine.node_id)

    async def spawn(self, agent: Agent, place: Place) -> RemoteProcess:
        """Start a session on its node. Raises: LocalRuntimeError."""
        node = self._nodes.get(place.node or "")
        if node is None:
            raise LocalRuntimeError(f"node {place.node} was lost")
        here = await self._load(node, agent)
        starting = self._tasks.start(result_of(node.actor.spawn.remote(here, place.name, place.log_path.name)))
        try:
            process = RemoteProcess(node, await asyncio.shield(starting))
        except asyncio.CancelledError:
            starting.add_done_callback(lambda task: _stop_late(node, task))
            raise
        node.sessions[agent.folder, place.name] = process
        self._tasks.start(process.wait())
        return process

    async def discard(self, place: Place) -> None:
        """Free the session's room. Its node has removed its files."""
        if (node := self._nodes.get(place.node or "")) is not None:
            node.sessions.pop((str(place.directory), place.name), None)

    async def read_log(self, session: Mapping[str, Any], offset: int, size: int) -> bytes:
        """A piece of a session's log; empty if its node is lost."""
        if (node := self._nodes.get(session["node"])) is None:
            return b""
        found: bytes = await result_of(node.actor.read.remote(session["log"], offset, size))
        return found

    # -- joining and leaving
    def nodes(self) -> list[dict[str, Any]]:
        """Every node: ready, joining, failed; and those that were lost."""
        joining = [{"node_id": node_id, "state": "joining"} for node_id in self._joining]
        failed = [
            {"node_id": node_id, "state": "failed", "reason": why}
            for node_id, (_, why) in self._failures.items()
            if node_id not in self._joining
        ]
        return [*(node.describe() for node in self._nodes.values()), *joining, *failed, *self._lost]

    async def _watch(self) -> None:
        while True:
            try:
                self._compare(await self._ray.machines())
            except Exception:  # nodes come and go all the same
                log.exception("looking for the cluster's machines failed, and is tried again")
            await asyncio.sleep(POLL_S)

    def _compare(self, machines: list[Machine]) -> None:
        alive = {machine.node_id for machine in machines}
        for node_id, node in list(self._nodes.items()):
            if node_id not in alive:
                self._lose(node, "its machine left the cluster")
        self._failures = {node_id: why for node_id, why in self._failures.items() if node_id in alive}
        now = time.monotonic()
        for machine in machines:
            node_id = machine.node_id
            known = node_id in self._nodes or node_id in self._joining
            if not known and self._failures.get(node_id, (0.0, ""))[0] <= now:
                self._joining[node_id] = self._tasks.start(self._join(machine))

    async def _join(self, machine: Machine) -> None:
        actor: Any = None
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                actor = await self._ray.place(machine)
                await self._probe_store(actor)
                found = await result_of(actor.start.remote(replace(self._config, credentials={}), machine.host))
                capacity = _capacity(machine, self._config.isolation.memory_bytes)
                node = Node(machine=machine, capacity=capacity, actor=actor, **found)
                await asyncio.gather(*(self._load(node, agent) for agent, *_ in list(self._agents.values())))
        except Exception as e:  # Ray's errors have no common base
            why = f"it did not start within {JOIN_TIMEOUT_S:g} s" if isinstance(e, TimeoutError) else str(e)
            log.warning("node %s cannot run sessions: %s", machine.node_id, why)
            self._failures[machine.node_id] = (time.monotonic() + RETRY_S, why)
            if actor is not None:
                await self._ray.remove(actor, CLOSE_S)
            return
        finally:
            self._joining.pop(machine.node_id, None)
        self._failures.pop(machine.node_id, None)
        self._nodes[machine.node_id] = node
        self._joined.set()
        try:
            await result_of(actor.live.remote())
        except LocalRuntimeError as e:
            self._lose(node, str(e))

    async def _probe_store(self, actor: Any) -> None:
        """Check that a node sees the folder of a ``file://`` store as this machine does. Raises: ConfigError."""
        folder = self._config.isolation.store
        if folder is None:
            return
        probe, content = folder / f".probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
        try:
            await asyncio.to_thread(probe.write_bytes, content)
            seen = await result_of(actor.read.remote(str(probe), 0, len(content)))
        finally:
            await asyncio.to_thread(probe.unlink, missing_ok=True)
        if seen != content:
            raise ConfigError(
                f"the store {folder} is not the same folder there: with several machines the store is s3:// or a shared folder"
            )

    def _lose(self, node: Node, why: str) -> None:
        if self._nodes.get(node.machine.node_id) is not node:
            return
        node.lost = f"node {node.machine.node_id} was lost: {why}"
        log.warning("%s", node.lost)
        del self._nodes[node.machine.node_id]
        for process in node.sessions.values():
            if process is not None:
                process.set_lost(node.lost)
        self._lost.append({**node.describe(), "sessions": 0})
        self._tasks.start(self._ray.remove(node.actor, CLOSE_S))


def _stop_late(node: Node, starting: asyncio.Task[dict[str, Any]]) -> None:
    """Stop a session that started when its caller waited no longer."""
    if _succeeded(starting):
        node.actor.stop.remote(starting.result()["token"], 0.0)


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _capacity(machine: Machine, session_bytes: int | None) -> int:
    """Sessions that a machine takes at once, at least 1."""
    count = int(SESSIONS_PER_CPU * machine.cpus)
    if machine.memory_bytes is not None:
        count = min(count, int(USABLE_MEMORY * machine.memory_bytes / (session_bytes or SESSION_BYTES)))
    return max(1, count)
