"""Signatures: any is accepted until keys are configured; then botocore's own must verify and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.runtime.sigv4 import verify
from agentcore_rl_toolkit.runtime.wire import WireError

from .conftest import Server

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
    return {
        "method": "POST",
        "raw_path": PATH.encode(),
        "query_string": query.encode(),
        "headers": headers,
        "body": [body],
        "now": time.time(),
    }


def test_botocores_signature_verifies() -> None:
    verify(KEYS, **signed())


@pytest.mark.parametrize(
    "change",
    [
        {"body": [b'{"a": 2}']},
        {"method": "PUT"},
        {"query_string": b"qualifier=other"},
        {"raw_path": b"/runtimes/other/invocations"},
        {"now": time.time() + 3_600},
        {"headers": []},
    ],
)
def test_anything_changed_is_403(change: dict[str, Any]) -> None:
    with pytest.raises(WireError) as error:
        verify(KEYS, **{**signed(), **change})
    assert error.value.status == 403


def test_another_secret_is_403() -> None:
    with pytest.raises(WireError, match="does not match"):
        verify(KEYS, **signed(secret="guessed"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("guarded"), "--credential", "AKLOCAL:secret")
    yield server
    server.stop()


def test_boto3_with_the_right_keys_gets_in_and_with_wrong_ones_does_not(guarded: Server, session_id: str) -> None:
    assert guarded.invoke({"x": "ü"}, session_id)["calls"] == 1
    for operation in (guarded.client("bedrock-agentcore-control").list_agent_runtimes,):
        assert operation()["agentRuntimes"]
    wrong = boto3.client(
        "bedrock-agentcore",
        endpoint_url=guarded.url,
        region_name="us-west-2",
        aws_access_key_id="AKLOCAL",
        aws_secret_access_key="wrong",
        config=Config(retries={"total_max_attempts": 1}),
    )
    with pytest.raises(ClientError) as error:
        guarded.invoke({}, session_id, client=wrong)
    assert error.value.response["Error"]["Code"] == "AccessDeniedException"
