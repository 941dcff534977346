"""The runtime's end of a template process: start it, ask it for sessions, learn when they end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import AgentLoadError, LocalRuntimeError
from ...isolation.project import Project
from . import linux
from .command_output import CommandEnd, Write, written
from .session_log import log_tail

BOOT = str(Path(__file__).resolve().parent / "boot.py")
TEMPLATE_MODULE = "runtime.template.process"
LOAD_TIMEOUT_S = 300.0
END_S = 8.0
_command_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class TemplateSpec:
    """The script to run, the interpreter of its environment, and its environment variables.

    ``mode`` is ``auto`` (fork where that is safe, else exec), ``fork`` or ``exec``. ``sandbox`` are the words in front of the
    command that make it run in a sandbox. ``memory_bytes`` bounds each process of a session. ``load_timeout_s`` bounds the
    script's way to its server. ``project``: the folder of which each session gets a view of its own, None for no view;
    ``copied``: files and folders in it that a session gets a copy of where it gets no view.
    """

    script: Path
    python: Path = Path(sys.executable)
    env: Mapping[str, str] = field(default_factory=dict)
    mode: str = "auto"
    sandbox: Sequence[str] = ()
    memory_bytes: int | None = None
    log_path: Path
    load_timeout_s: float = LOAD_TIMEOUT_S
    project: Path | None = None
    copied: Sequence[str] = ()


class SessionProcess:
    """A running session process. ``ended`` resolves to its exit status (negative: the signal that killed it, None: unknown)."""

    def __init__(self, template: TemplateProcess, session_id: str, socket_path: str) -> None:
        loop = asyncio.get_running_loop()
        self.template = template
        self.id = session_id
        self.pid: int | None = None
        self.started: asyncio.Future[int | None] = loop.create_future()
        self.ended: asyncio.Future[int | None] = loop.create_future()
        self.cpu_s: float | None = None
        self.max_rss_bytes: int | None = None
        self.death: str | None = None  # its exit status says it all
        self._socket_path = socket_path

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the session's server. Raises: OSError."""
        return await asyncio.open_unix_connection(self._socket_path)

    async def cause(self) -> str | None:
        """None: the cause is known only when the template has reaped the process, and this does not wait for that."""
        return None

    async def command(self, text: str, write: Write, timeout_s: float) -> CommandEnd:
        """Run a shell command in the session's environment to its end. What it prints goes to ``write``."""
        number = str(next(_command_numbers))
        path = f"{self._socket_path}{number}"
        ended: asyncio.Future[CommandEnd] = asyncio.get_running_loop().create_future()
        async with written(path, write):
            self.template.commands[number] = ended
            self.template.send(op="command", id=number, session=self.id, command=text, socket=path)
            await asyncio.wait([ended], timeout=timeout_s)
            if ended.done():
                return ended.result()
            self.template.send(op="kill_command", id=number)
            return replace(await ended, timed_out=True)

    def stop(self, grace_s: float) -> None:
        """SIGTERM now and SIGKILL of all that it started after the grace; at once when the grace is 0."""
        self.template.send(op="stop", id=self.id, grace_s=grace_s)


class TemplateProcess:
    """One template process. Started by `start`; when it dies, all of its sessions end."""

    def __init__(self, spec: TemplateSpec) -> None:
        self.spec = spec
        self.mode = spec.mode
        self._shown = Project.of(spec.script).shown
        self.reason: str | None = None
        self.no_view: str | None = None  # the reason, where sessions should get a view and do not
        self.pid: int | None = None
        self.closed = False
        self.sessions: dict[str, SessionProcess] = {}
        self.commands: dict[str, asyncio.Future[CommandEnd]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._writer is not None and not self.closed

    async def start(self) -> None:
        """Run the agent's script up to its server. Raises: AgentLoadError with the traceback, or on the deadline."""
        try:
            event = await self._launch(self.spec.mode)
            if event["ev"] == "unforkable":
                await self.close()
                self.closed = False
                event = await self._launch("exec", event["reason"])
        except BaseException:  # cancelled, for instance: the script may never look up from what it does
            self._kill()
            await self.close()
            raise
        self.mode, self.reason, self.pid = event["mode"], event.get("reason"), event["pid"]
        self.no_view = event["no_view"]

    async def _launch(self, mode: str, reason: str | None = None) -> dict[str, Any]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with self.spec.log_path.open("ab") as log:  # a local file, opened once per template
                self._process = await asyncio.create_subprocess_exec(
                    *self.spec.sandbox,
                    str(self.spec.python),
                    BOOT,
                    TEMPLATE_MODULE,
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(self.spec.env),
                    cwd=self._shown[0],
                    start_new_session=True,
                )
        except BaseException as e:  # cancelled, for instance
            ours.close()
            if isinstance(e, OSError):
                raise AgentLoadError(f"cannot run {self.spec.python}: {e}") from e
            raise
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**22)  # closes it where it is cancelled
        project = None if self.spec.project is None else str(self.spec.project)
        options = {"memory_bytes": self.spec.memory_bytes, "project": project}
        self.send(script=str(self.spec.script), mode=mode, reason=reason, **options)
        line = b""
        try:
            with contextlib.suppress(ConnectionError):  # it ended before it had read what it is to do
                async with asyncio.timeout(self.spec.load_timeout_s):
                    line = await reader.readline()
        except TimeoutError:
            raise AgentLoadError(
                f"{self.spec.script} did not reach its server within {self.spec.load_timeout_s:g} s; "
                f"output: {self.spec.log_path}"
            ) from None
        event: dict[str, Any] = json.loads(line) if line else {"ev": "died"}
        if event["ev"] == "error":
            raise AgentLoadError(f"{self.spec.script} failed to load:\n{event['traceback']}")
        if event["ev"] == "died":
            status = await self._process.wait()
            raise AgentLoadError(
                f"{self.spec.script}: its process ended (status {status}) before the server started. "
                f"Output:\n{log_tail(self.spec.log_path, 4_000)}"
            )
        self._reading = asyncio.create_task(self._read(reader), name=f"template {self.spec.script.name}")
        return event

    def spawn(self, session_id: str, socket_path: str, directory: Path, log: Path) -> SessionProcess:
        """Order a session process. Its ``started`` resolves to the process id, or fails with LocalRuntimeError."""
        if not self.alive:
            raise LocalRuntimeError("the agent's template process is gone", session_id=session_id)
        process = self.sessions[session_id] = SessionProcess(self, session_id, socket_path)
        order = {"socket": socket_path, "dir": str(directory), "log": str(log), "links": self._shown}
        viewed = self.spec.project if self.no_view is None else None
        project = None if viewed is None else str(viewed)
        self.send(op="spawn", id=session_id, project=project, copied=list(self.spec.copied), **order)
        return process

    def send(self, **order: Any) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(order).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):  # same as end of file
            while line := await reader.readline():
                self._on_event(json.loads(line))
        self.closed = True
        for process in self.sessions.values():
            _end(process, None, "the agent's template process died")
        self.sessions.clear()
        for command in self.commands.values():
            _exited(command, CommandEnd(-1))
        self.commands.clear()

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["ev"] == "command_exit":
            command = self.commands.pop(event["id"], None)
            if command is not None:
                _exited(command, CommandEnd(event["status"], error=event.get("error")))
            return
        process = self.sessions.get(event["id"])
        if process is None:
            return
        if event["ev"] == "spawned":
            process.pid = event["pid"]
            if not process.started.done():
                process.started.set_result(process.pid)
            return
        del self.sessions[process.id]
        if event["ev"] == "exit":
            process.cpu_s, process.max_rss_bytes = event["cpu_s"], event["max_rss"]
            _end(process, event["status"], f"the session's process ended with status {event['status']}")
        else:
            _end(process, None, event["error"])

    def _kill(self) -> None:
        """Kill the template and all below it."""
        if self._process is not None and self._process.returncode is None:
            linux.kill_below(self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End the template and all of its sessions now. Safe to call twice."""
        self.closed = True
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            try:
                async with asyncio.timeout(END_S):
                    await self._process.wait()
            except TimeoutError:
                self._kill()
                await self._process.wait()
        if self._reading is not None:
            await self._reading
            self._reading = None


def _exited(command: asyncio.Future[CommandEnd], end: CommandEnd) -> None:
    if not command.done():  # a caller that was cancelled cancelled the future too
        command.set_result(end)


def _end(process: SessionProcess, status: int | None, why: str) -> None:
    if not process.started.done():
        process.started.set_exception(LocalRuntimeError(why, session_id=process.id))
        process.started.exception()  # retrieved: a caller that gave up waiting is no reason for a warning
    if not process.ended.done():
        process.ended.set_result(status)
