"""Every process below a template: sessions and their commands, from fork to reaped.

A session leads a process group and adopts its own orphans (Linux), so all its processes are found below it while it lives,
detached ones too. Processes that outlive it become children of the template and are killed at once. Orphans of a command belong
to the command's session and live as long as that.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
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

END_TIMEOUT_S = 20.0
# Sessions are short, and the template has frozen their long-lived objects: rarer collections save CPU and page copies.
GC_THRESHOLDS = (5_000, 20, 20)


class Child:
    """A process of a session: its server, a command, or an orphan of a command.

    ``order`` is the runtime's order for it. It is empty for an orphan.
    """

    def __init__(self, order: dict[str, Any], session: Child | None = None) -> None:
        self.order, self.session, self.pid = order, session or self, 0


class Keeper:
    """Starts, stops and reaps. ``serve`` runs in the fork of a session, on its listening socket, and never returns."""

    def __init__(
        self, control: socket.socket, memory_bytes: int | None, serve: Callable[[socket.socket], None]
    ) -> None:
        self._control, self._memory_bytes, self._serve = control, memory_bytes, serve
        self._pending = b""
        self._ordered: dict[str, Child] = {}  # sessions and commands, by the id in their orders
        self._children: dict[int, Child] = {}  # these and orphans, by process id
        self._pid = os.getpid()
        self._helpers = set(linux.children())  # that the agent's module code has started
        self._selector = selectors.DefaultSelector()
        self._wake = socket.socketpair()
        self._previous_handler: Any = None

    def loop(self) -> None:
        """Carry out orders until the runtime ends. Forked sessions never return from it."""
        linux.die_with_parent(0)  # the closed control socket shows the same, and leaves time to end the sessions
        self._previous_handler = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        woken, wakes = self._wake
        for end in self._wake:
            end.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    self._read_orders()
                else:
                    woken.recv(4096)
            self._reap()

    def _read_orders(self) -> None:
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self._control.recv(262144)
        if not data:
            self._end_everything()
        *lines, self._pending = (self._pending + data).split(b"\n")
        for order in map(json.loads, lines):
            if order["op"] == "stop":
                self._stop(order["id"], order["signal"])
                continue
            try:
                self._start(order)
            except Exception as e:  # the runtime reports any failure of this order
                report(self._control, ev="failed", id=order["id"], error=f"{type(e).__name__}: {e}")

    # -- starting
    def _start(self, order: dict[str, Any]) -> None:
        """Start a session, or a command in one, with a listening socket."""
        session = self._ordered.get(order["session"]) if order["op"] == "command" else Child(order)
        if session is None:  # it has just ended
            report(self._control, ev="exit", id=order["id"], status=-signal.SIGKILL)
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(order["socket"])
            listener.listen(128)
            if order["op"] == "spawn":
                os.mkdir(order["dir"], 0o700)
                self._fork(session, lambda: self._become_session(session, listener))
            else:
                command = Child(order, session)
                self._fork(command, lambda: self._become_command(command, listener))

    def _fork(self, child: Child, work: Callable[[], None]) -> None:
        child.pid = os.fork()
        if child.pid:
            self._children[child.pid] = self._ordered[child.order["id"]] = child
            report(self._control, ev="spawned", id=child.order["id"], pid=child.pid)
            return
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, self._previous_handler or signal.SIG_DFL)
            for inherited in (self._selector, *self._wake, self._control):
                inherited.close()
            os.setsid()
            linux.die_with_parent(signal.SIGKILL)
            if os.getppid() != self._pid:  # it died between the fork and the line above
                os._exit(1)
            linux.adopt_orphans()
            linux.set_memory_limit(self._memory_bytes)
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _become_session(self, session: Child, listener: socket.socket) -> None:
        """Detach from the template: own log, view, environment, folder, and random numbers. Then serve."""
        order = session.order
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.mkdir(os.path.join(order["dir"], "tmp"), 0o700)
        if order["project"] is not None:
            view.make(order["project"], home=order["home"], emptied=order["emptied"], own=order["own"])
            linux.die_with_parent(signal.SIGKILL)  # a process that changes its user namespace may lose this
            linux.keep_signals_inside()  # a policy's `pkill python` must not end the trainer
        _enter(order["dir"])
        link_files(order["links"], order["dir"], order["copied"] if order["project"] is None else ())
        tempfile.tempdir = None
        # CPython gives `random` a new seed in a forked child, but numpy's global generator keeps the template's.
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            numpy_random.seed()
        gc.set_threshold(*GC_THRESHOLDS)
        gc.enable()
        self._serve(listener)

    def _become_command(self, command: Child, listener: socket.socket) -> None:
        """Turn into the shell that runs the command. The runtime connects for its output, and then for its errors."""
        for fd in (1, 2):
            os.dup2(listener.accept()[0].detach(), fd)
        if command.session.order["project"] is not None:
            view.join(command.session.pid)
            linux.die_with_parent(signal.SIGKILL)
            linux.keep_signals_inside()
        _enter(command.session.order["dir"])
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execve("/bin/sh", ["/bin/sh", "-c", command.order["command"]], dict(os.environ))

    # -- ending
    def _stop(self, name: str, number: int) -> None:
        child = self._ordered.get(name)
        if child is not None and number == signal.SIGKILL:
            _kill(child.pid)
        elif child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)

    def _reap(self) -> None:
        """Collect every process that ended, and kill what is left of ended sessions."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    break
                child = self._children.pop(pid, None)
                if child is not None:
                    self._ended(child, os.waitstatus_to_exitcode(status), usage)
        for stray in self._strays():
            _kill(stray)

    def _ended(self, child: Child, status: int, usage: Any) -> None:
        session = child.session
        if child is session:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            for pid in [pid for pid, other in self._children.items() if other.session is session]:
                _kill(pid)
        elif session.order["id"] in self._ordered:
            for pid in self._strays():  # orphans of the command
                self._children[pid] = Child({}, session)
        if child.order:
            del self._ordered[child.order["id"]]
            cpu_s = round(usage.ru_utime + usage.ru_stime, 6)
            report(self._control, ev="exit", id=child.order["id"], status=status, cpu_s=cpu_s)

    def _strays(self) -> list[int]:
        return [pid for pid in linux.children() if pid not in self._children and pid not in self._helpers]

    def _end_everything(self) -> None:
        deadline = time.monotonic() + END_TIMEOUT_S
        for pid in self._children:
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


def report(control: socket.socket, **event: Any) -> None:
    """Send an event to the runtime. If the runtime has ended, the loop finds out from the same socket."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.sendall(json.dumps(event).encode() + b"\n")


def _enter(folder: str) -> None:
    os.chdir(folder)
    os.environ["TMPDIR"] = os.path.join(folder, "tmp")
    os.environ["HOME"] = os.environ["PWD"] = folder


def _kill(pid: int) -> None:
    linux.kill_below(pid)
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may not have made its group yet
