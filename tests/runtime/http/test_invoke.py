"""The data plane as unmodified boto3 sees it: every operation, every error."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import time
import uuid
from typing import Any
from urllib.parse import quote, urlsplit

import psutil
import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from ..conftest import Server, alive, wait_for

SESSION = "x-amzn-bedrock-agentcore-runtime-session-id"


def code_of(error: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    return error.value.response["ResponseMetadata"]["HTTPStatusCode"], error.value.response["Error"]["Code"]


def raw(server: Server, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Any:
    with contextlib.closing(http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)) as connection:
        connection.request(method, path, body, headers or {})
        reply = connection.getresponse()
        return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()


def arn_path(server: Server, operation: str) -> str:
    return f"/runtimes/{quote(server.arn, safe='')}/{operation}"


def test_json_reply_carries_the_session_id_and_content_type(server: Server, client: Any, session_id: str) -> None:
    reply = client.invoke_agent_runtime(
        agentRuntimeArn=server.arn, runtimeSessionId=session_id, payload=b'{"x": 1}', qualifier="DEFAULT"
    )
    body = json.loads(reply["response"].read())
    assert (reply["statusCode"], reply["contentType"]) == (200, "application/json")
    assert reply["runtimeSessionId"] == session_id == body["session"]
    assert body["echo"] == {"x": 1}


def test_one_id_is_one_process_and_another_id_another(server: Server) -> None:
    a, b = str(uuid.uuid4()), str(uuid.uuid4())
    first, again, other = server.invoke({}, a), server.invoke({}, a), server.invoke({}, b)
    assert [first["calls"], again["calls"], other["calls"]] == [1, 2, 1]
    live = {s["session_id"]: s["pid"] for s in server.view.sessions()}
    assert live[a] != live[b]


def test_a_missing_session_id_is_made_up(server: Server, client: Any) -> None:
    reply = client.invoke_agent_runtime(agentRuntimeArn=server.arn, payload=b"{}")
    assert json.loads(reply["response"].read())["session"] == reply["runtimeSessionId"]
    assert len(reply["runtimeSessionId"]) >= 33


def test_stream_arrives_as_it_is_made(server: Server, client: Any, session_id: str) -> None:
    server.invoke({}, session_id)
    reply = client.invoke_agent_runtime(
        agentRuntimeArn=server.arn, runtimeSessionId=session_id, payload=b'{"do": "stream", "n": 3, "delay_s": 0.3}'
    )
    assert reply["contentType"].startswith("text/event-stream")
    at = [(time.monotonic(), line) for line in reply["response"].iter_lines(chunk_size=1) if line]
    assert [json.loads(line.removeprefix(b"data: "))["i"] for _, line in at] == [0, 1, 2]
    assert at[2][0] - at[0][0] > 0.4


def test_a_large_stream_and_a_large_payload_are_whole(server: Server, client: Any, session_id: str) -> None:
    reply = client.invoke_agent_runtime(
        agentRuntimeArn=server.arn,
        runtimeSessionId=session_id,
        payload=b'{"do": "stream", "n": 40, "size": 200000}',
    )
    lines = [line for line in reply["response"].iter_lines() if line]
    assert len(lines) == 40
    assert sum(map(len, lines)) > 8_000_000
    assert server.invoke({"do": "size", "data": "y" * 20_000_000}, session_id) == {"bytes": 20_000_000}


def test_a_dying_agent_is_424_and_the_id_starts_afresh(server: Server, session_id: str) -> None:
    with pytest.raises(ClientError, match="connection: the session's process ended with status 7") as error:
        server.invoke({"do": "die"}, session_id)
    assert code_of(error) == (424, "RuntimeClientError")
    ended = wait_for(lambda: server.ended(session_id))
    assert (ended["state"], ended["exit_status"]) == ("crashed", 7)
    assert server.invoke({}, session_id)["calls"] == 1


def test_an_injected_kill_ends_a_session_under_a_request(server: Server, session_id: str) -> None:
    server.view.call("PUT", "/_local/faults", [{"kind": "kill", "first": 1, "delay_s": 0.1}])
    with pytest.raises(ClientError, match="the session's process was killed by SIGKILL"):
        server.invoke({"do": "sleep", "s": 9}, session_id)
    server.view.call("PUT", "/_local/faults", [])


def test_payload_above_100_mb_is_refused_before_it_is_sent(server: Server) -> None:
    with contextlib.closing(http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)) as connection:
        connection.putrequest("POST", arn_path(server, "invocations"))
        connection.putheader("content-length", "100000001")
        connection.endheaders()
        reply = connection.getresponse()
        assert (reply.status, reply.getheader("x-amzn-errortype")) == (400, "ValidationException")
        reply.read()


def test_agent_sees_context_headers_and_no_others(server: Server, session_id: str) -> None:
    client = server.client()

    def add(request: Any, **_: Any) -> None:
        request.headers["X-Amzn-Bedrock-AgentCore-Runtime-Custom-Color"] = "green"
        request.headers["X-Not-Allowed"] = "no"

    client.meta.events.register("before-sign.bedrock-agentcore.InvokeAgentRuntime", add)
    reply = client.invoke_agent_runtime(
        agentRuntimeArn=server.arn,
        runtimeSessionId=session_id,
        runtimeUserId="user-7",
        traceId="Root=1-2-3",
        baggage="a=b",
        payload=b'{"do": "headers"}',
    )
    seen = {k.lower(): v for k, v in json.loads(reply["response"].read())["headers"].items()}
    assert seen["x-amzn-bedrock-agentcore-runtime-custom-color"] == "green"
    assert "x-not-allowed" not in seen
    assert "authorization" not in seen


def test_command_streams_output_and_exit_code(server: Server, client: Any, session_id: str) -> None:
    server.invoke({"do": "where"}, session_id)
    reply = client.invoke_agent_runtime_command(
        agentRuntimeArn=server.arn,
        runtimeSessionId=session_id,
        body={"command": "cat note; echo problem >&2; exit 3"},
    )
    assert reply["runtimeSessionId"] == session_id
    events = [event["chunk"] for event in reply["stream"]]
    assert events[0] == {"contentStart": {}}
    assert events[-1] == {"contentStop": {"exitCode": 3, "status": "COMPLETED"}}
    deltas = [event["contentDelta"] for event in events[1:-1]]
    assert {"stdout": "mine"} in deltas
    assert {"stderr": "problem\n"} in deltas


def test_command_that_takes_too_long_is_ended(server: Server, session_id: str) -> None:
    started = time.monotonic()
    events = server.command(session_id, "echo on; sleep 60", timeout=1)
    assert events[-1]["contentStop"]["status"] == "TIMED_OUT"
    assert {"contentDelta": {"stdout": "on\n"}} in events
    assert time.monotonic() - started < 50


def test_what_a_command_leaves_running_ends_with_the_session(server: Server, client: Any, session_id: str) -> None:
    server.invoke({}, session_id)
    seconds = str(10_000_000 + os.getpid())  # of this program alone: others of this machine may run the same test
    events = server.command(session_id, f"setsid sleep {seconds} >/dev/null 2>&1 & echo started")
    assert events[-1]["contentStop"]["exitCode"] == 0

    def sleepers() -> list[int]:
        below = psutil.Process(server.process.pid).children(recursive=True)
        return [p.pid for p in below if alive(p.pid) and p.cmdline() == ["sleep", seconds]]

    pids = wait_for(sleepers)
    client.stop_runtime_session(agentRuntimeArn=server.arn, runtimeSessionId=session_id)
    wait_for(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize(
    "body", [b"nonsense", b'{"command": ""}', b'{"command": "ls", "timeout": 0}', b'{"command": "ls", "timeout": 3601}']
)
def test_bad_command_is_400_and_starts_no_session(server: Server, session_id: str, body: bytes) -> None:
    status, headers, _ = raw(server, "POST", arn_path(server, "commands"), body, {SESSION: session_id})
    assert (status, headers["x-amzn-errortype"]) == (400, "ValidationException")
    assert server.session(session_id) is None


def test_stop_ends_the_session_and_a_second_stop_is_404(server: Server, client: Any, session_id: str) -> None:
    server.invoke({}, session_id)
    pid = server.session(session_id)["pid"]
    reply = client.stop_runtime_session(agentRuntimeArn=server.arn, runtimeSessionId=session_id)
    assert (reply["statusCode"], reply["runtimeSessionId"]) == (200, session_id)
    with pytest.raises(ClientError) as error:
        client.stop_runtime_session(agentRuntimeArn=server.arn, runtimeSessionId=session_id)
    assert code_of(error) == (404, "ResourceNotFoundException")
    wait_for(lambda: not alive(pid))


def test_first_calls_at_once_share_one_start(server: Server, session_id: str) -> None:
    before = server.view.get("/_local/status")["started"]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: server.invoke({}, session_id), range(16)))
    assert sorted(r["calls"] for r in replies) == list(range(1, 17))
    assert server.view.get("/_local/status")["started"] == before + 1


def test_a_caller_that_gives_up_does_not_stop_the_agent(server: Server, session_id: str) -> None:
    impatient = server.client(read_timeout=1)
    server.invoke({}, session_id)
    with pytest.raises(ReadTimeoutError):
        server.invoke({"do": "sleep", "s": 2}, session_id, client=impatient)
    assert server.session(session_id)["state"] == "active"
    wait_for(lambda: server.session(session_id)["state"] == "idle")
    assert server.invoke({}, session_id)["calls"] == 3
