"""Values that cannot work are refused when they are given, with the field or option that is wrong."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
from collections.abc import Callable
from urllib.parse import quote, urlsplit

import pytest
from botocore.exceptions import ClientError
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.servers.runtime import group
from agentcore_rl_toolkit.errors import ConfigError

from ..conftest import AGENTS, Server

BARE = AGENTS / "bare.py"


def test_what_can_be_is_taken(server: Server) -> None:
    vpc = {"securityGroups": ["sg-12345678"], "subnets": ["subnet-12345678"]}
    made = server.create(
        BARE,
        description="é→",
        protocolConfiguration={"serverProtocol": "HTTP", "port": 8080, "path": "/invocations"},
        requestHeaderConfiguration={"requestHeaderAllowlist": ["X-One", "X_Two"]},
        environmentVariables={"EMPTY": "", "WORDS": "ü 😀 ="},
        networkConfiguration={"networkMode": "VPC", "networkModeConfig": vpc},
        tags={"team": "rl", "empty": ""},
    )
    got = server.settled(made)
    assert got["status"] == "READY", got.get("failureReason")
    assert got["environmentVariables"]["WORDS"] == "ü 😀 ="
    assert got["networkConfiguration"]["networkMode"] == "VPC"
    server.delete(made)


def test_options_that_cannot_work_are_refused() -> None:
    for options, message in (
        (["--set", "tps=0"], "`tps` must be greater than 0"),
        (["--set", "max_sessions=0"], "`max_sessions` must be greater than 0"),
        (["--set", "max_sessions=inf"], "`max_sessions` "),
        (["--set", "invoke_timeout=0"], "`invoke_timeout` must be greater than 0"),
        (["--set", "idle_timeout=inf"], "`idle_timeout` "),
        (["--set", "stop_grace=inf"], "`stop_grace` must be a finite number"),
        (["--set", "stop_grace=-1"], "`stop_grace` must be greater than or equal to 0"),
        (["--agent", f"a={BARE}", "--agent", f"a={BARE}"], "given more than once"),
    ):
        result = CliRunner().invoke(group, ["serve", *options])
        assert isinstance(result.exception, ConfigError), result.exception
        assert message in str(result.exception)
    assert "--memory-mb" in CliRunner().invoke(group, ["serve", "--memory-mb", "-5"]).output


def test_region_and_account_are_those_of_the_arns(start_server: Callable[..., Server], session_id: str) -> None:
    server = start_server("--set", "region=eu-central-1", "--set", "account_id=210987654321", agent=BARE)
    assert server.arn.startswith("arn:aws:bedrock-agentcore:eu-central-1:210987654321:runtime/probe-")
    assert server.invoke({"do": "where"}, session_id)["env"]["AWS_REGION"] == "eu-central-1"
    server.default_client.stop_runtime_session(agentRuntimeArn=server.arn, runtimeSessionId=session_id)


def test_a_reply_and_a_stream_have_limits_of_their_own(start_server: Callable[..., Server], session_id: str) -> None:
    server = start_server("--set", "invoke_timeout=0.8", "--set", "stream_timeout=1.6")
    server.invoke({}, session_id)
    with pytest.raises(ClientError) as error:
        server.invoke({"do": "sleep", "s": 20}, session_id)
    assert error.value.response["Error"]["Code"] == "RuntimeClientError"
    assert "did not answer within 0.8 s" in error.value.response["Error"]["Message"]

    def stream(seconds: float) -> bytes:
        payload = json.dumps({"do": "stream", "n": 10, "delay_s": seconds / 10}).encode()
        reply = server.default_client.invoke_agent_runtime(
            agentRuntimeArn=server.arn, runtimeSessionId=session_id, payload=payload
        )
        return bytes(reply["response"].read())

    assert stream(1.1).count(b"data:") == 10  # longer than a reply may take to begin
    with pytest.raises(Exception, match=r"(?i)(incomplete|connection broken|read)"):
        stream(6.0)
    os.kill(
        server.session(session_id)["pid"], signal.SIGKILL
    )  # it still sleeps, which the end of the runtime would wait for


UNFIT = {
    "deep": b"[" * 100_000,
    "deep and whole": b'{"a":' * 3_000 + b"1" + b"}" * 3_000,
    "deeper than what is kept": b'{"metadataConfiguration":' + b'{"a":' * 300 + b"1" + b"}" * 301,
    "half a surrogate pair": b'{"agentRuntimeName": "\\ud800", "command": "\\udfff", "clientToken": "\\ud800"}',
    "as a name": b'{"\\ud800": 1}',
    "infinity": b'{"timeout": 1e999, "steps": 1e999}',
    "no number": b'{"timeout": NaN}',
    "no number at all": b"-Infinity",
    "bytes": b"\xff\xfe\x00",
    "digits": b'{"timeout": ' + b"9" * 5_000 + b"}",
}


def test_json_that_cannot_be_kept_is_400(server: Server, session_id: str) -> None:
    arn, runtime_id = quote(server.arn, safe=""), server.arn.rpartition("/")[2]
    server.invoke({}, session_id)
    paths = (
        ("PUT", "/runtimes/"),
        ("PUT", f"/runtimes/{runtime_id}/"),
        ("POST", f"/runtimes/{arn}/commands"),
        ("POST", f"/runtimes/{arn}/stopruntimesession"),
        ("PUT", "/_local/faults"),
    )
    for (method, path), body in itertools.product(paths, UNFIT.values()):
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
        connection.request(
            method,
            path,
            body,
            {"content-type": "application/json", "x-amzn-bedrock-agentcore-runtime-session-id": session_id},
        )
        reply = connection.getresponse()
        assert (reply.status, path) == (400, path), reply.read()
        connection.close()
    assert server.session(session_id) is not None  # no refused stop has stopped it


def test_a_create_that_fails_for_any_reason_leaves_no_name(server: Server) -> None:
    with pytest.raises(ClientError) as caught:
        server.create(BARE, agentRuntimeName="again", protocolConfiguration={"serverProtocol": "MCP"})
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    nested = b'{"agentRuntimeName": "again", "metadataConfiguration": ' + b'{"a":' * 400 + b"1" + b"}" * 400 + b"}"
    connection.request("PUT", "/runtimes/", nested, {"content-type": "application/json"})
    assert connection.getresponse().status == 400
    connection.close()
    made = server.create(BARE, agentRuntimeName="again")
    assert made["agentRuntimeVersion"] == "1"
    server.delete(made)
