"""Fault plans: which requests they hit, and what a client sees of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError, IncompleteReadError, ResponseStreamingError
from botocore.exceptions import ConnectionError as BotoConnectionError

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.runtime.api.faults import Fault, FaultPlan

from ..conftest import Server, wait_for


def kinds(plan: FaultPlan, count: int, *, operation: str = "InvokeAgentRuntime", at_s: float = 0.0) -> list[int]:
    return [len(plan.draw(operation, "math", at_s)) for _ in range(count)]


def test_first_every_and_window_choose_requests() -> None:
    assert kinds(FaultPlan([Fault(kind="throttle", first=2)]), 5) == [1, 1, 0, 0, 0]
    assert kinds(FaultPlan([Fault(kind="throttle", every=3)]), 6) == [0, 0, 1, 0, 0, 1]
    window = FaultPlan([Fault(kind="throttle", after_s=10, until_s=20)])
    assert [kinds(window, 1, at_s=t)[0] for t in (9.9, 10.0, 19.9, 20.0)] == [0, 1, 1, 0]


def test_operation_and_agent_narrow() -> None:
    plan = FaultPlan([Fault(kind="quota", operation="StopRuntimeSession"), Fault(kind="drop", agent="other")])
    assert kinds(plan, 1) == [0]
    assert kinds(plan, 1, operation="StopRuntimeSession") == [1]


def test_the_same_seed_gives_the_same_faults() -> None:
    rule = Fault(kind="server_error", probability=0.3)
    a, b, c = (kinds(FaultPlan([rule], seed=s), 200) for s in (1, 1, 2))
    assert a == b
    assert a != c
    assert 30 < sum(a) < 90


def test_files_are_read_and_typing_errors_refused(tmp_path: Path) -> None:
    good = tmp_path / "plan.toml"
    good.write_text('seed = 7\n[[fault]]\nkind = "slow_start"\ndelay_s = 2.5\nprobability = 0.1\n')
    assert FaultPlan.load(good).rules == [Fault(kind="slow_start", delay_s=2.5, probability=0.1)]
    for text in (
        '[[fault]]\nkind = "explode"\n',
        '[[fault]]\nkind = "drop"\nprobabilty = 1\n',
        '[[fault]]\nkind = "throttle"\nprobability = "1"\n',
        '[[fault]]\nkind = "throttle"\nfirst = true\n',
        '[[fault]]\nkind = "throttle"\nafter_s = "1"\n',
        '[[fault]]\nkind = "slow_start"\ndelay_s = -1\n',
        '[[fault]]\nkind = "slow_start"\ndelay_s = nan\n',
        '[[fault]]\nkind = "partial"\nafter_bytes = 1.5\n',
        '[[fault]]\nkind = "throttle"\noperation = "Invoke"\n',
        '[[fault]]\nkind = "throttle"\ndelay_s = 2\n',  # would do nothing
        '[[fault]]\nkind = "duplicate"\nwhen = "after"\n',
        '[[fault]]\nkind = "duplicate"\noperation = "InvokeAgentRuntimeCommand"\n',
        '[[fault]]\nkind = "kill"\noperation = "StopRuntimeSession"\n',
        'seed = "x"\n',
        "[[rule]]\n",
        "not toml",
    ):
        good.write_text(text)
        with pytest.raises(ConfigError):
            FaultPlan.load(good)


def test_a_rule_passes_over_what_its_kind_cannot_be_done_to() -> None:
    plan = FaultPlan([Fault(kind="duplicate", every=2), Fault(kind="drop", first=1), Fault(kind="slow_start", first=1)])
    assert kinds(plan, 4, operation="InvokeAgentRuntimeCommand") == [2, 0, 0, 0]  # the slow start and the drop
    assert kinds(plan, 2, operation="StopRuntimeSession") == [0, 0]
    assert kinds(plan, 4) == [0, 1, 0, 1]  # the duplicates
    assert plan.injected == {"slow_start": 1, "drop": 1, "duplicate": 2}
    slow = FaultPlan([Fault(kind="slow_start", first=1)])
    assert slow.draw("InvokeAgentRuntime", "math", 0.0, starts=False) == []  # its session is there: nothing to be late
    assert len(slow.draw("InvokeAgentRuntime", "math", 0.0)) == 1


@pytest.fixture
def plan(server: Server) -> Any:
    def put(*rules: dict[str, Any]) -> None:
        server.view.call("PUT", "/_local/faults", list(rules))

    yield put
    put()


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("throttle", 429, "ThrottlingException"),
        ("quota", 402, "ServiceQuotaExceededException"),
        ("runtime_error", 424, "RuntimeClientError"),
        ("server_error", 500, "InternalServerException"),
        ("conflict", 409, "RetryableConflictException"),
    ],
)
def test_error_faults_look_like_aws(
    server: Server, plan: Any, session_id: str, kind: str, status: int, code: str
) -> None:
    plan({"kind": kind, "first": 1})
    with pytest.raises(ClientError) as error:
        server.invoke({}, session_id)
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert error.value.response["Error"]["Code"] == code
    assert server.session(session_id) is None  # it never reached the agent
    assert server.invoke({}, session_id)["calls"] == 1


def test_drop_before_never_reaches_the_agent_and_after_does(server: Server, plan: Any, session_id: str) -> None:
    server.invoke({}, session_id)
    for when, expected in (("before", 2), ("after", 4)):
        plan({"kind": "drop", "when": when, "first": 1})
        with pytest.raises((ConnectionClosedError, BotoConnectionError)):
            server.invoke({}, session_id)
        assert server.invoke({}, session_id)["calls"] == expected


def test_duplicate_delivers_twice(server: Server, plan: Any, session_id: str) -> None:
    plan({"kind": "duplicate", "first": 1})
    server.invoke({}, session_id)
    wait_for(lambda: server.session(session_id)["inflight"] == 0)
    assert server.invoke({}, session_id)["calls"] == 3


def test_kill_ends_the_session_under_a_running_request(server: Server, plan: Any, session_id: str) -> None:
    plan({"kind": "kill", "delay_s": 0.3, "first": 1})
    with pytest.raises(ClientError) as error:
        server.invoke({"do": "sleep", "s": 30}, session_id)
    assert error.value.response["Error"]["Code"] == "RuntimeClientError"
    assert wait_for(lambda: server.ended(session_id))["state"] == "crashed"


def test_slow_start_delays_new_sessions_only(server: Server, plan: Any) -> None:
    plan({"kind": "slow_start", "delay_s": 0.8})
    session_id = new_session_id()
    server.invoke({}, session_id)
    assert server.session(session_id)["start_s"] > 0.8
    server.invoke({}, session_id)
    assert server.view.get("/_local/faults")["injected"] == {"slow_start": 1}  # by the first call alone


def test_init_timeout_is_a_late_424_of_a_new_session(server: Server, plan: Any, session_id: str) -> None:
    server.invoke({}, session_id)
    plan({"kind": "init_timeout", "delay_s": 0.5, "first": 1})
    assert server.invoke({}, session_id)["calls"] == 2
    began = time.monotonic()
    with pytest.raises(ClientError) as error:
        server.invoke({}, new_session_id())
    assert time.monotonic() - began > 0.5
    assert error.value.response["Error"]["Code"] == "RuntimeClientError"
    assert "initialization time exceeded" in error.value.response["Error"]["Message"]


def read_until_broken(stream: Any) -> bytes:
    """What comes of a reply that breaks off. Fails when it does not."""
    got = b""
    try:
        for piece in stream.iter_chunks(1):
            got += piece
    except (ResponseStreamingError, IncompleteReadError):
        return got
    raise AssertionError("the reply was whole")


@pytest.mark.parametrize("after_bytes", [0, 20])
def test_partial_breaks_the_reply_off(server: Server, plan: Any, session_id: str, after_bytes: int) -> None:
    server.invoke({}, session_id)
    plan({"kind": "partial", "after_bytes": after_bytes, "first": 1})
    reply = server.default_client.invoke_agent_runtime(
        agentRuntimeArn=server.arn, runtimeSessionId=session_id, payload=b'{"n": "enough of it"}'
    )
    assert len(read_until_broken(reply["response"])) == after_bytes
    assert server.invoke({}, session_id)["calls"] == 3  # the agent knows nothing of it


def test_partial_breaks_a_stream_off(server: Server, plan: Any, session_id: str) -> None:
    plan({"kind": "partial", "after_bytes": 25, "first": 1})
    reply = server.default_client.invoke_agent_runtime(
        agentRuntimeArn=server.arn, runtimeSessionId=session_id, payload=b'{"do": "stream", "n": 20, "delay_s": 0.01}'
    )
    assert len(read_until_broken(reply["response"])) == 25


@pytest.mark.parametrize("when", ["before", "after"])
def test_commands_and_stops_are_dropped_too(server: Server, plan: Any, session_id: str, when: str) -> None:
    server.invoke({}, session_id)
    target = {"agentRuntimeArn": server.arn, "runtimeSessionId": session_id}

    def run(command: str) -> str:
        reply = server.default_client.invoke_agent_runtime_command(body={"command": command}, **target)
        deltas = [e["chunk"].get("contentDelta", {}) for e in reply["stream"]]
        return "".join(d.get("stdout", "") for d in deltas)

    plan({"kind": "drop", "when": when, "operation": "InvokeAgentRuntimeCommand", "first": 1})
    with pytest.raises((ConnectionClosedError, BotoConnectionError)):
        run("echo done >> trace")
    assert run("cat trace 2>/dev/null") == ("done\n" if when == "after" else "")
    plan({"kind": "drop", "when": when, "operation": "StopRuntimeSession", "first": 1})
    with pytest.raises((ConnectionClosedError, BotoConnectionError)):
        server.default_client.stop_runtime_session(**target)
    assert (server.session(session_id) is None) == (when == "after")
