"""The Ray actor of a node, which keeps a local runtime as its child process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...isolation.project import Project
from ...isolation.sandbox import project_of

STOP_S = 12.0  # for a runtime to end its sessions
MAX_BUNDLE_BYTES = 64 * 2**20  # of files, before compression: code, not data sets
LEFT_OUT = {"__pycache__", "node_modules", "build", "dist"}


def pack_project(script: Path, hidden: Collection[Path] = ()) -> tuple[str, bytes]:
    """Pack an agent's project, as its sandbox shows it, or a smaller part of it where the project is too large.

    Returns the path of the agent's file in it, and the archive. Blocks. Raises: ConfigError if its own folder is too large.
    """
    own = script.parent
    places = [folder for folder in (project_of(script), Project.of(script).folder) if folder.is_dir()]
    for folder in places:
        with contextlib.suppress(ConfigError):
            return str(script.relative_to(folder)), pack(folder, hidden)
    return script.name, pack(own, hidden)


def pack(folder: Path, hidden: Collection[Path] = ()) -> bytes:
    """Pack a folder's files: without hidden ones, caches and environments. Blocks. Raises: ConfigError above 64 MiB."""
    total, buffer = 0, io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=3, dereference=True) as archive:
        for base, folders, names in os.walk(folder):
            inner = (name for name in sorted(folders) if not name.startswith(".") and name not in LEFT_OUT)
            folders[:] = [name for name in inner if not Path(base, name, "pyvenv.cfg").exists()]
            for path in (Path(base, name) for name in sorted(names) if not name.startswith(".")):
                if any(path.resolve().is_relative_to(other.resolve()) for other in hidden):
                    continue
                if not path.is_file():  # a link to nothing, a socket
                    continue
                total += path.stat().st_size
                if total > MAX_BUNDLE_BYTES:
                    raise ConfigError(
                        f"{folder} holds more than {MAX_BUNDLE_BYTES // 2**20} MiB of files, too much to send to every node; "
                        "keep the agent's code in a folder of its own and its data in a store"
                    )
                archive.add(path, path.relative_to(folder), recursive=False)
    return buffer.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """Make this folder of what was packed. Blocks."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        archive.extractall(folder, filter="data")


class NodeRuntime:
    """Runs inside the Ray actor. When the actor or its node ends, the runtime sees that its parent is gone and ends too."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="agentcore-rl-node-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, host: str, config: bytes, within_s: float) -> dict[str, Any]:
        """Start a runtime with this pickled configuration on this address of the node. Returns what its ready file holds.

        Raises: RuntimeError with the end of its output when it does not come up.
        """
        given, ready, output = (self._folder / name for name in ("config", "ready.json", "output"))
        with open(os.open(given, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(config)
        command = [
            sys.executable,
            "-m",
            "agentcore_rl_toolkit.runtime.service",
            str(given),
            host,
            str(ready),
            str(os.getpid()),
        ]
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with output.open("wb") as out:
            self._process = subprocess.Popen(
                command, env=own, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        give_up_s = time.monotonic() + within_s
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                self.stop()
                raise RuntimeError(f"the runtime did not start on {host}: {output.read_text()[-2000:]}")
            time.sleep(0.05)
        found: dict[str, Any] = json.loads(ready.read_text())
        return found

    def unpack(self, data: bytes, name: str) -> str:
        """Unpack an agent's folder where this node keeps such. Returns its path."""
        folder = self._folder / "agents" / name
        unpack(data, folder)
        return str(folder)

    def read(self, path: str) -> bytes | None:
        """A small file of this node; None when it is not there."""
        try:
            return Path(path).read_bytes()
        except OSError:
            return None

    def stop(self) -> None:
        """End the runtime with its sessions, and remove what was unpacked."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
