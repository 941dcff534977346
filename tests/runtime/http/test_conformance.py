"""Every operation with every error its service model names, and every field that travels as a header: unmodified boto3."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.runtime.http.data_plane import OPERATIONS
from agentcore_rl_toolkit.runtime.wire import STATUS

from ..conftest import AGENTS, Server, agent_fields, wait_for

BAD_ID = "nobody-AAAAAAAAAA"
INJECTED = {
    "throttle": "ThrottlingException",
    "quota": "ServiceQuotaExceededException",
    "runtime_error": "RuntimeClientError",
    "server_error": "InternalServerException",
    "conflict": "RetryableConflictException",
    "validation": "ValidationException",
    "access_denied": "AccessDeniedException",
    "not_found": "ResourceNotFoundException",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("conformance"), agent=AGENTS / "respond.py")
    yield server
    assert server.stop() == 0, server.output.read_text()


def call(server: Server, operation: str, **changes: Any) -> Any:
    """One data-plane operation with the parameters it needs, some of them changed; what it streams is read."""
    target = {"agentRuntimeArn": server.arn, "runtimeSessionId": new_session_id(), **changes}
    client = server.default_client
    match operation:
        case "InvokeAgentRuntime":
            reply = client.invoke_agent_runtime(payload=b"{}", **target)
            return {**reply, "response": reply["response"].read()}
        case "InvokeAgentRuntimeCommand":
            reply = client.invoke_agent_runtime_command(body={"command": "true"}, **target)
            return {**reply, "stream": list(reply["stream"])}
        case "StopRuntimeSession":
            return client.stop_runtime_session(**target)
    raise AssertionError(operation)


def refused(work: Callable[[], Any]) -> tuple[int, str, dict[str, Any]]:
    with pytest.raises(ClientError) as error:
        work()
    response = error.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"], dict(response)


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS.values())))
def test_each_operation_raises_each_error_as_its_modelled_class(server: Server, operation: str) -> None:
    model = server.default_client.meta.service_model.operation_model(operation)
    for kind, code in INJECTED.items():
        server.view.call("PUT", "/_local/faults", [{"kind": kind, "operation": operation}])
        try:
            status, found, response = refused(lambda: call(server, operation))
        finally:
            server.view.call("PUT", "/_local/faults", [])
        assert (status, found) == (STATUS[code], code)
        assert code in {shape.name for shape in model.error_shapes}
        assert response["Error"]["Message"]


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS.values())))
def test_each_operation_knows_wrong_targets(server: Server, operation: str) -> None:
    nobody = server.arn.rpartition("/")[0] + f"/{BAD_ID}"
    assert refused(lambda: call(server, operation, agentRuntimeArn=nobody))[:2] == (404, "ResourceNotFoundException")
    assert refused(lambda: call(server, operation, qualifier="nowhere"))[:2] == (404, "ResourceNotFoundException")
    status, code, response = refused(lambda: call(server, operation, agentRuntimeArn="no-arn-at-all"))
    assert (status, code, response["reason"]) == (400, "ValidationException", "FieldValidationFailed")
    assert response["fieldList"][0]["name"] == "agentRuntimeArn"


@pytest.fixture(scope="module")
def prod(server: Server) -> str:
    """The ARN of an endpoint that is not DEFAULT."""
    made = server.control.create_agent_runtime_endpoint(agentRuntimeId=server.arn.rpartition("/")[2], name="prod")
    return str(made["agentRuntimeEndpointArn"])


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS.values())))
def test_endpoint_arn_and_qualifier_name_the_same(server: Server, prod: str, operation: str) -> None:
    session_id = new_session_id()
    for target in ({"agentRuntimeArn": prod}, {"qualifier": "prod"}, {"agentRuntimeArn": prod, "qualifier": "prod"}):
        call(server, "InvokeAgentRuntime", runtimeSessionId=session_id, qualifier="prod")
        call(server, operation, runtimeSessionId=session_id, **target)
        found = [s["endpoint"] for s in server.view.sessions() if s["session_id"] == session_id]
        assert found == ([] if operation == "StopRuntimeSession" else ["prod"])


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS.values())))
def test_what_an_arn_says_is_not_passed_over(server: Server, prod: str, operation: str) -> None:
    arn, session_id = server.arn, new_session_id()
    call(server, "InvokeAgentRuntime", runtimeSessionId=session_id)
    for changes, status, code in (
        ({"agentRuntimeArn": f"{arn}/runtime-endpoint/nowhere"}, 404, "ResourceNotFoundException"),
        ({"agentRuntimeArn": arn.replace("us-west-2", "eu-west-1")}, 404, "ResourceNotFoundException"),
        ({"agentRuntimeArn": arn.replace("123456789012", "999999999999")}, 404, "ResourceNotFoundException"),
        ({"agentRuntimeArn": f"{arn}/foo/bar"}, 400, "ValidationException"),
        ({"agentRuntimeArn": prod, "qualifier": "DEFAULT"}, 400, "ValidationException"),
    ):
        found = refused(lambda: call(server, operation, runtimeSessionId=session_id, **changes))  # noqa: B023
        assert found[:2] == (status, code), changes


def test_the_id_of_a_reply_is_the_one_that_the_agent_was_given(server: Server) -> None:
    session_id = new_session_id()
    for _ in range(2):  # started for it, and warm
        reply = call(server, "InvokeAgentRuntime", runtimeSessionId=session_id)
        seen = json.loads(reply["response"])["x-amzn-bedrock-agentcore-runtime-request-id"]
        assert seen == reply["ResponseMetadata"]["RequestId"]


def test_trace_headers_reach_the_agent_and_its_own_come_back(server: Server) -> None:
    given = {
        "traceId": "Root=1-67891233-abcdef012345678912345678",
        "traceParent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "traceState": "vendor=value",
        "baggage": "userId=alice",
    }
    seen = json.loads(call(server, "InvokeAgentRuntime", **given)["response"])
    assert {seen[k] for k in ("x-amzn-trace-id", "traceparent", "tracestate", "baggage")} == set(given.values())
    payload = json.dumps({"headers": {"traceparent": "00-of-the-agent-01", "x-private": "no"}}).encode()
    reply = server.default_client.invoke_agent_runtime(agentRuntimeArn=server.arn, payload=payload, **given)
    reply["response"].read()
    assert reply["traceParent"] == "00-of-the-agent-01"
    assert "x-private" not in reply["ResponseMetadata"]["HTTPHeaders"]


def test_content_types_and_accept_go_both_ways(server: Server) -> None:
    payload = json.dumps({"body": "a,b\n", "headers": {"content-type": "text/csv"}}).encode()
    asked = {
        "contentType": "application/json",
        "accept": "text/csv, application/json",
        "runtimeUserId": "user-7",
    }
    client = server.default_client
    reply = client.invoke_agent_runtime(agentRuntimeArn=server.arn, payload=payload, **asked)
    assert (reply["contentType"], reply["response"].read()) == ("text/csv", b"a,b\n")
    reply = client.invoke_agent_runtime(agentRuntimeArn=server.arn, payload=b"{}", **asked)
    seen = json.loads(reply["response"].read())
    assert [seen[name] for name in ("content-type", "accept")] == list(asked.values())[:2]
    assert seen["x-amzn-bedrock-agentcore-runtime-user-id"] == "user-7"


@pytest.mark.parametrize("status", [400, 503])
def test_any_error_of_the_agent_is_424_and_names_its_status(server: Server, status: int) -> None:
    payload = json.dumps({"body": "secret of the agent", "status": status}).encode()
    client = server.default_client
    found = refused(lambda: client.invoke_agent_runtime(agentRuntimeArn=server.arn, payload=payload))
    assert found[:2] == (424, "RuntimeClientError")
    assert f"Received error ({status}) from runtime" in found[2]["Error"]["Message"]
    assert "secret of the agent" not in str(found[2])


# -- control plane


@pytest.fixture
def made(server: Server) -> Iterator[dict[str, Any]]:
    runtime = server.create(AGENTS / "respond.py", tags={"team": "rl"})
    yield runtime
    server.settled(runtime)
    server.delete(runtime)


def test_tags_of_runtimes_and_endpoints(server: Server, made: dict[str, Any]) -> None:
    arn, control = made["agentRuntimeArn"], server.control
    endpoint = control.create_agent_runtime_endpoint(
        agentRuntimeId=made["agentRuntimeId"], name="tagged", tags={"stage": "test"}
    )["agentRuntimeEndpointArn"]
    assert control.list_tags_for_resource(resourceArn=arn)["tags"] == {"team": "rl"}
    assert control.list_tags_for_resource(resourceArn=endpoint)["tags"] == {"stage": "test"}
    nobody = arn.rpartition("/")[0] + f"/{BAD_ID}"
    assert refused(lambda: control.list_tags_for_resource(resourceArn=nobody))[0] == 404


def test_every_control_operation_is_404_for_what_is_not_there(server: Server, made: dict[str, Any]) -> None:
    here, there, control = made["agentRuntimeId"], BAD_ID, server.control
    full = agent_fields(AGENTS / "respond.py")
    for work in (
        lambda: control.get_agent_runtime(agentRuntimeId=there),
        lambda: control.get_agent_runtime(agentRuntimeId=here, agentRuntimeVersion="9"),
        lambda: control.update_agent_runtime(agentRuntimeId=there, **full),
        lambda: control.delete_agent_runtime(agentRuntimeId=there),
        lambda: control.create_agent_runtime_endpoint(agentRuntimeId=there, name="prod"),
        lambda: control.get_agent_runtime_endpoint(agentRuntimeId=here, endpointName="prod"),
        lambda: control.update_agent_runtime_endpoint(agentRuntimeId=here, endpointName="prod"),
        lambda: control.delete_agent_runtime_endpoint(agentRuntimeId=here, endpointName="prod"),
    ):
        assert refused(work)[:2] == (404, "ResourceNotFoundException")


def test_what_cannot_be_changed_is_409(server: Server, made: dict[str, Any]) -> None:
    identity, control = made["agentRuntimeId"], server.control
    control.create_agent_runtime_endpoint(agentRuntimeId=identity, name="twice")
    for work in (
        lambda: control.create_agent_runtime_endpoint(agentRuntimeId=identity, name="twice"),
        lambda: control.delete_agent_runtime_endpoint(agentRuntimeId=identity, endpointName="DEFAULT"),
    ):
        assert refused(work)[:2] == (409, "ConflictException")
    control.update_agent_runtime(agentRuntimeId=identity, **agent_fields("local:///absent.py"))
    server.settled(made, agentRuntimeVersion="2")
    endpoint = {"agentRuntimeId": identity, "endpointName": "twice", "agentRuntimeVersion": "2"}
    _, code, response = refused(lambda: control.update_agent_runtime_endpoint(**endpoint))
    assert code == "ConflictException"
    assert response["Error"]["Message"].startswith("Version 2 is not ready: there is no agent file")


def test_bad_field_is_400_and_named(server: Server) -> None:
    status, code, response = refused(lambda: server.create(agentRuntimeName="9lives"))
    assert (status, code, response["reason"]) == (400, "ValidationException", "FieldValidationFailed")
    assert response["fieldList"][0]["name"] == "agentRuntimeName"


def test_a_call_whose_session_is_stopped_while_it_starts_is_to_be_retried(server: Server) -> None:
    server.view.call("PUT", "/_local/faults", [{"kind": "slow_start", "delay_s": 1.5, "first": 2}])
    target = {"agentRuntimeArn": server.arn, "runtimeSessionId": new_session_id()}
    patient = server.client(retries={"total_max_attempts": 3, "mode": "standard"})
    with ThreadPoolExecutor(2) as pool:
        once = pool.submit(refused, lambda: call(server, "InvokeAgentRuntime", **target))
        again = pool.submit(patient.invoke_agent_runtime, payload=b"{}", **target)
        wait_for(lambda: (server.session(target["runtimeSessionId"]) or {}).get("inflight") == 2)
        server.default_client.stop_runtime_session(**target)
        assert once.result()[:2] == (409, "RetryableConflictException")
        reply = again.result()
    assert reply["response"].read()
    assert reply["ResponseMetadata"]["RetryAttempts"] >= 1
    server.view.call("PUT", "/_local/faults", [])
