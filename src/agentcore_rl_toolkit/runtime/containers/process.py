"""A session that is a container, with the methods of a session that is a process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
from collections.abc import Mapping
from typing import Any

from ..._servers.tasks import Tasks
from ...errors import LocalRuntimeError
from ..launcher.command_output import CommandEnd, Write
from ..sessions.connection import Streams
from ..sessions.session import Session
from .client import ContainerEngine, EngineError

log = logging.getLogger(__name__)

AGENT_PORT = 8080
CAUSE_WAIT_S = 2.0  # an engine knows of a death a little later than the connection breaks
FIRST_LOOK_S, LONGEST_LOOK_S = 0.02, 2.0  # at the state of a container whose output has ended
_PID_LINE = re.compile(rb"(\d+)\n")


class ContainerCommand:
    """A command beside a session."""

    def __init__(self, engine: ContainerEngine, container: str, text: str, write: Write) -> None:
        self._engine, self._container, self._text, self._write = engine, container, text, write
        self._inner_pid: int | None = None

    async def run(self, timeout_s: float) -> CommandEnd:
        """Stay until it has ended. After the timeout it is killed, with what it started in its process group."""
        try:
            async with asyncio.timeout(timeout_s):
                return CommandEnd(await self._execute())
        except TimeoutError:
            await self._kill()
            return CommandEnd(-signal.SIGKILL, timed_out=True)
        except (EngineError, OSError) as e:
            return CommandEnd(-1, error=str(e))

    async def _execute(self) -> int:
        # The shell leads a process group of its own (the runtimes see to that) and says its id first, by which it can be killed.
        command = ["/bin/sh", "-c", 'echo $$; exec /bin/sh -c "$1"', "sh", self._text]
        begun = b""
        async with self._engine.asked(timeout_s=None):
            made = await self._engine.container(self._container).exec(command)
            async with made.start(detach=False) as stream:
                while (message := await stream.read_out()) is not None:
                    text = message.data
                    if message.stream == 1 and self._inner_pid is None:
                        begun += text
                        match = _PID_LINE.match(begun)
                        if match is None:
                            continue
                        self._inner_pid, text = int(match[1]), begun[match.end() :]
                    if text:
                        await self._write("stdout" if message.stream == 1 else "stderr", text)
            for name in ("stdout", "stderr"):
                await self._write(name, b"")
            found = await made.inspect()
        if self._inner_pid is None:
            raise EngineError("the container has no /bin/sh to run it with")
        code = int(found["ExitCode"])
        return code if code <= 128 else 128 - code

    async def _kill(self) -> None:
        if self._inner_pid is None:
            return
        command = ["/bin/sh", "-c", f"kill -9 -{self._inner_pid} || kill -9 {self._inner_pid}"]
        try:
            async with self._engine.asked():
                killing = await self._engine.container(self._container).exec(command)
                await killing.start(detach=True)
        except EngineError as e:
            log.warning("a command that took too long could not be killed: %s", e)


class ContainerProcess:
    """A container session. ``started`` resolves once it runs, ``ended`` to its exit status (negative: the signal that killed it,
    None: unknown). ``death`` says why it ended by itself. ``settings`` are the engine's, for the container."""

    def __init__(self, engine: ContainerEngine, session: Session, settings: Mapping[str, Any], name: str) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[int | None] = loop.create_future()
        self.pid: int | None = None
        self.cpu_s: float | None = None
        self.max_rss_bytes: int | None = None
        self.death: str | None = None
        self.agent_key = (session.agent.runtime_id, session.agent.version)
        self.container: str | None = None
        self._engine, self._session, self._settings, self._name = engine, session, settings, name
        self._port = 0
        self._stopping = False
        self._tasks = Tasks()
        self._tasks.start(self._run())

    # -- for the session table
    def stop(self, grace_s: float) -> None:
        """SIGTERM now and SIGKILL after the grace; at once when the grace is 0."""
        self._stopping = True
        self._tasks.start(self._stop(grace_s))

    async def _stop(self, grace_s: float) -> None:
        if self.container is None:
            return  # it will not be started
        try:
            if grace_s > 0:
                await self._engine.signal(self.container, "SIGTERM")
                await asyncio.wait([self.ended], timeout=grace_s)
            if not self.ended.done():
                await self._engine.signal(self.container, "SIGKILL")
        except EngineError as e:
            log.warning("container of session %s cannot be stopped: %s", self._session.id, e)

    async def dial(self) -> Streams:
        """A connection to the agent's server. Raises: OSError."""
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def cause(self) -> str | None:
        """After a connection to it broke: why it ended, where it has."""
        await asyncio.wait([self.ended], timeout=CAUSE_WAIT_S)
        return self.death

    async def command(self, text: str, write: Write, timeout_s: float) -> CommandEnd:
        """Run a shell command in the container to its end. What it prints goes to ``write``."""
        command = ContainerCommand(self._engine, self.container or "", text, write)
        running = self._tasks.start(command.run(timeout_s))
        await asyncio.wait([running, self.ended], return_when=asyncio.FIRST_COMPLETED)
        if running.done() and running.result().error is not None:  # the container may be about to end
            await asyncio.wait([self.ended], timeout=CAUSE_WAIT_S)
        if self.ended.done():
            running.cancel()
            return CommandEnd(-signal.SIGKILL)
        end: CommandEnd = running.result()
        return end

    # -- its life
    async def _run(self) -> None:
        failure: str | None = None
        status: int | None = None
        try:
            self.container = await self._engine.create(self._settings, self._name)
            if not self._stopping:
                status = await self._live(self.container)
        except (EngineError, OSError, LookupError, TypeError) as e:
            failure = str(e)
        finally:
            await asyncio.shield(self._tasks.start(self._clean_up()))
            if not self.started.done():
                why = failure or self.death or f"the container ended with status {status}"
                self.started.set_exception(LocalRuntimeError(why, session_id=self._session.id))
                self.started.exception()  # retrieved: a caller that gave up waiting is no reason for a warning
            self.ended.set_result(status)

    async def _live(self, container: str) -> int:
        """Start it and stay until it has ended. Returns its exit status."""
        # Attached before it starts, so that nothing is lost. Its output ends with it, which costs less than asking for its state.
        output = self._engine.container(container).attach(stdout=True, stderr=True)
        with self._session.log_path.open("ab") as file:  # a local file of small writes
            async with self._engine.asked(timeout_s=None), output:
                following = self._tasks.start(_copy(output, file))
                await asyncio.sleep(0)
                await self._engine.container(container).start()
                found = await self._engine.inspect(container)
                self._port = int(found["NetworkSettings"]["Ports"][f"{AGENT_PORT}/tcp"][0]["HostPort"])
                self.started.set_result(0)
                if self._stopping:
                    await self._engine.signal(container, "SIGKILL")
                await following
        pause_s = FIRST_LOOK_S
        while True:
            state = (await self._engine.inspect(container))["State"]
            if state["Status"] in ("exited", "stopped", "dead"):
                break
            await asyncio.sleep(pause_s)  # it may only have closed its output
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        code = int(state["ExitCode"])
        self.death = self._reason(code, bool(state.get("OOMKilled")))
        return code if code <= 128 else 128 - code

    def _reason(self, code: int, out_of_memory: bool) -> str | None:
        limit = self._settings["HostConfig"].get("Memory")
        size = "the machine's memory" if limit is None else f"its memory limit ({limit / 2**20:g} MiB)"
        if out_of_memory:
            return f"the session was killed for using more than {size}"
        if self._stopping:
            return None
        if code == 128 + signal.SIGKILL and limit is not None:  # Podman does not see it on version 1 of control groups
            return f"the session was killed from outside, as the kernel does above {size}"
        return f"its container ended with status {code}"

    async def _clean_up(self) -> None:
        if self.container is not None:
            try:
                await self._engine.remove(self.container)
            except EngineError as e:  # its session is over all the same
                log.warning("container %s could not be removed: %s", self._name, e)


async def _copy(output: Any, file: Any) -> None:
    with contextlib.suppress(OSError):
        while (message := await output.read_out()) is not None:
            file.write(message.data)
            file.flush()
