"""The front of a cluster: knows each session's node and sends its calls there.

Theory of operation. The front lists Ray's machines every `POLL_S`. Each new one gets an actor, which starts an ordinary local
runtime there with a key that only this front has. A session's first call goes to the open node with the largest free share of
its capacity, later ones to the same node. The front asks the nodes which sessions live: this frees places and tells why sessions
ended. A machine that is gone, or whose runtime is silent for `SILENCE_S`, is lost: its sessions end with that cause, and it may
come back as a new node.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.types import Send

from ..._servers.tasks import Tasks
from ...errors import AgentLoadError, ConfigError, LocalRuntimeError
from ..agents.agent import Agent
from ..api.faults import FaultPlan
from ..api.quotas import PROFILES
from ..config import RuntimeConfig
from ..sessions.connection import UpstreamLostError, request
from ..sessions.session import Key
from ..wire import Headers, Target, WireError, not_found
from .actor import pack_project
from .node import Node, least_loaded
from .ray_nodes import Machine, RayNodes

log = logging.getLogger(__name__)
RETRY_S = 10.0  # after a failed start of a node
STOP_S = 15.0
POLL_S, SILENCE_S, JOIN_TIMEOUT_S = 1.0, 15.0, 120.0  # a node that has not answered for the second is lost
SESSIONS_PER_CPU = 50
SESSION_BYTES = 64 * 2**20  # where no limit is set; a forked Strands session needs a fraction of it
USABLE_MEMORY = 0.8
REMEMBERED_ENDINGS = 10_000
STOP = "StopRuntimeSession"
PATHS = {"InvokeAgentRuntime": "invocations", "InvokeAgentRuntimeCommand": "commands", STOP: "stopruntimesession"}
# Of one connection, or of the caller's signature: the front signs anew.
NOT_HANDED_ON = frozenset(
    {
        *(b"host", b"connection", b"content-length", b"transfer-encoding", b"expect"),
        *(b"authorization", b"x-amz-date", b"x-amz-content-sha256", b"x-amz-security-token"),
    }
)


class Cluster:
    """The nodes of a Ray cluster as one place for sessions. The runtime starts it and closes it.

    ``admit`` is asked before a new session is started and may raise a WireError.
    """

    def __init__(self, config: RuntimeConfig, machines: RayNodes) -> None:
        self.admit: Callable[[Agent, str, int], None] = lambda agent, endpoint, live: None
        self.ended: deque[dict[str, Any]] = deque(maxlen=REMEMBERED_ENDINGS)
        self.ended_total: dict[str, int] = {}
        self.started_total = 0
        self._config = config
        self._ray = machines
        self._nodes: dict[str, Node] = {}
        self._placed: dict[Key, Node] = {}
        self._lost: deque[dict[str, Any]] = deque(maxlen=100)
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, tuple[float, str]] = {}  # not again before, why
        self._agents: dict[tuple[str, int], Agent] = {}
        self._packed: dict[tuple[str, int], tuple[str, bytes]] = {}
        self._changed = asyncio.Event()
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
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                while not self._nodes:
                    await self._change()
        except TimeoutError:
            reasons = "; ".join(f"{node_id}: {why}" for node_id, (_, why) in self._failures.items())
            raise ConfigError(
                f"no node of the cluster could run sessions within {JOIN_TIMEOUT_S:g} s"
                + (f" ({reasons})" if reasons else ": it has none with a free CPU share")
            ) from None

    async def close(self) -> None:
        """End every node's runtime with its sessions."""
        tasks = [*self._tasks, *self._joining.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._ray.remove(node.actor, STOP_S) for node in self._nodes.values()))
        self._nodes.clear()
        await self._ray.close()

    # -- agents
    async def prepare(self, agent: Agent) -> None:
        """Load an agent version on every node. Raises: AgentLoadError, LocalRuntimeError when that works on none."""
        self._agents[agent.runtime_id, agent.version] = agent
        nodes = list(self._nodes.values())
        results = await asyncio.gather(*(self._arn(node, agent) for node in nodes), return_exceptions=True)
        errors = [e for e in results if isinstance(e, BaseException)]
        if errors and len(errors) == len(results):
            raise AgentLoadError(str(errors[0])) from errors[0]
        for node, error in zip(nodes, results, strict=True):
            if isinstance(error, BaseException):
                log.warning("agent %s did not load on node %s: %s", agent.name, node.node_id, error)

    async def forget(self, agent: Agent) -> None:
        """Remove an agent version from the nodes, and with it its sessions."""
        key = (agent.runtime_id, agent.version)
        self._agents.pop(key, None)
        self._packed.pop(key, None)
        await asyncio.gather(*(node.forget(agent) for node in self._nodes.values()))

    async def forget_if_unused(self, agent: Agent) -> None:
        """Remove a version that no endpoint names any more, unless it has sessions."""
        if not any(key[0] == agent.runtime_id for key in self._placed):
            await self.forget(agent)

    async def _arn(self, node: Node, agent: Agent) -> str:
        key = (agent.runtime_id, agent.version)
        if key not in self._packed:
            self._packed[key] = await asyncio.to_thread(pack_project, agent.script, self._config.isolation.hidden)
        return await node.arn_of(agent, self._packed[key])

    # -- calls
    async def forward(
        self,
        operation: str,
        target: Target,
        agent: Agent,
        key: Key,
        headers: Headers,
        body: Sequence[bytes],
        send: Send,
    ) -> None:
        """Send a call to its session's node, and the node's reply to ``send`` as it comes.

        Raises: WireError 404 for a stop of no session, 402 when there is no room, 424 when the node is lost.
        UpstreamLostError when it is lost after its reply began.
        """
        node = self._placed.get(key)
        if node is None:
            if operation == STOP:
                raise not_found(f"Session {key[2]}")
            node = await self._place(agent, key)
        node.remember(agent, key)
        started = False
        try:
            path = node.path_of(await self._arn(node, agent), PATHS[operation], target.query)
            payload = b"".join(body)
            handed = [(name, value) for name, value in headers if name not in NOT_HANDED_ON]
            handed += node.signed(path, payload)
            async with request(node.dial, b"POST", path.encode(), handed, [payload]) as reply:
                back = [(name, value) for name, value in reply.headers if name not in NOT_HANDED_ON]
                length = next((v for n, v in reply.headers if n == b"content-length"), None)
                back += [(b"content-length", length)] if length is not None else []
                started = True
                await send({"type": "http.response.start", "status": reply.status, "headers": back})
                while data := await reply.read():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except UpstreamLostError as e:
            if started:
                raise
            raise WireError("RuntimeClientError", f"The session's node does not answer: {node.lost or e}") from e
        except LocalRuntimeError as e:
            raise WireError("RuntimeClientError", f"The agent did not load on the session's node: {e}") from e
        finally:
            node.answered(key)

    async def _place(self, agent: Agent, key: Key) -> Node:
        """The node for a new session; waits while one may still join. Raises: WireError 402."""
        self.admit(agent, key[1], len(self._placed))
        while True:
            if (known := self._placed.get(key)) is not None:  # another call of the same session was first
                return known
            node = least_loaded(list(self._nodes.values()))
            if node is not None:
                self._placed[key] = node
                self.started_total += 1
                return node
            if not self._joining:
                capacity = sum(each.capacity for each in self._nodes.values() if each.open)
                raise WireError(
                    "ServiceQuotaExceededException",
                    "The cluster has no room for another session.",
                    localDetail=f"{len(self._placed)} sessions, room for {capacity} on {len(self._nodes)} nodes",
                )
            await self._change()

    # -- what is shown of them
    @property
    def sessions(self) -> dict[Key, dict[str, Any]]:
        """The live sessions as their nodes last described them."""
        return {key: node.sessions.get(key, node.fresh(key)) for key, node in self._placed.items()}

    def describe(self) -> list[dict[str, Any]]:
        return list(self.sessions.values())

    async def refresh(self) -> None:
        """Ask every node which sessions live."""
        await asyncio.gather(*(self._look(node) for node in list(self._nodes.values())))

    async def stop(self, key: Key, grace_s: float | None) -> None:
        """Stop a session at its node. Raises: WireError 404."""
        node = self._placed.get(key)
        if node is None:
            raise not_found(f"Session {key[2]}")
        await asyncio.to_thread(node.view.stop, key[2], grace_s)

    async def log(self, session_id: str, offset: int) -> bytes:
        """A session's log from an offset on. Raises: WireError 404."""
        places = [node for key, node in self._placed.items() if key[2] == session_id]
        places += [
            self._nodes[e["node"]] for e in self.ended if e["session_id"] == session_id and e["node"] in self._nodes
        ]
        if not places:
            raise not_found(f"The log of session {session_id}")
        return await asyncio.to_thread(places[0].view.log_from, session_id, offset)

    def nodes(self) -> list[dict[str, Any]]:
        """Every node: ready, joining, failed; and those that were lost."""
        joining = [{"node_id": n, "state": "joining"} for n in self._joining if n not in self._nodes]
        failed = [
            {"node_id": n, "state": "failed", "reason": why}
            for n, (_, why) in self._failures.items()
            if n not in self._joining and n not in self._nodes
        ]
        return [*(node.describe() for node in self._nodes.values()), *joining, *failed, *self._lost]

    # -- joining and leaving
    async def _watch(self) -> None:
        while True:
            try:
                self._compare(await self._ray.machines())
            except Exception:  # nodes come and go all the same
                log.exception("looking for the cluster's machines failed, and is tried again")
            await self.refresh()
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
                task = self._joining[node_id] = asyncio.create_task(self._join(machine), name=f"join {node_id}")
                task.add_done_callback(lambda _, node_id=node_id: self._joined(node_id))  # type: ignore[misc]  # a default makes it bind now

    def _joined(self, node_id: str) -> None:
        self._joining.pop(node_id, None)
        self._changed.set()

    async def _join(self, machine: Machine) -> None:
        actor: Any = None
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                actor = await self._ray.place(machine)
                node = await self._start_node(machine, actor)
                await asyncio.gather(*(self._arn(node, agent) for agent in list(self._agents.values())))
        except (Exception, asyncio.CancelledError) as e:  # Ray's errors have no common base
            if actor is not None:
                await self._ray.remove(actor, STOP_S)
            if isinstance(e, asyncio.CancelledError):
                raise
            late = f"it did not start within {JOIN_TIMEOUT_S:g} s"
            why = late if isinstance(e, TimeoutError) else str(e)
            log.warning("node %s cannot run sessions: %s", machine.node_id, why)
            self._failures[machine.node_id] = (time.monotonic() + RETRY_S, why)
            return
        self._failures.pop(machine.node_id, None)
        self._nodes[machine.node_id] = node
        self._changed.set()

    async def _start_node(self, machine: Machine, actor: Any) -> Node:
        await self._probe_store(actor)
        credential = ("cluster", secrets.token_urlsafe(24))
        # Quotas and faults are the front's; what it admits, its nodes take.
        config = replace(
            self._config,
            state_dir=None,
            quotas=PROFILES["unlimited"],
            faults=FaultPlan(),
            credentials=dict([credential]),
        )
        started = actor.start.remote(machine.host, pickle.dumps(config), JOIN_TIMEOUT_S * 0.75)
        found = await asyncio.wrap_future(started.future())
        session_bytes = self._config.isolation.memory_bytes
        return Node(
            node_id=machine.node_id,
            host=machine.host,
            capacity=_capacity(machine, session_bytes),
            actor=actor,
            url=found["url"],
            credential=credential,
            pid=found["pid"],
            tier=found["isolation"],
        )

    async def _probe_store(self, actor: Any) -> None:
        """Whether a node sees the folder of a ``file://`` store as this machine does. Raises: ConfigError."""
        folder = self._config.isolation.store
        if folder is None:
            return
        probe, content = folder / f".probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
        try:
            await asyncio.to_thread(probe.write_bytes, content)
            seen = await asyncio.wrap_future(actor.read.remote(str(probe)).future())
        finally:
            await asyncio.to_thread(probe.unlink, missing_ok=True)
        if seen != content:
            raise ConfigError(
                f"the store {folder} is not the same folder there: with several machines the store is s3:// or a shared folder"
            )

    async def _look(self, node: Node) -> None:
        try:
            ended = await node.look()
        except LocalRuntimeError as e:
            if time.monotonic() - node.seen_s > SILENCE_S:
                self._lose(node, f"its runtime has been silent for {SILENCE_S:g} s: {e}")
            return
        for key, ending in ended:
            self._end(key, ending)
        gone = [k for k, n in self._placed.items() if n is node and k not in node.sessions and k not in node.inflight]
        for key in gone:  # its ending is forgotten there, or it never began
            del self._placed[key]
        self._changed.set()

    def _end(self, key: Key, ending: dict[str, Any]) -> None:
        self._placed.pop(key, None)
        state = str(ending.get("state", "lost"))
        self.ended_total[state] = self.ended_total.get(state, 0) + 1
        self.ended.append(ending)

    def _lose(self, node: Node, why: str) -> None:
        if self._nodes.get(node.node_id) is not node:
            return
        node.lost = f"node {node.node_id} was lost: {why}"
        log.warning("%s", node.lost)
        for key in [k for k, n in self._placed.items() if n is node]:
            shown = node.sessions.get(key, node.fresh(key))
            self._end(key, {**shown, "state": "lost", "cause": node.lost, "error": node.lost, "gone": True})
        del self._nodes[node.node_id]
        self._lost.append({**node.describe(), "sessions": 0})
        self._changed.set()
        self._tasks.start(self._ray.remove(node.actor, STOP_S))

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _capacity(machine: Machine, session_bytes: int | None) -> int:
    """Sessions that a machine takes at once, at least 1."""
    count = int(SESSIONS_PER_CPU * machine.cpus)
    if machine.memory_bytes is not None:
        count = min(count, int(USABLE_MEMORY * machine.memory_bytes / (session_bytes or SESSION_BYTES)))
    return max(1, count)
