"""The processes behind a run: policy server, model gateway, local runtime. They start together, are watched, and end with it.

Each is an `agentcore-rl ... serve` of its own in its own process group, so a Ctrl-C in the terminal reaches only the run,
which then stops them in order. Each also exits by itself when the run's process disappears (`--parent-pid`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import AgentCoreRLError
from ..output.terminal import Waiting

READY_DEADLINE_S = (
    180.0  # importing torch on a cold machine takes 30 s, on a very loaded one minutes; what dies shows at once
)
STOP_DEADLINE_S = 15.0
WATCH_INTERVAL_S = 0.5


class ServiceError(AgentCoreRLError):
    """A process the run depends on did not start, or died; the message carries the end of its log."""


@dataclass
class Service:
    """One child process with its log file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ready_file: Path
    ready: dict[str, Any]
    doing: str  # what it does before it listens; shown to the user

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def log_tail(self, lines: int = 25) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class Services:
    """Starts services, waits until they listen, notices when one dies, stops them all.

    Use as a context manager; leaving it stops everything.
    """

    def __init__(self, log_dir: Path, env: Mapping[str, str] | None = None) -> None:
        self._log_dir = log_dir
        self._env = {**os.environ, **(env or {})}
        self._services: list[Service] = []
        log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def launch(
        self, name: str, arguments: Sequence[str], *, doing: str = "", env: Mapping[str, str] | None = None
    ) -> Service:
        """Start `agentcore-rl ARGUMENTS` without waiting for it, with variables ``env`` of its own. ``doing`` says what takes its
        time before it listens.
        """
        ready_file = self._log_dir / f"{name}.ready.json"
        ready_file.unlink(missing_ok=True)
        log = self._log_dir / f"{name}.log"
        argv = [sys.executable, "-m", "agentcore_rl_toolkit.cli", *arguments]
        argv += ["--port", "0", "--ready-file", str(ready_file), "--parent-pid", str(os.getpid())]
        with log.open("wb") as out:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**self._env, **(env or {})},
                start_new_session=True,
            )
        service = Service(name, process, log, ready_file, {}, f"the {name}{doing and f', {doing}'}")
        self._services.append(service)
        return service

    def wait_ready(self, service: Service, deadline_s: float = READY_DEADLINE_S) -> Service:
        """Block until the service listens. Raises: ServiceError at once when it exits, or after `deadline_s`."""
        give_up = time.monotonic() + deadline_s
        waiting = Waiting(f"starting: {service.doing}")
        while True:
            if service.ready_file.exists():
                service.ready = json.loads(service.ready_file.read_text())
                return service
            for started in self._services:  # one that another waits behind may be the one that cannot start
                if started.process.poll() is not None and not started.ready:
                    raise ServiceError(self._not_started(started))
            if time.monotonic() > give_up:
                raise ServiceError(
                    f"the {service.name} was not ready after {deadline_s:.0f} s; its log ({service.log}) ends with:\n"
                    f"{service.log_tail()}"
                )
            waiting()
            time.sleep(0.05)

    def _not_started(self, service: Service) -> str:
        """The cause first, then the end of its log."""
        tail = service.log_tail()
        cause = cause_of(tail) or f"exit code {service.process.returncode}"
        return f"the {service.name} did not start: {cause}\nIts log ({service.log}) ends with:\n{tail}"

    def check(self) -> None:
        """Raises: ServiceError when a service has died."""
        for service in self._services:
            code = service.process.poll()
            if code is not None:
                how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
                raise ServiceError(
                    f"the {service.name} {how} during the run; its log ({service.log}) ends with:\n{service.log_tail()}"
                )

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """End the block, which runs on the main thread, with ServiceError within a second of a service's death."""
        over, dead = threading.Event(), []
        main = threading.main_thread().ident
        assert main is not None

        def watch() -> None:
            while not over.wait(WATCH_INTERVAL_S):
                try:
                    self.check()
                except ServiceError as e:
                    dead.append(e)
                    signal.pthread_kill(main, signal.SIGINT)  # also wakes a call that waits for the dead service
                    return

        watcher = threading.Thread(target=watch, name="agentcore-rl-watch", daemon=True)
        watcher.start()
        try:
            yield
        except BaseException as e:
            if isinstance(e, Exception):  # a dead service usually shows first as a refused connection
                with contextlib.suppress(KeyboardInterrupt):
                    watcher.join(3 * WATCH_INTERVAL_S)
            if dead:
                raise dead[0] from e
            raise
        finally:
            over.set()

    def stop(self) -> None:
        """SIGTERM to all, SIGKILL to what is left of their process groups after the deadline."""
        for service in reversed(self._services):
            _signal_group(service.process, signal.SIGTERM, group=False)
        give_up = time.monotonic() + STOP_DEADLINE_S
        for service in reversed(self._services):
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.process.wait(timeout=max(0.1, give_up - time.monotonic()))
            _signal_group(service.process, signal.SIGKILL, group=True)
            service.process.wait(timeout=STOP_DEADLINE_S)
            service.ready_file.unlink(missing_ok=True)
        self._services.clear()


def _signal_group(process: subprocess.Popen[bytes], number: int, *, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(process.pid, number)
        elif process.poll() is None:
            os.kill(process.pid, number)


_RAISED = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt)(?:: .*)?)")


def cause_of(text: str) -> str:
    """The line of a log or a traceback that says what went wrong: the last exception, else our own error, else the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    raised = [found[1] for line in lines if (found := _RAISED.fullmatch(line))]
    ours = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return next(iter(raised[::-1] + ours + lines[::-1]), "").strip()
