"""Container images of agents: which artifact names one, and getting it into the engine."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from typing import Any

from ..agents.version_fields import LOCAL_ARTIFACT
from .client import Engine, EngineError

log = logging.getLogger(__name__)
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
            raise EngineError(f"{engine} has no image {name!r} and could not pull it: {e}", status=e.status) from e
        found = await engine.image(name)
    if found is None:
        raise EngineError(f"{engine} has no image {name!r}; build it, or pull it")
    _warn_of_architecture(name, str(found.get("Architecture", "")))
    return str(found["Id"])


def _warn_of_architecture(name: str, architecture: str) -> None:
    here = ARCHITECTURES.get(platform.machine(), platform.machine())
    if architecture and architecture != here:
        log.warning("image %s is for %s, this machine is %s: it runs by emulation, if at all", name, architecture, here)
    elif architecture == "amd64":
        log.warning("image %s is for amd64; AgentCore Runtime runs linux/arm64 images only", name)
