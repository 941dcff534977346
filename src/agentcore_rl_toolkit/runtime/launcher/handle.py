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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpcore

from ...errors import AgentLoadError, LocalRuntimeError
from ...isolation.project import Project
from . import linux
from .command_output import copy_output
from .place import NETWORK, CommandEnd, Place, SessionProcess, Stream, Write
from .session_log import log_tail

BOOT = str(Path(__file__).resolve().parent / "boot.py")
LOAD_TIMEOUT_S = 300.0
END_S = 4.0  # time of a template to end its sessions itself
_command_numbers = itertools.count()


class ForkedProcess(SessionProcess):
    """A fork of a template: a session, or a command in the environment of a session.

    ``started`` resolves when the process runs. ``failure`` is the reason why it never ran.
    """

    def __init__(self, template: TemplateProcess, name: str, socket_path: str) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int | None] = loop.create_future()
        self.failure: str | None = None
        self._template, self._name, self._socket_path = template, name, socket_path

    async def dial(self) -> Stream:
        return await NETWORK.connect_unix_socket(self._socket_path)

    async def command(self, text: str, write: Write, timeout_s: float) -> CommandEnd:
        number = next(_command_numbers)
        path, name = f"{self._socket_path}{number}", f"{self._name}/{number}"
        command = self._template.fork(name, path, op="command", session=self._name, command=text, socket=path)
        try:
            async with asyncio.TaskGroup() as copies:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        with contextlib.suppress(LocalRuntimeError, httpcore.NetworkError):  # it has already ended
                            await command.started
                            for stream in ("stdout", "stderr"):
                                copies.create_task(copy_output(stream, await command.dial(), write, command.ended))
                        await asyncio.wait([command.ended])
                timed_out = not command.ended.done()
                if timed_out:
                    command.stop(0.0)
                status = await command.ended
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return CommandEnd(-1 if status is None else status, timed_out, command.failure)

    def stop(self, grace_s: float) -> None:
        if grace_s:
            self._signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(grace_s, self._signal, signal.SIGKILL)
        else:
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        self._template.send(op="stop", id=self._name, signal=number)

    def set_ended(self, status: int | None, failure: str | None = None) -> None:
        """Resolve the futures. ``failure`` is the error of a process that never ran."""
        self.failure = failure
        if not self.started.done():
            text = failure or f"the session's process ended with status {status}"
            self.started.set_exception(LocalRuntimeError(text))
            self.started.exception()  # a caller that no longer waits needs no warning
        if not self.ended.done():
            self.ended.set_result(status)


@dataclass(kw_only=True, eq=False)
class TemplateProcess:
    """A template process. When it dies, all of its sessions end.

    ``python`` is the interpreter of the script's environment, and ``env`` has its variables. ``mode`` is ``auto`` (fork if that
    is safe, otherwise libraries, otherwise exec) or ``exec``. After the start it is the chosen mode, with a ``reason`` unless it
    is fork. ``sandbox`` are the arguments in front of the command that run it in a sandbox. ``memory_bytes`` bounds each process
    of a session. ``load_timeout_s`` bounds the script's way to its server. ``project``: the folder of which each session gets its
    own view, None for no view, with ``no_view`` as the reason if there should be one. ``no_overlay``: folders in the view that
    all sessions share. ``copied``: files and folders in it that a session gets a copy of where it gets no view.
    ``forks``: sessions by the names of their places, and commands.
    """

    script: Path
    env: Mapping[str, str]
    log_path: Path
    python: Path = Path(sys.executable)
    mode: str = "auto"
    sandbox: Sequence[str] = ()
    memory_bytes: int | None = None
    load_timeout_s: float = LOAD_TIMEOUT_S
    project: Path | None = None
    copied: Sequence[str] = ()
    reason: str | None = field(init=False, default=None)
    no_view: str | None = field(init=False, default=None)
    no_overlay: Sequence[str] = field(init=False, default=())
    pid: int | None = field(init=False, default=None)
    closed: bool = field(init=False, default=False)
    forks: dict[str, ForkedProcess] = field(init=False, default_factory=dict)
    _process: asyncio.subprocess.Process | None = field(init=False, default=None)
    _writer: asyncio.StreamWriter | None = field(init=False, default=None)
    _reading: asyncio.Task[None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._shown = Project.of(self.script).shown

    @property
    def alive(self) -> bool:
        return self._writer is not None and not self.closed

    def describe(self) -> dict[str, Any]:
        facts = {"start": self.mode, "reason": self.reason, "pid": self.pid, "no_view": self.no_view}
        return {**facts, "sessions": sum("/" not in name for name in self.forks)}  # without their commands

    async def start(self) -> None:
        """Run the agent's script up to its server. Raises: AgentLoadError with the traceback, or on the deadline."""
        try:
            await self._launch()
        except BaseException:  # such as a cancellation: the script may never return
            self._kill()
            await self.close()
            raise

    async def _launch(self) -> None:
        project = None if self.project is None else str(self.project)
        options = {"script": str(self.script), "project": project, "home": self.env.get("HOME"), "mode": self.mode}
        ours, theirs = socket.socketpair()
        with theirs, self.log_path.open("ab") as log:  # a local file, opened once per template
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**22)
            words = [*self.sandbox, str(self.python), BOOT, "runtime.template.process", str(theirs.fileno())]
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *words,
                    json.dumps({**options, "memory_bytes": self.memory_bytes}),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(self.env),
                    cwd=self._shown[0],
                    start_new_session=True,
                )
            except OSError as e:
                raise AgentLoadError(f"cannot run {self.python}: {e}") from e
        try:
            line = await asyncio.wait_for(reader.readline(), self.load_timeout_s)
        except TimeoutError:
            late = f"did not reach its server within {self.load_timeout_s:g} s"
            raise AgentLoadError(f"{self.script} {late}; output: {self.log_path}") from None
        if not line:
            end = f"its process ended (status {await self._process.wait()}) before the server started"
            raise AgentLoadError(f"{self.script}: {end}. Output:\n{log_tail(self.log_path, 4_000)}")
        event: dict[str, Any] = json.loads(line)
        if event["ev"] == "error":
            raise AgentLoadError(f"{self.script} failed to load:\n{event['traceback']}")
        self.mode, self.reason, self.pid = event["mode"], event["reason"], event["pid"]
        self.no_view, self.no_overlay = event["no_view"], event["no_overlay"]
        self._reading = asyncio.create_task(self._read(reader), name=f"template {self.script.name}")

    async def spawn(self, place: Place) -> ForkedProcess:
        """Start a session process. Raises: LocalRuntimeError."""
        paths = {"socket": place.socket_path, "dir": str(place.directory), "log": str(place.log_path)}
        order: dict[str, Any] = {"project": None, "copied": list(self.copied), "links": self._shown}
        if self.project is not None and self.no_view is None:
            # Each session sees its own part of the folders that the template's sessions share.
            own = [(paths["dir"], paths["dir"])]
            if place.store is not None:
                await asyncio.to_thread(place.store.make)
                own += [(name, str(place.store.path)) for name in place.store.names]
            emptied = sorted({os.path.dirname(path) for path in paths.values()})
            order |= {"project": str(self.project), "home": self.env.get("HOME"), "emptied": emptied, "own": own}
        if not self.alive:
            raise LocalRuntimeError("the agent's template process has ended")
        process = self.fork(place.name, place.socket_path, op="spawn", **paths, **order)
        await process.started
        return process

    def fork(self, name: str, socket_path: str, **order: Any) -> ForkedProcess:
        """Order a process. It is known by its name until it has ended."""
        process = ForkedProcess(self, name, socket_path)
        if self.closed:
            process.set_ended(-signal.SIGKILL)
        else:
            self.forks[name] = process
            self.send(id=name, **order)
        return process

    def send(self, **order: Any) -> None:
        if not self.closed:
            assert self._writer is not None
            self._writer.write(json.dumps(order).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):  # same as end of file
            while line := await reader.readline():
                event = json.loads(line)
                process = self.forks[event["id"]]
                if event["ev"] == "spawned":
                    process.pid = event["pid"]
                    if not process.started.done():
                        process.started.set_result(None)
                else:
                    del self.forks[event["id"]]
                    process.cpu_s = event.get("cpu_s")
                    process.set_ended(event.get("status"), event.get("error"))
        self.closed = True
        for process in self.forks.values():
            process.set_ended(-signal.SIGKILL)
        self.forks.clear()

    def _kill(self) -> None:
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
                await asyncio.wait_for(self._process.wait(), END_S)
            except TimeoutError:
                self._kill()
                await self._process.wait()
        if self._reading is not None:
            await self._reading
            self._reading = None
