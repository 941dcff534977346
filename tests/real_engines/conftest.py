"""One vLLM for all tests of this folder, and the table of what they checked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

HERE = Path(os.environ.get("AGENTCORE_RL_ENGINE_PYTHON") or Path(__file__).parents[2] / ".venvs/vllm/bin/python")
START_S = 900.0  # without compiled files it imports for six minutes
_rows: list[tuple[str, str]] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(1800))
            if not HERE.exists():
                item.add_marker(pytest.mark.skip(reason="needs vLLM: `make vllm` builds its environment and runs it"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _rows:
        terminalreporter.section("checked with vLLM")
        width = max(len(what) for what, _ in _rows)
        for what, found in _rows:
            terminalreporter.write_line(f"{what:<{width}}  {found}")


@pytest.fixture(scope="session")
def checked() -> Callable[[str, object], None]:
    """Puts a line into the table that is printed at the end."""
    return lambda what, found: _rows.append((what, str(found)))


class VLLM:
    """vLLM in a process of its own, which can be killed and started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ready = folder / "ready.json"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.starts_s: list[float] = []

    def start(self) -> None:
        self._ready.unlink(missing_ok=True)
        port = self.url.rpartition(":")[2] or "0"
        line = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "policy", "vllm", "--port", port]
        line += ["--ready-file", str(self._ready), "--parent-pid", str(os.getpid())]
        began = time.monotonic()
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True)
        while not self._ready.exists():
            late = time.monotonic() - began > START_S
            if self._process.poll() is not None or late:
                self.stop()
                pytest.fail(f"vLLM did not start: {(self._folder / 'log').read_text()[-4000:]}")
            time.sleep(0.2)
        self.starts_s.append(time.monotonic() - began)
        self.url = json.loads(self._ready.read_text())["url"]

    def kill(self) -> None:
        """kill -9 of vLLM and of its workers, as when the machine runs out of memory."""
        main = psutil.Process(json.loads(self._ready.read_text())["pid"])
        for process in [*main.children(recursive=True), main]:
            process.kill()
        assert self._process is not None
        self._process.wait(60)

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(60)


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory, checked: Callable[[str, object], None]) -> Iterator[VLLM]:
    torch.set_num_threads(1)
    running = VLLM(tmp_path_factory.mktemp("vllm"))
    running.start()
    checked("vLLM answers its first request after", f"{running.starts_s[0]:.0f} s")
    yield running
    running.stop()
