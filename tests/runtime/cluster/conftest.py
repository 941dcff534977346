"""An environment with Ray, and a real Ray cluster of several nodes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

START_LIMIT_S = 170.0

# Small, quiet and alone: nothing is reported anywhere, and other Ray clusters of this machine are not found.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on any system: everything on 127.0.0.1
    "RAY_enable_metrics_collection": "0",
}


@pytest.fixture(scope="session")
def ray_python(make_environment: Callable[..., str]) -> str:
    """Path of a Python with Ray and this package."""
    return make_environment("ray", "ray>=2.41,<3", upon_this=True, limit_s=100)


class RayCluster:
    """A head and other nodes, each a raylet of its own. Kept by `ray_cluster.py` in a process. ``raylets``: not the head's."""

    def __init__(self, python: str, folder: Path, nodes: int) -> None:
        self.python = python
        # Ray's sockets have long names: its folder must have a short one.
        self._temporary = tempfile.mkdtemp(prefix="ray-")
        self.environment = {**os.environ, **RAY_ENVIRONMENT, "RAY_TMPDIR": self._temporary}
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(40)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def ray_cluster(ray_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    cluster = RayCluster(ray_python, tmp_path_factory.mktemp("ray"), nodes=1)
    yield cluster
    cluster.close()
