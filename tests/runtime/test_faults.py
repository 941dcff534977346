"""Fault plans: which requests they hit, and what a client sees of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError
from botocore.exceptions import ConnectionError as BotoConnectionError

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.runtime.faults import Fault, FaultPlan

from .conftest import Server, wait_for


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
        "[[rule]]\n",
        "not toml",
    ):
        good.write_text(text)
        with pytest.raises(ConfigError):
            FaultPlan.load(good)


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
    started = time.monotonic()
    server.invoke({}, session_id)
    assert time.monotonic() - started < 0.8
