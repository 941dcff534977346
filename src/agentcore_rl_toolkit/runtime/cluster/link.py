"""The router's end of one node agent: orders out, events in, and the verdict that it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import AgentLoadError, LocalRuntimeError
from ..agents.agent import Agent
from ..sessions.node import SessionOrder
from . import handshake
from .bundles import Bundle
from .machines import AgentAddress, Machine
from .process import RemoteProcess

log = logging.getLogger(__name__)
LINE_BYTES = 16 * 2**20  # an ended session's log comes in one line
REQUEST_TIMEOUT_S = 30.0
PREPARE_TIMEOUT_S = 1_200.0  # an environment may have to be built there
Packed = Callable[[Agent], Awaitable[Bundle]]


class NodeLink:
    """A node agent that answers. ``lost`` says why it does not any more; its sessions are over then."""

    def __init__(self, machine: Machine, address: AgentAddress, token: str, *, capacity: int, silence_s: float) -> None:
        self.machine = machine
        self.node_id = machine.node_id
        self.address = address
        self.capacity = capacity
        self.processes: dict[str, RemoteProcess] = {}
        self.reserved = 0
        self.draining = False
        self.tier = ""
        self.lost: str | None = None
        self.templates: list[dict[str, Any]] = []
        self.on_freed: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self._token = token
        self._silence_s = silence_s
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._prepared: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._logs: dict[str, Path] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def load(self) -> int:
        """Sessions there, with those being placed and those on their way out."""
        return len(self.processes) + self.reserved

    @property
    def open_for_sessions(self) -> bool:
        return self.lost is None and not self.draining and self._writer is not None

    async def open(self, configuration: Mapping[str, Any]) -> None:
        """Connect and configure. Raises: LocalRuntimeError, also when the package there is another version."""
        sock = await self.dial({"kind": "control"})
        reader, self._writer = await asyncio.open_connection(sock=sock, limit=LINE_BYTES)
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._ping())]
        answer = await self.request("configure", silence_s=self._silence_s, **configuration)
        if answer["version"] != __version__:
            raise LocalRuntimeError(
                f"node {self.machine.node_id} has version {answer['version']} of this package, the router {__version__}; "
                "install the same on every node"
            )
        self.tier = answer["tier"]

    async def dial(self, purpose: dict[str, Any]) -> socket.socket:
        return await handshake.dial(self.address.host, self.address.port, self._token, purpose)

    def send(self, **message: Any) -> None:
        if self._writer is not None and self.lost is None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def request(self, op: str, *, timeout_s: float = REQUEST_TIMEOUT_S, **fields: Any) -> dict[str, Any]:
        """Ask and wait for the answer. Raises: LocalRuntimeError, AgentLoadError."""
        if self.lost is not None:
            raise LocalRuntimeError(self.lost)
        number = next(self._numbers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        self.send(op=op, n=number, **fields)
        try:
            async with asyncio.timeout(timeout_s):
                answer: dict[str, Any] = await future
        except TimeoutError:
            raise LocalRuntimeError(f"node {self.machine.node_id} did not answer {op} within {timeout_s:g} s") from None
        finally:
            self._answers.pop(number, None)
        if answer.get("error") is not None:
            kind = AgentLoadError if answer.get("kind") == "load" else LocalRuntimeError
            raise kind(answer["error"])
        return answer

    # -- agents
    async def prepare(self, agent: Agent, packed: Packed) -> None:
        """Have the agent's code there and its template loaded; one attempt at a time. Raises: as `request`."""
        key = (agent.runtime_id, agent.version)
        task = self._prepared.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._prepared[key] = asyncio.create_task(self._prepare(agent, packed))
            task.add_done_callback(lambda t: None if t.cancelled() else t.exception())
        await asyncio.shield(task)

    async def _prepare(self, agent: Agent, packed: Packed) -> None:
        bundle = await packed(agent)
        fields = {
            "runtime_id": agent.runtime_id,
            "version": agent.version,
            "name": agent.name,
            "env": dict(agent.env),
        }
        order = {
            "agent": fields,
            "bundle": bundle.key,
            "script": agent.script.name,
            "build": agent.python != Path(sys.executable),
        }
        answer = await self.request("prepare", timeout_s=PREPARE_TIMEOUT_S, **order)
        if "missing" in answer:
            await self._upload(bundle)
            await self.request("prepare", timeout_s=PREPARE_TIMEOUT_S, **order)

    async def _upload(self, bundle: Bundle) -> None:
        purpose = {"kind": "bundle", "key": bundle.key, "size": len(bundle.data)}
        reader, writer = await asyncio.open_connection(sock=await self.dial(purpose))
        try:
            async with asyncio.timeout(PREPARE_TIMEOUT_S):
                writer.write(bundle.data)
                await writer.drain()
                line = await reader.readline()
        except (OSError, TimeoutError) as e:
            raise LocalRuntimeError(f"sending the agent to node {self.machine.node_id} failed: {e}") from e
        finally:
            writer.close()
        error = json.loads(line)["error"] if line else "the connection broke"
        if error is not None:
            raise LocalRuntimeError(f"node {self.machine.node_id} did not take the agent's code: {error}")

    async def forget(self, agent: Agent, *, only_unused: bool) -> None:
        """End the agent's template there; with ``only_unused`` not while it has sessions."""
        key = [agent.runtime_id, agent.version]
        if not only_unused:
            self._prepared.pop((agent.runtime_id, agent.version), None)
        with contextlib.suppress(LocalRuntimeError):  # a node that is lost has forgotten everything
            await self.request("forget_if_unused" if only_unused else "forget", agent=key)

    # -- sessions
    def spawn(self, order: SessionOrder) -> RemoteProcess:
        """Order a session. Its ``started`` tells how that went."""
        process = RemoteProcess(self, order.session_id)
        self.processes[order.session_id] = process
        self._logs[order.session_id] = order.log_path
        identity = [order.agent.runtime_id, order.agent.version]
        self.send(op="spawn", id=order.session_id, agent=identity, env=dict(order.env))
        return process

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = "its agent closed the connection"
        try:
            while line := await reader.readline():
                self._on_message(json.loads(line))
        except (OSError, ValueError) as e:
            why = f"its connection broke: {e}"
        except Exception as e:  # whatever it says, its sessions must not wait for it
            log.exception("what node %s says cannot be understood", self.machine.node_id)
            why = f"it says what no node agent says: {type(e).__name__}: {e}"
        self.lose(why)

    def _on_message(self, message: dict[str, Any]) -> None:
        if "re" in message:
            future = self._answers.get(message["re"])
            if future is not None and not future.done():
                future.set_result(message)
            return
        process = self.processes.get(message["id"])
        if process is None:
            return
        if message["ev"] == "started":
            process.on_started(message["pid"])
            return
        del self.processes[process.id]
        process.cpu_s, process.max_rss_bytes = message["cpu_s"], message["rss"]
        log_path = self._logs.pop(process.id)
        if message["log"]:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log_path.write_text(message["log"])
        status = message["status"]
        process.on_ended(status, message["error"] or f"the session's process ended with status {status}")
        self.on_freed()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(self._silence_s / 5)
            try:
                answer = await self.request("ping", timeout_s=self._silence_s * 0.8)
            except LocalRuntimeError as e:
                self.lose(f"its agent is silent: {e}")
                return
            self.templates = answer["templates"]

    def lose(self, why: str) -> None:
        """Give the node up: everything on it is over."""
        if self.lost is not None:
            return
        self.lost = f"node {self.machine.node_id} is lost: {why}"
        if self._writer is not None:
            self._writer.transport.abort()
        for future in self._answers.values():
            if not future.done():
                future.set_result({"error": self.lost})
        for process in list(self.processes.values()):
            process.on_lost(self.lost)
        self.processes.clear()
        self._logs.clear()
        self.on_lost()

    async def close(self) -> None:
        """Ask the agent to end, wait for it to hang up, and let go."""
        self.send(op="close")
        if self._tasks:
            await asyncio.wait(self._tasks[:1], timeout=10.0)
        self.lose("it was released")
        for task in [*self._tasks, *self._prepared.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._prepared.values(), return_exceptions=True)

    def describe(self) -> dict[str, Any]:
        """The node as `/_local/nodes` shows it."""
        return {
            "node_id": self.machine.node_id,
            "state": "draining" if self.draining else "ready",
            "host": self.address.host,
            "port": self.address.port,
            "pid": self.address.pid,
            "cpus": self.machine.cpus,
            "capacity": self.capacity,
            "sessions": self.load,
            "isolation": self.tier,
        }
