"""A container engine through aiodocker, which Podman's service understands as well: asynchronous, no process per container.

Looked for, in this order: the address in ``DOCKER_HOST`` or ``CONTAINER_HOST``, the sockets of Docker and Podman, the ``podman``
program, whose service is then started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._installation import missing_extra
from ...errors import ConfigError, LocalRuntimeError

if TYPE_CHECKING:
    import aiodocker
    from aiodocker.containers import DockerContainer

SERVICE_START_S = 20.0
INSTALL = (
    "install Docker (https://docs.docker.com/engine/install) or Podman (on Debian and Ubuntu: apt-get install podman)"
)
CALL_TIMEOUT_S = 120.0
PULL_TIMEOUT_S = 1_800.0
HYBRID_GROUPS, SYSTEMD = "/sys/fs/cgroup/unified", "/run/systemd/system"
_NO_REPLY = 900  # aiodocker's status of an engine that was not reached


class EngineError(LocalRuntimeError):
    """The engine refused. ``status``: its HTTP status, 0 when it did not answer."""

    def __init__(self, message: str = "", *, status: int = 0, session_id: str | None = None) -> None:
        super().__init__(message, session_id=session_id)
        self.status = status


class Engine:
    """The first engine that answers. ``await start()`` first; `close` ends a service that was started for it.

    ``name``: docker or podman. ``runtime``: what Podman's service runs containers with, such as runsc.

    Raises: MissingExtraError without aiodocker.
    """

    def __init__(self, folder: Path, *, runtime: str | None = None) -> None:
        try:
            import aiodocker
        except ImportError as e:
            raise missing_extra("sessions in containers need aiodocker", "containers") from e
        self.name = self.url = ""
        self._runtime = runtime
        self._folder = folder
        self._service: asyncio.subprocess.Process | None = None
        self._connect = aiodocker.Docker
        self._docker: Any = None

    def __str__(self) -> str:
        return f"{self.name} at {self.url}"

    async def start(self) -> None:
        """Find the engine, or start Podman's service. Raises: ConfigError that says what was tried and what to install."""
        tried = []
        for url in _usual_places():
            try:
                await self._try(url)
                return
            except EngineError as e:
                tried.append(str(e))
        podman = shutil.which("podman")
        if podman is None:
            raise ConfigError(
                f"no container engine can be used here ({'; '.join([*tried, 'podman is not on PATH'])}); {INSTALL}"
            )
        await self._serve(podman)

    async def _try(self, url: str) -> None:
        """Take the engine at this address. Raises: EngineError."""
        self.url = url
        self._docker = self._connect(url)
        try:
            async with self.asked(SERVICE_START_S) as docker:
                version = await docker.version()
        except BaseException:
            await self._docker.close()
            self._docker = None
            raise
        podman = any("podman" in str(part.get("Name", "")).lower() for part in version.get("Components") or ())
        self.name = "podman" if podman else "docker"

    async def _serve(self, podman: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        log, url = self._folder / "podman.log", f"unix://{self._folder / 'podman'}"
        ends_with_us = ["/bin/sh", "-c", '"$@" & read _; kill $!', "sh"]  # its input ends with this process
        with log.open("wb") as output:
            self._service = await asyncio.create_subprocess_exec(
                *ends_with_us,
                *(podman, *self._podman_options(), "system", "service", "--time=0", url),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=self._folder,  # its monitors write files where it stands
                start_new_session=True,
            )
        deadline = asyncio.get_running_loop().time() + SERVICE_START_S
        while True:
            try:
                await self._try(url)
                return
            except EngineError as e:
                late = asyncio.get_running_loop().time() > deadline
                if late or self._service.returncode is not None:
                    printed = log.read_text(errors="replace").strip()[-1_000:]
                    raise EngineError(f"podman's service did not start: {printed or e}") from None
            await asyncio.sleep(0.02)

    def _podman_options(self) -> list[str]:
        options = []
        if self._runtime is not None:
            program = str(gvisor_program(self._folder)) if self._runtime == "runsc" else self._runtime
            options += ["--runtime", program]
        elif Path(HYBRID_GROUPS).is_dir() and shutil.which("runc") is not None:
            options += ["--runtime", "runc"]  # Podman's first choice, crun, refuses mixed control groups
        if not Path(SYSTEMD).is_dir():
            options += ["--cgroup-manager", "cgroupfs"]
        return options

    async def close(self) -> None:
        if self._docker is not None:
            await self._docker.close()
        if self._service is not None and self._service.stdin is not None:
            self._service.stdin.close()
            await self._service.wait()

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
        """What the engine knows of an image that it has; None when it has not."""
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


# Releases of runsc before 2024 take a network namespace for the machine's own when it has /proc/sys/net/core/rmem_default, which
# since Linux 6.9 all have, and then refuse to start. So as root it is shown a /proc/sys without "net".
# And runsc gives its standard input to its sandbox's user, "nobody": the machine's own /dev/null, where an engine opens that.
_GVISOR = """\
#!/bin/sh
if [ /dev/stdin -ef /dev/null ]; then exec <"{folder}/nothing"; fi
if [ "$(id -u)" != 0 ]; then exec runsc --ignore-cgroups "$@"; fi
exec unshare --mount --propagation slave /bin/sh -ec '
cd "$0"
mkdir -p vm kernel
mount --bind /proc/sys/vm vm
mount --bind /proc/sys/kernel kernel
mount -t tmpfs none /proc/sys
mkdir /proc/sys/vm /proc/sys/kernel
mount --bind vm /proc/sys/vm
mount --bind kernel /proc/sys/kernel
cd "$1"
shift
exec runsc "$@"' "{folder}" "$PWD" "$@"
"""


def gvisor_program(folder: Path) -> Path:
    """A runtime for an engine that is ``runsc`` as it works here."""
    program = folder / "runsc"
    (folder / "nothing").touch()
    program.write_text(_GVISOR.replace("{folder}", str(folder)))
    program.chmod(0o700)
    return program
