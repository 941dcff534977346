"""A node agent: a process on each machine of the cluster that runs sessions there for the one router that holds its token.

It lives as long as its parent (end of file on stdin) and as long as the router's control connection: when either goes, or the
router is silent for too long, every session ends and its files go, so that a session the router gave up for lost does not run on.
Run as a module; the token is the first line of stdin, the address is printed as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ... import __version__
from ..._servers.open_files import raise_file_limit
from ...errors import AgentCoreRLError, AgentLoadError, LocalRuntimeError
from .. import roots
from ..agents import environments
from ..agents.agent import Agent
from ..config import IsolationConfig, RuntimeConfig
from ..launcher import folders
from ..launcher.session_log import read_log
from ..local_node import LocalNode
from ..sessions.command_output import CommandOutput
from ..sessions.node import SessionOrder
from . import bundles
from .front import Front

FIRST_CONTACT_S = 60.0
CLEAN_UP_THREADS = 4
LOG_BYTES = 256 * 1024  # of a session's log, handed over at its end
MAX_BUNDLE_BYTES = 2 * bundles.MAX_BUNDLE_BYTES
CHUNK_BYTES = 64_000


def code_dir() -> Path:
    """Where agents' code is unpacked, beside their environments."""
    return environments.cache_dir().parent / "agent-code"


class NodeAgent:
    """Sessions of one machine. `closed` is set once the router is gone or asked for it."""

    def __init__(self, token: str) -> None:
        self.closed = asyncio.Event()
        self._token = token
        self._locked = roots.new_root()
        self._root = self._locked.path
        for name in ("s", "state"):
            (self._root / name).mkdir()
        self._node: LocalNode | None = None
        self._silence_s = FIRST_CONTACT_S
        self._agents: dict[tuple[str, int], Agent] = {}
        self._processes: dict[str, Any] = {}
        self._orders: dict[str, SessionOrder] = {}  # of those
        self._ordered: dict[str, float | None] = {}  # not yet running; a number: stop it with this grace
        self._tasks: set[asyncio.Task[None]] = set()
        self._clean_up = ThreadPoolExecutor(CLEAN_UP_THREADS, thread_name_prefix="clean-up")
        self._controlled = False

    def front(self) -> Front:
        """The protocol of one incoming connection."""
        return Front(self._token, self._handle, self._socket_of)

    def _socket_of(self, session_id: str) -> str | None:
        return self._orders[session_id].socket_path if session_id in self._processes else None

    async def _handle(self, purpose: dict[str, Any], reader: asyncio.StreamReader, front: Front) -> None:
        match purpose.get("kind"):
            case "control" if not self._controlled:
                self._controlled = True
                try:
                    await self._control(reader, front)
                finally:
                    self.closed.set()
            case "bundle":
                await self._receive(purpose, reader, front)
            case "command":
                await self._command(purpose, reader, front)

    # -- control
    async def _control(self, reader: asyncio.StreamReader, front: Front) -> None:
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    line = await reader.readline()
            except (TimeoutError, ValueError):
                return
            if not line:
                return
            message: dict[str, Any] = json.loads(line)
            match message["op"]:
                case "ping":
                    front.send(re=message["n"], templates=self._node.describe() if self._node is not None else [])
                case "configure" | "prepare" | "forget" | "forget_if_unused":
                    self._run(self._answer(message, front))
                case "spawn":
                    self._ordered[message["id"]] = None
                    self._run(self._spawn(message, front))
                case "stop":
                    self._stop(message["id"], message["grace_s"])
                case "log":
                    order = self._orders.get(message["id"])
                    data = read_log(order.log_path, message["offset"], LOG_BYTES) if order is not None else b""
                    front.send(re=message["n"], data=base64.b64encode(data).decode())
                case "close":
                    return

    async def _answer(self, message: dict[str, Any], front: Front) -> None:
        try:
            content = await getattr(self, f"_{message['op']}")(message)
        except (AgentCoreRLError, OSError) as e:
            kind = "load" if isinstance(e, AgentLoadError) else "other"
            front.send(re=message["n"], error=str(e) or type(e).__name__, kind=kind)
        else:
            front.send(re=message["n"], **content)

    async def _configure(self, message: dict[str, Any]) -> dict[str, Any]:
        given, isolation = message["config"], dict(message["isolation"])
        for name in ("writable", "readable"):
            isolation[name] = tuple(Path(path) for path in isolation[name])
        isolation["store"] = None if isolation["store"] is None else Path(isolation["store"])
        config = RuntimeConfig(isolation=IsolationConfig(**isolation), **given)
        self._silence_s = message["silence_s"]
        node = LocalNode(
            config,
            state_dir=self._root / "state",
            sessions=self._root / "state" / "sessions",
            root=self._root,
        )
        await node.start()
        self._node = node
        return {"tier": node.tier, "version": __version__, "pid": os.getpid()}

    async def _prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        fields = dict(message["agent"])
        folder = code_dir() / message["bundle"]
        if not folder.exists():
            return {"missing": message["bundle"]}
        script = folder / message["script"]
        python = Path(sys.executable)
        if message["build"]:
            dependencies = environments.Dependencies.beside(script)
            python = await asyncio.to_thread(environments.build, dependencies, environments.cache_dir())
        agent = Agent(script=script, python=python, **fields)
        self._agents[agent.runtime_id, agent.version] = agent
        await self._ready_node().prepare(agent)
        return {}

    async def _forget(self, message: dict[str, Any]) -> dict[str, Any]:
        agent = self._agents.pop((message["agent"][0], message["agent"][1]), None)
        if agent is not None:
            await self._ready_node().forget(agent)
        return {}

    async def _forget_if_unused(self, message: dict[str, Any]) -> dict[str, Any]:
        agent = self._agents.get((message["agent"][0], message["agent"][1]))
        if agent is not None:
            await self._ready_node().forget_if_unused(agent)
        return {}

    def _ready_node(self) -> LocalNode:
        if self._node is None:
            raise LocalRuntimeError("the node agent has not been configured")
        return self._node

    # -- sessions
    async def _spawn(self, message: dict[str, Any], front: Front) -> None:
        identity: str = message["id"]
        order: SessionOrder | None = None
        error: str | None = None
        status, process = None, None
        try:
            agent = self._agents.get((message["agent"][0], message["agent"][1]))
            if agent is None:
                raise LocalRuntimeError("the node agent does not know this agent version")
            order = SessionOrder(
                agent=agent,
                session_id=identity,
                directory=self._root / "state" / "sessions" / agent.folder / identity,
                log_path=self._root / "state" / "logs" / agent.name / f"{identity}.log",
                socket_path=str(self._root / "s" / agent.folder / f"{identity}.s"),
                env=message["env"],
            )
            self._orders[identity] = order
            process = self._processes[identity] = await self._ready_node().start_session(order)
            grace_s = self._ordered.pop(identity, None)
            if grace_s is not None:
                process.stop(grace_s)
            front.send(ev="started", id=identity, pid=await process.started)
        except (AgentCoreRLError, OSError) as e:
            error = str(e) or type(e).__name__
        if process is not None:
            status = await process.ended
        self._ordered.pop(identity, None)
        self._processes.pop(identity, None)
        front.send(
            ev="ended",
            id=identity,
            status=status,
            error=error,
            cpu_s=process.cpu_s if process is not None else None,
            rss=process.max_rss_bytes if process is not None else None,
            log=read_log(order.log_path, -LOG_BYTES, LOG_BYTES).decode(errors="replace") if order is not None else "",
        )
        self._orders.pop(identity, None)
        if order is not None:
            await self._remove(order)

    async def _remove(self, order: SessionOrder) -> None:
        await asyncio.get_running_loop().run_in_executor(self._clean_up, folders.remove, order.directory)
        for path in (order.log_path, Path(order.socket_path)):
            with contextlib.suppress(OSError):
                await asyncio.to_thread(path.unlink, missing_ok=True)

    def _stop(self, identity: str, grace_s: float) -> None:
        process = self._processes.get(identity)
        if process is not None:
            process.stop(grace_s)
        elif identity in self._ordered:
            self._ordered[identity] = grace_s

    # -- connections of their own
    async def _receive(self, purpose: dict[str, Any], reader: asyncio.StreamReader, front: Front) -> None:
        if not 0 < purpose["size"] <= MAX_BUNDLE_BYTES:
            front.send(error=f"a bundle of {purpose['size']} bytes")
            return
        try:
            data = await reader.readexactly(purpose["size"])
            await asyncio.to_thread(bundles.unpack, data, purpose["key"], code_dir())
        except (OSError, asyncio.IncompleteReadError, tarfile.TarError) as e:
            front.send(error=f"the bundle could not be unpacked: {e}")
        else:
            front.send(error=None)
        await front.drain()

    async def _command(self, purpose: dict[str, Any], reader: asyncio.StreamReader, front: Front) -> None:
        """Run a command beside a session; its output goes out in lines, base64, as fast as the router takes it."""
        process = self._processes.get(purpose["session"])
        if process is None:
            front.send(end=-1, error="the session is gone")
            return

        async def copy(stream: bytes, output: asyncio.StreamReader) -> None:
            while stream and (data := await output.read(CHUNK_BYTES)):
                front.send(k=stream.decode(), d=base64.b64encode(data).decode())
                await front.drain()

        text = (await reader.readline()).decode()
        identity = f"c{purpose['id']}"
        path = f"{self._orders[purpose['session']].socket_path}{identity}"
        async with CommandOutput(path, copy) as output:
            command = process.command(identity, json.loads(text), path)
            orders = asyncio.create_task(reader.readline())  # the router says one word more, or hangs up: kill
            await asyncio.wait((orders, command.ended), return_when=asyncio.FIRST_COMPLETED)
            if not command.ended.done():
                command.kill()
            status = await command.ended
            orders.cancel()
            await output.rest()
            front.send(end=status, error=command.error)
            await front.drain()

    def _run(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End every session now and remove every file."""
        if self._node is not None:
            await self._node.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._clean_up.shutdown(wait=True)  # at once, in a hurry
        self._locked.discard()


async def serve(host: str, port: int) -> None:
    """Serve until the parent or the router is gone."""
    loop = asyncio.get_running_loop()
    lifeline = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lifeline), sys.stdin)
    async with asyncio.timeout(FIRST_CONTACT_S):
        token = (await lifeline.readline()).decode().strip()
    if not token:
        raise SystemExit("the node agent takes its token as the first line of its standard input")
    agent = NodeAgent(token)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.closed.set)
    server = await loop.create_server(agent.front, host, port, backlog=4096)
    print(json.dumps({"port": server.sockets[0].getsockname()[1], "pid": os.getpid()}), flush=True)
    parent = asyncio.create_task(lifeline.read())
    router = asyncio.create_task(agent.closed.wait())
    try:
        await asyncio.wait((parent, router), return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.close()
        for task in (parent, router):
            task.cancel()
        with contextlib.suppress(OSError):
            await agent.close()


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(prog="agentcore-rl node agent")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    raise_file_limit()  # a session holds a few files here
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.host, options.port))


if __name__ == "__main__":
    main()
