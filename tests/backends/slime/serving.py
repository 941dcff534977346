"""Processes that tell their address in a `--ready-file`, for as long as a test runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_S, STOP_S = 120.0, 30.0


@contextlib.contextmanager
def serving(name: str, command: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Start `command`; what its ready file says. Its output goes to `{name}.log`."""
    ready = folder / f"{name}.json"
    command = [*command, "--ready-file", str(ready), "--parent-pid", str(os.getpid())]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        give_up_s = time.monotonic() + START_S
        while not ready.exists():
            text = (folder / f"{name}.log").read_text()[-2000:]
            assert process.poll() is None, f"{name} ended: {text}"
            assert time.monotonic() < give_up_s, f"{name} is not ready: {text}"
            time.sleep(0.05)
        yield json.loads(ready.read_text())
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
