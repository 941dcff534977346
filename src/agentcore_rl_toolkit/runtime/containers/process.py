"""A session that is a container."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._servers.tasks import Tasks
from ...errors import LocalRuntimeError
from ..launcher.place import NETWORK, CommandEnd, SessionProcess, Stream, Write
from .client import ContainerEngine, EngineError

if TYPE_CHECKING:
    from aiodocker.containers import DockerContainer

log = logging.getLogger(__name__)

AGENT_PORT = 8080
LOOK_S = 3.0  # pause between two checks of a container whose output has not ended
FIRST_LOOK_S, LAST_OUTPUT_S = 0.05, 1.0
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)  # pause between requests that the engine refuses
NOT_RUNNING = (404, 409)
_PID_LINE = re.compile(rb"(\d+)\n")


class ContainerProcess(SessionProcess):
    """A container session, as `SessionProcess` describes it. ``settings`` are the engine's, for the container.

    Its life is one task, from the container's creation to its removal. The engine's report of the container's state
    decides if it has ended. Streams of the engine carry output only: they may break at any time.
    """

    def __init__(self, engine: ContainerEngine, settings: Mapping[str, Any], name: str, log_path: Path) -> None:
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._engine, self._settings, self._name, self._log_path = engine, settings, name, log_path
        self._created = self._stopping = False
        self._port: int
        self._tasks = Tasks()

    async def start(self) -> None:
        """Create and start the container. Raises: LocalRuntimeError if it does not run."""
        running: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        life = self._tasks.start(self._live(running))
        await asyncio.wait([running, life], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise LocalRuntimeError(self.death or f"the container ended with status {self.ended.result()}")

    async def _live(self, running: asyncio.Future[None]) -> None:
        status: int | None = None
        try:
            async with self._engine.asked() as docker:
                await docker.containers.create(dict(self._settings), name=self._name)
            self._created = True
            if not self._stopping:
                status = await self._run(running)
        except (EngineError, OSError, LookupError, TypeError) as e:
            self.death = str(e)
        finally:
            # By its name: its creation may have been without a reply.
            removal = self._insist(lambda container: container.delete(force=True, v=True), done=(404,))
            await asyncio.shield(self._tasks.start(removal))
            self.ended.set_result(status)

    async def _run(self, running: asyncio.Future[None]) -> int:
        """Start the container, copy its output, and stay until it has ended. Returns its exit status.

        Its output ends with it, which costs less than asking for its state. But it may close the output itself, and engines do
        not always end the output of a container that was killed.
        """
        attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        output = self._tasks.start(self._copy_output(attached))
        await asyncio.wait([attached, output], return_when=asyncio.FIRST_COMPLETED)
        async with self._engine.container(self._name) as container:
            await container.start()
            found = await container.show()
        self._port = int(found["NetworkSettings"]["Ports"][f"{AGENT_PORT}/tcp"][0]["HostPort"])
        running.set_result(None)
        if self._stopping:  # it was not running when it was stopped
            self.stop(0.0)
        pause_s, state = FIRST_LOOK_S, {"Running": True}
        while state["Running"]:
            if output.done():
                await asyncio.sleep(pause_s)
                pause_s = min(LOOK_S, 2 * pause_s)
            await asyncio.wait([output], timeout=LOOK_S)
            state = (await self._repeated(lambda container: container.show()))["State"]
        await asyncio.wait([output], timeout=LAST_OUTPUT_S)
        output.cancel()
        code = int(state["ExitCode"])
        self.death = self._reason(code, bool(state.get("OOMKilled")))
        return code if code <= 128 else 128 - code

    async def _copy_output(self, attached: asyncio.Future[None]) -> None:
        try:
            with self._log_path.open("ab") as file:  # a local file of small writes
                async with (
                    self._engine.container(self._name, None) as container,
                    container.attach(stdout=True, stderr=True) as output,
                ):
                    attached.set_result(None)
                    while (message := await output.read_out()) is not None:
                        file.write(message.data)
                        file.flush()
        except (EngineError, OSError) as e:
            log.warning("the output of container %s ended early: %s", self._name, e)

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

    async def _repeated(self, ask: Callable[[DockerContainer], Awaitable[Any]], done: Collection[int] = (404,)) -> Any:
        """Send a request, and again while the engine refuses it. ``done``: refusals that will not change. Raises: EngineError."""
        for pause_s in (*PAUSES_S, None):
            try:
                async with self._engine.container(self._name) as container:
                    return await ask(container)
            except EngineError as e:
                if e.status in done or pause_s is None:
                    raise
                await asyncio.sleep(pause_s)

    async def _insist(self, ask: Callable[[DockerContainer], Awaitable[Any]], *, done: Collection[int]) -> None:
        """Send a request that ends the container. ``done``: refusals which mean that there is nothing to do."""
        try:
            await self._repeated(ask, done)
        except EngineError as e:
            if e.status not in done:
                log.warning("container %s can be neither stopped nor removed: %s", self._name, e)

    def stop(self, grace_s: float) -> None:
        self._stopping = True
        if self._created:  # otherwise it will not be started
            self._tasks.start(self._stop(grace_s))

    async def _stop(self, grace_s: float) -> None:
        if grace_s > 0:
            await self._insist(lambda container: container.kill(signal="SIGTERM"), done=NOT_RUNNING)
            await asyncio.wait([self.ended], timeout=grace_s)
        if not self.ended.done():
            await self._insist(lambda container: container.kill(signal="SIGKILL"), done=NOT_RUNNING)

    async def dial(self) -> Stream:
        return await NETWORK.connect_tcp("127.0.0.1", self._port)

    async def command(self, text: str, write: Write, timeout_s: float) -> CommandEnd:
        running = self._tasks.start(self._command(text, write, timeout_s))
        await asyncio.wait([running, self.ended], return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            running.cancel()
            return CommandEnd(-signal.SIGKILL)
        end: CommandEnd = running.result()
        return end

    async def _command(self, text: str, write: Write, timeout_s: float) -> CommandEnd:
        """Run a command. After the timeout, its process group is killed."""
        # The engines give the shell its own process group. The shell prints its id first, and by that id it can be killed.
        words = ["/bin/sh", "-c", 'echo $$; exec /bin/sh -c "$1"', "sh", text]
        head, inner_pid = b"", ""
        try:
            async with asyncio.timeout(timeout_s), self._engine.container(self._name, None) as container:
                made = await container.exec(words)
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
            if inner_pid:
                words = ["/bin/sh", "-c", f"kill -9 -{inner_pid} || kill -9 {inner_pid}"]
                with contextlib.suppress(EngineError):  # the container may have ended
                    async with self._engine.container(self._name) as container:
                        await (await container.exec(words)).start(detach=True)
            return CommandEnd(-signal.SIGKILL, timed_out=True)
        except (EngineError, OSError) as e:
            return CommandEnd(-1, error=str(e))
