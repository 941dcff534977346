"""What a freshly forked process does to become a session of its own."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import tempfile
from typing import Any

from . import linux
from .script import run_script
from .serve import leave, make_config, serve

# Sessions are short and their long-lived objects are frozen in the template: rarer collections save CPU and page copies.
GC_THRESHOLDS = (5_000, 20, 20)


class Session:
    """One session process as its template and the process itself see it."""

    random_state: Any = None

    def __init__(self, order: dict[str, Any], listener: socket.socket, lifeline_fd: int, template_pid: int) -> None:
        self.id: str = order["id"]
        self.directory: str = order["dir"]
        self.log_path: str = order["log"]
        self.socket_path: str = order["socket"]
        self.env: dict[str, str] = order["env"]
        self.listener = listener
        self.lifeline_fd = lifeline_fd
        self.template_pid = template_pid
        self.pid = 0

    @classmethod
    def keep_random_state(cls) -> None:
        """Remember the template's random state; every session then starts from it, as from one snapshot on AWS."""
        import random

        cls.random_state = random.getstate()

    def serve(self, config: Any) -> None:
        """Serve the template's app. Never returns."""
        leave(serve(config, self.listener, self.lifeline_fd))

    def run_cold(self, script: str, argv: list[str]) -> None:
        """Run the script from its first line and serve its app. Never returns."""

        def take_over(app: Any, options: dict[str, Any]) -> None:
            self.serve(make_config(app, options))

        run_script(script, argv, take_over)


def become_session(session: Session) -> None:
    """Detach from the template: own process group, environment, folder, log, random state."""
    os.setsid()
    linux.die_with_parent(signal.SIGKILL)
    if os.getppid() != session.template_pid:  # it died between the fork and the line above
        os._exit(1)
    linux.adopt_orphans()
    log = os.open(session.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    temporary = os.path.join(session.directory, "tmp")
    os.makedirs(temporary, mode=0o700)
    os.chdir(session.directory)
    os.environ.update(session.env)
    os.environ["TMPDIR"] = temporary
    os.environ["HOME"] = session.directory
    tempfile.tempdir = None
    _set_random_state(session)
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


def _set_random_state(session: Session) -> None:
    if session.random_state is not None:
        import random

        random.setstate(session.random_state)
        return
    # CPython gives `random` a new seed in a forked child; numpy's global generator keeps the template's.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
