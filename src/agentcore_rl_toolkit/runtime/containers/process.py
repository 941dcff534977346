"""One container session, from creation to removal, in the shape that the session table knows from processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import LocalRuntimeError
from ...isolation.spec import IsolationSpec
from ..launcher.disk import POLL_S, excess, log_limit, used_bytes
from ..launcher.session_log import log_bytes, shorten
from ..sessions.connection import Connection, UpstreamLostError, connect_over
from ..sessions.grants import Grant
from ..sessions.node import SessionOrder
from .client import Engine, EngineError
from .exec import ContainerCommand
from .network import ContainerNetwork

log = logging.getLogger(__name__)

AGENT_PORT = 8080
READY_POLL_S = 0.02
PING_TIMEOUT_S = 5.0
ENTER_S = 5.0  # a started container's first process is for a moment still the engine's own program
LOG_END_S = 2.0  # how long the rest of an ended container's log is waited for
CAUSE_WAIT_S = 2.0  # an engine knows of a death a little later than the connection breaks
SLOW_POLL_S, QUICK_POLL_S = 5.0, 0.05  # of a container whose process is watched, and of one whose process has ended


@dataclass(frozen=True, kw_only=True)
class ContainerPlan:
    """What a session's container is made from. ``mark``: of its runtime; ``publish``: reach it through a port of this machine;
    ``offer``: endpoints to open inside; ``own_directories``: that it sees and can write to, beside its own folder.
    """

    settings: Mapping[str, Any]
    name: str
    mark: str
    publish: bool
    offer: IsolationSpec | None
    disk_bytes: int | None
    own_directories: Sequence[Path] = ()


class ContainerProcess:
    """A container session. ``started`` resolves to its process id on this machine (0: the engine is elsewhere), ``ended``
    to its exit status (negative: the signal that killed it, None: unknown). ``death`` says why it ended by itself."""

    def __init__(self, engine: Engine, order: SessionOrder, plan: ContainerPlan) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[int | None] = loop.create_future()
        self.pid: int | None = None
        self.cpu_s: float | None = None
        self.max_rss_bytes: int | None = None
        self.death: str | None = None
        self.grants: list[Grant] = []
        self.own_directories = plan.own_directories
        self.agent_key = (order.agent.runtime_id, order.agent.version)
        self.container: str | None = None
        self._engine, self._order, self._plan = engine, order, plan
        self._network: ContainerNetwork | None = None
        self._port = 0
        self._signals: asyncio.Queue[str] = asyncio.Queue()
        self._stopping = False
        self._commands: set[ContainerCommand] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._keep(self._run())

    # -- for the session table
    async def grant(self, grant: Grant) -> None:
        """Let it keep one more record."""
        self.grants.append(grant)

    def stop(self, grace_s: float) -> None:
        """SIGTERM now and SIGKILL after the grace; at once when the grace is 0."""
        self._stopping = True
        if grace_s <= 0:
            self._signals.put_nowait("SIGKILL")
            return
        self._signals.put_nowait("SIGTERM")
        handle = asyncio.get_running_loop().call_later(grace_s, self._signals.put_nowait, "SIGKILL")
        self.ended.add_done_callback(lambda _: handle.cancel())

    async def dial(self) -> socket.socket:
        """A connection to the agent's server. Raises: UpstreamLostError."""
        if self._network is not None:
            return await self._network.dial(AGENT_PORT)
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        except BaseException as e:  # cancelled, for instance
            sock.close()
            if isinstance(e, OSError):
                raise UpstreamLostError(f"cannot connect to the session's server: {e}") from e
            raise
        return sock

    async def cause(self) -> str | None:
        """Why it ended, where it has; for a caller whose connection broke."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.ended), CAUSE_WAIT_S)
        return self.death

    def command(self, command_id: str, text: str, socket_path: str) -> ContainerCommand:
        """Run a shell command in the container; its two outputs connect to this unix socket and send o or e."""
        command = ContainerCommand(self._engine, self.container or "", command_id, text, socket_path)
        self._commands.add(command)
        command.ended.add_done_callback(lambda _: self._commands.discard(command))
        return command

    # -- its life
    async def _run(self) -> None:
        failure: str | None = None
        status: int | None = None
        try:
            self.container = await self._engine.create(self._plan.settings, self._plan.name)
            if not self._stopping:
                status = await self._live(self.container)
        except (EngineError, OSError) as e:
            failure = str(e)
        except Exception as e:  # whoever waits for it must hear that it is over
            log.exception("container of session %s", self._order.session_id)
            failure = f"{type(e).__name__}: {e}"
        finally:
            await asyncio.shield(self._keep(self._clean_up()))
        if not self.started.done():
            why = failure or f"the container ended with status {status}" + (f": {self.death}" if self.death else "")
            self.started.set_exception(LocalRuntimeError(why, session_id=self._order.session_id))
            self.started.exception()  # retrieved: a caller that gave up waiting is no reason for a warning
        self.ended.set_result(status)

    async def _live(self, container: str) -> int:
        """Start it and stay until it has ended. Returns its exit status."""
        # Attached before it starts, so that nothing is lost. Following its log instead costs Podman's service 2 % of a core each.
        attached = asyncio.Event()
        logs = self._keep(self._write_log(container, attached))
        await asyncio.wait([logs, self._keep(attached.wait())], return_when=asyncio.FIRST_COMPLETED)
        async with self._engine.asked():
            await self._engine.container(container).start()
        waiting = asyncio.ensure_future(self._until_ended(container))
        helpers = [self._keep(self._deliver_signals(container)), self._keep(self._get_ready(container))]
        if self._plan.disk_bytes is not None:
            helpers.append(self._keep(self._watch_disk(container, self._plan.disk_bytes)))
        try:
            code = await waiting
        finally:
            waiting.cancel()
            for helper in helpers:
                helper.cancel()
        await asyncio.wait([logs], timeout=LOG_END_S)
        state = (await self._engine.inspect(container))["State"]
        if self.death is None:
            self.death = self._reason(code, bool(state.get("OOMKilled")))
        return code if code <= 128 else 128 - code

    async def _until_ended(self, container: str) -> int:
        """Its exit status."""
        if self._engine.name == "docker":
            async with self._engine.asked(timeout_s=None):
                return int((await self._engine.container(container).wait(condition="not-running"))["StatusCode"])
        # Podman's service answers the same request by asking itself as fast as it can, which takes half a core.
        watching: asyncio.Task[None] | None = None
        try:
            while True:
                state = (await self._engine.inspect(container))["State"]
                if state["Status"] in ("exited", "stopped", "dead"):
                    return int(state["ExitCode"])
                if watching is None:
                    watching = self._keep(process_end(int(state["Pid"] or 0)))
                done, _ = await asyncio.wait([watching], timeout=SLOW_POLL_S)
                if done:
                    await asyncio.sleep(QUICK_POLL_S)
        finally:
            if watching is not None:
                watching.cancel()

    def _reason(self, code: int, out_of_memory: bool) -> str | None:
        limit = self._plan.settings["HostConfig"].get("Memory")
        size = "the machine's memory" if limit is None else f"its memory limit ({limit / 2**20:g} MiB)"
        if out_of_memory:
            return f"the session was killed for using more than {size}"
        if self._stopping:
            return None
        if code == 128 + signal.SIGKILL and limit is not None:  # Podman does not see it on version 1 of control groups
            return f"the session was killed from outside, as the kernel does above {size}"
        return f"its container ended with status {code}"

    async def _get_ready(self, container: str) -> None:
        try:
            info = await self._engine.inspect(container)
            self.pid = info["State"]["Pid"] or None
            if self._plan.publish:
                self._port = int(info["NetworkSettings"]["Ports"][f"{AGENT_PORT}/tcp"][0]["HostPort"])
            elif self.pid is None:
                return  # it has ended already
            else:
                self._network = await self._enter(self.pid, container)
                if self._plan.offer is not None:
                    await self._network.offer(self._plan.offer)
            while not await self._healthy():  # noqa: ASYNC110  # the server is in another process
                await asyncio.sleep(READY_POLL_S)
        except (EngineError, OSError, LookupError, TypeError) as e:
            if not self.started.done():
                self.started.set_exception(LocalRuntimeError(f"its container cannot be reached: {e}"))
                self.started.exception()
            self.stop(0.0)
            return
        if not self.started.done():
            self.started.set_result(self.pid or 0)

    async def _enter(self, pid: int, container: str) -> ContainerNetwork:
        deadline = asyncio.get_running_loop().time() + ENTER_S
        while True:
            try:
                return ContainerNetwork(pid, container=container, mark=self._plan.mark)
            except ProcessLookupError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(READY_POLL_S)

    async def _healthy(self) -> bool:
        connection: Connection | None = None
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                connection = await connect_over(await self.dial())
                await connection.send(b"GET", b"/ping", [])
                return await connection.head() == 200
        except (UpstreamLostError, TimeoutError):
            return False
        finally:
            if connection is not None:
                connection.close()

    async def _write_log(self, container: str, attached: asyncio.Event) -> None:
        limit, written = log_limit(self._plan.disk_bytes), log_bytes(self._order.log_path)
        output = self._engine.container(container).attach(stdout=True, stderr=True)
        with self._order.log_path.open("ab") as file:  # a local file of small writes
            async with self._engine.asked(timeout_s=None), output:
                attached.set()
                while (message := await output.read_out()) is not None:
                    file.write(message.data)
                    file.flush()
                    written += len(message.data)
                    if written > limit:
                        shorten(self._order.log_path, limit)
                        written = log_bytes(self._order.log_path)

    async def _deliver_signals(self, container: str) -> None:
        while True:
            name = await self._signals.get()
            try:
                await self._engine.signal(container, name)
            except Exception as e:  # the next signal may get there
                log.warning("container of session %s: %s: %s", self._order.session_id, name, e)

    async def _watch_disk(self, container: str, limit: int) -> None:
        """End the session when what it wrote to its container exceeds the limit."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                info = await self._engine.inspect(container, size=True)
                used = int(info.get("SizeRw") or 0) + log_bytes(self._order.log_path)
                used += await asyncio.to_thread(used_bytes, self._order.directory, most=limit)
            except Exception as e:  # it is measured again
                level = logging.DEBUG if isinstance(e, EngineError) else logging.WARNING
                log.log(level, "what session %s uses of the disk is not known: %r", self._order.session_id, e)
                continue
            if used > limit:
                self.death = excess(used, limit)
                self.stop(0.0)
                return

    async def _clean_up(self) -> None:
        for command in list(self._commands):
            command.lose()
        if self._network is not None:
            self._network.close()
        if self.container is not None:
            try:
                await self._engine.remove(self.container)
            except Exception as e:  # its session is over all the same
                log.warning("container %s could not be removed: %r", self._plan.name, e)

    def _keep(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("container of session %s", self._order.session_id, exc_info=task.exception())


async def process_end(pid: int) -> None:
    """Return when the process has ended; never, where it is not on this machine or the system cannot tell."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    try:
        fd = os.pidfd_open(pid) if pid and hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        return
    except OSError:
        fd = None
    if fd is None:
        await ended
        return
    try:
        loop.add_reader(fd, _settle, ended)
        await ended
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _settle(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
