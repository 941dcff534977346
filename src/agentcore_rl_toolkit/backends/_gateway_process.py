"""The model gateway as a child process. It is started again at the same address when it ends by itself."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from .._servers.child import Child
from ..errors import GatewayError

log = logging.getLogger(__name__)

START_S = 120.0
STOP_S = 20.0
RESTARTS = 10  # the pause grows by a second each time; a process that ends more often has a permanent fault


class GatewayProcess:
    """``agentcore-rl gateway serve`` with these arguments and variables, at `url`. It ends with this process.

    A process that ends by itself (killed for memory, for example) is started again with the same
    port and store, which has all of its records, its weight version and its pause.
    Raises: GatewayError when it does not start in time; the message holds the end of its log.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        host: str,
        port: int,
        store: str | None,
        environment: Mapping[str, str],
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="agentcore-rl-gateway-"))
        self._words = ["gateway", "serve", *words, "--host", host, "--store", store or str(self._folder / "turns")]
        self._environment = environment
        self._closed = threading.Event()
        self.child = self._start(port)
        self.url = self.child.url.replace("0.0.0.0", "127.0.0.1")
        self._port = urlsplit(self.url).port or port
        threading.Thread(target=self._keep, name="agentcore-rl-gateway", daemon=True).start()

    def close(self) -> None:
        """Stop it; a second call does nothing. An empty log is deleted."""
        self._closed.set()
        if self.child.process.poll() is None:
            self.child.process.terminate()
            if self.child.end(STOP_S) == 0:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _keep(self) -> None:
        for times in range(RESTARTS):
            code = self.child.process.wait()
            if self._closed.wait(times):
                return
            log.error("the model gateway ended (code %s); starting it again. Its log: %s", code, self.child.log)
            try:
                self.child = self._start(self._port)
                if self._closed.is_set():  # `close` may not know this process
                    self.child.end()
                    return
            except Exception:  # also a full disk, which has its log and its ready file
                log.exception("the model gateway could not be restarted")
        self.child.process.wait()
        if not self._closed.is_set():
            log.error("the model gateway ended after %d restarts and stays down; see %s", RESTARTS, self.child.log)

    def _start(self, port: int) -> Child:
        words = [*self._words, "--port", str(port)]
        child = Child("model gateway", words, self._folder / "gateway.log", self._environment, GatewayError)
        child.wait_ready(START_S)
        return child
