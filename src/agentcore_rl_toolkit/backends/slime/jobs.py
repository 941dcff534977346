"""One job on a Ray cluster that runs already."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import AgentCoreRLError

ADDRESS = "http://127.0.0.1:8265"  # of a local cluster's dashboard
JOB_STOP_S = 60.0
CLIENT_STOP_S = 10.0


class SlimeError(AgentCoreRLError):
    """slime, or the Ray cluster it runs on, ended with an error."""


def run_job(command: Sequence[str], environment: Mapping[str, str], *, job_id: str, address: str) -> int:
    """Submit a job, show its log and wait for its end. Returns the exit code. An interruption of the wait stops the job too."""
    # In a session of its own: Ctrl-C ends the wait, and the client is still there to stop the job.
    client = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
    try:
        return client.wait()
    except BaseException:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.call(["ray", "job", "stop", "--address", address, job_id], timeout=JOB_STOP_S)
        raise
    finally:
        client.terminate()
        try:
            client.wait(CLIENT_STOP_S)
        except subprocess.TimeoutExpired:
            client.kill()
            client.wait()


@contextlib.contextmanager
def signals_end_the_run() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the main thread like Ctrl-C does, so that what was started is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
