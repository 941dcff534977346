"""Finds a container engine on this machine: Docker, or Podman, whose service speaks Docker's HTTP API.

Looked for, in this order: the address in ``DOCKER_HOST`` (``CONTAINER_HOST`` for Podman), Docker's socket, the endpoint of the
current ``docker`` context, Podman's sockets, the ``podman`` program (the caller then starts its service).

Source: Docker Engine API v1.41, ``/_ping`` and ``/version``.
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
ENGINES = ("auto", "docker", "podman")
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


def find_engine(wanted: str = "auto") -> EngineAddress:
    """The first engine that answers. Blocks. Raises: ConfigError that says what was tried and what to install."""
    if wanted not in ENGINES:
        raise ConfigError(f"the container engine must be one of {', '.join(ENGINES)}, got {wanted!r}")
    tried: list[str] = []
    for url in _candidates(wanted):
        try:
            name = _who_answers(url)
        except (OSError, ValueError, http.client.HTTPException) as e:
            tried.append(f"{url}: {e}")
            continue
        if wanted in ("auto", name):
            return EngineAddress(name=name, url=url)
        tried.append(f"{url}: it is {name}")
    if wanted in ("auto", "podman"):
        program = shutil.which("podman")
        why = "podman is not on PATH" if program is None else _podman_fails(program)
        if why is None:
            return EngineAddress(name="podman", program=program)
        tried.append(why)
    asked = "no container engine" if wanted == "auto" else f"{wanted}: no such container engine"
    raise ConfigError(f"{asked} can be used here ({'; '.join(tried)}); {INSTALL}")


def engine_unavailable() -> str | None:
    """Why no container engine can be used; None when one can."""
    try:
        find_engine()
    except ConfigError as e:
        return str(e)
    return None


def gvisor_unavailable() -> str | None:
    """Why containers cannot run behind gVisor; None when they can."""
    try:
        engine = find_engine()
    except ConfigError as e:
        return str(e)
    if engine.program is not None:
        return None if shutil.which("runsc") else "runsc is not on PATH (on Debian: apt-get install runsc)"
    if engine.name == "podman":
        return f"{engine} runs already, with the runtime it was started with; gVisor needs a service of its own"
    return _docker_lacks_runsc(engine)


def _docker_lacks_runsc(engine: EngineAddress) -> str | None:
    try:
        known = _ask(engine.url or "", "/info").get("Runtimes") or {}
    except (OSError, ValueError, http.client.HTTPException) as e:
        return f"{engine}: {e}"
    return (
        None
        if "runsc" in known
        else f"{engine} does not know the runtime runsc; see https://gvisor.dev/docs/user_guide"
    )


def _candidates(wanted: str) -> Iterator[str]:
    """Addresses to try, without those of socket files that do not exist."""
    seen = set()
    for url in (*_configured(wanted), *_usual(wanted)):
        if url in seen or (url.startswith("unix://") and not os.path.exists(url.removeprefix("unix://"))):
            continue
        seen.add(url)
        if url.startswith(("unix://", "tcp://")):
            yield url


def _configured(wanted: str) -> Iterator[str]:
    names = {"docker": ("DOCKER_HOST",), "podman": ("CONTAINER_HOST",)}.get(wanted, ("DOCKER_HOST", "CONTAINER_HOST"))
    for name in names:
        if os.environ.get(name):
            yield os.environ[name]


def _usual(wanted: str) -> Iterator[str]:
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    if wanted != "podman":
        yield from ("unix:///var/run/docker.sock", f"unix://{runtime_dir}/docker.sock")
        endpoint = _context_endpoint()
        if endpoint is not None:
            yield endpoint
    if wanted != "docker":
        if os.geteuid() == 0:
            yield "unix:///run/podman/podman.sock"
        yield f"unix://{runtime_dir}/podman/podman.sock"


def _context_endpoint() -> str | None:
    program = shutil.which("docker")
    if program is None:
        return None
    command = [program, "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _podman_fails(program: str) -> str | None:
    try:
        done = subprocess.run([program, "info"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{program}: {e}"
    lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    return None if done.returncode == 0 else f"{program} info: {lines[-1]}"


def split_url(url: str) -> tuple[str | None, tuple[str, int] | None]:
    """The path of a unix socket, or host and port. Raises: ConfigError for any other kind of address."""
    if url.startswith("unix://"):
        return url.removeprefix("unix://"), None
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    if not url.startswith("tcp://") or not host or not port.isdecimal():
        raise ConfigError(
            f"the container engine's address {url!r} must be unix:///path or tcp://host:port (without TLS)"
        )
    return None, (host.strip("[]"), int(port))


class _Connection(http.client.HTTPConnection):
    def __init__(self, url: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path, self._address = split_url(url)

    def connect(self) -> None:
        if self._path is None:
            self.sock = socket.create_connection(self._address or ("", 0), _TIMEOUT_S)
            return
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._path)


def _who_answers(url: str) -> EngineName:
    version = _ask(url, "/version")
    podman = any("podman" in str(c.get("Name", "")).lower() for c in version.get("Components") or ())
    return "podman" if podman else "docker"


def _ask(url: str, path: str) -> dict[str, Any]:
    """One GET. Raises: OSError, ValueError, HTTPException."""
    connection = _Connection(url)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        body = reply.read()
        if reply.status != 200:
            raise ValueError(f"it answers {reply.status} to {path}")
        answer: dict[str, Any] = json.loads(body)
        return answer
    finally:
        connection.close()
