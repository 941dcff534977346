"""The template process: runs an agent script up to ``app.run()`` once, then forks it per session.

Theory of operation. The runtime starts one template per agent and version and talks to it over a socket, one JSON object per
line. In fork mode the script is executed here; at the point where it would start its server, the loop below runs instead and
every session is a fork that carries on from that point: imports, module state and open configuration are shared copy-on-write.
In exec mode (a script with threads or a running event loop cannot be forked safely) nothing is imported here, and each session
runs the whole script from its start in a fresh fork.

Orders: ``spawn`` {id, socket, dir, log, env}, ``stop`` {id, grace_s}. Reports: ``ready`` {mode, reason}, ``error`` {traceback},
``spawned`` {id, pid}, ``exit`` {id, status}, ``failed`` {id, error}.

Nothing outlives its parent: when the control socket closes (the runtime is gone, by whatever signal), every session's process
group is killed, adopted orphans with it, then session folders are removed. When the template itself is killed, the
kernel kills the sessions (Linux), or their lifeline pipe closes (elsewhere).
"""

from __future__ import annotations

import gc
import heapq
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from . import linux, warm
from .child import Session, become_session
from .script import run_script
from .serve import make_config

Serve = Callable[[Session], None]


class CannotForkError(BaseException):
    """Raised out of the agent script: its state at ``app.run()`` does not survive a fork."""


class Template:
    """Owns the control socket and the session processes."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.pending = b""
        self.sessions: dict[int, Session] = {}  # by process id
        self.by_id: dict[str, Session] = {}
        self.deadlines: list[tuple[float, str]] = []  # when to kill a session that was told to stop
        self.lifeline_read, self.lifeline_write = os.pipe()

    def read_options(self) -> dict[str, Any]:
        """The first line on the control socket."""
        while b"\n" not in self.pending:
            data = self.control.recv(65536)
            if not data:
                os._exit(0)
            self.pending += data
        line, self.pending = self.pending.split(b"\n", 1)
        options: dict[str, Any] = json.loads(line)
        return options

    def report(self, **event: Any) -> None:
        self.control.sendall(json.dumps(event).encode() + b"\n")

    def loop(self, serve: Serve) -> None:
        """Serve orders until the runtime goes away. Forked sessions run ``serve`` and never come back."""
        linux.adopt_orphans()
        linux.die_with_parent(0)  # from here on a closed control socket says it, and leaves time to clean up
        previous = signal.signal(signal.SIGCHLD, _ignore)
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self.control, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)

        def release() -> None:
            """In a forked session: give up what belongs to the template."""
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, previous if previous is not None else signal.SIG_DFL)
            selector.close()
            for fd in (wake_read, wake_write, self.lifeline_write):
                os.close(fd)
            self.control.close()

        while True:
            timeout = max(0.0, self.deadlines[0][0] - time.monotonic()) if self.deadlines else None
            for key, _ in selector.select(timeout):
                if key.fd == wake_read:
                    try:
                        os.read(wake_read, 4096)
                    except BlockingIOError:
                        continue
                elif not self._read_orders(serve, release):
                    self._end_everything()
            self._reap()
            self._kill_overdue()

    def _read_orders(self, serve: Serve, release: Callable[[], None]) -> bool:
        data = self.control.recv(262144)
        if not data:
            return False
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order["op"] == "spawn":
                self._spawn(order, serve, release)
            elif order["op"] == "stop":
                self._stop(order["id"], float(order["grace_s"]))
        return True

    def _spawn(self, order: dict[str, Any], serve: Serve, release: Callable[[], None]) -> None:
        session_id = order["id"]
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(order["socket"])
            listener.listen(128)
            session = Session(order, listener, self.lifeline_read, os.getpid())
            pid = os.fork()
        except OSError as e:
            self.report(ev="failed", id=session_id, error=f"{type(e).__name__}: {e}")
            return
        if pid == 0:
            try:
                release()
                become_session(session)
                serve(session)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        listener.close()
        session.pid = pid
        self.sessions[pid] = self.by_id[session_id] = session
        self.report(ev="spawned", id=session_id, pid=pid)

    def _stop(self, session_id: str, grace_s: float) -> None:
        session = self.by_id.get(session_id)
        if session is None:
            return
        if grace_s <= 0:
            _signal_group(session.pid, signal.SIGKILL)
            return
        _signal(session.pid, signal.SIGTERM)
        heapq.heappush(self.deadlines, (time.monotonic() + grace_s, session_id))

    def _kill_overdue(self) -> None:
        while self.deadlines and self.deadlines[0][0] <= time.monotonic():
            _, session_id = heapq.heappop(self.deadlines)
            session = self.by_id.get(session_id)
            if session is not None:
                _signal_group(session.pid, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            session = self.sessions.pop(pid, None)
            if session is None:
                continue
            self.by_id.pop(session.id, None)
            _signal_group(pid, signal.SIGKILL)
            # Each session adopts its own orphans, so a child of ours that is no session belonged to the one just reaped.
            for stray in linux.children():
                if stray not in self.sessions:
                    _signal(stray, signal.SIGKILL)
            self.report(
                ev="exit",
                id=session.id,
                status=os.waitstatus_to_exitcode(status),
                cpu_s=round(usage.ru_utime + usage.ru_stime, 6),
                max_rss=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            )

    def _end_everything(self) -> None:
        for pid in self.sessions:
            _signal_group(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            for stray in linux.children():
                _signal(stray, signal.SIGKILL)
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.002)
            except ChildProcessError:
                break
        for session in self.sessions.values():
            shutil.rmtree(session.directory, ignore_errors=True)
            try:
                os.unlink(session.socket_path)
            except OSError:
                continue
        os._exit(0)


def main(control_fd: int) -> None:
    """Run the template over this inherited socket until the runtime goes away."""
    linux.die_with_parent(signal.SIGKILL)
    os.set_inheritable(control_fd, False)
    template = Template(socket.socket(fileno=control_fd))
    options = template.read_options()
    script, argv = options["script"], options.get("argv", [])
    warm.defer_certificates()
    if options["mode"] == "exec":
        template.report(ev="ready", mode="exec", reason=options.get("reason", "asked for"))
        template.loop(lambda session: session.run_cold(script, argv))

    def take_over(app: Any, uvicorn_options: dict[str, Any]) -> None:
        reason = why_not_forkable()
        if reason is not None and options["mode"] != "fork":
            raise CannotForkError(reason)
        config = make_config(app, uvicorn_options)
        warm.import_quietly(warm.late_imports())
        if options.get("strict_snapshot"):
            Session.keep_random_state()
        gc.collect()
        gc.freeze()
        template.report(ev="ready", mode="fork", reason=None)
        template.loop(lambda session: session.serve(config))

    try:
        run_script(script, argv, take_over)
    except CannotForkError as e:
        template.report(ev="unforkable", reason=str(e))
    except BaseException:
        template.report(ev="error", traceback=traceback.format_exc())
    sys.stderr.flush()
    os._exit(0)


def why_not_forkable() -> str | None:
    """Why this process must not be forked now; None when it may."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        return "an event loop is running where the server starts"
    names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if names:
        return f"the script started threads before its server: {', '.join(names[:5])}"
    native = linux.thread_count()
    if native is not None and native > 1:
        return f"the script's libraries started {native - 1} native threads before its server"
    return None


def _ignore(signum: int, frame: Any) -> None:
    return None


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
        return
