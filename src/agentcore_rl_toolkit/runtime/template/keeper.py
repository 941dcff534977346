"""Every process below a template: sessions and the commands that run beside them, from fork to reaped.

A session leads a process group and adopts its own orphans (Linux), so all its processes are found below it while it lives,
detached ones too. Processes that outlive it become children of the template and are killed at once. Orphans of a command belong
to the command's session and live as long as that.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from ...isolation import view
from ...isolation.project import link_files
from ..launcher import linux
from ..launcher.linux import set_memory_limit
from .script import run_script
from .serve import leave, make_config, serve

Report = Callable[..., None]
END_TIMEOUT_S = 20.0
# Sessions are short and their long-lived objects are frozen in the template: rarer collections save CPU and page copies.
GC_THRESHOLDS = (5_000, 20, 20)


class Fork:
    """One session process as its template and the process itself see it."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.id: str = order["id"]
        self.directory: str = order["dir"]
        self.log_path: str = order["log"]
        self.socket_path: str = order["socket"]
        self.links: list[str] = order["links"]
        self.copied: list[str] = order["copied"]
        self.project: str | None = order["project"]  # None: the session has no view of its own
        self.listener: socket.socket
        self.pid = 0

    def serve(self, config: Any) -> None:
        """Serve the template's app. Never returns."""
        leave(serve(config, self.listener))

    def run_cold(self, script: str) -> None:
        """Run the script from its first line and serve its app. Never returns."""

        def take_over(app: Any, options: dict[str, Any]) -> None:
            self.serve(make_config(app, options))

        run_script(script, take_over, serve_here=lambda: self.listener)


class Command:
    """A shell command beside a session. Its output goes to two connections to the runtime's socket."""

    def __init__(self, order: dict[str, Any], session: Fork) -> None:
        self.id: str = order["id"]
        self.socket_path: str = order["socket"]
        self.text: str = order["command"]
        self.session = session
        self.outputs: list[socket.socket] = []

    def connect(self) -> None:
        for name in (b"o", b"e"):
            output = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.outputs.append(output)
            output.connect(self.socket_path)
            output.sendall(name)

    def close(self) -> None:
        for output in self.outputs:
            output.close()


def become_session(session: Fork, template_pid: int, memory_bytes: int | None) -> None:
    """Detach from the template: own process group, environment, folder, log, random numbers, and the memory limit."""
    _begin(template_pid, memory_bytes)
    log = os.open(session.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.mkdir(os.path.join(session.directory, "tmp"), 0o700)
    if session.project is not None:
        view.make(session.project, session.copied)
        linux.die_with_parent(signal.SIGKILL)  # a process that changes its user namespace may lose this
    _settle(session)
    link_files(session.links, session.directory, session.copied if session.project is None else ())
    tempfile.tempdir = None
    # CPython gives `random` a new seed in a forked child; numpy's global generator keeps the template's.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


def become_command(command: Command, template_pid: int, memory_bytes: int | None) -> None:
    """Turn into the shell that runs the command. Never returns."""
    _begin(template_pid, memory_bytes)
    for output, fd in zip(command.outputs, (1, 2), strict=True):
        os.dup2(output.fileno(), fd)
    if command.session.project is not None:
        view.join(command.session.pid)
        linux.die_with_parent(signal.SIGKILL)
    _settle(command.session)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execve("/bin/sh", ["/bin/sh", "-c", command.text], dict(os.environ))


def _begin(template_pid: int, memory_bytes: int | None) -> None:
    os.setsid()
    linux.die_with_parent(signal.SIGKILL)
    if os.getppid() != template_pid:  # it died between the fork and the line above
        os._exit(1)
    linux.adopt_orphans()
    set_memory_limit(memory_bytes)


def _settle(session: Fork) -> None:
    """Environment, folder and temporary folder."""
    os.chdir(session.directory)
    os.environ["TMPDIR"] = os.path.join(session.directory, "tmp")
    os.environ["HOME"] = os.environ["PWD"] = session.directory


class Keeper:
    """Starts, stops and reaps. ``release`` gives up the template's own descriptors in a fresh child."""

    def __init__(
        self,
        memory_bytes: int | None,
        report: Report,
        serve: Callable[[Fork], None],
        release: Callable[[], None],
    ) -> None:
        self._memory_bytes = memory_bytes
        self._report = report
        self._serve = serve
        self._release = release
        self._sessions: dict[int, Fork] = {}  # by process id
        self._by_id: dict[str, Fork] = {}
        self._commands: dict[int, Command] = {}
        self._orphans: dict[int, Fork] = {}  # of commands that have ended
        self._deadlines: list[tuple[float, str]] = []
        self._pid = os.getpid()
        self._agents_own = set(linux.children())  # helpers that the agent's module code has started

    def obey(self, order: dict[str, Any]) -> None:
        """Carry out one order of the runtime."""
        if order["op"] == "spawn":
            self._spawn(order)
        elif order["op"] == "stop":
            self._stop(order["id"], float(order["grace_s"]))
        elif order["op"] == "command":
            self._run_command(order)
        elif order["op"] == "kill_command":
            for pid, command in self._commands.items():
                if command.id == order["id"]:
                    _kill(pid)

    # -- starting
    def _spawn(self, order: dict[str, Any]) -> None:
        session = Fork(order)
        try:
            os.mkdir(session.directory, 0o700)
            session.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            session.listener.bind(session.socket_path)
            session.listener.listen(128)
            pid = self._fork(lambda: self._be_session(session))
        except Exception as e:  # whatever it is, it is this session's failure and the runtime's to report
            self._report(ev="failed", id=session.id, error=f"{type(e).__name__}: {e}")
            return
        session.listener.close()
        session.pid = pid
        self._sessions[pid] = self._by_id[session.id] = session
        self._report(ev="spawned", id=session.id, pid=pid)

    def _be_session(self, session: Fork) -> None:
        become_session(session, self._pid, self._memory_bytes)
        self._serve(session)

    def _run_command(self, order: dict[str, Any]) -> None:
        session = self._by_id.get(order["session"])
        if session is None:
            self._report(ev="command_exit", id=order["id"], status=-1)
            return
        command = Command(order, session)
        try:
            command.connect()
            pid = self._fork(lambda: become_command(command, self._pid, self._memory_bytes))
        except Exception as e:
            self._report(ev="command_exit", id=command.id, status=-1, error=f"{type(e).__name__}: {e}")
            return
        command.close()
        self._commands[pid] = command

    def _fork(self, work: Callable[[], None]) -> int:
        """The process id of a child that does the work and never returns."""
        pid = os.fork()
        if pid:
            return pid
        try:
            self._release()
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    # -- ending
    def _stop(self, session_id: str, grace_s: float) -> None:
        session = self._by_id.get(session_id)
        if session is None:
            return
        if grace_s <= 0:
            _kill(session.pid)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(session.pid, signal.SIGTERM)
        heapq.heappush(self._deadlines, (time.monotonic() + grace_s, session_id))

    def timeout_s(self) -> float | None:
        """How long until `kill_overdue` has something to do."""
        return max(0.0, self._deadlines[0][0] - time.monotonic()) if self._deadlines else None

    def kill_overdue(self) -> None:
        """Kill the sessions whose grace is over, with all that they started."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            session = self._by_id.get(heapq.heappop(self._deadlines)[1])
            if session is not None:
                _kill(session.pid)
        if not self._by_id:
            self._deadlines.clear()

    def reap(self) -> None:
        """Collect every process that ended, and kill what is left of ended sessions."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            if pid in self._commands:
                command = self._commands.pop(pid)
                self._orphans |= dict.fromkeys(self._strays(), command.session)
                self._report(ev="command_exit", id=command.id, status=code)
            elif pid in self._orphans:
                self._orphans |= dict.fromkeys(self._strays(), self._orphans.pop(pid))
            elif pid in self._sessions:
                session = self._sessions.pop(pid)
                self._by_id.pop(session.id, None)
                self._bury(session)
                self._report(
                    ev="exit",
                    id=session.id,
                    status=code,
                    cpu_s=round(usage.ru_utime + usage.ru_stime, 6),
                    max_rss=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
                )
        for stray in self._strays():
            _kill(stray)

    def _bury(self, session: Fork) -> None:
        """Kill what an ended session left behind; what has detached itself is a stray now."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session.pid, signal.SIGKILL)
        for pid, command in self._commands.items():
            if command.session is session:
                _kill(pid)
        for pid in [pid for pid, owner in self._orphans.items() if owner is session]:
            del self._orphans[pid]
            _kill(pid)

    def _strays(self) -> list[int]:
        """Children that neither are sessions or commands nor belong to a session that lives."""
        known = {*self._sessions, *self._commands, *self._orphans, *self._agents_own}
        return [pid for pid in linux.children() if pid not in known]

    def end_everything(self) -> None:
        """Kill all and end this process."""
        deadline = time.monotonic() + END_TIMEOUT_S
        for pid in (*self._sessions, *self._commands):
            _kill(pid)
        while time.monotonic() < deadline:
            for pid in linux.children():  # those that become children of this process by it, too
                _kill(pid)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            except ChildProcessError:
                break
            time.sleep(0.005)
        os._exit(0)


def _kill(pid: int) -> None:
    """Kill a process, its group, and everything below it."""
    linux.kill_below(pid)
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may not have made its group yet
