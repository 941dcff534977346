"""A container engine through aiodocker, which Podman's service understands as well: asynchronous, no process per container.

Looked for, in this order: the address in ``DOCKER_HOST`` or ``CONTAINER_HOST``, the sockets of Docker and Podman.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._installation import missing_extra
from ...errors import ConfigError, LocalRuntimeError
from ..agents.version_fields import LOCAL_ARTIFACT

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
_NO_REPLY = 900  # aiodocker's status of an engine that was not reached
_BUILT_HERE = "localhost/"  # what Podman calls images that were never pushed; there is no registry to ask


def image_of(fields: Mapping[str, Any]) -> str | None:
    """The image that a runtime's artifact names; None when it is an agent file or code."""
    uri = (fields.get("agentRuntimeArtifact") or {}).get("containerConfiguration", {}).get("containerUri")
    return None if uri is None or uri.startswith(LOCAL_ARTIFACT) else str(uri)


async def fetch(engine: ContainerEngine, name: str) -> str:
    """The id of an image, pulled when the engine does not have it. Raises: EngineError with the reason."""
    found = await engine.image(name)
    if found is None and not name.startswith(_BUILT_HERE):
        try:
            await engine.pull(name)
        except EngineError as e:
            raise EngineError(f"{engine} has no image {name!r} and could not pull it: {e}", status=e.status) from e
        found = await engine.image(name)
    if found is None:
        raise EngineError(f"{engine} has no image {name!r}; build it, or pull it")
    return str(found["Id"])


class EngineError(LocalRuntimeError):
    """The engine refused. ``status``: its HTTP status, 0 when it did not answer."""

    def __init__(self, message: str = "", *, status: int = 0, session_id: str | None = None) -> None:
        super().__init__(message, session_id=session_id)
        self.status = status


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
        """Find the engine. Raises: ConfigError that says what was tried and what to start."""
        tried = []
        for url in _usual_places():
            try:
                await self._try(url)
                return
            except EngineError as e:
                tried.append(str(e))
        raise ConfigError(f"no container engine answers here ({'; '.join(tried) or 'there is no socket'}); {START_ONE}")

    async def _try(self, url: str) -> None:
        """Take the engine at this address. Raises: EngineError."""
        self.url = url
        self._docker = self._connect(url)
        try:
            async with self.asked(FIRST_REPLY_S) as docker:
                version = await docker.version()
        except BaseException:
            await self._docker.close()
            self._docker = None
            raise
        podman = any("podman" in str(part.get("Name", "")).lower() for part in version.get("Components") or ())
        self.name = "podman" if podman else "docker"

    async def close(self) -> None:
        if self._docker is not None:
            await self._docker.close()

    @contextlib.asynccontextmanager
    async def asked(self, timeout_s: float | None = CALL_TIMEOUT_S) -> AsyncIterator[aiodocker.Docker]:
        """The engine, for one request. Raises: EngineError with its words, or when it did not answer in time."""
        import aiodocker
        import aiohttp

        try:
            async with asyncio.timeout(timeout_s):
                yield self._docker
        except TimeoutError:
            raise EngineError(f"{self} did not answer within {timeout_s:g} s") from None
        except aiodocker.DockerError as e:
            raise EngineError(e.message, status=0 if e.status == _NO_REPLY else e.status) from e
        except aiohttp.ClientError as e:
            raise EngineError(f"{self} does not answer: {e}") from e

    # -- containers
    def container(self, container: str) -> DockerContainer:
        """A container by its id; to be used while the engine is `asked`."""
        return self._docker.containers.container(container)

    async def create(self, settings: Mapping[str, Any], name: str) -> str:
        """Make a container, not yet running; its id."""
        async with self.asked() as docker:
            return str((await docker.containers.create(dict(settings), name=name)).id)

    async def inspect(self, container: str, **query: Any) -> dict[str, Any]:
        async with self.asked():
            found: dict[str, Any] = await self.container(container).show(**query)
            return found

    async def remove(self, container: str) -> None:
        """Kill and remove it with its anonymous volumes; one that is gone is fine."""
        async with self._gone_is_fine():
            await self.container(container).delete(force=True, v=True)

    async def signal(self, container: str, name: str) -> None:
        """Send a signal to its first process; one that has ended is fine."""
        async with self._gone_is_fine():
            await self.container(container).kill(signal=name)

    @contextlib.asynccontextmanager
    async def _gone_is_fine(self) -> AsyncIterator[None]:
        try:
            async with self.asked():
                yield
        except EngineError as e:
            if e.status not in (404, 409):  # 409: its removal is under way
                raise

    async def with_labels(self, labels: Sequence[str]) -> list[DockerContainer]:
        """All containers, ended ones too, that carry every one of these labels (``key`` or ``key=value``)."""
        async with self.asked() as docker:
            found: list[DockerContainer] = await docker.containers.list(all=True, filters={"label": list(labels)})
            return found

    # -- images
    async def image(self, name: str) -> dict[str, Any] | None:
        """The engine's description of an image; None when it does not have the image."""
        try:
            async with self.asked() as docker:
                found: dict[str, Any] = await docker.images.inspect(name)
        except EngineError as e:
            if e.status == 404:
                return None
            raise
        return found

    async def pull(self, name: str) -> None:
        """Fetch an image from its registry. Raises: EngineError with the registry's or the engine's words."""
        async with self.asked(PULL_TIMEOUT_S) as docker:
            await docker.images.pull(name)

    async def load_image(self, archive: bytes) -> None:
        """Take an image from an archive as ``docker save`` writes it."""
        async with self.asked() as docker:
            await docker.images.import_image(archive)


def _usual_places() -> list[str]:
    """Addresses to try."""
    named = [os.environ.get(name, "") for name in ("DOCKER_HOST", "CONTAINER_HOST")]
    user = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    sockets = ["/var/run/docker.sock", f"{user}/docker.sock", f"{Path.home()}/.docker/run/docker.sock"]
    sockets += ["/run/podman/podman.sock"] if os.geteuid() == 0 else []
    sockets += [f"{user}/podman/podman.sock"]
    return [url for url in named if url.startswith(("unix://", "tcp://"))] + [
        f"unix://{path}" for path in sockets if os.path.exists(path)
    ]
