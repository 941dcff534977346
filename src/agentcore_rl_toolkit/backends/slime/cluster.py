"""Ray under `SlimeRunner`: a head of our own where no cluster answers, and one job on it.

The head is a child process (``ray start --head --block``) with a folder of its own, and ending it ends nothing else: it is
ended by its process id, and by the kernel where this process is killed. ``ray stop`` is never called, because that
ends every Ray process of the machine, whoever started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import AgentCoreRLError

log = logging.getLogger(__name__)

STATUS_S = 120.0
HEAD_START_S = 120.0
HEAD_STOP_S = 60.0
HEAD_TRIES = 3
WORKERS_STOP_S = 15.0  # of a head that has ended already
JOB_STOP_S = 60.0
CLIENT_STOP_S = 10.0
ACCEPT_S = 120.0
ACCEPT_PAUSE_S = 3.0
_PR_SET_PDEATHSIG = 1
DASHBOARD_PORT = 8265  # Ray's own; another free one where it is taken
_LISTENING = "0A"  # a state in /proc/net/tcp


class SlimeError(AgentCoreRLError):
    """slime, or the Ray cluster it runs on, ended with an error."""


class HeadEndedError(SlimeError):
    """A Ray head ended before it was up."""


def answers(address: str) -> bool:
    """Whether a Ray cluster runs here (or at RAY_ADDRESS) that takes jobs at `address`.

    Raises: SlimeError when one runs that does not, or hangs.
    """
    try:
        code = subprocess.call(
            ["ray", "status"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=STATUS_S
        )
    except subprocess.TimeoutExpired as e:
        raise SlimeError(
            f"`ray status` did not end within {STATUS_S:g} s: a Ray cluster of this machine hangs; end it, or set ray_address"
        ) from e
    if code == 0 and not _serves_jobs(address):
        raise SlimeError(
            f"a Ray cluster runs here but takes no jobs at {address}: set ray_address to its dashboard, or end it"
        )
    return code == 0


class Head:
    """A Ray head that this process started. `address` takes jobs.

    Its ports are looked up before it binds them, and another cluster that starts at the same time takes ports by the hundred: a
    head that ends before it is up is started again, on other ports. Raises: SlimeError when none of `HEAD_TRIES` comes up.
    """

    def __init__(self, gpus: int) -> None:
        for tries_left in reversed(range(HEAD_TRIES)):
            self._start(gpus)
            try:
                self._wait_until_ready()
                return
            except HeadEndedError as e:
                self.stop()
                if not tries_left:
                    raise
                log.warning("%s; starting another one, on other ports", e)
            except BaseException:
                self.stop()
                raise

    def _start(self, gpus: int) -> None:
        # Ray's sockets lie in this folder and their names must be short, so never under a long TMPDIR. A folder of its own
        # also keeps other programs from finding this cluster and joining it: they would end with it.
        self.folder = tempfile.mkdtemp(prefix="slime-ray-", dir=os.environ.get("RAY_TMPDIR") or "/tmp")
        port = DASHBOARD_PORT if _is_free(DASHBOARD_PORT) else _free_port()
        self.address = f"http://127.0.0.1:{port}"
        command = [
            *("ray", "start", "--head", "--block", "--disable-usage-stats", "--num-gpus", str(gpus)),
            *("--port", str(_free_port()), "--dashboard-host", "127.0.0.1", "--dashboard-port", str(port)),
            *("--temp-dir", self.folder),
            # The defaults may be another cluster's of this machine, and jobs are started through the first of these.
            *("--dashboard-agent-listen-port", str(_free_port()), "--dashboard-agent-grpc-port", str(_free_port())),
            *("--metrics-export-port", str(_free_port()), "--ray-client-server-port", str(_free_port())),
        ]
        self.process = start_tied(command)

    def stop(self) -> None:
        """End this head and the processes it started, and nothing else; a second call does nothing."""
        _end(self.process, HEAD_STOP_S)
        _end_those_of(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_until_ready(self) -> None:
        give_up_s = time.monotonic() + HEAD_START_S
        while not _serves_jobs(self.address):
            self._expect_alive()
            if time.monotonic() > give_up_s:
                raise SlimeError(
                    f"the Ray head takes no jobs at {self.address} after {HEAD_START_S:g} s; is it ray[default]?"
                )
            time.sleep(0.2)
        if not _is_served_by(_those_of(self.folder), self.address):
            self._expect_alive()
            raise HeadEndedError(f"another program took {self.address} before the Ray head had it")

    def _expect_alive(self) -> None:
        if self.process.poll() is not None:
            raise HeadEndedError(f"`ray start` ended with code {self.process.returncode}; its output is above")


def run_job(command: Sequence[str], environment: Mapping[str, str], *, job_id: str, address: str) -> int:
    """Submit a job, show its log and wait for its end. Returns the exit code.

    A head that has just started, on a machine with much to do, may refuse jobs for a while: then it is asked again.
    Whatever interrupts the wait stops the job too, on whichever cluster it runs.
    """
    give_up_s = time.monotonic() + ACCEPT_S
    while True:
        code = _run_once(command, environment, job_id, address)
        if code == 0 or _was_accepted(address, job_id) or time.monotonic() > give_up_s:
            return code
        log.warning("the Ray head at %s did not take the job; asking again", address)
        time.sleep(ACCEPT_PAUSE_S)


def _was_accepted(address: str, job_id: str) -> bool:
    """False only when the cluster answers that it knows no such job."""
    try:
        with urllib.request.urlopen(f"{address}/api/jobs/{job_id}", timeout=30):
            return True
    except urllib.error.HTTPError as e:
        return e.code != 404
    except (urllib.error.URLError, OSError):
        return True


def _run_once(command: Sequence[str], environment: Mapping[str, str], job_id: str, address: str) -> int:
    client = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
    try:
        return client.wait()
    except BaseException:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.call(["ray", "job", "stop", "--address", address, job_id], timeout=JOB_STOP_S)
        raise
    finally:
        _end(client, CLIENT_STOP_S)


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


def start_tied(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a program that is told to end (SIGTERM) when this one is gone, however it went; other systems than Linux can't.

    Call it on a thread that lives as long as the program shall: the kernel looks at that. The program leads a session of
    its own: Ctrl-C must reach the job before the cluster under it.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None

    def tie() -> None:  # between fork and exec: only a call that was looked up before
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=tie)  # noqa: PLW1509


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """SIGTERM, patience, SIGKILL for a child that leads its own session; what it left in its group goes with it."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end_those_of(folder: str) -> None:
    """Wait for the processes of a cluster, which name its folder on their command line, and end those that stay (Linux)."""
    give_up_s = time.monotonic() + WORKERS_STOP_S
    while pids := _those_of(folder):
        if time.monotonic() > give_up_s:
            log.warning("processes %s of the Ray cluster in %s outlived it and are killed", pids, folder)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def _those_of(folder: str) -> list[int]:
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if folder.encode() in command.read_bytes():
                found.append(int(command.parent.name))
    return found


def _is_served_by(pids: Sequence[int], address: str) -> bool:
    """Whether one of these processes listens there: a job must not go to somebody else's cluster. Elsewhere than on Linux nobody
    can tell.
    """
    if not sys.platform.startswith("linux"):
        return True
    port, listening = f"{int(address.rpartition(':')[2]):04X}", set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with contextlib.suppress(OSError):  # no IPv6
            for words in map(str.split, table.read_text().splitlines()):
                if words[1].endswith(f":{port}") and words[3] == _LISTENING:
                    listening.add(f"socket:[{words[9]}]")
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(file.readlink()) in listening:
                        return True
    return False


def _serves_jobs(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/api/version", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
