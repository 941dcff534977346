"""Every process below a template: sessions and the commands that run beside them, from fork to reaped.

Each session adopts its own orphans (Linux), so whatever it started is found below it while it lives; when it ends, its
leftovers become children
of the template and are killed at once. Orphans of a command belong to the command's session and live as long as that.
"""

from __future__ import annotations

import heapq
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from ..launcher import linux, trees
from .child import Command, Session, become_command, become_session
from .confine import Confinement
from .guardian import end_children
from .warm import Learning

Report = Callable[..., None]
END_TIMEOUT_S = 20.0
REMEMBERED = 1024  # sessions that ended, whose folders the runtime removes: where it is gone, the template does


class Keeper:
    """Starts, stops and reaps. ``release`` gives up the template's own descriptors in a fresh child."""

    def __init__(
        self,
        isolation: dict[str, Any],
        report: Report,
        serve: Callable[[Session], None],
        release: Callable[[], None],
        learning: Learning | None,
    ) -> None:
        self._confinement = Confinement(isolation)
        self._report = report
        self._serve = serve
        self._release = release
        self._learning = learning
        self._sessions: dict[int, Session] = {}  # by process id
        self._by_id: dict[str, Session] = {}
        self._ended: deque[Session] = deque(maxlen=REMEMBERED)
        self._commands: dict[int, Command] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._template_pid = os.getpid()
        self._lifeline_read, self._lifeline_write = os.pipe()

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
                    _signal_group(pid, signal.SIGKILL)

    # -- starting
    def _spawn(self, order: dict[str, Any]) -> None:
        session = Session(order)
        try:
            os.mkdir(session.directory, 0o700)
            session.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            session.listener.bind(session.socket_path)
            session.listener.listen(128)
            pid = self._confinement.fork(session.directory)
        except Exception as e:  # whatever it is, it is this session's failure and the runtime's to report
            self._not_in_a_child()
            self._report(ev="failed", id=session.id, error=f"{type(e).__name__}: {e}")
            return
        if pid == 0:
            self._in_child(lambda: self._be_session(session))
        session.listener.close()
        if self._learning is not None:
            self._learning.count_session()
        session.pid = pid
        self._sessions[pid] = self._by_id[session.id] = session
        self._report(ev="spawned", id=session.id, pid=pid)

    def _be_session(self, session: Session) -> None:
        self._release()
        os.close(self._lifeline_write)
        session.lifeline_fd = self._lifeline_read
        session.learning = self._learning.student() if self._learning is not None else None
        become_session(session, None if self._confinement.own_parent_check else self._template_pid)
        self._confinement.confine(session.directory)
        self._serve(session)

    def _run_command(self, order: dict[str, Any]) -> None:
        session = self._by_id.get(order["session"])
        if session is None:
            self._report(ev="command_exit", id=order["id"], status=-1)
            return
        command = Command(order, session)
        try:
            command.connect()
            pid = self._confinement.fork_beside(session.pid, session.directory)
        except Exception as e:
            self._not_in_a_child()
            self._report(ev="command_exit", id=command.id, status=-1, error=f"{type(e).__name__}: {e}")
            return
        if pid == 0:
            self._in_child(lambda: self._be_command(command))
        command.close()
        command.pid = pid
        self._commands[pid] = command
        self._report(ev="command_started", id=command.id, pid=pid)

    def _be_command(self, command: Command) -> None:
        self._release()
        os.close(self._lifeline_write)
        become_command(command, in_namespace=self._confinement.own_parent_check)

    def _not_in_a_child(self) -> None:
        """A fork that confines may fail on the other side of it."""
        if os.getpid() != self._template_pid:
            traceback.print_exc()
            os._exit(1)

    def _in_child(self, work: Callable[[], None]) -> None:
        try:
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
            _signal_group(session.pid, signal.SIGKILL)
            return
        _signal(session.pid, signal.SIGTERM)
        heapq.heappush(self._deadlines, (time.monotonic() + grace_s, session_id))

    def timeout_s(self) -> float | None:
        """How long until `kill_overdue` has something to do."""
        return max(0.0, self._deadlines[0][0] - time.monotonic()) if self._deadlines else None

    def kill_overdue(self) -> None:
        """SIGKILL the groups of sessions whose grace is over."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            session = self._by_id.get(heapq.heappop(self._deadlines)[1])
            if session is not None:
                _signal_group(session.pid, signal.SIGKILL)
        if not self._by_id:
            self._deadlines.clear()

    def reap(self) -> None:
        """Collect every process that ended."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid in self._commands:
                command = self._commands.pop(pid)
                command.session.orphans.update(self._unknown_children())
                self._report(ev="command_exit", id=command.id, status=code)
            elif pid in self._sessions:
                session = self._sessions.pop(pid)
                self._by_id.pop(session.id, None)
                self._ended.append(session)
                kills = self._confinement.out_of_memory_kills(session.directory)
                self._bury(session)
                self._report(
                    ev="exit",
                    id=session.id,
                    status=code,
                    cpu_s=round(usage.ru_utime + usage.ru_stime, 6),
                    max_rss=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
                    out_of_memory_kills=kills,
                )

    def _bury(self, session: Session) -> None:
        """Kill what an ended session left behind."""
        _signal_group(session.pid, signal.SIGKILL)
        for pid, command in self._commands.items():
            if command.session is session:
                _signal_group(pid, signal.SIGKILL)
        for orphan in (*session.orphans, *self._unknown_children()):
            _signal(orphan, signal.SIGKILL)
        self._confinement.release(session.directory)

    def _unknown_children(self) -> set[int]:
        known = {orphan for session in self._sessions.values() for orphan in session.orphans}
        return {p for p in linux.children() if p not in self._sessions and p not in self._commands} - known

    def end_everything(self) -> None:
        """Kill all, remove their folders and end this process."""
        for pid in (*self._sessions, *self._commands):
            _signal_group(pid, signal.SIGKILL)
        deadline = time.monotonic() + END_TIMEOUT_S
        end_children(END_TIMEOUT_S)
        for session in self._sessions.values():
            self._confinement.release(session.directory)
        for session in (
            *self._sessions.values(),
            *self._ended,
        ):  # those that ended: the runtime may not have come to it
            trees.remove(session.directory, within_s=max(1.0, deadline - time.monotonic()))
            try:
                os.unlink(session.socket_path)
            except OSError:
                continue
        os._exit(0)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
        _signal(pid, number)  # it may not have made its group yet
