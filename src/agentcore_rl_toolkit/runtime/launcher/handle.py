"""The runtime's end of a template process: start it, ask it for sessions, learn when they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import AgentLoadError, LocalRuntimeError
from ...isolation.base import BOOT
from ...isolation.linux import cgroups
from . import TEMPLATE_MODULE, linux
from .disk import hold_to
from .fair_deadline import FairDeadline
from .pids import Children
from .session_log import log_tail

log = logging.getLogger(__name__)
LOAD_TIMEOUT_S = 120.0
LOAD_LOOK_S = 1.0
END_S = 8.0
CAUSE_WAIT_S = 0.5  # the end of a process is known a little later than its connections break


@dataclass(frozen=True, kw_only=True)
class TemplateSpec:
    """What to run: the script, the interpreter of its environment, and the environment variables it sees.

    ``mode`` is ``auto`` (fork where that is safe, else exec), ``fork`` or ``exec``. ``disk_bytes`` bounds all files of a
    session together: they are measured every two seconds, and a session above it is killed. ``load_timeout_s`` is the
    `FairDeadline` of the script's way to its server.
    """

    script: Path
    python: Path = Path(sys.executable)
    env: Mapping[str, str] = field(default_factory=dict)
    mode: str = "auto"
    strict_snapshot: bool = False
    isolation: Mapping[str, Any] = field(default_factory=dict)
    loader: Mapping[str, Any] | None = (
        None  # see `Confinement.confine_loader`; None: the template itself is not confined
    )
    disk_bytes: int | None = None
    log_path: Path
    load_timeout_s: float = LOAD_TIMEOUT_S


class SessionProcess:
    """A running session process. ``ended`` resolves to its exit status (negative: the signal that killed it, None: unknown)."""

    def __init__(
        self, template: TemplateProcess, session_id: str, socket_path: str, directory: Path, log_path: Path
    ) -> None:
        self.template = template
        self.id = session_id
        self.socket_path = socket_path
        self.directory = directory
        self.log_path = log_path
        self.pid: int | None = None
        self.started: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.cpu_s: float | None = None
        self.max_rss_bytes: int | None = None
        self.grants: list[Any] = []  # what its node takes from it for a store
        self.death: str | None = None  # why it ended, where the runtime ended it for a limit or the kernel did

    async def grant(self, grant: Any) -> None:
        """Let it keep one more record."""
        self.grants.append(grant)

    @property
    def own_directories(self) -> Sequence[Path] | None:
        """What it can write to beside its own folder; None: everything that this user can."""
        isolation = self.template.spec.isolation
        if isolation.get("tier", "process") == "process":
            return None
        return [Path(p) for p in isolation.get("writable", ())]

    @property
    def command_pids(self) -> list[int]:
        """The first processes of the commands that run beside it."""
        return [c.pid for c in self.template.commands.values() if c.pid is not None and c.session_id == self.id]

    async def cause(self) -> str | None:
        """Why it ended, where that is known; for a caller whose connection broke."""
        await asyncio.wait([self.ended], timeout=CAUSE_WAIT_S)
        return self.death

    def command(self, command_id: str, text: str, socket_path: str) -> CommandProcess:
        """Run a shell command in the session's environment; its two outputs connect to this unix socket and send o or e."""
        command = CommandProcess(self.template, command_id, self.id)
        self.template.commands[command_id] = command
        self.template.send(op="command", id=command_id, session=self.id, command=text, socket=socket_path)
        return command

    def stop(self, grace_s: float) -> None:
        """SIGTERM now and SIGKILL of the whole process group after the grace; at once when the grace is 0."""
        self.template.send(op="stop", id=self.id, grace_s=grace_s)


class CommandProcess:
    """A command beside a session. ``ended`` resolves to its exit status, -1 when it could not be started."""

    def __init__(self, template: TemplateProcess, command_id: str, session_id: str) -> None:
        self.template = template
        self.id = command_id
        self.session_id = session_id
        self.pid: int | None = None
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.error: str | None = None

    def kill(self) -> None:
        self.template.send(op="kill_command", id=self.id)


class TemplateProcess:
    """One template process. Started by `start`; when it dies, all of its sessions end."""

    def __init__(self, spec: TemplateSpec) -> None:
        self.spec = spec
        self.mode = spec.mode
        self.reason: str | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.sessions: dict[str, SessionProcess] = {}
        self.commands: dict[str, CommandProcess] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._measuring: asyncio.Task[None] | None = None
        self.closed = False
        self.confined = False  # the agent's module code
        self.pid: int | None = None
        self._children: Children | None = None
        self._groups: list[Path] = []
        self._orphaned: list[str] = []  # control groups of sessions that ended with the template

    @property
    def alive(self) -> bool:
        return self._writer is not None and not self.closed

    async def start(self) -> None:
        """Run the agent's script up to its server. Raises: AgentLoadError with the traceback, or on the deadline."""
        watch = hold_to(self.spec.disk_bytes, self.sessions, top=self._top, log_path=self.spec.log_path)
        self._measuring = asyncio.create_task(watch)
        try:
            event = await self._launch(self.spec.mode)
            if event["ev"] == "unforkable":
                await self._end()
                self.closed = False
                event = await self._launch("exec", event["reason"])
            if event["mode"] == "exec" and self.spec.strict_snapshot:
                why = event.get("reason") or "they were asked to start by exec"
                raise AgentLoadError(
                    f"--strict-snapshot needs forked sessions, and those of {self.spec.script} are not: {why}"
                )
        except BaseException:  # cancelled, for instance: the script may never look up from what it does
            self._kill()
            await self.close()
            raise
        self.mode, self.reason = event["mode"], event.get("reason")
        self.confined = event["mode"] == "exec" or event["confined"]

    async def _launch(self, mode: str, reason: str | None = None) -> dict[str, Any]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with self.spec.log_path.open("ab") as log:  # a local file, opened once per template
                self.process = await asyncio.create_subprocess_exec(
                    str(self.spec.python),
                    BOOT,
                    TEMPLATE_MODULE,
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(self.spec.env),
                    cwd=self.spec.script.parent,
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
        self.send(
            script=str(self.spec.script),
            mode=mode,
            reason=reason,
            strict_snapshot=self.spec.strict_snapshot,
            isolation=dict(self.spec.isolation),
            loader=self.spec.loader,
        )
        try:
            line = await self._first_line(reader)
        except TimeoutError as e:
            await self.close()
            raise AgentLoadError(
                f"{self.spec.script} did not reach its server within {e}; output: {self.spec.log_path}"
            ) from None
        event = _first_event(line)
        if event["ev"] in ("error", "died"):
            await self.close()
            raise AgentLoadError(self._explain(event))
        self._know_pids(event)
        self._reading = asyncio.create_task(self._read(reader), name=f"template {self.spec.script.name}")
        return event

    async def _first_line(self, reader: asyncio.StreamReader) -> bytes:
        """What the template says first. Raises: TimeoutError, whose text is the time it had."""
        assert self.process is not None
        deadline = FairDeadline(self.process.pid, self.spec.load_timeout_s)
        reading = asyncio.create_task(reader.readline())
        try:
            while not reading.done():
                await asyncio.wait({reading}, timeout=min(LOAD_LOOK_S, deadline.limit_s))
                if not reading.done() and deadline.passed():
                    raise TimeoutError(str(deadline))
            return reading.result()
        finally:
            reading.cancel()

    def _know_pids(self, event: dict[str, Any]) -> None:
        self.pid = self.process.pid if self.process is not None else None
        self._groups = [Path(p) for p in event.get("groups", ())]
        if event.get("guarded"):
            self.pid = event["pid"]
        elif (
            self.pid is not None and event.get("pid", self.pid) != self.pid
        ):  # it is in a pid namespace, below what we started
            self.pid = next(iter(linux.children(self.pid)), None)
            self._children = Children(self.pid) if self.pid is not None else None

    def _explain(self, event: dict[str, Any]) -> str:
        if event["ev"] == "error":
            return f"{self.spec.script} failed to load:\n{event.get('traceback')}"
        tail = log_tail(self.spec.log_path, 4_000)
        status = self.process.returncode if self.process is not None else None
        return f"{self.spec.script}: its process ended (status {status}) before the server started. Output:\n{tail}"

    def spawn(
        self, session_id: str, socket_path: str, directory: Path, log: Path, env: Mapping[str, str], links: Path | None
    ) -> SessionProcess:
        """Order a session process. Its ``started`` resolves to the process id, or fails with LocalRuntimeError."""
        if not self.alive:
            raise LocalRuntimeError("the agent's template process is gone", session_id=session_id)
        process = SessionProcess(self, session_id, socket_path, directory, log)
        self.sessions[session_id] = process
        self.send(
            op="spawn",
            id=session_id,
            socket=socket_path,
            dir=str(directory),
            log=str(log),
            env=dict(env),
            links=str(links) if links is not None else None,
        )
        return process

    def send(self, **order: Any) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(order).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._on_event(json.loads(line))
        except ConnectionError:
            pass  # same as end of file: handled below
        except Exception as e:  # whatever it says, its sessions must not wait for it
            # Its process runs the agent's module code, which can write to that socket as well.
            log.warning("the template of %s says what no template says; it is ended: %r", self.spec.script, e)
            if self._writer is not None:
                self._writer.close()
        if (
            not self.closed
            and self._children is not None
            and self.process is not None
            and self.process.returncode is None
        ):
            self.process.kill()  # and with it all that is in the namespace
        self.closed = True
        prefix = self.spec.isolation.get("name_prefix")
        if prefix is not None:  # whoever would have removed them is gone
            self._orphaned += [prefix + process.directory.name for process in self.sessions.values()]
        for process in list(self.sessions.values()):
            self._kill_group(process)
            _end(process, None, "the agent's template process died")
        self.sessions.clear()
        for command in self.commands.values():
            _exited(command, -1)
        self.commands.clear()

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["ev"] == "command_started":
            started = self.commands.get(event["id"])
            if started is not None:
                started.pid = event["pid"] if self._children is None else self._children.outer(event["pid"])
            return
        if event["ev"] == "command_exit":
            command = self.commands.pop(event["id"], None)
            if command is not None:
                if self._children is not None:
                    self._children.forget(command.pid)
                command.error = event.get("error")
                _exited(command, event["status"])
            return
        process = self.sessions.get(event.get("id", ""))
        if process is None:
            return
        if event["ev"] == "spawned":
            process.pid = event["pid"] if self._children is None else self._children.outer(event["pid"])
            if not process.started.done():
                process.started.set_result(process.pid)
        elif event["ev"] == "exit":
            del self.sessions[process.id]
            if self._children is not None:
                self._children.forget(process.pid)
            process.cpu_s, process.max_rss_bytes = event["cpu_s"], event["max_rss"]
            if event["out_of_memory_kills"] and event["status"] != 0:
                limit = self.spec.isolation["limits"]["memory_bytes"]
                process.death = f"the session was killed for using more than its memory limit ({limit / 2**20:g} MiB)"
            _end(process, event["status"], f"the session's process ended with status {event['status']}")
        elif event["ev"] == "failed":
            del self.sessions[process.id]
            _end(process, None, event["error"])

    def _kill_group(self, process: SessionProcess) -> None:
        if process.pid is not None:
            try:
                os.killpg(process.pid, 9)
            except (ProcessLookupError, PermissionError):
                return

    async def close(self) -> None:
        """End the template and all of its sessions now. Safe to call twice."""
        if self._measuring is not None:
            self._measuring.cancel()
            self._measuring = None
        await self._end()

    def _top(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def _kill(self) -> None:
        """Kill the template; its guardian then ends what is left, and itself."""
        if self.process is None or self.process.returncode is not None:
            return
        guarded = self.spec.isolation.get("tier") != "namespaces"
        below = linux.children(self.process.pid) if guarded else []
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not below:
            self.process.kill()

    async def _end(self) -> None:
        self.closed = True
        if self._writer is not None:
            self._writer.close()
        if self.process is not None and self.process.returncode is None:
            for last in (self._kill, self.process.kill):
                try:
                    async with asyncio.timeout(END_S):
                        await self.process.wait()
                    break
                except TimeoutError:
                    last()
            await self.process.wait()
        if self._reading is not None:
            await self._reading
            self._reading = None
        if self._orphaned or self._groups:
            await asyncio.to_thread(self._remove_groups, self._orphaned, self._groups)
            self._orphaned, self._groups = [], []

    @staticmethod
    def _remove_groups(sessions: Sequence[str], templates: Sequence[Path]) -> None:
        """Remove control groups whose processes were just killed, which still count for a moment. Blocks."""
        give_up_s = time.monotonic() + cgroups.DYING_S
        cgroups.remove_all(sessions, wait_s=cgroups.DYING_S)
        for group in templates:
            cgroups.remove_soon(group, give_up_s)


def _first_event(line: bytes) -> dict[str, Any]:
    """What a template says when its agent is loaded, or is not."""
    try:
        event = json.loads(line) if line else {"ev": "died"}
        needed = {"ready": {"mode", "confined"}, "unforkable": {"reason"}, "error": {"traceback"}, "died": set()}[
            event["ev"]
        ]
        if event.get("mode") != "exec" and not needed <= set(event):
            raise KeyError(*needed - set(event))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as e:
        return {"ev": "error", "traceback": f"its process says what no template says ({e!r}): {line[:200]!r}"}
    return dict(event)


def _exited(command: CommandProcess, status: int) -> None:
    if not command.ended.done():  # whoever waited for it may have been cancelled, and it with them
        command.ended.set_result(status)


def _end(process: SessionProcess, status: int | None, why: str) -> None:
    if not process.started.done():
        process.started.set_exception(LocalRuntimeError(why, session_id=process.id))
        process.started.exception()  # retrieved: a caller that gave up waiting is no reason for a warning
    if not process.ended.done():
        process.ended.set_result(status)
