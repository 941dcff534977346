"""Deploying, bringing up to date, taking away: IAM and ECR of moto, the local control plane, S3 and runtime, unmodified boto3."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.deploy import command, write_env
from agentcore_rl_toolkit.deploy.artifact import this_platform
from agentcore_rl_toolkit.deploy.calls import Calls
from agentcore_rl_toolkit.deploy.deployment import TAG, Settings
from agentcore_rl_toolkit.errors import ConfigError

from .conftest import AGENT, deployment

ROOT = Path(__file__).parents[2]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
BUCKET = "records-of-the-shop"


@pytest.fixture(scope="module")
def agent_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents") / "shop"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    (folder / "requirements.txt").write_text("agentcore-rl-toolkit\n# nothing else\n")
    return folder


def settings(folder: Path, /, **changed: Any) -> Settings:
    return Settings(
        **{
            "name": "shop",
            "folder": folder,
            "code": True,
            "python": HERE,
            "platform": this_platform(),
            "bucket": BUCKET,
            "endpoint": "prod",
            "smoke": {"prompt": "four"},
            **changed,
        }
    )


class KilledError(BaseException):
    pass


class Mortal(Calls):
    """Ends the process, as far as the deployment can tell, when its first call that changes something was answered."""

    def __init__(self) -> None:
        super().__init__(region=None, rehearse=False, say=lambda _: None)

    def __call__(self, service: str, operation: str, **parameters: Any) -> Any:
        reply = super().__call__(service, operation, **parameters)
        if not operation.startswith(("Get", "List", "Describe", "Head")):
            raise KilledError(operation)
        return reply


def runtimes() -> list[dict[str, Any]]:
    found = boto3.client("bedrock-agentcore-control").list_agent_runtimes()["agentRuntimes"]
    return [r for r in found if r["agentRuntimeName"] == "shop" and r["status"] != "DELETING"]


@pytest.mark.timeout(600)  # fifteen deployments, each cut short
def test_deploy_update_and_remove_go_on_wherever_they_were_killed(account: dict[str, str], agent_folder: Path) -> None:
    killed = []
    for _ in range(20):
        try:
            done = deployment(settings(agent_folder), calls=Mortal()).up()
            break
        except KilledError as e:
            killed.append(str(e))
    assert killed == [
        "CreateBucket",
        "PutObject",
        "CreateRole",
        "PutRolePolicy",
        "CreateAgentRuntime",
        "CreateAgentRuntimeEndpoint",
    ]
    assert done.smoke == "ok"
    [runtime] = runtimes()
    assert runtime["agentRuntimeArn"] == done.arn
    control, iam = boto3.client("bedrock-agentcore-control"), boto3.client("iam")
    assert control.list_tags_for_resource(resourceArn=done.arn)["tags"][TAG] == "shop"
    policy = iam.get_role_policy(RoleName="agentcore-rl-shop", PolicyName="agentcore-rl")["PolicyDocument"]
    assert {"Sid": "Records"}.items() <= policy["Statement"][-1].items()

    # again: nothing to do, said so
    lines: list[str] = []
    again = deployment(settings(agent_folder, smoke=None), lines).up()
    assert (again.arn, again.version, again.changed) == (done.arn, done.version, False)
    assert any("up to date" in line for line in lines)

    # another environment: a new version, the endpoint follows, killed in between
    changed = settings(agent_folder, environment={"LEVEL": "2"}, smoke={"prompt": "four"})
    for _ in range(20):
        try:
            new = deployment(changed, calls=Mortal()).up()
            break
        except KilledError as e:
            killed.append(str(e))
    assert killed[6:] == ["UpdateAgentRuntime", "UpdateAgentRuntimeEndpoint"]
    assert new.arn == done.arn
    assert int(new.version or 0) > int(done.version or 0)
    identity = str(done.arn).rsplit("/", 1)[1]
    endpoint = control.get_agent_runtime_endpoint(agentRuntimeId=identity, endpointName="prod")
    assert new.version in (endpoint.get("targetVersion"), endpoint.get("liveVersion"))

    # an agent that raises ran, and says what it raised
    failing = deployment(settings(agent_folder, environment={"LEVEL": "2"}, smoke={"prompt": "x", "fail": True})).up()
    assert str(failing.smoke).startswith("agent_error")
    assert "does not like" in str(failing.smoke)

    # away, killed at every step
    removed = []
    for _ in range(20):
        try:
            left = deployment(settings(agent_folder), calls=Mortal()).remove()
            break
        except KilledError as e:
            removed.append(str(e))
    assert {"DeleteAgentRuntimeEndpoint", "DeleteAgentRuntime", "DeleteRole", "DeleteObject"} <= set(removed)
    assert runtimes() == []
    with pytest.raises(iam.exceptions.NoSuchEntityException):
        iam.get_role(RoleName="agentcore-rl-shop")
    kept = [item["Key"] for item in boto3.client("s3").list_objects_v2(Bucket=BUCKET)["Contents"]]
    assert all(key.startswith("agentcore-rl-smoke/") for key in kept)  # the records stay
    assert any(BUCKET in line for line in left)


def test_a_rehearsal_prints_every_call_and_changes_nothing(
    account: dict[str, str], agent_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [
        "--agent",
        str(agent_folder),
        "--bucket",
        "not-there-yet",
        "--dry-run",
        "--no-smoke",
        "--name",
        "rehearsed",
    ]
    (agent_folder / "Dockerfile").write_text("FROM scratch\n")
    try:
        done = CliRunner().invoke(command, options)
    finally:
        (agent_folder / "Dockerfile").unlink()
    assert done.exit_code == 0, done.output
    for call in (
        "s3:CreateBucket",
        "ecr:CreateRepository",
        "iam:CreateRole",
        "iam:PutRolePolicy",
        "control:CreateAgentRuntime",
    ):
        assert f"would call {'bedrock-agentcore-' if call.startswith('control') else ''}{call}" in done.output
    assert '"bedrock-agentcore.amazonaws.com"' in done.output  # the trust policy, as a document
    assert "would build" in done.output
    assert not (tmp_path / ".env").exists()
    assert boto3.client("ecr").describe_repositories()["repositories"] == []
    assert "not-there-yet" not in [b["Name"] for b in boto3.client("s3").list_buckets()["Buckets"]]


def test_the_examples_are_deployed_as_their_pages_say(account: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page's own command, rehearsed: the image would be built from the example's folder, and the agent made."""
    monkeypatch.chdir(ROOT)
    pages = [page for page in ROOT.glob("examples/*/README.md") if "## Run it on AWS" in page.read_text()]
    assert len(pages) == 10
    for page in pages:
        [line] = re.findall(r"^agentcore-rl deploy (.*)$", page.read_text(), re.MULTILINE)
        done = CliRunner().invoke(command, [*shlex.split(line), "--dry-run"])
        assert done.exit_code == 0, (page, done.output)
        assert f"would build examples/{page.parent.name} " in done.output
        assert f'"agentRuntimeName": "{page.parent.name}"' in done.output


def test_the_policies_are_printed_as_documents_that_iam_takes(account: dict[str, str]) -> None:
    options = ["iam", "--name", "shop", "--bucket", "my-records"]
    names = ["trust", "execution", "trainer", "doctor", "deployer"]
    build = ["codebuild_trust", "codebuild", "codebuild_starter"]
    printed = CliRunner().invoke(command, [*options, "--json"])
    assert printed.exit_code == 0, printed.output
    documents = json.loads(printed.output)
    assert list(documents) == names + build
    read = CliRunner().invoke(command, options).output
    sections = [part.split("\n", 1) for part in read.removeprefix("# ").split("\n\n# ")]
    assert {title.split(":")[0]: json.loads(body) for title, body in sections} == documents
    for name, document in documents.items():
        made = {"RoleName": f"printed-{name}", "AssumeRolePolicyDocument": json.dumps(documents["trust"])}
        if name.endswith("trust"):
            made["AssumeRolePolicyDocument"] = json.dumps(document)
        boto3.client("iam").create_role(**made)
        if not name.endswith("trust"):
            boto3.client("iam").put_role_policy(
                RoleName=f"printed-{name}", PolicyName="p", PolicyDocument=json.dumps(document)
            )
    # an archive (--code) has no image to build
    printed = CliRunner().invoke(command, [*options, "--json", "--code"])
    assert list(json.loads(printed.output)) == names


def test_the_command_killed_while_it_makes_the_agent_goes_on_and_writes_env(
    account: dict[str, str], agent_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text("# mine\nOTHER=1\nAGENTCORE_AGENT_ARN=old\n")
    run = [
        sys.executable,
        "-m",
        "agentcore_rl_toolkit.cli",
        "deploy",
        "--agent",
        str(agent_folder),
        "--code",
        "--python",
        HERE,
    ]
    run += ["--bucket", BUCKET, "--name", "killed", "--smoke", '{"prompt": "abc"}']
    first = subprocess.Popen(
        run, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert first.stdout is not None
    for line in first.stdout:
        if "agent killed: is made" in line:
            first.kill()
            break
    first.stdout.close()
    assert first.wait(60) == -signal.SIGKILL
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one rollout: ok" in done.stdout
    lines = (tmp_path / ".env").read_text().splitlines()
    [arn] = [line.partition("=")[2] for line in lines if line.startswith("AGENTCORE_AGENT_ARN=")]
    assert ":runtime/killed-" in arn
    assert lines[:2] == ["# mine", "OTHER=1"]
    assert f"AGENTCORE_S3_BUCKET={BUCKET}" in lines
    done = subprocess.run([*run, "--remove"], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left: the bucket" in done.stdout


def test_what_another_made_is_not_removed(account: dict[str, str]) -> None:
    control, iam = boto3.client("bedrock-agentcore-control"), boto3.client("iam")
    assert "other" in [r["agentRuntimeName"] for r in control.list_agent_runtimes()["agentRuntimes"]]
    with pytest.raises(ConfigError, match="was not made by"):
        deployment(Settings(name="other", platform=this_platform())).remove()
    iam.create_role(RoleName="agentcore-rl-theirs", AssumeRolePolicyDocument="{}")
    left = deployment(Settings(name="theirs", platform=this_platform())).remove()
    assert any("agentcore-rl-theirs" in line for line in left)
    assert iam.get_role(RoleName="agentcore-rl-theirs")["Role"]["RoleName"] == "agentcore-rl-theirs"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"image": "x"}, "contradict"),
        ({"bucket": None}, "--bucket"),
        ({"subnets": ["subnet-1"]}, "--security-group"),
        ({"folder": None, "code": False}, "what is to be deployed"),
        ({"entry": "absent.py"}, "has no absent.py"),
        ({"code": False}, "has no Dockerfile"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_before_any_call(
    account: dict[str, str], agent_folder: Path, changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        deployment(settings(agent_folder, **changed)).up()


def test_an_image_without_an_engine_says_what_else_there_is(account: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    what = settings(tmp_path, code=False, name="without", engine="no-such-engine", smoke=None)
    with pytest.raises(ConfigError, match=r"no-such-engine is not on PATH.*--code"):
        deployment(what).up()
    deployment(what).remove()


def test_missing_credentials_and_region_are_said_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigError, match="no region"):
        Calls(region=None, rehearse=False, say=print)
    with pytest.raises(ConfigError, match="no credentials: export"):
        Calls(region="us-west-2", rehearse=False, say=print)


def test_env_keeps_what_it_does_not_set(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    write_env(path, {"A": "1", "B": None})
    assert path.read_text() == "A=1\n"
    path.write_text("export A=0\n# note\nC=3")
    write_env(path, {"A": "2"})
    assert path.read_text() == "A=2\n# note\nC=3\n"
