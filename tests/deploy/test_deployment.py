"""Deploying, bringing up to date, taking away: IAM, ECR and S3 of moto, the local control plane, unmodified boto3."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from click.testing import CliRunner
from moto.bedrockagentcorecontrol.models import AgentRuntime

from agentcore_rl_toolkit.cli.deploy import _name, command, forget_agent
from agentcore_rl_toolkit.deploy.artifact import this_platform
from agentcore_rl_toolkit.deploy.calls import Calls, RefusedError
from agentcore_rl_toolkit.deploy.deployment import Deployment
from agentcore_rl_toolkit.deploy.settings import TAG, Settings
from agentcore_rl_toolkit.errors import ConfigError

from .conftest import AGENT, an_aws, deployment, use, without_processes

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


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with without_processes(tmp_path_factory.mktemp("aws")) as found:
        yield found


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


def until_it_stays(killed: list[str], do: Callable[[], Any]) -> Any:
    """What is done in the end, with a kill at each call that changes something: these calls are added to ``killed``."""
    for _ in range(20):
        try:
            return do()
        except KilledError as e:
            killed.append(str(e))
    raise AssertionError(killed)


def runtimes() -> list[dict[str, Any]]:
    found = boto3.client("bedrock-agentcore-control").list_agent_runtimes()["agentRuntimes"]
    return [r for r in found if r["agentRuntimeName"] == "shop" and r["status"] != "DELETING"]


@pytest.mark.system
def test_an_archive_is_uploaded_and_named_to_the_control_plane(
    account: dict[str, str], agent_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of moto: the local runtime takes no archives."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE_CONTROL", account["AWS_ENDPOINT_URL"])
    made = AgentRuntime.__init__

    def named(runtime: Any, *args: Any, **kwargs: Any) -> None:  # AWS's ARNs end with the runtime's id
        made(runtime, *args, **kwargs)
        runtime.agent_runtime_arn = (
            f"arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/{runtime.agent_runtime_id}"
        )

    monkeypatch.setattr(AgentRuntime, "__init__", named)
    done = deployment(settings(agent_folder, name="archived", bucket="archives", endpoint=None, smoke=None)).up()
    control, s3 = boto3.client("bedrock-agentcore-control"), boto3.client("s3")
    [runtime] = control.list_agent_runtimes()["agentRuntimes"]
    code = control.get_agent_runtime(agentRuntimeId=runtime["agentRuntimeId"])["agentRuntimeArtifact"][
        "codeConfiguration"
    ]
    assert done.arn == runtime["agentRuntimeArn"]
    assert (code["runtime"], code["entryPoint"]) == (f"PYTHON_{HERE.replace('.', '_')}", ["agent.py"])
    place = code["code"]["s3"]
    archive = io.BytesIO(s3.get_object(Bucket=place["bucket"], Key=place["prefix"])["Body"].read())
    assert "agent.py" in zipfile.ZipFile(archive).namelist()
    assert place["bucket"] == "archives"


@pytest.mark.timeout(600)  # fifteen deployments, each cut short
def test_deploy_update_and_remove_go_on_wherever_they_were_killed(
    agent_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with an_aws(tmp_path) as found:
        _deploy_update_and_remove(use(found, monkeypatch), agent_folder)


def _deploy_update_and_remove(account: dict[str, str], agent_folder: Path) -> None:
    killed: list[str] = []
    served = {
        "folder": None,
        "code": False,
        "image": f"local://{account['agent']}",
    }  # the local runtime takes no archives
    done = until_it_stays(killed, lambda: deployment(settings(agent_folder, **served), calls=Mortal()).up())
    assert killed == [
        "CreateBucket",
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
    again = deployment(settings(agent_folder, **served, smoke=None), lines).up()
    assert (again.arn, again.version, again.changed) == (done.arn, done.version, False)
    assert any("up to date" in line for line in lines)

    # another environment: a new version, the endpoint follows, killed in between
    changed = settings(agent_folder, **served, environment={"LEVEL": "2"}, smoke={"prompt": "four"})
    new = until_it_stays(killed, lambda: deployment(changed, calls=Mortal()).up())
    assert killed[5:] == ["UpdateAgentRuntime", "UpdateAgentRuntimeEndpoint"]
    assert new.arn == done.arn
    assert int(new.version or 0) > int(done.version or 0)
    identity = str(done.arn).rsplit("/", 1)[1]
    endpoint = control.get_agent_runtime_endpoint(agentRuntimeId=identity, endpointName="prod")
    assert new.version in (endpoint.get("targetVersion"), endpoint.get("liveVersion"))

    # an agent that raises ran, and says what it raised
    fail = {"environment": {"LEVEL": "2"}, "smoke": {"prompt": "x", "fail": True}}
    failing = deployment(settings(agent_folder, **served, **fail)).up()
    assert str(failing.smoke).startswith("agent_error")
    assert "does not like" in str(failing.smoke)

    # away, killed at every step
    removed: list[str] = []
    left = until_it_stays(removed, lambda: deployment(settings(agent_folder, **served), calls=Mortal()).remove())
    assert {"DeleteAgentRuntimeEndpoint", "DeleteAgentRuntime", "DeleteRole"} <= set(removed)
    assert runtimes() == []
    with pytest.raises(iam.exceptions.NoSuchEntityException):
        iam.get_role(RoleName="agentcore-rl-shop")
    kept = [item["Key"] for item in boto3.client("s3").list_objects_v2(Bucket=BUCKET)["Contents"]]
    assert all(key.startswith("agentcore-rl-smoke/") for key in kept)  # the records stay
    assert any(BUCKET in line for line in left)


@pytest.mark.system
@pytest.mark.usefixtures("image_builder")
def test_the_examples_are_deployed_as_their_pages_say(account: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page's own command, rehearsed: the image would be built from the example's folder, and the agent made."""
    monkeypatch.chdir(ROOT)
    pages = [page for page in ROOT.glob("examples/*/README.md") if "## Run it on AWS" in page.read_text()]
    assert len(pages) > 9
    for page in pages:
        [line] = re.findall(r"^agentcore-rl deploy (.*)$", page.read_text(), re.MULTILINE)
        done = CliRunner().invoke(command, [*shlex.split(line), "--dry-run"])
        assert done.exit_code == 0, (page, done.output)
        assert f"would build examples/{page.parent.name} " in done.output
        assert f'"agentRuntimeName": "{page.parent.name}"' in done.output


ALL_OPTIONS = {
    "--role": ["arn:aws:iam::123456789012:role/mine"],
    "--subnet": ["subnet-0a1b2c3d", "subnet-4e5f6a7b"],
    "--security-group": ["sg-0a1b2c3d"],
    "--env": ["LEVEL=1", "PATH_TO=a=b"],
}


@pytest.fixture
def on_the_wire(account: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, Any]]]:
    """Runs the command; gives what it sent that changes something (botocore's model checks it first)."""
    sent: list[tuple[str, Any]] = []
    call = Calls.__call__

    def recorded(self: Calls, service: str, operation: str, *, absent: tuple[str, ...] = (), **parameters: Any) -> Any:
        if not operation.startswith(("Get", "List", "Describe", "Head")) and service != "s3":
            sent.append((operation, parameters))
        return call(self, service, operation, absent=absent, **parameters)

    monkeypatch.setattr(Calls, "__call__", recorded)

    def run(options: dict[str, list[str]], *more: str) -> list[tuple[str, Any]]:
        words = [word for option, values in options.items() for value in values for word in (option, value)]
        sent.clear()
        image = ["--image", f"local://{account['agent']}"]
        done = CliRunner().invoke(command, ["--name", "optional", "--smoke", "none", *image, *words, *more])
        assert done.exit_code == 0, done.output
        if "--dry-run" in more:
            parts = re.findall(r"^would call [\w-]+:(\w+)\n((?:    .*\n)+)", done.output, re.MULTILINE)
            return [(name, json.loads(body)) for name, body in parts]
        return list(sent)

    return run


def test_every_option_reaches_the_control_plane_and_is_kept_or_changed_by_the_next_call(
    on_the_wire: Callable[..., list[tuple[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    endpoint = ["--endpoint", "prod"]
    (name, sent), (second, pointed) = on_the_wire(ALL_OPTIONS, *endpoint)
    assert (name, second) == ("CreateAgentRuntime", "CreateAgentRuntimeEndpoint")
    tags = {TAG: "optional"}
    wanted = {
        "roleArn": "arn:aws:iam::123456789012:role/mine",
        "networkConfiguration": {
            "networkMode": "VPC",
            "networkModeConfig": {"subnets": ["subnet-0a1b2c3d", "subnet-4e5f6a7b"], "securityGroups": ["sg-0a1b2c3d"]},
        },
        "environmentVariables": {"AGENTCORE_RL_ROLLOUTS": "on", "LEVEL": "1", "PATH_TO": "a=b"},
    }
    assert wanted.items() <= sent.items()
    assert (sent["agentRuntimeName"], sent["tags"]) == ("optional", tags)
    assert (pointed["name"], pointed["agentRuntimeVersion"], pointed["tags"]) == ("prod", "1", tags)

    # the same again changes nothing; the order of subnets is none
    assert on_the_wire(ALL_OPTIONS, *endpoint) == []
    assert on_the_wire({**ALL_OPTIONS, "--subnet": ALL_OPTIONS["--subnet"][::-1]}, *endpoint) == []

    # each option alone changes its own field, and sends the others as they are
    ours = {"AGENTCORE_RL_ROLLOUTS": "(set)"}  # of each version for training; values are not printed
    shown = {**wanted, "environmentVariables": {**ours, "LEVEL": "(set)", "PATH_TO": "(set)"}}
    for option, value, field, becomes in (
        ("--role", ["arn:aws:iam::123456789012:role/other"], "roleArn", "arn:aws:iam::123456789012:role/other"),
        ("--env", ["LEVEL=1"], "environmentVariables", {**ours, "LEVEL": "(set)"}),  # a variable less is a change, too
        ("--env", [], "environmentVariables", ours),
    ):
        [(name, body)] = on_the_wire({**ALL_OPTIONS, option: value}, *endpoint, "--dry-run")
        assert name == "UpdateAgentRuntime"
        assert {k: body[k] for k in wanted} == {**shown, field: becomes}, option
    for option in ("--subnet", "--security-group"):
        [(name, body)] = on_the_wire({**ALL_OPTIONS, option: [ALL_OPTIONS[option][0] + "ff"]}, *endpoint, "--dry-run")
        assert {k: v for k, v in shown.items() if body[k] != v} == {
            "networkConfiguration": wanted["networkConfiguration"]
        }
    control = boto3.client("bedrock-agentcore-control")
    [runtime] = [r for r in control.list_agent_runtimes()["agentRuntimes"] if r["agentRuntimeName"] == "optional"]
    assert runtime["agentRuntimeVersion"] == "1"
    identity = runtime["agentRuntimeId"]

    # what another tool has set stays; what the options no longer say is AgentCore's own again
    now = control.get_agent_runtime(agentRuntimeId=identity)
    theirs = {
        "description": "theirs",
        "requestHeaderConfiguration": {"requestHeaderAllowlist": ["X-Amzn-Bedrock-AgentCore-Runtime-Custom-Theirs"]},
    }
    kept = ("agentRuntimeArtifact", "roleArn", "networkConfiguration", "environmentVariables")
    control.update_agent_runtime(agentRuntimeId=identity, **{name: now[name] for name in kept}, **theirs)
    names = [name for name, _ in on_the_wire({}, *endpoint)]
    assert names == ["CreateRole", "PutRolePolicy", "UpdateAgentRuntime", "UpdateAgentRuntimeEndpoint"]
    now = control.get_agent_runtime(agentRuntimeId=identity)
    assert {name: now[name] for name in theirs} == theirs
    assert now["networkConfiguration"] == {"networkMode": "PUBLIC"}
    assert now["environmentVariables"] == {"AGENTCORE_RL_ROLLOUTS": "on"}
    assert now["roleArn"].endswith(":role/agentcore-rl-optional")
    assert on_the_wire({}, "--remove") != []
    assert "optional" not in [r["agentRuntimeName"] for r in control.list_agent_runtimes()["agentRuntimes"]]


def test_a_deployment_keeps_the_promoted_model_unless_its_options_name_one(
    on_the_wire: Callable[..., list[tuple[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url, model_id = "AGENTCORE_RL_MODEL_URL", "AGENTCORE_RL_MODEL_ID"
    role = {"--role": ["arn:aws:iam::123456789012:role/mine"]}
    ours = {"AGENTCORE_RL_ROLLOUTS": "on"}
    on_the_wire({**role, "--env": [f"{url}=https://promoted.example", "LEVEL=1"]})
    assert on_the_wire({**role, "--env": ["LEVEL=1"]}) == []
    [(_, updated)] = on_the_wire({**role, "--env": ["LEVEL=2"]})
    assert updated["environmentVariables"] == {**ours, "LEVEL": "2", url: "https://promoted.example"}
    [(_, updated)] = on_the_wire({**role, "--env": [f"{model_id}=m"]})
    assert updated["environmentVariables"] == {**ours, model_id: "m"}
    on_the_wire({}, "--remove")


def test_a_refused_role_of_the_user_is_an_error_at_once(account: dict[str, str]) -> None:
    class Refuses(Calls):
        def __call__(self, service: str, operation: str, **parameters: Any) -> Any:
            if operation == "CreateAgentRuntime":
                refused.append(operation)
                raise RefusedError("Role validation failed", code="ValidationException")
            return super().__call__(service, operation, **parameters)

    refused: list[str] = []
    role = "arn:aws:iam::123456789012:role/mine"
    image = "123456789012.dkr.ecr.us-west-2.amazonaws.com/shop:1"
    what = Settings(name="refused", image=image, role=role, platform="linux/arm64")
    with pytest.raises(RefusedError, match="Role validation failed"):
        Deployment(what, Refuses(region=None, rehearse=False, say=lambda _: None)).up()
    assert len(refused) == 1


def test_a_role_that_another_made_is_not_changed(account: dict[str, str]) -> None:
    iam = boto3.client("iam")
    iam.create_role(RoleName="agentcore-rl-taken", AssumeRolePolicyDocument="{}")
    what = Settings(name="taken", image=f"local://{account['agent']}", platform=this_platform())
    with pytest.raises(ConfigError, match=r"role agentcore-rl-taken .*--name"):
        deployment(what).up()
    assert iam.list_role_policies(RoleName="agentcore-rl-taken")["PolicyNames"] == []


def test_a_deployment_in_another_region_leaves_the_role_of_the_first(account: dict[str, str]) -> None:
    """Roles belong to no region: sessions of the first one would lose their rights."""
    iam = boto3.client("iam")
    what = Settings(name="everywhere", image=f"local://{account['agent']}", platform=this_platform())
    first, second = (
        deployment(what, calls=Calls(region=region, rehearse=False, say=lambda _: None))
        for region in ("us-west-2", "eu-west-1")
    )
    first.up()
    assert iam.get_role(RoleName="agentcore-rl-everywhere")["Role"]["Tags"] == [{"Key": TAG, "Value": "everywhere"}]
    trust = iam.get_role(RoleName="agentcore-rl-everywhere")["Role"]["AssumeRolePolicyDocument"]
    second._artifact = lambda: pytest.fail("an image is built")  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"not made by this command in eu-west-1: choose another --name"):
        second.up()
    assert second._resources.remove_role("agentcore-rl-everywhere") is False
    assert iam.get_role(RoleName="agentcore-rl-everywhere")["Role"]["AssumeRolePolicyDocument"] == trust
    assert first.remove()
    assert "agentcore-rl-everywhere" not in [role["RoleName"] for role in iam.list_roles()["Roles"]]


def test_an_agent_for_production_is_not_turned_into_one_for_rollouts(account: dict[str, str]) -> None:
    control = boto3.client("bedrock-agentcore-control")
    what = Settings(name="sells", image=f"local://{account['agent']}", platform=this_platform())
    production = deployment(what).up()
    with pytest.raises(
        ConfigError, match=r"the agent sells serves production calls; --score-ready needs another --name"
    ):
        deployment(replace(what, score_ready=True)).up()
    assert production.arn is not None
    now = control.get_agent_runtime(agentRuntimeId=production.arn.rpartition("/")[2])
    assert (now["agentRuntimeVersion"], now["environmentVariables"]) == ("1", {"AGENTCORE_RL_ROLLOUTS": "on"})
    assert deployment(what).remove()


def test_an_agent_that_another_tool_made_is_not_changed(account: dict[str, str]) -> None:
    control = boto3.client("bedrock-agentcore-control")
    what = Settings(name="other", image=f"local://{account['agent']}", platform=this_platform(), bucket="of-the-other")
    with pytest.raises(ConfigError, match=r"the agent other was not made by .*nothing is changed.*--name"):
        deployment(what).up()
    (agent,) = [a for a in control.list_agent_runtimes()["agentRuntimes"] if a["agentRuntimeName"] == "other"]
    assert agent["agentRuntimeVersion"] == "1"
    assert "agentcore-rl-other" not in [role["RoleName"] for role in boto3.client("iam").list_roles()["Roles"]]
    assert "of-the-other" not in [bucket["Name"] for bucket in boto3.client("s3").list_buckets()["Buckets"]]


@pytest.mark.parametrize(
    ("bucket", "prefix", "store"), [("b", "p/", "s3://b/p/"), ("b", "", "b"), (None, "p/", None), (None, "", None)]
)
def test_the_store_of_the_records_has_their_prefix(bucket: str | None, prefix: str, store: str | None) -> None:
    assert Settings(name="shop", platform=this_platform(), bucket=bucket, prefix=prefix).store == store


def test_two_folders_with_long_names_are_no_common_agent(tmp_path: Path) -> None:
    folders = [tmp_path / f"an-agent-whose-folder-has-a-name-of-more-than-48-letters-{n}" for n in range(2)]
    names = {_name(None, folder, end) for folder in folders for end in ("", "_training")}
    assert (len(names), {*map(len, names)}) == (4, {48})
    with pytest.raises(ConfigError, match="at most 48"):
        _name("a" * 49, None)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"image": "x"}, "contradict"),
        ({"bucket": None, "smoke": None}, "--code uploads an archive"),
        ({"bucket": None, "code": False}, "the rollout writes a record"),
        ({"subnets": ["subnet-1"]}, "--security-group"),
        ({"folder": None, "code": False}, "nothing to deploy"),
        ({"entry": "absent.py"}, "has no absent.py"),
        ({"code": False, "entry": "absent.py"}, "has no absent.py"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_before_any_call(
    account: dict[str, str], agent_folder: Path, changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        deployment(settings(agent_folder, **changed)).up()


@pytest.mark.usefixtures("image_builder")
@pytest.mark.parametrize("kind", ["an image", "an archive"])
def test_who_has_no_account_sees_what_would_be_done_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, agent_folder: Path, kind: str
) -> None:
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # nothing is asked
    folder = tmp_path / "shop"
    shutil.copytree(agent_folder, folder)
    (folder / "Dockerfile").write_text("FROM scratch\n")
    options = ["--agent", str(folder), "--bucket", "my-records", "--endpoint", "prod", "--smoke", '{"prompt": "x"}']
    options += ["--code"] if kind == "an archive" else []
    done = CliRunner().invoke(command, [*options, "--dry-run"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("no credentials, so AWS is not called: 123456789012 stands for your account")
    for call in (
        "s3:CreateBucket",
        "iam:CreateRole",
        "iam:PutRolePolicy",
        "bedrock-agentcore-control:CreateAgentRuntime",
    ):
        assert f"would call {call}\n" in done.output
    assert "would wait until the version is ready, and point endpoint prod at it" in done.output
    assert "would run one rollout of {" in done.output
    assert "would write .env" in done.output
    assert not (folder / "wheels").exists()
    assert ("would build" if kind == "an image" else "would make an archive") in done.output
    assert not re.search(r": is (created|removed)", done.output)
    assert CliRunner().invoke(command, [*options, "--dry-run", "--remove"]).exit_code == 0
    printed = CliRunner().invoke(command, ["iam", *options])
    assert printed.exit_code == 0, printed.output
    assert printed.stdout.startswith("# trust: ")
    assert "123456789012" in printed.stderr


def test_a_removed_agent_leaves_the_arn_of_its_namesake_in_another_region(tmp_path: Path) -> None:
    stored = "AGENTCORE_AGENT_ARN=arn:aws:bedrock-agentcore:eu-west-1:123456789012:runtime/shop-abc\n"
    (tmp_path / ".env").write_text(stored)
    assert not forget_agent(tmp_path / ".env", "shop", "us-west-2")
    assert not forget_agent(tmp_path / ".env", "sho", "eu-west-1")
    assert (tmp_path / ".env").read_text() == stored
    assert forget_agent(tmp_path / ".env", "shop", "eu-west-1")
    assert (tmp_path / ".env").read_text() == ""
