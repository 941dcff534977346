"""Turns a freshly forked process into a session, or a command beside one."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import tempfile
from typing import Any

from ...isolation.limits import set_memory_limit
from ...isolation.project import link_files
from ..launcher import linux
from .script import run_script
from .serve import leave, make_config, serve

# Sessions are short and their long-lived objects are frozen in the template: rarer collections save CPU and page copies.
GC_THRESHOLDS = (5_000, 20, 20)


class Session:
    """One session process as its template and the process itself see it."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.id: str = order["id"]
        self.directory: str = order["dir"]
        self.log_path: str = order["log"]
        self.socket_path: str = order["socket"]
        self.links: list[str] = order["links"]
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

    def __init__(self, order: dict[str, Any], session: Session) -> None:
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


def become_session(session: Session, template_pid: int, memory_bytes: int | None) -> None:
    """Detach from the template: own process group, environment, folder, log, random numbers, and the memory limit."""
    _begin(template_pid, memory_bytes)
    log = os.open(session.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.mkdir(os.path.join(session.directory, "tmp"), 0o700)
    _settle(session)
    link_files(session.links, session.directory)
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


def _settle(session: Session) -> None:
    """Environment, folder and temporary folder."""
    os.chdir(session.directory)
    os.environ["TMPDIR"] = os.path.join(session.directory, "tmp")
    os.environ["HOME"] = os.environ["PWD"] = session.directory
