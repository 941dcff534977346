"""`agentcore-rl doctor --aws` on an account in order, and on accounts with one mistake each.

The account: moto's IAM, EC2 and S3, the local control plane and runtime with sessions of a real agent, a real gateway. That
credentials expired, a server on loopback says in STS' wire shape.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.doctor import command
from agentcore_rl_toolkit.deploy import iam
from agentcore_rl_toolkit.gateway import Gateway
from agentcore_rl_toolkit.gateway.testing import ScriptedModel
from agentcore_rl_toolkit.runtime.local import LocalRuntime
from serving import answering, gateway_before, moto_server, wait_for

from ..conftest import reserved_port
from ..deploy.conftest import AGENT

REGION, BUCKET, ACCOUNT = "us-west-2", "records-to-doctor", "123456789012"
ADMIN_KEY, MODEL = "trainers-secret-key", "scripted"
PLACE = iam.Place(account=ACCOUNT, region=REGION, name="shop", bucket=BUCKET)


EXPIRED = (
    b"<ErrorResponse><Error><Type>Sender</Type><Code>ExpiredToken</Code><Message>The security token included in the "
    b"request is expired</Message></Error><RequestId>1</RequestId></ErrorResponse>"
)


@dataclass(kw_only=True)
class Aws:
    """The account in order, and the environment and options with which the doctor finds it."""

    moto: str
    expired_sts: str
    runtime: LocalRuntime
    arn: str
    gateway: Gateway
    keys: dict[str, str]
    script: Path
    closed_port: int
    doctor: dict[str, str] = field(default_factory=dict)
    made_of: dict[str, Any] = field(default_factory=dict)

    def root(self, service: str, region: str = REGION) -> Any:
        keys = {"aws_access_key_id": "root", "aws_secret_access_key": "root"}
        return boto3.client(service, endpoint_url=self.moto, region_name=region, **keys)

    @property
    def control(self) -> Any:
        keys = {"aws_access_key_id": "root", "aws_secret_access_key": "root"}
        return boto3.client("bedrock-agentcore-control", endpoint_url=self.runtime.url, region_name=REGION, **keys)

    def agent(self, *, image: str | None = None, role: str = "agentcore-rl-shop", **changed: Any) -> None:
        """Bring the agent up to date: `image`, `role` and other fields of UpdateAgentRuntime."""
        fields = {
            "agentRuntimeArtifact": {"containerConfiguration": {"containerUri": image or f"local://{self.script}"}},
            "roleArn": f"arn:aws:iam::{ACCOUNT}:role/{role}",
            "networkConfiguration": {"networkMode": "PUBLIC"},
            "environmentVariables": self.variables(self.keys),
            **changed,
        }
        if fields == self.made_of:
            return
        self.made_of = fields
        identity = self.arn.rpartition("/")[2]
        self.control.update_agent_runtime(agentRuntimeId=identity, **fields)

        def status() -> str:
            return str(self.control.get_agent_runtime(agentRuntimeId=identity)["status"])

        wait_for(lambda: status() not in ("CREATING", "UPDATING"))

    def variables(self, keys: dict[str, str]) -> dict[str, str]:
        return {**keys, "AWS_ENDPOINT_URL_S3": self.moto, "AWS_ALLOW_HTTP": "true", "AWS_REGION": REGION}

    def user(self, policy: iam.Policy) -> dict[str, str]:
        """Keys of a new user with one policy, which moto enforces."""
        client, name = self.root("iam"), f"session-{hashlib.sha256(iam.text(policy).encode()).hexdigest()[:8]}"
        client.create_user(UserName=name)
        client.put_user_policy(UserName=name, PolicyName="p", PolicyDocument=iam.text(policy))
        key = client.create_access_key(UserName=name)["AccessKey"]
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}

    def enforce(self, on: bool) -> None:
        requests.post(f"{self.moto}/moto-api/reset-auth", data=b"0" if on else b"inf", timeout=30)


def without_put() -> iam.Policy:
    policy: iam.Policy = json.loads(iam.text(iam.execution(PLACE)))
    for statement in policy["Statement"]:
        statement["Action"] = [action for action in statement["Action"] if action != "s3:PutObject"]
    return policy


@pytest.fixture(scope="module")
def scripted_gateway() -> Iterator[Gateway]:
    with (
        ScriptedModel(lambda messages, tools: "Yes.") as model,
        gateway_before(model.url, admin_key=ADMIN_KEY) as gateway,
    ):
        yield gateway


@pytest.fixture(scope="module")
def closed_port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory, scripted_gateway: Gateway, closed_port: int) -> Iterator[Aws]:
    folder = tmp_path_factory.mktemp("doctor")
    script = folder / "agent.py"
    script.write_text(AGENT)
    with (
        moto_server() as url,
        answering(lambda _: (403, EXPIRED)) as sts,
        LocalRuntime({"shop": script}, ["--callers", "any"]) as runtime,
    ):
        found = Aws(
            moto=url,
            expired_sts=sts,
            runtime=runtime,
            arn=runtime.arns["shop"],
            gateway=scripted_gateway,
            keys={},
            script=script,
            closed_port=closed_port,
        )
        found.enforce(False)
        where: Any = {"LocationConstraint": REGION}
        with contextlib.suppress(found.root("s3").exceptions.BucketAlreadyOwnedByYou):  # moto's state is the process's
            found.root("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=where)
        with contextlib.suppress(found.root("iam").exceptions.EntityAlreadyExistsException):
            trust = iam.text(iam.execution_trust(PLACE))
            found.root("iam").create_role(RoleName="agentcore-rl-shop", AssumeRolePolicyDocument=trust)
        found.keys = found.user(iam.execution(PLACE))
        found.doctor = found.user(
            {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
        )
        found.agent()
        yield found
        found.enforce(False)


@pytest.fixture
def doctor(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., dict[str, dict[str, str]]]]:
    """Runs the command in this process: its findings by name."""
    environment = {
        **aws.doctor,
        "AWS_REGION": REGION,
        "AWS_ENDPOINT_URL": aws.moto,
        "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": aws.runtime.url,
        "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE_CONTROL": aws.runtime.url,
        "AGENTCORE_AGENT_ARN": aws.arn,
        "AGENTCORE_S3_BUCKET": BUCKET,
        "AGENTCORE_RL_GATEWAY_URL": aws.gateway.url,
        "AGENTCORE_RL_GATEWAY_ADMIN_KEY": ADMIN_KEY,
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def run(*options: str) -> dict[str, dict[str, str]]:
        done = CliRunner().invoke(command, ["--aws", "--json", *options])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.output
        listed = json.loads(done.stdout)
        assert done.exit_code == (1 if any(f["level"] == "fail" for f in listed) else 0)
        return {finding["name"]: finding for finding in listed}

    yield run
    aws.enforce(False)


def test_an_account_in_order_passes_from_outside_and_from_a_session(aws: Aws, doctor: Callable[..., Any]) -> None:
    found = doctor()
    bad = {name: f for name, f in found.items() if f["level"] == "fail"}
    assert bad == {}
    inside = {"session", "session clock", "session bucket", "session gateway"}
    assert inside | {"quotas", "model"} <= set(found)
    assert all(found[name]["level"] == "ok" for name in inside | {"model"})
    assert (found["gateway"]["level"], "token mode" in found["gateway"]["advice"]) == ("note", True)
    assert not aws.gateway.sessions.by_id
    assert "Contents" not in aws.root("s3").list_objects_v2(Bucket=BUCKET)
    everything = json.dumps(found)
    assert ADMIN_KEY not in everything
    assert aws.keys["AWS_SECRET_ACCESS_KEY"] not in everything


def no_put(aws: Aws, _: pytest.MonkeyPatch) -> list[str]:
    aws.agent(environmentVariables=aws.variables(aws.user(without_put())))
    aws.enforce(True)
    return []


def out_of_reach(aws: Aws, _: pytest.MonkeyPatch) -> list[str]:
    aws.agent()
    return ["--session-gateway-url", f"http://127.0.0.1:{aws.closed_port}"]


def expired(aws: Aws, environment: pytest.MonkeyPatch) -> list[str]:
    aws.agent()
    environment.setenv("AWS_ENDPOINT_URL_STS", aws.expired_sts)
    return []


def wrong_key(aws: Aws, environment: pytest.MonkeyPatch) -> list[str]:
    aws.agent()
    environment.setenv("AGENTCORE_RL_GATEWAY_ADMIN_KEY", "wrong")
    return []


def rollouts_off(aws: Aws, _: pytest.MonkeyPatch) -> list[str]:
    aws.agent(environmentVariables={**aws.variables(aws.keys), "AGENTCORE_RL_ROLLOUTS": "off"})
    return []


@pytest.mark.parametrize(
    ("mistake", "name", "says", "advice"),
    [
        (out_of_reach, "session gateway", "cannot reach http://127.0.0.1", "security group"),
        (expired, "credentials", "ExpiredToken", "log in again"),
        (wrong_key, "gateway", "key", "AGENTCORE_RL_GATEWAY_ADMIN_KEY"),
        (no_put, "session bucket", "cannot write", "allow s3:PutObject"),  # this and the next one change the agent
        (rollouts_off, "session", "(403)", "AGENTCORE_RL_ROLLOUTS=on"),
    ],
)
def test_each_mistake_is_found_and_says_what_to_do(
    aws: Aws,
    doctor: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[Aws, pytest.MonkeyPatch], list[str]],
    name: str,
    says: str,
    advice: str,
) -> None:
    options = mistake(aws, monkeypatch)
    found = doctor(*options)
    assert name in found, found
    assert found[name]["level"] == "fail", found[name]
    assert says in found[name]["text"]
    assert advice in found[name]["advice"]
    blamed = {n for n, f in found.items() if f["level"] == "fail"} - {name}
    assert blamed == set(), {n: found[n] for n in blamed}
