"""An environment with Ray, and a real Ray cluster of several nodes on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import LocalRuntimeError
from agentcore_rl_toolkit.runtime.environments import find_uv

ROOT = Path(__file__).parents[3]
ENVIRONMENT = ROOT / ".venvs" / "ray"
WANTED = ["ray>=2.41,<3"]
BUILD_LIMIT_S = 100
START_LIMIT_S = 110.0

# Small, quiet and alone: nothing is reported anywhere, and other Ray clusters of this machine are not found.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on any system: everything on 127.0.0.1
    "RAY_enable_metrics_collection": "0",
}


@pytest.fixture(scope="session")
def ray_python() -> str:
    """Path of a Python with Ray and this package; skips, saying why, where none can be made."""
    python = ENVIRONMENT / "bin" / "python"
    ENVIRONMENT.parent.mkdir(exist_ok=True)
    with open(ENVIRONMENT.parent / "ray.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = ENVIRONMENT / "ready"
        stamp = f"{sysconfig.get_paths()['purelib']} {' '.join(WANTED)}"
        if not ready.exists() or ready.read_text() != stamp:
            trouble = _build(python)
            if trouble:
                pytest.skip(f"no environment with Ray could be made ({' '.join(WANTED)}): {trouble}")
            ready.write_text(stamp)
    return str(python)


def _build(python: Path) -> str | None:
    """Ray's own needs are installed; what this environment has stays visible through a .pth line."""
    if os.environ.get("AGENTCORE_RL_NO_INSTALL"):
        return "AGENTCORE_RL_NO_INSTALL is set"
    try:
        uv = find_uv()
    except LocalRuntimeError as e:
        return str(e)
    for command in (
        [uv, "venv", "-q", "--clear", "--python", sys.executable, str(ENVIRONMENT)],
        [uv, "pip", "install", "-q", "--python", str(python), *WANTED],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"{' '.join(command[:3])} took longer than {BUILD_LIMIT_S} s"
        if done.returncode != 0:
            return (done.stderr or done.stdout)[-400:]
    site = next((ENVIRONMENT / "lib").glob("python*/site-packages"))
    (site / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    return None


class RayCluster:
    """A head and other nodes, each a raylet of its own. Kept by `ray_cluster.py` in a process. ``raylets``: not the head's."""

    def __init__(self, python: str, folder: Path, nodes: int) -> None:
        self.python = python
        # Ray's sockets have long names: its folder must have a short one.
        self.environment = {**os.environ, **RAY_ENVIRONMENT}
        script = Path(__file__).with_name("ray_cluster.py")
        with (folder / "ray.txt").open("wb") as output:
            self._process = subprocess.Popen(
                [python, "-W", "ignore", str(script), str(nodes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=self.environment,
                start_new_session=True,
            )
        late = threading.Timer(START_LIMIT_S, self._process.kill)
        late.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        late.cancel()
        if not line:
            self.close()
            pytest.fail(f"the Ray cluster did not start: {(folder / 'ray.txt').read_text()}")
        answer = json.loads(line)
        self.address: str = answer["address"]
        self.raylets: dict[str, int] = answer["raylets"]

    def kill(self, node_id: str) -> None:
        """As if the machine lost its power: its raylet first; everything below it notices."""
        os.kill(self.raylets[node_id], signal.SIGKILL)

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(40)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(5)
            self._process.stdout.close()


@pytest.fixture(scope="module")
def ray_cluster(ray_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    cluster = RayCluster(ray_python, tmp_path_factory.mktemp("ray"), nodes=1)
    yield cluster
    cluster.close()
