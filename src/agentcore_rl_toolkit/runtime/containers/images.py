"""Container images of agents: which artifact names one, getting it into the engine, building one from a folder."""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError, LocalRuntimeError
from ...isolation.engines import INSTALL, EngineAddress, find_engine
from ..agents.version_fields import LOCAL_ARTIFACT
from .client import Engine, EngineError

log = logging.getLogger(__name__)
BUILD_TIMEOUT_S = 3_600
_BUILT_HERE = "localhost/"  # what Podman calls images that were never pushed; there is no registry to ask
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def image_of(fields: Mapping[str, Any]) -> str | None:
    """The image that a runtime's artifact names; None when it is an agent file or code."""
    uri = (fields.get("agentRuntimeArtifact") or {}).get("containerConfiguration", {}).get("containerUri")
    return None if uri is None or uri.startswith(LOCAL_ARTIFACT) else str(uri)


async def fetch(engine: Engine, name: str) -> str:
    """The id of an image, pulled when the engine does not have it. Raises: EngineError with the reason."""
    found = await engine.image(name)
    if found is None and not name.startswith(_BUILT_HERE):
        try:
            await engine.pull(name)
        except EngineError as e:
            raise EngineError(
                f"{engine.address} has no image {name!r} and could not pull it: {e}", status=e.status
            ) from e
        found = await engine.image(name)
    if found is None:
        raise EngineError(f"{engine.address} has no image {name!r}; build it, or pull it")
    _warn_of_architecture(name, str(found.get("Architecture", "")))
    return str(found["Id"])


def _warn_of_architecture(name: str, architecture: str) -> None:
    here = ARCHITECTURES.get(platform.machine(), platform.machine())
    if architecture and architecture != here:
        log.warning("image %s is for %s, this machine is %s: it runs by emulation, if at all", name, architecture, here)
    elif architecture == "amd64":
        log.warning("image %s is for amd64; AgentCore Runtime runs linux/arm64 images only", name)


def build(folder: Path, name: str) -> str:
    """Build the Dockerfile (or Containerfile) of a folder with the engine's own program, output to the terminal. Blocks.

    Returns the image's name. Raises: ConfigError without a file to build or a program to build it, LocalRuntimeError.
    """
    if not any((folder / file).is_file() for file in ("Dockerfile", "Containerfile")):
        raise ConfigError(f"there is no Dockerfile in {folder}")
    address = find_engine()
    command = _build_command(address)
    image = f"localhost/agentcore-rl/{name.lower()}:latest"
    try:
        done = subprocess.run([*command, "-t", image, str(folder)], timeout=BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise LocalRuntimeError(f"building {folder} took longer than {BUILD_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise LocalRuntimeError(f"{' '.join(command)} failed with status {done.returncode}; its output is above")
    return image


def _build_command(address: EngineAddress) -> list[str]:
    program = address.program or shutil.which(address.name)
    if program is not None:
        where = []
        if address.url is not None:
            where = ["--host", address.url] if address.name == "docker" else ["--remote", "--url", address.url]
        return [program, *where, "build"]
    raise ConfigError(f"building needs the program {address.name!r} on PATH; {INSTALL}")
