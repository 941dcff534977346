"""What a freshly forked process does to become a session, or a command beside one."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from ..launcher import linux
from .script import run_script
from .serve import leave, make_config, serve, stop_early

# Sessions are short and their long-lived objects are frozen in the template: rarer collections save CPU and page copies.
GC_THRESHOLDS = (5_000, 20, 20)
MAX_LINKS = 200


class Session:
    """One session process as its template and the process itself see it."""

    random_state: Any = None
    names_before: Sequence[str] = ()  # in the agent's folder, before the template was confined

    def __init__(self, order: dict[str, Any]) -> None:
        self.id: str = order["id"]
        self.directory: str = order["dir"]
        self.log_path: str = order["log"]
        self.socket_path: str = order["socket"]
        self.env: dict[str, str] = order["env"]
        self.links: str | None = order.get("links")
        self.listener: socket.socket
        self.lifeline_fd: int | None = None
        self.learning: Any = None
        self.pid = 0
        self.orphans: set[int] = set()

    @classmethod
    def keep_random_state(cls) -> None:
        """Remember the template's random state; every session then starts from it, as from one snapshot on AWS."""
        import random

        cls.random_state = random.getstate()

    def serve(self, config: Any) -> None:
        """Serve the template's app. Never returns."""
        leave(serve(config, self.listener, self.lifeline_fd, self.learning))

    def run_cold(self, script: str, argv: list[str]) -> None:
        """Run the script from its first line and serve its app. Never returns."""

        def take_over(app: Any, options: dict[str, Any]) -> None:
            self.serve(make_config(app, options))

        def serve_here(server: Any) -> tuple[socket.socket, int | None]:
            return self.listener, self.lifeline_fd

        run_script(script, argv, take_over, serve_here)


class Command:
    """A shell command beside a session. Its output goes to two connections to the runtime's socket."""

    def __init__(self, order: dict[str, Any], session: Session) -> None:
        self.id: str = order["id"]
        self.socket_path: str = order["socket"]
        self.text: str = order["command"]
        self.session = session
        self.pid = 0
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


def become_session(session: Session, template_pid: int | None) -> None:
    """Detach from the template: own process group, environment, folder, log, random state."""
    os.setsid()
    signal.signal(signal.SIGTERM, stop_early)
    if template_pid is not None:
        linux.die_with_parent(signal.SIGKILL)
        if os.getppid() != template_pid:  # it died between the fork and the line above
            os._exit(1)
    linux.adopt_orphans()
    log = os.open(session.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    _settle(session)
    tempfile.tempdir = None
    _set_random_state(session)
    _reseed_tls()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


def become_command(command: Command, *, in_namespace: bool) -> None:
    """Turn into the shell that runs the command; in a session's namespace it ends with that. Never returns."""
    os.setsid()
    if not in_namespace:
        linux.die_with_parent(signal.SIGKILL)
    linux.adopt_orphans()
    for output, fd in zip(command.outputs, (1, 2), strict=True):
        os.dup2(output.fileno(), fd)
    _settle(command.session, fresh=False)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execve("/bin/sh", ["/bin/sh", "-c", command.text], dict(os.environ))


def _settle(session: Session, *, fresh: bool = True) -> None:
    """Environment, folder and temporary folder."""
    temporary = os.path.join(session.directory, "tmp")
    os.chdir(session.directory)
    if fresh:
        os.mkdir(temporary, 0o700)
        _link_agent_files(session)
    os.environ.update(session.env)
    os.environ["TMPDIR"] = temporary
    os.environ["HOME"] = os.environ["PWD"] = session.directory


def _link_agent_files(session: Session) -> None:
    """Show the agent's files in the working folder, as in a container's /app; what the agent writes stays with the session."""
    if session.links is None:
        return
    try:
        names = os.listdir(session.links)
    except PermissionError:  # Landlock, and something in it is hidden: its files can be opened, itself cannot
        names = list(session.names_before)
    for name in sorted(names)[:MAX_LINKS]:
        if not name.startswith(".") and name not in ("__pycache__", "tmp"):
            os.symlink(os.path.join(session.links, name), name)


def _reseed_tls() -> None:
    """Give OpenSSL's generator a seed of this session's own.

    It finds a fork by the process number, and a template and its sessions may all be process 1, each of its own namespace: keys
    of TLS connections would be the same in every session.
    """
    if "_ssl" in sys.modules:
        import ssl

        ssl.RAND_add(os.urandom(32), 32.0)


def _set_random_state(session: Session) -> None:
    if session.random_state is not None:
        import random

        random.setstate(session.random_state)
        return
    # CPython gives `random` a new seed in a forked child; numpy's global generator keeps the template's.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
