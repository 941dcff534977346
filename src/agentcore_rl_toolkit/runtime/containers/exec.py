"""A shell command beside a container session, through the engine's exec."""

from __future__ import annotations

import asyncio
import logging
import re
import signal

from ..launcher.command_output import CommandEnd, Write
from .client import Engine, EngineError

log = logging.getLogger(__name__)
_PID_LINE = re.compile(rb"(\d+)\n")


class ContainerCommand:
    """A command beside a session."""

    def __init__(self, engine: Engine, container: str, text: str, write: Write) -> None:
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
