"""The launcher of a cluster: chooses a node for each session, and starts it there.

Theory of operation. Ray's machines are listed every `POLL_S`. Each new one becomes a node, whose life is one task: an actor on
the machine runs the launcher of a single machine until the machine fails. The front has all sessions in its own table. A
session's process is a `RemoteProcess`, which the front reaches through the node's port. When an actor or its machine is dead, Ray
fails every call to it, so its sessions end as lost. If the machine still runs, it becomes a node again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..._installation import missing_extra
from ..._servers.tasks import Tasks
from ...errors import AgentCoreRLError, AgentLoadError, ConfigError, LocalRuntimeError
from ..agents.agent import Agent
from ..config import RuntimeConfig
from ..launcher.place import NETWORK, CommandEnd, Place, SessionProcess, Stream, Write
from ..wire import WireError
from .actor import NodeActor
from .bundle import pack_project

log = logging.getLogger(__name__)
RETRY_S = 10.0  # pause after the end of a node whose machine still runs
CLOSE_S = 15.0
POLL_S, LIST_TIMEOUT_S, CONNECT_TIMEOUT_S, JOIN_TIMEOUT_S = 1.0, 15.0, 78.0, 120.0
ACTOR_CPUS = 0.1
MAX_CALLS = 100_000  # calls at once to one actor: one waits for each session
SESSIONS_PER_CPU = 50
SESSION_BYTES = 64 * 2**20  # memory of a session without a limit. A forked Strands session needs a fraction of it.
USABLE_MEMORY = 0.8


@dataclass(eq=False)
class Node:
    """A machine with an actor. ``state``: joining, ready, failed (it never ran sessions) or lost. The last two have a reason.

    When it is ready, it has the ``port`` for connections to sessions, the actor's ``pid``, its isolation ``tier``, and the folder
    of ``logs``. ``agents`` are the loaded ones, as they are on the node.
    """

    node_id: str
    host: str
    capacity: int
    state: str = "joining"
    reason: str | None = None
    ended_s: float | None = None
    actor: Any = None
    port: int = 0
    pid: int | None = None
    tier: str = ""
    logs: str = ""
    sessions: set[Place] = field(default_factory=set)
    agents: dict[tuple[str, int], Agent] = field(default_factory=dict)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def describe(self) -> dict[str, Any]:
        """Return the node as `/_local/nodes` shows it."""
        shown = {name: getattr(self, name) for name in ("node_id", "host", "pid", "state", "capacity", "reason")}
        return {**shown, "isolation": self.tier, "sessions": len(self.sessions)}


class RemoteProcess(SessionProcess):
    """A session on a node."""

    def __init__(self, node: Node, token: str, pid: int | None) -> None:
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.pid, self._node, self._token = pid, node, token

    async def wait(self) -> None:
        """Wait for its end, and resolve ``ended``."""
        status = None
        try:
            status, self.death, self.cpu_s = await result_of(self._node.actor.ended.remote(self._token))
        except LocalRuntimeError as e:
            self.lost, self.death = True, f"node {self._node.node_id} was lost: {e}"
        self.ended.set_result(status)

    async def dial(self) -> Stream:
        stream = await NETWORK.connect_tcp(self._node.host, self._node.port)
        await stream.write(self._token.encode() + b"\n")
        return stream

    async def command(self, text: str, write: Write, timeout_s: float) -> CommandEnd:
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
        if not self.ended.done():
            self._node.actor.stop.remote(self._token, grace_s)


class Cluster:
    """The nodes of the Ray cluster at ``address`` (auto: the running one of this machine) as one launcher."""

    def __init__(self, config: RuntimeConfig, address: str = "auto") -> None:
        self._config, self._address = config, address
        self._ray: Any = None
        self._nodes: dict[str, Node] = {}  # the last one of each machine
        self._bundles: dict[tuple[str, int], tuple[Agent, str, bytes]] = {}  # agents, paths in their bundles, bundles
        self._joined = asyncio.Event()
        self._tasks = Tasks()

    @property
    def _ready(self) -> list[Node]:
        return [node for node in self._nodes.values() if node.state == "ready"]

    @property
    def tier(self) -> str:
        return ", ".join(sorted({node.tier for node in self._ready})) or "unknown"

    async def start(self) -> None:
        """Connect, and wait for a first node. Raises: ConfigError, MissingExtraError."""
        await self._connect()
        self._tasks.start(self._watch())
        try:
            await asyncio.wait_for(self._joined.wait(), JOIN_TIMEOUT_S)
        except TimeoutError:
            failed = [f"{node.node_id}: {node.reason}" for node in self._nodes.values() if node.reason]
            why = "; ".join(failed) or "it has none with a free CPU share"
            raise ConfigError(
                f"no node of the cluster could run sessions within {JOIN_TIMEOUT_S:g} s ({why})"
            ) from None

    async def _connect(self) -> None:
        try:
            import ray
        except ImportError as e:
            raise missing_extra("a Ray cluster needs Ray", "ray") from e
        quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.WARNING}
        done: Future[None] = Future()

        def connect() -> None:
            try:
                ray.init(address=self._address, namespace=f"agentcore-rl-{os.getpid()}", **quiet)
                done.set_result(None)
            except BaseException as e:  # any error is passed to the caller
                done.set_exception(e)

        # It may never return. In the main thread Ray would replace signal handlers, and a pool would wait for its threads.
        threading.Thread(target=connect, daemon=True, name="connect to Ray").start()
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(done)), CONNECT_TIMEOUT_S)
        except (TimeoutError, ConnectionError, RuntimeError, ValueError) as e:
            why = str(e) or f"it does not answer within {CONNECT_TIMEOUT_S:g} s"
            raise ConfigError(f"cannot connect to the Ray cluster at {self._address}: {why}") from e
        self._ray = ray

    async def close(self) -> None:
        await self._tasks.cancel()
        if self._ray is not None:
            await asyncio.to_thread(self._ray.shutdown)

    # -- nodes
    async def _watch(self) -> None:
        while True:
            try:
                machines = await asyncio.wait_for(asyncio.to_thread(self._ray.nodes), LIST_TIMEOUT_S)
            except Exception:  # the task must not end: nodes still change
                log.exception("the machines of the cluster could not be listed; this is tried again later")
                machines = []
            for machine in machines:
                node = self._nodes.get(machine["NodeID"])
                is_new = node is None or (node.ended_s is not None and time.monotonic() > node.ended_s + RETRY_S)
                resources = machine["Resources"]
                if is_new and machine["Alive"] and resources.get("CPU", 0.0) >= ACTOR_CPUS:
                    capacity = _capacity(resources, self._config.isolation.memory_bytes)
                    node = Node(machine["NodeID"], machine["NodeManagerAddress"], capacity)
                    self._nodes[node.node_id] = node
                    self._tasks.start(self._run(node))
            await asyncio.sleep(POLL_S)

    async def _run(self, node: Node) -> None:
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                await self._join(node)
            node.state = "ready"
            self._joined.set()
            await result_of(node.actor.live.remote())
        except Exception as e:  # Ray's errors have no common base
            node.state = "lost" if node.state == "ready" else "failed"
            node.reason = str(e) or f"it did not start within {JOIN_TIMEOUT_S:g} s"
            log.warning("node %s is %s: %s", node.node_id, node.state, node.reason)
        finally:
            node.ended_s = time.monotonic()
            if node.actor is not None:
                with contextlib.suppress(Exception):  # it has already ended
                    await asyncio.wait_for(result_of(node.actor.close.remote()), CLOSE_S)
                with contextlib.suppress(Exception):
                    await asyncio.to_thread(self._ray.kill, node.actor)

    async def _join(self, node: Node) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        options: dict[str, Any] = {"num_cpus": ACTOR_CPUS, "max_restarts": 0, "max_concurrency": MAX_CALLS}
        remote = self._ray.remote(scheduling_strategy=strategy, **options)
        node.actor = await asyncio.to_thread(lambda: remote(NodeActor).remote())
        await self._probe_store(node.actor)
        config = replace(self._config, credentials={})
        node.port, node.pid, node.tier, node.logs = await result_of(node.actor.start.remote(config, node.host))
        for agent, *_ in list(self._bundles.values()):
            await self._load(node, agent)

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
                f"the store {folder} is not the same folder on that node: with several machines, use s3:// or a shared folder"
            )

    def nodes(self) -> list[dict[str, Any]]:
        return [node.describe() for node in self._nodes.values()]

    # -- agents
    async def prepare(self, agent: Agent) -> None:
        if agent.image is not None:
            raise ConfigError("container images run on a single machine's runtime only, not on a cluster")
        await self._pack(agent)
        loading = (self._load(node, agent) for node in self._ready)
        results = await asyncio.gather(*loading, return_exceptions=True)
        if results and all(isinstance(result, BaseException) for result in results):
            raise AgentLoadError(str(results[0]))

    async def _load(self, node: Node, agent: Agent) -> Agent:
        """Load an agent on a node if it is not loaded there. Return the agent as it is there. Raises: LocalRuntimeError."""
        here = node.agents.get(agent.key)
        if here is None:
            async with node.loading:
                if agent.key not in self._bundles:  # it was removed, and has an endpoint again
                    await self._pack(agent)
                here = node.agents.get(agent.key) or await result_of(
                    node.actor.prepare.remote(*self._bundles[agent.key])
                )
                node.agents[agent.key] = here
        return here

    async def _pack(self, agent: Agent) -> None:
        packed = await asyncio.to_thread(pack_project, agent.script, self._config.isolation.hidden)
        self._bundles[agent.key] = agent, *packed

    async def forget(self, agent: Agent) -> None:
        self._bundles.pop(agent.key, None)
        for node in self._ready:
            here = node.agents.pop(agent.key, None)
            if here is not None:
                node.actor.forget.remote(here)

    def describe(self) -> list[dict[str, Any]]:
        return [
            {"runtime_id": key[0], "version": key[1], "start": "ray", "reason": f"node {node.node_id}"}
            for node in self._ready
            for key in node.agents
        ]

    # -- sessions
    def place(self, agent: Agent, name: str, log: str) -> Place:
        """Choose the node with the largest free share. Raises: WireError 402 if none has room."""
        free = [node for node in self._ready if len(node.sessions) < node.capacity]
        if not free:
            capacity = sum(node.capacity for node in self._ready)
            message = "The cluster has no room for another session."
            detail = f"{len(self._ready)} nodes with room for {capacity} sessions"
            raise WireError("ServiceQuotaExceededException", message, localDetail=detail)
        node = min(free, key=lambda node: (len(node.sessions) / node.capacity, len(node.sessions)))
        place = Place(name, Path(agent.folder), Path(node.logs, agent.name, log), "", node=node.node_id)
        node.sessions.add(place)
        return place

    async def spawn(self, agent: Agent, place: Place) -> RemoteProcess:
        node = self._nodes[place.node or ""]
        if node.state != "ready":
            raise LocalRuntimeError(f"node {place.node} was lost: {node.reason}")
        here = await self._load(node, agent)
        token, pid = await result_of(node.actor.spawn.remote(here, place.name, place.log_path.name))
        process = RemoteProcess(node, token, pid)
        self._tasks.start(process.wait())
        return process

    async def discard(self, place: Place) -> None:
        """Free the session's room. Its node has removed its files."""
        self._nodes[place.node or ""].sessions.discard(place)

    async def read_log(self, session: Mapping[str, Any], offset: int, size: int) -> bytes:
        """Read a piece of a session's log. It is empty if the node is lost."""
        node = self._nodes[session["node"]]
        lost = node.state != "ready"
        return b"" if lost else bytes(await result_of(node.actor.read.remote(session["log"], offset, size)))


def _capacity(resources: Mapping[str, float], session_bytes: int | None) -> int:
    count = int(SESSIONS_PER_CPU * resources["CPU"])
    if "memory" in resources:
        count = min(count, int(USABLE_MEMORY * resources["memory"] / (session_bytes or SESSION_BYTES)))
    return max(1, count)


async def result_of(reference: Any) -> Any:
    """Wait for the result of an actor's method. Raises: AgentCoreRLError of the method, otherwise LocalRuntimeError."""
    try:
        return await asyncio.wrap_future(reference.future())
    except Exception as e:  # Ray's errors have no common base
        cause = getattr(e, "cause", None)
        if isinstance(cause, AgentCoreRLError):
            raise cause from e
        raise LocalRuntimeError(str(cause or e)) from e
