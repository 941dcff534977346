"""Container images of agents: reads the image's name from the artifact and pulls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..agents.version_fields import LOCAL_ARTIFACT
from .client import Engine, EngineError

_BUILT_HERE = "localhost/"  # what Podman calls images that were never pushed; there is no registry to ask


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
    return str(found["Id"])
