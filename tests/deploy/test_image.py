"""An image: built and pushed by Podman, run by the local runtime."""

from __future__ import annotations

import base64
import dataclasses
import os
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
from .killer import Between, Killer, deadly_engine, warm_cli
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


@pytest.mark.nightly
@pytest.mark.timeout(600)  # some forty commands, each cut short by one call later
def test_an_image_killed_after_every_call_is_deployed_once_and_taken_away(
    account: dict[str, str], pushed: list[str], tmp_path: Path
) -> None:
    """The command itself is killed, by SIGKILL, when what it asked of AWS or of Podman was done and it has no answer yet."""
    killer = Killer()
    services = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE")
    between = {name: Between(account[name], killer) for name in services}
    between[f"{services[2]}_CONTROL"] = between[services[2]]
    environment = {**os.environ, **{name: server.url for name, server in between.items()}}
    engine, steps = deadly_engine(tmp_path, str(shutil.which("podman")))
    environment["PATH"] = f"{engine.parent}:{environment['PATH']}"
    folder = an_agent(tmp_path / "mortal", Path(__file__).parent / "recording_agent.py")
    deploy = ["deploy", "--agent", str(folder), "--bucket", "records-of-the-mortal"]
    deploy += ["--endpoint", "prod", "--smoke", '{"prompt": "x"}']
    (tmp_path / ".env").write_text("MINE=1\n")
    try:
        with warm_cli(tmp_path, environment, killer) as cli:
            printed, killed = cli.run_until_it_ends(deploy, at_most=60)
            made = killer.done.copy()
            assert killed == len(made) + 3
            assert {step.name for step in steps.iterdir()} == {"build", "image", "push"}
            assert "one rollout: ok" in printed
            it_is_deployed_once(tmp_path, pushed)

            # with nothing to do it changes nothing
            killer.kills = False
            before = len(killer.bodies)
            code, printed = cli.run([*deploy, "--smoke", "none"])
            assert code == 0, printed
            again = {operation for operation, _ in killer.bodies[before:]}
            assert not {o for o in again if not o.partition(":")[2].startswith(("Get", "List", "Describe", "Head"))}

            killer.kills, killer.done = True, []
            printed, _ = cli.run_until_it_ends([*deploy, "--remove"], at_most=60)
            assert it_is_gone() == []
            assert "left: the bucket records-of-the-mortal" in printed
            assert (tmp_path / ".env").read_text().splitlines()[0] == "MINE=1"
            assert "AGENTCORE_AGENT_ARN" not in (tmp_path / ".env").read_text()
    finally:
        for server in {*between.values()}:
            server.close()
        deployment(Settings(name="mortal", platform=this_platform())).remove()
    changes = {"s3:CreateBucket", "ecr:CreateRepository", "iam:CreateRole", "iam:PutRolePolicy"}
    runtime = {"CreateAgentRuntime", "CreateAgentRuntimeEndpoint", "InvokeAgentRuntime", "StopRuntimeSession"}
    assert changes | {f"bedrock-agentcore:{name}" for name in runtime} <= set(made)
    gone = {"bedrock-agentcore:DeleteAgentRuntime", "iam:DeleteRole", "iam:DeleteRolePolicy", "ecr:DeleteRepository"}
    assert gone | {"bedrock-agentcore:DeleteAgentRuntimeEndpoint"} <= set(killer.done)


def it_is_deployed_once(folder: Path, pushed: list[str]) -> None:
    control, ecr = boto3.client("bedrock-agentcore-control"), boto3.client("ecr")
    [runtime] = [r for r in control.list_agent_runtimes()["agentRuntimes"] if r["agentRuntimeName"] == "mortal"]
    assert (runtime["status"], runtime["agentRuntimeVersion"]) == ("READY", "1")
    ends = control.list_agent_runtime_endpoints(agentRuntimeId=runtime["agentRuntimeId"])["runtimeEndpoints"]
    assert sorted(end["name"] for end in ends) == ["DEFAULT", "prod"]
    assert len(pushed) == 1
    [image] = ecr.describe_images(repositoryName="agentcore-rl/mortal")["imageDetails"]
    assert [f"agentcore-rl/mortal:{tag}" for tag in image["imageTags"]] == pushed
    lines = (folder / ".env").read_text().splitlines()
    assert lines[:2] == ["MINE=1", f"AGENTCORE_AGENT_ARN={runtime['agentRuntimeArn']}"]


def it_is_gone() -> list[str]:
    """What there still is of it."""
    control = boto3.client("bedrock-agentcore-control")
    names = [r["agentRuntimeName"] for r in control.list_agent_runtimes()["agentRuntimes"]]
    names += [role["RoleName"] for role in boto3.client("iam").list_roles()["Roles"]]
    names += [
        repository["repositoryName"] for repository in boto3.client("ecr").describe_repositories()["repositories"]
    ]
    return [name for name in names if "mortal" in name]
