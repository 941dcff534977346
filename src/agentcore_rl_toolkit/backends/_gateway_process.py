"""The model gateway as a child process. It is started again at the same address when it ends by itself."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import GatewayError

log = logging.getLogger(__name__)

START_S = 120.0
STOP_S = 20.0
RESTARTS = 10  # in all, each a second later than the one before; then something is wrong for good


class GatewayProcess:
    """``agentcore-rl gateway serve`` with these words and variables; `url` is where it listens. It ends with this process.

    One that ends by itself (killed for memory, say) is started again with the same port and store, in which everything it
    had recorded still is; `restarted` is called then, on a thread.
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
        self._words = [*words, "--host", host, "--store", store or str(self._folder / "turns")]
        self._environment = environment
        self.restarted: Callable[[], None] = lambda: None
        self._closed = threading.Event()
        self.process, self.url = self._start(port)
        self._port = urlsplit(self.url).port or port
        threading.Thread(target=self._keep, name="agentcore-rl-gateway", daemon=True).start()

    def close(self) -> None:
        """Stop it; a second call does nothing. Its log stays only where there is something to read in it."""
        self._closed.set()
        process = self.process
        if process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            _end(process)
        if process.returncode == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _keep(self) -> None:
        for times in range(RESTARTS):
            code = self.process.wait()
            if self._closed.wait(times):
                return
            log.error("the model gateway ended (code %s); starting it again. Its log: %s", code, self._log)
            try:
                self.process, _ = self._start(self._port)
                if self._closed.is_set():  # `close` may not have seen this one
                    return _end(self.process)
                self.restarted()
            except Exception:  # a full disk, too: its log and its ready file are on one
                log.exception("the model gateway could not be started again as it was")
        self.process.wait()
        if not self._closed.is_set():
            log.error("the model gateway ended after %d restarts and stays down; its log is %s", RESTARTS, self._log)

    @property
    def _log(self) -> Path:
        return self._folder / "gateway.log"

    def _start(self, port: int) -> tuple[subprocess.Popen[bytes], str]:
        ready = self._folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "gateway", "serve", *self._words]
        command += ["--port", str(port), "--ready-file", str(ready), "--parent-pid", str(os.getpid())]
        with self._log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._environment},
                start_new_session=True,  # Ctrl-C is for the trainer, which still needs it to delete its sessions
            )
        give_up_s = time.monotonic() + START_S
        while not ready.exists():
            ended = process.poll() is not None
            if ended or time.monotonic() > give_up_s:
                _end(process)
                why = "ended" if ended else f"was not ready after {START_S:g} s"
                tail = self._log.read_text(errors="replace")[-2000:]
                raise GatewayError(f"the model gateway {why}; its log ({self._log}) ends with:\n{tail}")
            time.sleep(0.05)
        return process, str(json.loads(ready.read_text())["url"]).replace("0.0.0.0", "127.0.0.1")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
