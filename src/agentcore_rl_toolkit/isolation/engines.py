"""Finds a container engine on this machine: Docker, or Podman, whose service speaks Docker's HTTP API.

Looked for, in this order: the address in ``DOCKER_HOST`` or ``CONTAINER_HOST``, Docker's socket, the endpoint of the current
``docker`` context, Podman's sockets, the ``podman`` program (the caller then starts its service).

Source: Docker Engine API v1.41, ``/version``.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError

EngineName = Literal["docker", "podman"]
_TIMEOUT_S = 10.0
INSTALL = (
    "install Docker (https://docs.docker.com/engine/install) or Podman (on Debian and Ubuntu: apt-get install podman)"
)


@dataclass(frozen=True, kw_only=True)
class EngineAddress:
    """Where an engine is: ``url`` is ``unix:///path`` or ``tcp://host:port``; None: ``program`` is to be started as a service."""

    name: EngineName
    url: str | None = None
    program: str | None = None

    def __str__(self) -> str:
        return f"{self.name} at {self.url}" if self.url is not None else f"{self.name} ({self.program})"


def find_engine() -> EngineAddress:
    """The first engine that answers. Blocks. Raises: ConfigError that says what was tried and what to install."""
    tried: list[str] = []
    for url in dict.fromkeys(_candidates()):
        if url.startswith("unix://") and not os.path.exists(url.removeprefix("unix://")):
            continue
        try:
            return EngineAddress(name=_name_of(url), url=url)
        except (OSError, ValueError, http.client.HTTPException) as e:
            tried.append(f"{url}: {e}")
    program = shutil.which("podman")
    why = "podman is not on PATH" if program is None else _failure([program, "info"])
    if why is None:
        return EngineAddress(name="podman", program=program)
    raise ConfigError(f"no container engine can be used here ({'; '.join([*tried, why])}); {INSTALL}")


def _candidates() -> Iterator[str]:
    """Addresses to try."""
    for name in ("DOCKER_HOST", "CONTAINER_HOST"):
        if os.environ.get(name, "").startswith(("unix://", "tcp://")):
            yield os.environ[name]
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    yield from ("unix:///var/run/docker.sock", f"unix://{runtime_dir}/docker.sock")
    program = shutil.which("docker")
    if program is not None:
        asked = [program, "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0 and done.stdout.startswith(("unix://", "tcp://")):
            yield done.stdout.strip()
    if os.geteuid() == 0:
        yield "unix:///run/podman/podman.sock"
    yield f"unix://{runtime_dir}/podman/podman.sock"


def _failure(command: list[str]) -> str | None:
    """Why a command does not work; None when it does."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{command[0]}: {e}"
    lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    return None if done.returncode == 0 else f"{' '.join(command)}: {lines[-1]}"


class _Connection(http.client.HTTPConnection):
    """To ``unix:///path`` or ``tcp://host:port`` (without TLS)."""

    def __init__(self, url: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._url = url

    def connect(self) -> None:
        if self._url.startswith("unix://"):
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(_TIMEOUT_S)
            self.sock.connect(self._url.removeprefix("unix://"))
            return
        host, _, port = self._url.removeprefix("tcp://").rpartition(":")
        self.sock = socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S)


def _name_of(url: str) -> EngineName:
    """Which engine answers there. Raises: OSError, ValueError, HTTPException."""
    connection = _Connection(url)
    try:
        connection.request("GET", "/version")
        reply = connection.getresponse()
        body = reply.read()
    finally:
        connection.close()
    if reply.status != 200:
        raise ValueError(f"it answers {reply.status}")
    version: dict[str, Any] = json.loads(body)
    podman = any("podman" in str(part.get("Name", "")).lower() for part in version.get("Components") or ())
    return "podman" if podman else "docker"
