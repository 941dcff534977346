"""A container engine through aiodocker, which Podman's service understands as well: asynchronous, no process per container.

It looks for an engine in this order: the address in ``DOCKER_HOST`` or ``CONTAINER_HOST``, the sockets of Docker and Podman.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._installation import missing_extra
from ...errors import ConfigError, LocalRuntimeError

if TYPE_CHECKING:
    import aiodocker
    from aiodocker.containers import DockerContainer

FIRST_REPLY_S = 20.0
START_ONE = (
    "start Docker, or Podman's service: systemctl --user start podman.socket; without systemd: "
    "podman system service --time=0 unix:///tmp/podman.sock, and CONTAINER_HOST=unix:///tmp/podman.sock here"
)
CALL_TIMEOUT_S = 120.0
PULL_TIMEOUT_S = 1_800.0
_BUILT_HERE = "localhost/"  # Podman's prefix of images that were never pushed: no registry has them


class EngineError(LocalRuntimeError):
    """The engine refused with this HTTP ``status``, or did not answer."""

    status = 0


class ContainerEngine:
    """The first engine that answers. ``await start()`` first. ``name``: docker or podman.

    Raises: MissingExtraError without aiodocker.
    """

    def __init__(self) -> None:
        try:
            import aiodocker
        except ImportError as e:
            raise missing_extra("sessions in containers need aiodocker", "containers") from e
        self.name = self.url = ""
        self._connect = aiodocker.Docker
        self._docker: Any = None

    def __str__(self) -> str:
        return f"{self.name} at {self.url}"

    async def start(self) -> None:
        """Find the engine. Raises: ConfigError with the addresses that were tried and a command that starts an engine."""
        tried = []
        for self.url in _usual_places():
            self._docker = self._connect(self.url)
            try:
                async with self.asked(FIRST_REPLY_S) as docker:
                    parts = (await docker.version()).get("Components") or ()
            except EngineError as e:
                tried.append(str(e))
                await self._docker.close()
                continue
            self.name = "podman" if any("podman" in str(p.get("Name", "")).lower() for p in parts) else "docker"
            return
        self._docker = None
        raise ConfigError(f"no container engine answers here ({'; '.join(tried) or 'there is no socket'}); {START_ONE}")

    async def close(self) -> None:
        if self._docker is not None:
            await self._docker.close()

    @contextlib.asynccontextmanager
    async def asked(self, timeout_s: float | None = CALL_TIMEOUT_S) -> AsyncIterator[aiodocker.Docker]:
        """Yield the engine for one request. Raises: EngineError with its message, or when it did not answer in time."""
        import aiodocker
        import aiohttp

        try:
            async with asyncio.timeout(timeout_s):
                yield self._docker
        except TimeoutError:
            raise EngineError(f"{self} did not answer within {timeout_s:g} s") from None
        except aiodocker.DockerError as e:
            raise EngineError(e.message, status=e.status) from e
        except aiohttp.ClientError as e:
            raise EngineError(f"{self} does not answer: {e}") from e

    @contextlib.asynccontextmanager
    async def container(self, name: str, timeout_s: float | None = CALL_TIMEOUT_S) -> AsyncIterator[DockerContainer]:
        """Yield a container for one request. Raises: EngineError."""
        async with self.asked(timeout_s) as docker:
            yield docker.containers.container(name)

    async def find_image(self, name: str) -> str | None:
        """Return the id of an image, or None when the engine does not have it. Raises: EngineError."""
        try:
            async with self.asked() as docker:
                return str((await docker.images.inspect(name))["Id"])
        except EngineError as e:
            if e.status == 404:
                return None
            raise

    async def fetch(self, name: str) -> str:
        """Return the id of an image. Pull it when the engine does not have it. Raises: EngineError with the reason."""
        found = await self.find_image(name)
        if found is None and not name.startswith(_BUILT_HERE):
            try:
                async with self.asked(PULL_TIMEOUT_S) as docker:
                    await docker.images.pull(name)
            except EngineError as e:
                raise EngineError(f"{self} has no image {name!r} and could not pull it: {e}") from e
            found = await self.find_image(name)
        if found is None:
            raise EngineError(f"{self} has no image {name!r}; build it, or pull it")
        return found


def _usual_places() -> list[str]:
    named = [os.environ.get(name, "") for name in ("DOCKER_HOST", "CONTAINER_HOST")]
    user = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    sockets = ["/var/run/docker.sock", f"{user}/docker.sock", f"{Path.home()}/.docker/run/docker.sock"]
    sockets += ["/run/podman/podman.sock"] if os.geteuid() == 0 else []
    places = [f"unix://{path}" for path in (*sockets, f"{user}/podman/podman.sock") if os.path.exists(path)]
    return [url for url in named if url.startswith(("unix://", "tcp://"))] + places
