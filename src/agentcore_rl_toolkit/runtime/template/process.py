"""The template process: runs an agent script up to ``app.run()`` once, then forks it per session.

Theory of operation. The runtime starts one template per agent and version and talks to it over a socket, one JSON object per
line. In fork mode the script is executed here; at the point where it would start its server, the loop below runs instead and
every session is a fork that carries on from that point: imports and module state are shared copy-on-write.
In exec mode nothing is imported here, and each session runs the whole script from its start in a fresh fork. A script with
threads, a running event loop, or an open connection cannot be forked safely.

Orders: ``spawn`` {id, socket, dir, log, links, copied, project}, ``stop`` {id, grace_s},
``command`` {id, session, socket, command}, ``kill_command`` {id}. Reports: ``ready`` {mode, reason, pid, no_view},
``unforkable`` {reason}, ``error`` {traceback},
``spawned`` {id, pid}, ``failed`` {id, error}, ``exit`` {id, status, cpu_s, max_rss}, ``command_exit`` {id, status}.

Nothing outlives its parent: when the control socket closes (the runtime is gone, by whatever signal), every process is killed.
When the template itself is killed, the kernel kills the sessions (Linux).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ...isolation import hints, view
from ...isolation.hints import hint
from ..launcher import linux
from .keeper import Fork, Keeper
from .script import run_script
from .serve import make_config
from .shared import shared_by_forks

Serve = Callable[[Fork], None]
ENDING_THREAD_S = 0.5  # the kernel lists a thread a moment longer than `join` waits for it
# Loaded library -> modules it imports on first use.
LATE_IMPORTS = {
    "anyio": ("anyio._backends._asyncio",),
    "anthropic": ("anthropic.resources.messages",),
    "httpx": ("httpcore", "h11"),
    "openai": ("openai.resources", "openai.resources.chat.completions", "openai.lib.streaming.chat"),
    "uvicorn": ("uvicorn.loops.auto", "uvloop"),
    "agentcore_rl_toolkit.app": ("agentcore_rl_toolkit.store.local",),
}


def import_late_parts() -> None:
    """Import the modules of the table whose library is loaded."""
    for library, names in LATE_IMPORTS.items():
        for name in names if library in sys.modules else ():
            with contextlib.suppress(Exception):  # another version of the library, or one without this part
                importlib.import_module(name)


class CannotForkError(BaseException):
    """Raised out of the agent script: its state at ``app.run()`` does not survive a fork."""


class Template:
    """Owns the control socket: orders in, reports out."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.pending = b""

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
        """Tell the runtime. When it is gone, the loop learns it from the same socket."""
        try:
            self.control.sendall(json.dumps(event).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            return

    def ready(self, options: dict[str, Any], **how: str | None) -> None:
        """Report how sessions start, and why they get no view of the project, if they get none."""
        project = options.get("project")
        no_view = view.why_none(project) if project is not None else None
        if no_view is not None:
            hints.add(no_view=no_view)
        self.report(ev="ready", pid=os.getpid(), no_view=no_view, **how)

    def loop(self, options: dict[str, Any], serve: Serve) -> None:
        """Serve orders until the runtime goes away. Forked sessions run ``serve`` and never come back."""
        linux.die_with_parent(0)  # from here on a closed control socket says it, and leaves time to end the sessions
        previous = signal.signal(signal.SIGCHLD, _ignore)
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self.control, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)

        def release() -> None:
            """In a forked child: give up what belongs to the template."""
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, previous if previous is not None else signal.SIG_DFL)
            selector.close()
            os.close(wake_read)
            os.close(wake_write)
            self.control.close()

        keeper = Keeper(options.get("memory_bytes"), self.report, serve, release)
        while True:
            for key, _ in selector.select(keeper.timeout_s()):
                if key.fd == wake_read:
                    _drain(wake_read)
                elif not self._read_orders(keeper):
                    keeper.end_everything()
            keeper.reap()
            keeper.kill_overdue()

    def _read_orders(self, keeper: Keeper) -> bool:
        try:
            data = self.control.recv(262144)
        except ConnectionResetError:
            data = b""
        if not data:
            return False
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            keeper.obey(json.loads(line))
        return True


def main(control: str) -> None:
    """Run the template over this inherited socket until the runtime goes away."""
    control_fd = int(control)
    linux.die_with_parent(signal.SIGKILL)
    linux.adopt_orphans()
    os.set_inheritable(control_fd, False)
    os.closerange(3, control_fd)  # what the runtime's loop leaves open besides: further descriptors of our log
    os.closerange(control_fd + 1, os.sysconf("SC_OPEN_MAX"))
    template = Template(socket.socket(fileno=control_fd))
    options = template.read_options()
    script = options["script"]
    if options["mode"] == "exec":
        template.ready(options, mode="exec", reason=options.get("reason"))
        template.loop(options, lambda session: session.run_cold(script))

    def take_over(app: Any, uvicorn_options: dict[str, Any]) -> None:
        reason = why_not_forkable(control_fd)
        if reason is not None and options["mode"] != "fork":
            raise CannotForkError(reason)
        config = make_config(app, uvicorn_options)
        import_late_parts()
        gc.collect()
        gc.freeze()
        forced = reason and f"forced, although {reason}"
        template.ready(options, mode="fork", reason=forced)
        template.loop(options, lambda session: session.serve(config))

    try:
        run_script(script, take_over)
    except CannotForkError as e:
        template.report(ev="unforkable", reason=str(e))
    except BaseException as e:
        template.report(ev="error", traceback=_agents_traceback(e))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _agents_traceback(error: BaseException) -> str:
    """An exception without the launcher's own frames."""
    trace = error.__traceback__
    here = os.path.dirname(os.path.abspath(__file__))
    while (
        trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == here and trace.tb_next is not None
    ):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    why = hint(error)
    return text if why is None else f"{text}{why}\n"


def why_not_forkable(control: int) -> str | None:
    """Return why this process must not be forked now, and how the agent can change that; None when it may.

    A lock of a native library needs no check: only another thread can hold one here.
    """
    import asyncio

    if asyncio._get_running_loop() is not None:
        return "an event loop is running where the server starts"
    names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if names:
        return (
            f"the script started threads before its server: {', '.join(names[:5])}; "
            "start threads in the entrypoint, not when the file is loaded"
        )
    deadline_s = time.monotonic() + ENDING_THREAD_S
    while (native := linux.thread_count()) is not None and native > 1:
        if time.monotonic() > deadline_s:
            return (
                f"the script's libraries started {native - 1} native threads before its server; "
                "keep the library from that with a variable, such as --session-env OMP_NUM_THREADS=1"
            )
        time.sleep(0.002)
    gc.collect()  # a connection that nothing refers to any more is closed by it
    shared = shared_by_forks(control)
    if shared:
        return (
            f"the script keeps open what its sessions would share: {', '.join(shared[:5])}; "
            "open it in the entrypoint, or close it when the file is loaded"
        )
    return None


def _drain(fd: int) -> None:
    try:
        os.read(fd, 4096)
    except BlockingIOError:
        return


def _ignore(signum: int, frame: Any) -> None:
    return None
