"""`agentcore-rl doctor --aws` on an account in order, and on accounts with one mistake each.

The account: moto's IAM, EC2 and S3, the local control plane and runtime with sessions of a real agent, a real gateway. What moto
has not (quotas, expired credentials) a server on loopback answers in the service's wire
shape, which unmodified boto3 reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import boto3
import botocore.session
import pytest
import requests
from botocore.validate import ParamValidator
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.doctor import command
from agentcore_rl_toolkit.deploy import iam
from agentcore_rl_toolkit.gateway import Gateway, GatewayConfig, UpstreamConfig
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine
from agentcore_rl_toolkit.runtime.local import LocalRuntime
from serving import moto_server

from ..conftest import reserved_port
from ..deploy.conftest import AGENT

REGION, BUCKET, ACCOUNT = "us-west-2", "records-to-doctor", "123456789012"
ADMIN_KEY, MODEL = "trainers-secret-key", "scripted"
PLACE = iam.Place(account=ACCOUNT, region=REGION, name="shop", bucket=BUCKET)


class Wire(ThreadingHTTPServer):
    """Service Quotas, ECR and STS, as far as moto has them not. What it answers is checked by botocore's model first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.quotas: dict[str, float] = {}
        self.expired = False
        self.models = {name: botocore.session.get_session().get_service_model(name) for name in ("service-quotas",)}
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.reset()

    def reset(self) -> None:
        self.quotas = {
            "Active Session Workloads per Account": 5000.0,
            "Rate of new Runtime session creation": 25.0,
            "Rate of Runtime data plane APIs": 200.0,
        }
        self.expired = False

    def answer(self, service: str, operation: str) -> dict[str, Any]:
        reply = self._replies()[operation]
        wrong = ParamValidator().validate(reply, self.models[service].operation_model(operation).output_shape)
        assert not wrong.has_errors(), wrong.generate_report()
        return reply

    def _replies(self) -> dict[str, dict[str, Any]]:
        quotas = [
            {"ServiceCode": "bedrock-agentcore", "QuotaName": name, "Value": value}
            for name, value in self.quotas.items()
        ]
        return {"ListServiceQuotas": {"Quotas": quotas}}


class _Handler(BaseHTTPRequestHandler):
    server: Wire

    def log_message(self, *_: object) -> None: ...

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        target = self.headers.get("x-amz-target", "")
        if target:
            self._answer(200, json.dumps(self.server.answer("service-quotas", target.rpartition(".")[2])).encode())
            return
        assert parse_qs(body.decode())["Action"] == ["GetCallerIdentity"]
        if self.server.expired:
            self._answer(
                403,
                b"<ErrorResponse><Error><Type>Sender</Type><Code>ExpiredToken</Code><Message>The security token included in the "
                b"request is expired</Message></Error><RequestId>1</RequestId></ErrorResponse>",
            )
            return
        self._answer(
            200,
            b"<GetCallerIdentityResponse><GetCallerIdentityResult><Arn>arn:aws:iam::123456789012:user/x</Arn><UserId>x</UserId>"
            b"<Account>123456789012</Account></GetCallerIdentityResult></GetCallerIdentityResponse>",
        )


@dataclass(kw_only=True)
class Aws:
    """The account in order, and the environment and options with which the doctor finds it."""

    moto: str
    wire: Wire
    runtime: LocalRuntime
    arn: str
    gateway: str
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
        wait = threading.Event()
        for _ in range(1200):
            if self.control.get_agent_runtime(agentRuntimeId=identity)["status"] not in ("CREATING", "UPDATING"):
                return
            wait.wait(0.05)
        raise AssertionError("the agent is not up to date after a minute")

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
def scripted_gateway() -> Iterator[str]:
    """A real gateway over a scripted engine, on a thread of its own."""
    ready, ended = threading.Event(), asyncio.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        async with ScriptedEngine() as engine:
            upstreams = (UpstreamConfig(url=engine.url, engine="vllm"),)
            gateway = Gateway(GatewayConfig(upstreams=upstreams, admin_key=ADMIN_KEY))
            await gateway.start()
            found.update(url=gateway.url, loop=asyncio.get_running_loop())
            ready.set()
            await ended.wait()
            await gateway.stop(grace_s=0.2)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(60)
    yield found["url"]
    found["loop"].call_soon_threadsafe(ended.set)
    thread.join(60)


@pytest.fixture(scope="module")
def closed_port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory, scripted_gateway: str, closed_port: int) -> Iterator[Aws]:
    folder = tmp_path_factory.mktemp("doctor")
    script = folder / "agent.py"
    script.write_text(AGENT)
    wire = Wire()
    with moto_server() as url, LocalRuntime({"shop": script}, ["--callers", "any"]) as runtime:
        found = Aws(
            moto=url,
            wire=wire,
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
    wire.shutdown()
    wire.server_close()


@pytest.fixture
def doctor(
    aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., dict[str, dict[str, str]]]]:
    """Runs the command in this process: its findings by name."""
    aws.wire.reset()
    environment = {
        **aws.doctor,
        "AWS_REGION": REGION,
        "AWS_ENDPOINT_URL": aws.moto,
        "AWS_ENDPOINT_URL_STS": aws.wire.url,
        "AWS_ENDPOINT_URL_SERVICE_QUOTAS": aws.wire.url,
        "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": aws.runtime.url,
        "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE_CONTROL": aws.runtime.url,
        "AGENTCORE_AGENT_ARN": aws.arn,
        "AGENTCORE_S3_BUCKET": BUCKET,
        "AGENTCORE_RL_GATEWAY_URL": aws.gateway,
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
    assert all(found[name]["level"] == "ok" for name in inside)
    assert "Contents" not in aws.root("s3").list_objects_v2(Bucket=BUCKET)
    everything = json.dumps(found)
    assert ADMIN_KEY not in everything
    assert aws.keys["AWS_SECRET_ACCESS_KEY"] not in everything


def no_put(aws: Aws, _: pytest.MonkeyPatch) -> list[str]:
    aws.agent(environmentVariables=aws.variables(aws.user(without_put())))
    aws.enforce(True)
    return []


def out_of_reach(aws: Aws, _: pytest.MonkeyPatch) -> list[str]:
    return ["--session-gateway-url", f"http://127.0.0.1:{aws.closed_port}"]


def expired(aws: Aws, _: pytest.MonkeyPatch) -> list[str]:
    aws.wire.expired = True
    return []


@pytest.mark.parametrize(
    ("mistake", "name", "says", "advice"),
    [
        (no_put, "session bucket", "cannot write", "allow s3:PutObject"),
        (out_of_reach, "session gateway", "cannot reach http://127.0.0.1", "security group"),
        (expired, "credentials", "ExpiredToken", "log in again"),
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
    aws.agent()
    options = mistake(aws, monkeypatch)
    found = doctor(*options)
    assert name in found, found
    assert found[name]["level"] == "fail", found[name]
    assert says in found[name]["text"]
    assert advice in found[name]["advice"]
    blamed = {n for n, f in found.items() if f["level"] == "fail"} - {name}
    assert blamed == set(), {n: found[n] for n in blamed}
