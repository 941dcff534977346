"""An image: built and pushed by Podman, run by the local runtime."""

from __future__ import annotations

import base64
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.deploy.artifact import this_platform
from agentcore_rl_toolkit.deploy.settings import Settings
from agentcore_rl_toolkit.errors import ConfigError

from ..runtime.container_images import AGENT as CONTAINER_AGENT
from ..runtime.container_images import engine_storage
from .conftest import an_aws, deployment
from .registry import Registry

__all__ = ["engine_storage"]  # a fixture


@pytest.fixture(scope="module")
def aws(engine_storage: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Here the runtime has the tests' container engine."""
    with an_aws(tmp_path_factory.mktemp("aws")) as found:
        yield found


@pytest.fixture
def pushed(account: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What Podman pushes to a registry that stands where ECR's name leads; what it gets, ECR's API knows."""
    ecr = boto3.client("ecr")
    token = ecr.get_authorization_token()["authorizationData"][0]["authorizationToken"]
    found: list[str] = []

    def known(repository: str, tag: str, manifest: str) -> None:
        found.append(f"{repository}:{tag}")
        ecr.put_image(repositoryName=repository, imageManifest=manifest, imageTag=tag)

    registry = Registry(base64.b64decode(token).decode().partition(":")[2], known)
    registries = tmp_path / "registries.conf"
    registries.write_text('[[registry]]\nlocation = "123456789012.dkr.ecr.us-west-2.amazonaws.com"\ninsecure = true\n')
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(registries))
    monkeypatch.setenv("http_proxy", f"http://{registry.address}")  # the name of ECR leads here
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield found
    registry.close()


def an_agent(folder: Path, script: Path) -> Path:
    folder.mkdir()
    shutil.copy(script, folder / "agent.py")
    base = "FROM localhost/agentcore-rl-test/base\nCOPY agent.py /app/agent.py\nWORKDIR /app\n"
    (folder / "Dockerfile").write_text(base + 'CMD ["python3", "/app/agent.py"]\n')
    return folder


@pytest.mark.system
def test_an_image_is_built_pushed_and_runs_and_is_built_once(pushed: list[str], tmp_path: Path) -> None:
    control = boto3.client("bedrock-agentcore-control")
    folder = an_agent(tmp_path / "boxed", CONTAINER_AGENT)
    what = Settings(name="boxed", folder=folder, platform=this_platform())
    lines: list[str] = []
    try:
        absent = "123456789012.dkr.ecr.us-west-2.amazonaws.com/agentcore-rl/boxed:absent"
        with pytest.raises(ConfigError, match=r"CREATE_FAILED.*absent"):
            deployment(dataclasses.replace(what, folder=None, image=absent), lines).up()
        done = deployment(what, lines).up()  # what failed to be made is in nobody's way
        assert any(line.endswith("is pushed") for line in lines)
        assert len(pushed) == 1
        state = control.get_agent_runtime(agentRuntimeId=str(done.arn).rsplit("/", 1)[1])
        assert state["status"] == "READY"
        uri = state["agentRuntimeArtifact"]["containerConfiguration"]["containerUri"]
        assert uri == f"123456789012.dkr.ecr.us-west-2.amazonaws.com/{pushed[0]}"
        reply = boto3.client("bedrock-agentcore").invoke_agent_runtime(
            agentRuntimeArn=done.arn, runtimeSessionId=new_session_id(), payload=b'{"do": "echo"}'
        )
        assert reply["statusCode"] == 200
        again = deployment(what, lines).up()
        assert (again.changed, len(pushed)) == (False, 1)
        # for another architecture than the base image has, it does not get as far as the registry
        other = "linux/amd64" if this_platform() == "linux/arm64" else "linux/arm64"
        with pytest.raises(ConfigError, match=f"{other} is needed|the build failed"):
            deployment(dataclasses.replace(what, platform=other), lines).up()
        assert len(pushed) == 1
    finally:
        deployment(what, lines).remove()
    assert any("repository agentcore-rl/boxed: is removed" in line for line in lines)
