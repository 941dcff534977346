"""A server of ours as a child process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import AgentCoreRLError


class Child:
    """``agentcore-rl WORDS`` in a new process session, so that Ctrl-C reaches this process only. It ends with this process.

    Its output is appended to ``log``. ``ready`` is the content of its ready file.
    """

    ready: Mapping[str, Any]

    def __init__(
        self, name: str, words: Sequence[str], log: Path, environment: Mapping[str, str], error: type[AgentCoreRLError]
    ) -> None:
        self.name, self.log, self._error = name, log, error
        self._file = log.with_suffix(".ready.json")
        self._file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", *words]
        command += ["--ready-file", str(self._file), "--parent-pid", str(os.getpid())]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def is_ready(self) -> bool:
        """Return True once it listens. Raises: ``error`` when it has ended instead."""
        with contextlib.suppress(FileNotFoundError):
            self.ready = json.loads(self._file.read_text())
            return True
        code = self.process.poll()
        if code is not None:
            raise self._failed(f"did not start: {cause_of(self._tail()) or f'exit code {code}'}")
        return False

    def wait_ready(self, within_s: float, on_wait: Callable[[], object] = lambda: None) -> None:
        """Wait until it listens. Raises: ``error`` at once when it ends, or after that time, with the end of its log."""
        give_up_s = time.monotonic() + within_s
        while not self.is_ready():
            if time.monotonic() > give_up_s:
                raise self._failed(f"was not ready after {within_s:g} s")
            on_wait()
            time.sleep(0.02)

    def check(self) -> None:
        """Check that it still runs. Raises: ``error`` when it has ended."""
        code = self.process.poll()
        if code is not None:
            raise self._failed(f"was killed by signal {-code}" if code < 0 else f"exited with code {code}")

    def end(self, within_s: float = 0.0) -> int:
        """Wait for its end and return its exit code. It is killed after that time, with all its children."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=within_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._file.unlink(missing_ok=True)
        return self.process.wait()

    def _failed(self, why: str) -> AgentCoreRLError:
        self.end()
        return self._error(f"the {self.name} {why}\nIts log ({self.log}) ends with:\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])


_RAISED = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt)(?:: .*)?)")


def cause_of(text: str) -> str:
    """Find the line of a log with the cause: the last exception, otherwise our own error, otherwise the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    raised = [found[1] for line in lines if (found := _RAISED.fullmatch(line))]
    ours = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return [*raised[-1:], *ours, *lines[-1:], ""][0].strip()
