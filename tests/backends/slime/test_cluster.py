"""A real Ray head of our own beside somebody else's cluster: a job runs on ours, and only ours ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentcore_rl_toolkit.backends.slime import cluster

# A program with a Ray cluster of its own, which uses it once more when it is told to.
SOMEBODY = """
import ray
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
@ray.remote
def double(x):
    return 2 * x
print("up", ray.get(double.remote(1)), flush=True)
input()
print("still up", ray.get(double.remote(21)), flush=True)
"""

JOB = """
import os, pathlib, sys
if sys.argv[2] != "0":
    sys.exit(int(sys.argv[2]))
import ray
ray.init(log_to_driver=False)
pathlib.Path(sys.argv[1]).write_text(f"{int(ray.cluster_resources()['GPU'])} {os.environ['FOR_THE_JOB']}")
"""


@pytest.fixture(scope="session")
def ray_jobs(make_environment: Callable[..., str]) -> str:
    """A Python with Ray and its dashboard, which takes jobs."""
    return make_environment("ray-jobs", "ray[default]>=2.41,<3", upon_this=True, limit_s=240)


# 35 CPU seconds of Ray; test_runner.py has the same of a stand-in that takes Ray's commands.
@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_head_whose_port_was_taken_starts_again_runs_a_job_and_takes_only_its_own_with_it(
    ray_jobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_ray(ray_jobs, monkeypatch)
    (tmp_path / "job.py").write_text(JOB)
    free_port, given = cluster._free_port, []
    command = [sys.executable, "-c", "input()", f"{tmp_path}/slime-ray-theirs"]  # as another cluster's processes look
    with (
        socket.create_server(("", 0)) as another,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as somebody,
    ):

        def taken_at_first() -> int:
            given.append(free_port() if given else another.getsockname()[1])
            return given[-1]

        monkeypatch.setattr(cluster, "_is_free", lambda port: True)  # so that the first port given is the head's own
        monkeypatch.setattr(cluster, "_free_port", taken_at_first)
        monkeypatch.setattr(cluster, "DASHBOARD_PORT", free_port())
        head = cluster.Head(3)
        try:
            assert submit(ray_jobs, head, tmp_path, 0) == 0
            assert (tmp_path / "told-0").read_text() == "3 from here"
        finally:
            head.stop()
        assert somebody.poll() is None
        somebody.communicate(b"\n")
    assert len(given) == 10  # five for each of two heads
    assert head.process.poll() is not None
    assert not Path(head.folder).exists()
    assert cluster._those_of(head.folder) == []


def for_ray(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's commands are this environment's, and no setting of the caller reaches them."""
    monkeypatch.setenv("PATH", f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}")
    for name in ("RAY_ADDRESS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("FOR_THE_JOB", "from here")


def submit(python: str, head: cluster.Head, folder: Path, code: int) -> int:
    """Run the job that is to end with this code. Returns how it ended."""
    command = ["ray", "job", "submit", "--address", head.address, "--submission-id", f"j{code}", "--"]
    command += [python, str(folder / "job.py"), str(folder / f"told-{code}"), str(code)]
    return cluster.run_job(command, {}, job_id=f"j{code}", address=head.address)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ending_our_head_ends_nobody_elses_cluster(
    ray_jobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_ray(ray_jobs, monkeypatch)
    (tmp_path / "job.py").write_text(JOB)
    with (tmp_path / "somebody.txt").open("wb") as output:
        somebody = subprocess.Popen(
            [ray_jobs, "-c", SOMEBODY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True
        )
    try:
        assert somebody.stdout is not None
        assert somebody.stdout.readline().strip() == "up 2", (tmp_path / "somebody.txt").read_text()
        head = cluster.Head(3)
        try:
            assert submit(ray_jobs, head, tmp_path, 5) != 0
            assert submit(ray_jobs, head, tmp_path, 0) == 0
            assert (tmp_path / "told-0").read_text() == "3 from here"
        finally:
            head.stop()
        answer, _ = somebody.communicate("\n", timeout=300)
        assert answer.strip() == "still up 42", (tmp_path / "somebody.txt").read_text()
    finally:
        somebody.kill()
        somebody.communicate()


KILLED = """
import subprocess, sys, time
from agentcore_rl_toolkit.backends.slime.cluster import start_tied
child = start_tied([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_what_is_tied_to_a_runner_ends_when_the_runner_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        child = int(runner.stdout.readline())
        assert _command(Path(f"/proc/{child}"))
        runner.kill()
    give_up_s = time.monotonic() + 30
    while _command(Path(f"/proc/{child}")):  # empty once it is gone, or waits to be reaped
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""
