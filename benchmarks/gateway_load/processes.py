"""Processes under measurement: started on one core, ended by their pid, their CPU and memory read from the kernel."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
LOAD_CORE, GATEWAY_CORE = 0, 1


def pinned(core: int | None, command: list[str]) -> list[str]:
    """The command on one core: on a machine with two, load and gateway must not fight for the same one."""
    if core is None or not shutil.which("taskset") or (os.cpu_count() or 1) < 2:
        return command
    return ["taskset", "-c", str(core), *command]


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Run this thread, and the threads and processes that it starts, on one core."""
    if not hasattr(os, "sched_setaffinity") or (os.cpu_count() or 1) < 2:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def process(command: list[str], *, core: int | None, **options: Any) -> Iterator[subprocess.Popen[str]]:
    # A process group, not a session: with a kernel that groups the scheduling by session, a new one would escape
    # whatever priority the benchmark was started with.
    running: subprocess.Popen[str] = subprocess.Popen(pinned(core, command), text=True, process_group=0, **options)
    try:
        yield running
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGTERM)
            try:
                running.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
        if running.stdout is not None:
            running.stdout.close()


def family(pid: int) -> list[int]:
    """A process and all that come from it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += family(int(child))
    return found


def cpu_s(pid: int) -> float:
    """CPU time of a process and its living children, to the nanosecond, threads that have ended included."""
    # The kernel's clock of another process: its number is the complement of the pid, shifted by the clock's kind (2).
    return sum(time.clock_gettime((~each << 3) | 2) for each in family(pid))


def rss_kb(pid: int) -> float:
    page_kb = os.sysconf("SC_PAGE_SIZE") / 1024
    return sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) * page_kb for each in family(pid))


def peak_kb(pid: int) -> float:
    """The most that was ever resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    return float(status.partition("VmHWM:")[2].split()[0])


def settle(pid: int | None, longest_s: float = 15.0) -> None:
    """Wait until a process has nothing left to do: calls that a load broke off are still worked on for a while."""
    deadline = time.monotonic() + longest_s
    while pid is not None and time.monotonic() < deadline:
        before = cpu_s(pid)
        time.sleep(0.1)
        if cpu_s(pid) - before < 0.005:
            return


@dataclass(frozen=True)
class Machine:
    """CPU seconds of all processes of the machine, and those the hypervisor gave to others."""

    busy_s: float
    stolen_s: float

    @classmethod
    def now(cls) -> Machine:
        fields = [int(n) for n in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        user, nice, system, _idle, _wait, irq, soft, stolen = fields[:8]
        tick = os.sysconf("SC_CLK_TCK")
        return cls((user + nice + system + irq + soft) / tick, stolen / tick)


def calibration_ms() -> float:
    """CPU ms of a million additions in plain Python: how fast this machine is now. Best of five."""
    best = float("inf")
    for _ in range(5):
        before, total = time.process_time(), 0
        for i in range(1_000_000):
            total += i
        best = min(best, time.process_time() - before)
    return best * 1000


def wait_http(url: str, running: subprocess.Popen[str], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).read()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            if running.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"nothing answers at {url}") from None
            time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass(frozen=True)
class Server:
    url: str
    pid: int


@contextmanager
def upstream() -> Iterator[Server]:
    """The scripted engine of `upstream.py`, on the load's core."""
    command = [sys.executable, "-m", "gateway_load.upstream"]
    with process(command, core=LOAD_CORE, stdout=subprocess.PIPE, cwd=BENCHMARKS) as running:
        assert running.stdout is not None
        yield Server(f"http://127.0.0.1:{int(running.stdout.readline())}", running.pid)
