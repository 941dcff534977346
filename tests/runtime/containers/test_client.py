"""Finding a container engine, and what is said where there is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from agentcore_rl_toolkit.errors import ConfigError, MissingExtraError
from agentcore_rl_toolkit.runtime.containers.client import ContainerEngine
from serving import answering


async def test_the_engine_that_docker_host_names_is_asked_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiodocker")
    podman = {"ApiVersion": "1.41", "Components": [{"Name": "Podman ContainerEngine"}]}
    with answering(lambda _: (200, podman, {"content-type": "application/json"})) as url:
        monkeypatch.setenv("DOCKER_HOST", url.replace("http", "tcp"))
        engine = ContainerEngine()
        await engine.start()
        await engine.close()
        assert engine.name == "podman"


@pytest.mark.skipif(
    os.path.exists("/var/run/docker.sock") or os.path.exists("/run/podman/podman.sock"),
    reason="an engine listens at its usual place",
)
async def test_without_an_engine_the_error_says_what_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiodocker")
    for name in ("DOCKER_HOST", "CONTAINER_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no socket.*podman system service"):
        await ContainerEngine().start()


def test_without_aiodocker_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiodocker", None)
    with pytest.raises(MissingExtraError, match=r"\[containers\]"):
        ContainerEngine()
