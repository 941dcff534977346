"""A session that is a container."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._servers.tasks import Tasks
from ...errors import LocalRuntimeError
from ..launcher.place import CommandEnd, Streams, Write
from .client import ContainerEngine, EngineError

log = logging.getLogger(__name__)

AGENT_PORT = 8080
CAUSE_WAIT_S = 2.0  # an engine knows of a death a little later than the connection breaks
LOOK_S = 3.0  # between two looks at the state of a container whose output has not ended
FIRST_LOOK_S, LAST_OUTPUT_S = 0.05, 1.0
_PID_LINE = re.compile(rb"(\d+)\n")


class ContainerProcess:
    """A container session, as `SessionProcess` describes it. ``settings`` are the engine's, for the container."""

    lost = False
    pid: int | None = None
    cpu_s: float | None = None
    max_rss_bytes: int | None = None

    def __init__(self, engine: ContainerEngine, settings: Mapping[str, Any], log_path: Path) -> None:
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.death: str | None = None
        self._engine, self._settings, self._log_path = engine, settings, log_path
        self._id = ""
        self._port = 0
        self._stopping = False
        self._tasks = Tasks()

    async def start(self, name: str) -> None:
        """Create and start the container. Raises: LocalRuntimeError if it does not run."""
        running: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        life = self._tasks.start(self._live(name, running))
        try:
            await asyncio.wait([running, life], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._stopping = True  # its life ends it
            raise
        if not running.done():
            raise LocalRuntimeError(self.death or f"the container ended with status {self.ended.result()}")

    async def _live(self, name: str, running: asyncio.Future[None]) -> None:
        """Live from the container's creation to its removal."""
        status: int | None = None
        try:
            async with self._engine.asked() as docker:
                self._id = (await docker.containers.create(dict(self._settings), name=name)).id
            if not self._stopping:
                status = await self._run(running)
        except (EngineError, OSError, LookupError, TypeError) as e:
            self.death = str(e)
        finally:
            await asyncio.shield(self._tasks.start(self._remove(name)))
            self.ended.set_result(status)

    async def _run(self, running: asyncio.Future[None]) -> int:
        """Start the container, copy its output, and stay until it has ended. Returns its exit status."""
        # Attached before it starts, so that nothing is lost. Its output ends with it, which costs less than asking for its state.
        with self._log_path.open("ab") as file:  # a local file of small writes
            async with self._engine.asked(timeout_s=None) as docker:
                container = docker.containers.container(self._id)
                async with container.attach(stdout=True, stderr=True) as output:
                    copying = self._tasks.start(_copy(output, file))
                    await asyncio.sleep(0)
                    await container.start()
                    found = await container.show()
                    self._port = int(found["NetworkSettings"]["Ports"][f"{AGENT_PORT}/tcp"][0]["HostPort"])
                    running.set_result(None)
                    if self._stopping:
                        await container.kill(signal="SIGKILL")
                    state = await _end_of(container, copying)
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

    async def _remove(self, name: str) -> None:
        if self._id:
            try:
                async with self._engine.asked_about(self._id) as container:
                    await container.delete(force=True, v=True)
            except EngineError as e:  # its session is over all the same
                log.warning("container %s could not be removed: %s", name, e)

    def stop(self, grace_s: float) -> None:
        """SIGTERM now and SIGKILL after the grace; at once when the grace is 0."""
        self._stopping = True
        self._tasks.start(self._stop(grace_s))

    async def _stop(self, grace_s: float) -> None:
        if not self._id:
            return  # it will not be started
        try:
            if grace_s > 0:
                async with self._engine.asked_about(self._id) as container:
                    await container.kill(signal="SIGTERM")
                await asyncio.wait([self.ended], timeout=grace_s)
            if not self.ended.done():
                async with self._engine.asked_about(self._id) as container:
                    await container.kill(signal="SIGKILL")
        except EngineError as e:
            log.warning("container %s cannot be stopped: %s", self._id[:12], e)

    async def dial(self) -> Streams:
        """Connect to the agent's server. Raises: OSError."""
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def cause(self) -> str | None:
        """Return why it ended, after a connection to it broke; None if it has not."""
        await asyncio.wait([self.ended], timeout=CAUSE_WAIT_S)
        return self.death

    # -- commands
    async def command(self, text: str, write: Write, timeout_s: float) -> CommandEnd:
        """Run a shell command in the container to its end. ``write`` gets its output."""
        running = self._tasks.start(self._command(text, write, timeout_s))
        await asyncio.wait([running, self.ended], return_when=asyncio.FIRST_COMPLETED)
        if running.done() and running.result().error is not None:  # the container may be about to end
            await asyncio.wait([self.ended], timeout=CAUSE_WAIT_S)
        if self.ended.done():
            running.cancel()
            return CommandEnd(-signal.SIGKILL)
        end: CommandEnd = running.result()
        return end

    async def _command(self, text: str, write: Write, timeout_s: float) -> CommandEnd:
        """Run a command. After the timeout it is killed, with what it started in its process group."""
        # The shell leads a process group of its own (the engines see to that) and prints its id first, by which it can be killed.
        words = ["/bin/sh", "-c", 'echo $$; exec /bin/sh -c "$1"', "sh", text]
        head, inner_pid = b"", ""
        try:
            async with asyncio.timeout(timeout_s), self._engine.asked(timeout_s=None) as docker:
                made = await docker.containers.container(self._id).exec(words)
                async with made.start(detach=False) as stream:
                    while (message := await stream.read_out()) is not None:
                        data = message.data
                        if message.stream == 1 and not inner_pid:
                            head += data
                            if (match := _PID_LINE.match(head)) is None:
                                continue
                            inner_pid, data = match[1].decode(), head[match.end() :]
                        if data:
                            await write("stdout" if message.stream == 1 else "stderr", data)
                for name in ("stdout", "stderr"):
                    await write(name, b"")
                code = int((await made.inspect())["ExitCode"])
            if not inner_pid:
                return CommandEnd(-1, error="the container has no /bin/sh to run it with")
            return CommandEnd(code if code <= 128 else 128 - code)
        except TimeoutError:
            await self._kill_command(inner_pid)
            return CommandEnd(-signal.SIGKILL, timed_out=True)
        except (EngineError, OSError) as e:
            return CommandEnd(-1, error=str(e))

    async def _kill_command(self, inner_pid: str) -> None:
        if not inner_pid:
            return
        words = ["/bin/sh", "-c", f"kill -9 -{inner_pid} || kill -9 {inner_pid}"]
        try:
            async with self._engine.asked() as docker:
                killing = await docker.containers.container(self._id).exec(words)
                await killing.start(detach=True)
        except EngineError as e:
            log.warning("a command that took too long could not be killed: %s", e)


async def _end_of(container: Any, copying: asyncio.Task[None]) -> dict[str, Any]:
    """Wait until a container has ended, and return its state. Its output ends with it, unless it closed the output itself.

    The state is also looked at from time to time: engines do not always end the output of a container that was killed.
    """
    pause_s = FIRST_LOOK_S
    while True:
        await asyncio.wait([copying], timeout=LOOK_S)
        state: dict[str, Any] = (await container.show())["State"]
        if not state["Running"]:
            await asyncio.wait([copying], timeout=LAST_OUTPUT_S)
            copying.cancel()
            return state
        if copying.done():
            await asyncio.sleep(pause_s)
            pause_s = min(LOOK_S, 2 * pause_s)


async def _copy(output: Any, file: Any) -> None:
    with contextlib.suppress(OSError):
        while (message := await output.read_out()) is not None:
            file.write(message.data)
            file.flush()
