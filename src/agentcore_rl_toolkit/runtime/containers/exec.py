"""A shell command beside a container session, through the engine's exec."""

from __future__ import annotations

import asyncio
import logging
import re
import signal

from ..launcher.command_output import Write
from .client import Engine, EngineError

log = logging.getLogger(__name__)
_PID_LINE = re.compile(rb"(\d+)\n")


class ContainerCommand:
    """A command beside a session. ``ended`` resolves to its exit status, -1 when it could not be started."""

    def __init__(self, engine: Engine, container: str, text: str, write: Write) -> None:
        self.error: str | None = None
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._engine, self._container, self._text, self._write = engine, container, text, write
        self._inner_pid: int | None = None
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._killing: asyncio.Task[None] | None = None

    def kill(self) -> None:
        """SIGKILL for it and what it started in its process group."""
        self._killing = asyncio.get_running_loop().create_task(self._kill())

    def lose(self) -> None:
        """Its container is gone."""
        self._task.cancel()
        if not self.ended.done():
            self.ended.set_result(-signal.SIGKILL)

    async def _run(self) -> None:
        try:
            status = await self._execute()
        except (EngineError, OSError) as e:
            self.error, status = str(e), -1
        if not self.ended.done():
            self.ended.set_result(status)

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
            self._task.cancel()
            if not self.ended.done():
                self.ended.set_result(-signal.SIGKILL)
            return
        command = ["/bin/sh", "-c", f"kill -9 -{self._inner_pid} || kill -9 {self._inner_pid}"]
        try:
            async with self._engine.asked():
                killing = await self._engine.container(self._container).exec(command)
                await killing.start(detach=True)
        except EngineError as e:
            log.warning("a command that took too long could not be killed: %s", e)
            self.lose()
