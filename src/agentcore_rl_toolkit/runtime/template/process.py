"""The template process: runs an agent script up to ``app.run()`` once, then forks it per session.

Theory of operation. The runtime starts one template per agent and version and talks to it over a socket, one JSON object per
line. In fork mode the script is executed here. At the point where it would start its server, the loop of `keeper` runs instead
and every session is a fork that carries on from that point: imports and module state are shared copy-on-write.
A script with threads, a running event loop, or an open connection cannot be forked safely. Then this process starts again and
imports the libraries that were loaded, and each of its forks runs the script from its start (libraries mode). If the libraries
cannot be forked either, it starts once more, and nothing is imported before the fork (exec mode).

Orders: ``spawn`` {id, socket, dir, log, links, copied, project, home, emptied, own}, ``command`` {id, session, socket, command}
and ``stop`` {id, signal}. Events: ``ready`` {mode, reason, pid, no_view, no_overlay}, ``error`` {traceback},
``spawned`` {id, pid}, ``failed`` {id, error} and ``exit`` {id, status, cpu_s}.

Nothing outlives its parent: when the control socket closes because the runtime has ended, every process is killed.
When the template itself is killed, the kernel kills the sessions (Linux).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...isolation import hints, view
from ...isolation.project import Project
from ..launcher import linux
from .keeper import Keeper, report
from .script import run_script
from .serve import leave, make_config, serve
from .shared import shared_by_forks

ENDING_THREAD_S = 0.5  # the kernel lists a thread a moment longer than `join` waits for it
# Loaded library -> modules that are imported on first use, here in this order.
LATE_IMPORTS = {
    "strands": ("strands.models.openai",),  # which `strands_model` uses
    "anyio": ("anyio._backends._asyncio",),
    "anthropic": ("anthropic.resources.messages",),
    "httpx": ("httpcore", "h11"),
    "httpx2": ("httpcore2", "h11"),
    "openai": ("openai.resources", "openai.resources.chat.completions", "openai.lib.streaming.chat"),
    "uvicorn": ("uvicorn.loops.auto", "uvloop"),
    "agentcore_rl_toolkit.app": ("agentcore_rl_toolkit.store.local",),
}


class CannotForkError(BaseException):
    """Raised out of the agent script: its state at ``app.run()`` does not survive a fork."""


def main(control: str, given: str) -> None:
    """Run the template over this inherited socket until the runtime ends. ``given`` has its options as JSON.

    These are ``script``, ``project``, ``home``, ``memory_bytes`` and ``mode``, and after a start in another mode the
    ``reason`` for this one and ``libraries``, a file with the names of modules.
    """
    control_fd = int(control)
    linux.die_with_parent(signal.SIGKILL)
    linux.adopt_orphans()
    os.set_inheritable(control_fd, False)
    os.closerange(3, control_fd)  # what the runtime's loop leaves open besides: further descriptors of our log
    os.closerange(control_fd + 1, os.sysconf("SC_OPEN_MAX"))
    runtime, options = socket.socket(fileno=control_fd), json.loads(given)
    script = options["script"]
    given_environment, folder = dict(os.environ), os.getcwd()

    def loop(serve: Callable[[socket.socket], None]) -> None:
        gc.collect()
        gc.freeze()
        no_view, no_overlay = (
            (None, []) if options["project"] is None else view.try_out(options["project"], options["home"])
        )
        if no_view is not None:
            hints.add(no_view=no_view)
        elif options["project"] is not None:
            hints.add(view=f"{view.MAX_BYTES >> 20} MiB in {view.MAX_FILES} files")
        mode = "fork" if options["mode"] == "auto" else options["mode"]
        facts = {"reason": options.get("reason"), "no_view": no_view, "no_overlay": no_overlay}
        report(runtime, ev="ready", mode=mode, pid=os.getpid(), **facts)
        Keeper(runtime, options["memory_bytes"], serve).loop()

    def take_over(app: Any, uvicorn_options: dict[str, Any]) -> None:
        check_forkable(control_fd)
        config = make_config(app, uvicorn_options)
        for library, names in LATE_IMPORTS.items():
            for name in names if library in sys.modules else ():
                with contextlib.suppress(Exception):  # another version of the library, or one without this part
                    importlib.import_module(name)
        loop(lambda listener: leave(serve(config, listener)))

    def run_cold(listener: socket.socket) -> None:
        run_script(
            script,
            lambda app, uvicorn_options: leave(serve(make_config(app, uvicorn_options), listener)),
            serve_here=lambda: listener,
        )

    try:
        if options["mode"] == "libraries":
            import_libraries(options["libraries"])
            check_forkable(control_fd)
        if options["mode"] != "auto":
            loop(run_cold)
        run_script(script, take_over)
    except CannotForkError as e:
        os.set_inheritable(control_fd, True)
        os.chdir(folder)
        again = {**options, "mode": "exec"}
        if options["mode"] == "auto":
            again |= {"mode": "libraries", "reason": str(e), "libraries": write_libraries(Path(script))}
        os.execve(sys.executable, [*sys.orig_argv[:-1], json.dumps(again)], given_environment)
    except BaseException as e:
        report(runtime, ev="error", traceback=_agents_traceback(e))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def write_libraries(script: Path) -> str:
    """Write the names of the loaded modules that do not belong to the agent's project, as loaded, to a file. Returns its path."""
    own = tuple(f"{os.path.realpath(path)}/" for path in Project.of(script).import_paths)

    def is_library(name: str, module: Any) -> bool:
        file = os.path.realpath(getattr(module, "__file__", None) or "/")
        return not name.startswith("_agentcore") and ("site-packages" in file or not file.startswith(own))

    with tempfile.NamedTemporaryFile("w", delete=False) as file:  # too long for an argument
        json.dump([name for name, module in list(sys.modules.items()) if is_library(name, module)], file)
    return file.name


def import_libraries(file: str) -> None:
    """Import the modules that are named in this file, as far as that is possible, and remove the file."""
    names = json.loads(Path(file).read_text())
    os.unlink(file)
    for name in names:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)


def _agents_traceback(error: BaseException) -> str:
    """Format an exception without the launcher's own frames."""
    here, trace = os.path.dirname(os.path.abspath(__file__)), error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(here):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    why = hints.hint(error)
    return text if why is None else f"{text}{why}\n"


def check_forkable(control: int) -> None:
    """Check that this process may be forked now. Raises: CannotForkError with the way in which the agent can change that.

    A lock of a native library needs no check: only another thread can hold one here.
    """
    import asyncio

    if asyncio._get_running_loop() is not None:
        raise CannotForkError("an event loop is running where the server starts")
    names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if names:
        raise CannotForkError(
            f"the script started threads before its server: {', '.join(names[:5])}; "
            "start threads in the entrypoint, not when the file is loaded"
        )
    deadline_s = time.monotonic() + ENDING_THREAD_S
    while (native := linux.thread_count()) is not None and native > 1:
        if time.monotonic() > deadline_s:
            raise CannotForkError(
                f"the script's libraries started {native - 1} native threads before its server; "
                "prevent this with a variable of the library, such as --session-env OMP_NUM_THREADS=1"
            )
        time.sleep(0.002)
    gc.collect()  # a connection that nothing refers to any more is closed by it
    shared = shared_by_forks(control)
    if shared:
        raise CannotForkError(
            f"the script keeps open what its sessions would share: {', '.join(shared[:5])}; "
            "open it in the entrypoint, or close it when the file is loaded"
        )
