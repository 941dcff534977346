"""One node as the front sees it: its runtime's address, the agents it has, the sessions that were sent there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ..._servers import sigv4
from ...errors import LocalRuntimeError
from ..agents.agent import Agent
from ..remote import RuntimeView
from ..sessions.connection import Streams
from ..sessions.session import Key

Credential = tuple[str, str]


@dataclass(eq=False)
class Node:
    """A machine of the cluster whose runtime takes sessions. ``lost``: why it takes none any more."""

    node_id: str
    host: str
    capacity: int
    actor: Any
    url: str
    credential: Credential = field(repr=False)
    pid: int
    tier: str
    lost: str | None = None
    inflight: dict[Key, int] = field(default_factory=dict)  # calls under way
    sessions: dict[Key, dict[str, Any]] = field(default_factory=dict)  # as the runtime last described them
    seen_s: float = field(default_factory=time.monotonic)
    _arns: dict[tuple[str, int], asyncio.Task[str]] = field(default_factory=dict, repr=False)
    _known: dict[tuple[str, str, str], tuple[Key, Agent]] = field(default_factory=dict, repr=False)

    @property
    def load(self) -> int:
        """Sessions that live here, or are about to."""
        return len(self.sessions.keys() | self.inflight.keys())

    @property
    def open(self) -> bool:
        return self.lost is None

    @property
    def view(self) -> RuntimeView:
        """The node's runtime, for calls in a thread."""
        return RuntimeView(self.url, self.credential)

    def describe(self) -> dict[str, Any]:
        state = "lost" if self.lost is not None else "ready"
        shown = {"node_id": self.node_id, "host": self.host, "state": state, "pid": self.pid, "isolation": self.tier}
        return {**shown, "capacity": self.capacity, "sessions": self.load, "reason": self.lost}

    async def dial(self) -> Streams:
        """A connection to its runtime. Raises: OSError."""
        address = urlsplit(self.url)
        return await asyncio.open_connection(address.hostname, address.port)

    def signed(self, path: str, body: bytes) -> list[tuple[bytes, bytes]]:
        """The headers that make a request one of this front's."""
        url = f"{self.url}{path}"
        made = sigv4.sign(self.credential, method="POST", url=url, body=body, now=time.time())
        made["host"] = urlsplit(url).netloc
        return [(name.encode(), value.encode()) for name, value in made.items()]

    # -- agents
    async def arn_of(self, agent: Agent, packed: tuple[str, bytes]) -> str:
        """Its ARN at the node, where it is loaded first if it is not. Raises: LocalRuntimeError."""
        key = (agent.runtime_id, agent.version)
        task = self._arns.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._arns[key] = asyncio.create_task(self._load(agent, packed), name=f"load {agent.name}")
        return await asyncio.shield(task)

    async def _load(self, agent: Agent, packed: tuple[str, bytes]) -> str:
        name, (path, data) = node_name(agent), packed
        folder = await asyncio.wrap_future(self.actor.unpack.remote(data, name).future())
        script = Path(folder) / path
        return await asyncio.to_thread(self.view.deploy, script, name, agent.env, fields=agent.fields)

    def path_of(self, arn: str, operation: str, query: Mapping[str, str]) -> str:
        """The path of a request at the node. Each version of an agent is an agent of its own there, at its default endpoint."""
        rest = {name: value for name, value in query.items() if name not in ("qualifier", "accountId")}
        return f"/runtimes/{quote(arn, safe='')}/{operation}" + (f"?{urlencode(rest)}" if rest else "")

    async def forget(self, agent: Agent) -> None:
        """Remove an agent version, and with it its sessions."""
        task = self._arns.pop((agent.runtime_id, agent.version), None)
        if task is None or self.lost is not None:
            return
        try:
            arn = await asyncio.shield(task)
            await asyncio.to_thread(self.view.call, "DELETE", f"/runtimes/{arn.rpartition('/')[2]}/")
        except LocalRuntimeError:
            pass  # it never loaded, or the node has just gone

    # -- sessions
    def remember(self, agent: Agent, key: Key) -> None:
        """That a call for this session goes here: by this the node's own words for it are understood."""
        self._known[node_name(agent), "DEFAULT", key[2]] = (key, agent)
        self.inflight[key] = self.inflight.get(key, 0) + 1

    def answered(self, key: Key) -> None:
        """That a call is over. Until the node is looked at again its session counts as living."""
        left = self.inflight.pop(key) - 1
        if left:
            self.inflight[key] = left
        self.sessions.setdefault(key, self.fresh(key))

    async def look(self) -> list[tuple[Key, dict[str, Any]]]:
        """Ask which sessions live. Returns those that ended since, in the front's words. Raises: LocalRuntimeError."""
        before = set(self.sessions)
        found = await asyncio.to_thread(self.view.get, "/_local/sessions")
        self.seen_s = time.monotonic()
        live = dict(self._ours(found["sessions"]))
        new = {key: shown for key, shown in self.sessions.items() if key not in before}  # sent here while it was asked
        self.sessions = {**new, **live}
        ended = [(key, shown) for key, shown in self._ours(found["ended"]) if key in before and key not in live]
        current = self.sessions.keys() | self.inflight.keys()
        self._known = {name: known for name, known in self._known.items() if known[0] in current}
        return ended

    def _ours(self, described: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Key, dict[str, Any]]]:
        for each in described:
            known = self._known.get((each["agent"], each["endpoint"], each["session_id"]))
            if known is not None:
                key, agent = known
                named = {"agent": agent.name, "version": agent.version, "runtime_id": key[0], "endpoint": key[1]}
                yield key, {**each, **named, "node": self.node_id}

    def fresh(self, key: Key) -> dict[str, Any]:
        """The description of a session before its node has described it."""
        named = {"session_id": key[2], "runtime_id": key[0], "endpoint": key[1], "node": self.node_id, "agent": ""}
        counts = {"age_s": 0.0, "idle_s": 0.0, "start_s": None, "inflight": 0, "invocations": 0}
        return {**named, **counts, "version": 0, "state": "starting", "pid": None, "log": ""}


def node_name(agent: Agent) -> str:
    """The name under which a version is deployed at a node."""
    return f"{agent.name[:32]}_{agent.folder}"


def least_loaded(nodes: Sequence[Node]) -> Node | None:
    """Of the open nodes with room the one with the largest free share."""
    free = [node for node in nodes if node.open and node.load < node.capacity]
    return min(free, key=lambda node: (node.load / node.capacity, node.load), default=None)
