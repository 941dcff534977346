"""The processes of a run: policy server, model gateway, local runtime. They start together, are watched, and end with it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..._servers.child import Child
from ...errors import AgentCoreRLError
from ..output.terminal import WaitReport

READY_DEADLINE_S = 180.0  # importing torch takes 30 s on a cold machine, and minutes on a busy one
STOP_DEADLINE_S = 15.0
WATCH_INTERVAL_S = 0.5


class ServiceError(AgentCoreRLError):
    """A process of the run did not start, or died. The message has the end of its log."""


class Services:
    """Starts services, waits until they listen, notices when one dies, stops them all.

    Use as a context manager; leaving it stops everything.
    """

    def __init__(self, log_dir: Path, env: Mapping[str, str] | None = None) -> None:
        self._log_dir, self._env = log_dir, env or {}
        self._services: dict[Child, str] = {}  # the values describe the work of each before it listens, for the user
        log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def launch(
        self, name: str, arguments: Sequence[str], *, doing: str = "", env: Mapping[str, str] | None = None
    ) -> Child:
        """Start `agentcore-rl ARGUMENTS` with extra variables ``env``, without waiting for it.

        ``doing`` describes its work before it listens.
        """
        log = self._log_dir / f"{name}.log"
        log.unlink(missing_ok=True)  # left by the earlier part of a resumed run
        service = Child(name, [*arguments, "--port", "0"], log, {**self._env, **(env or {})}, ServiceError)
        self._services[service] = f"the {name}{doing and f', {doing}'}"
        return service

    def wait_ready(self, service: Child, deadline_s: float = READY_DEADLINE_S) -> Child:
        """Block until the service listens. Raises: ServiceError at once when one exits, or after `deadline_s`."""
        waiting = WaitReport(f"starting: {self._services[service]}")

        def wait() -> None:
            for started in self._services:  # a service may wait for another one, which failed
                started.is_ready()
            waiting()

        service.wait_ready(deadline_s, wait)
        return service

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """End the block, which runs on the main thread, with ServiceError within a second of a service's death."""
        over, dead = threading.Event(), []
        main = threading.main_thread().ident
        assert main is not None

        def watch() -> None:
            while not over.wait(WATCH_INTERVAL_S):
                try:
                    for service in self._services:
                        service.check()
                except ServiceError as e:
                    dead.append(e)
                    # Also wakes a call that waits for the dead service. `COMMAND &` in a script ignores SIGINT.
                    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
                    signal.pthread_kill(main, signal.SIGTERM if ignored else signal.SIGINT)
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
        """Send SIGTERM to all, and SIGKILL to the rest of their process groups after the deadline."""
        for service in self._services:
            service.process.terminate()
        give_up = time.monotonic() + STOP_DEADLINE_S
        for service in reversed(self._services):
            service.end(max(0.1, give_up - time.monotonic()))
        self._services.clear()
