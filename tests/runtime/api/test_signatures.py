"""Signatures: any is accepted until keys are configured; then botocore's own must verify and nothing else."""

from __future__ import annotations

import base64
import datetime
import io
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from click.testing import CliRunner

from agentcore_rl_toolkit._servers import sigv4
from agentcore_rl_toolkit.cli.servers.runtime import group
from agentcore_rl_toolkit.errors import LocalRuntimeError
from agentcore_rl_toolkit.runtime.remote import RuntimeView

from ..conftest import AGENTS, Server

KEYS = {"AKLOCAL": "very/secret+key"}
PATH = "/runtimes/arn%3Aaws%3Abedrock-agentcore%3Aus-west-2%3A123456789012%3Aruntime%2Fa-AAAAAAAAAA/invocations"


def signed(
    body: bytes = b'{"a": 1}', query: str = "qualifier=DEFAULT&b=%20x", secret: str = KEYS["AKLOCAL"]
) -> dict[str, Any]:
    request = AWSRequest(
        "POST", f"http://127.0.0.1:1{PATH}?{query}", data=body, headers={"Content-Type": "application/json"}
    )
    SigV4Auth(Credentials("AKLOCAL", secret), "bedrock-agentcore", "us-west-2").add_auth(request)
    headers = [(b"host", b"127.0.0.1:1"), *((k.lower().encode(), v.encode()) for k, v in request.headers.items())]
    scope = {"method": "POST", "raw_path": PATH.encode(), "query_string": query.encode(), "headers": headers}
    return {"scope": scope, "body": body}


def test_botocores_signature_verifies_and_anything_changed_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sigv4.refusal(KEYS, **signed()) is None
    assert sigv4.refusal(KEYS, **{**signed(), "body": b'{"a": 2}'}) is not None
    for change in (
        {"method": "PUT"},
        {"query_string": b"qualifier=other"},
        {"raw_path": b"/runtimes/other/invocations"},
        {"headers": []},
    ):
        given = signed()
        assert sigv4.refusal(KEYS, {**given["scope"], **change}, given["body"]) is not None, change
    assert "does not match" in (sigv4.refusal(KEYS, **signed(secret="guessed")) or "")
    given = signed()
    stamp = dict(given["scope"]["headers"])[b"x-amz-date"].decode()
    signed_at_s = datetime.datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.UTC).timestamp()
    for late_s in (-300, 300, -301, 301):
        monkeypatch.setattr(time, "time", lambda late_s=late_s: signed_at_s + late_s)
        expired = None if abs(late_s) == 300 else f"Signature expired: {stamp} is not within 300 seconds of now."
        assert sigv4.refusal(KEYS, **given) == expired


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("guarded"), credential="AKLOCAL:secret")
    yield server
    server.stop()


def test_boto3_with_the_right_keys_gets_in(guarded: Server, session_id: str) -> None:
    assert guarded.invoke({"x": "ü"}, session_id)["calls"] == 1
    assert guarded.control.list_agent_runtimes()["agentRuntimes"]


def client(guarded: Server, key: str, secret: str, service: str = "bedrock-agentcore") -> Any:
    return boto3.client(
        service,
        endpoint_url=guarded.url,
        region_name="us-west-2",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=Config(retries={"total_max_attempts": 1}),
    )


@pytest.mark.parametrize(("key", "secret"), [("AKNOBODY", "secret"), ("AKLOCAL", "Secret")])
def test_unknown_key_or_wrong_secret_is_403_for_every_operation(guarded: Server, key: str, secret: str) -> None:
    data, control = client(guarded, key, secret), client(guarded, key, secret, "bedrock-agentcore-control")
    target = {"agentRuntimeArn": guarded.arn, "runtimeSessionId": "s" * 40}
    for call in (
        lambda: data.invoke_agent_runtime(**target, payload=b"{}"),
        lambda: data.invoke_agent_runtime_command(**target, body={"command": "ls"}),
        lambda: data.stop_runtime_session(**target),
        control.list_agent_runtimes,
        lambda: control.get_agent_runtime(agentRuntimeId=guarded.arn.rpartition("/")[2]),
    ):
        with pytest.raises(ClientError) as error:
            call()
        assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
        assert error.value.response["Error"]["Code"] == "AccessDeniedException"


def test_clock_that_is_wrong_is_403(guarded: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import botocore.auth

    behind = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=6)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: behind.replace(tzinfo=None))
    with pytest.raises(ClientError, match="Signature expired"):
        guarded.invoke({}, client=guarded.client())


def test_payload_from_a_file_is_signed_too(guarded: Server) -> None:
    reply = guarded.default_client.invoke_agent_runtime(
        agentRuntimeArn=guarded.arn, payload=io.BytesIO(b'{"do": "size", "data": "abc"}')
    )
    assert reply["response"].read() == b'{"bytes": 3}'


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/_local/sessions"),
        ("GET", "/_local/status"),
        ("GET", "/_local/metrics"),
        ("DELETE", "/_local/sessions/x"),
        ("PUT", "/_local/faults"),
    ],
)
def test_what_aws_does_not_show_is_guarded_too(guarded: Server, method: str, path: str) -> None:
    for credential in (("AKLOCAL", "wrong"), ("OTHER", "secret")):
        with pytest.raises(LocalRuntimeError, match="AWS_SECRET_ACCESS_KEY"):
            RuntimeView(guarded.url, credential).call(method, path, [])
    request = urllib.request.Request(guarded.url + path, b"[]", method=method)
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=10)
    assert error.value.code == 403
    error.value.close()


def test_metrics_are_read_with_the_key_as_a_password_too(guarded: Server) -> None:
    for password, status in (("secret", 200), ("wrong", 403)):
        word = base64.b64encode(f"AKLOCAL:{password}".encode()).decode()
        request = urllib.request.Request(guarded.url + "/_local/metrics", headers={"Authorization": f"Basic {word}"})
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                found = reply.status
        except urllib.error.HTTPError as e:
            found = e.code
            e.close()
        assert found == status


def test_the_command_line_finds_the_key_of_this_users_runtime(guarded: Server, session_id: str) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(group, [*arguments, "--url", guarded.url], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    guarded.invoke({"do": "print", "text": "a secret line"}, session_id)
    assert session_id in run("ps", "--all")
    assert "a secret line" in run("logs", session_id)
    assert run("stop", session_id) == f"stopped {session_id}\n"
    assert ":runtime/again-" in run("deploy", str(AGENTS / "probe.py"), "--name", "again")
