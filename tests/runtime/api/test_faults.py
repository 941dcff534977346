"""Fault plans: which requests they hit, and what a client sees of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError
from botocore.exceptions import ConnectionError as BotoConnectionError

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.runtime.api.faults import Fault, FaultPlan

from ..conftest import Server, shown


def kinds(plan: FaultPlan, count: int, *, operation: str = "InvokeAgentRuntime") -> list[int]:
    return [len(plan.draw(operation, "math")) for _ in range(count)]


def test_first_and_every_choose_requests() -> None:
    assert kinds(FaultPlan([Fault(kind="throttle", first=2)]), 5) == [1, 1, 0, 0, 0]
    assert kinds(FaultPlan([Fault(kind="throttle", every=3)]), 6) == [0, 0, 1, 0, 0, 1]
    assert kinds(FaultPlan([Fault(kind="throttle", every=1)]), 2) == [1, 1]


def test_operation_and_agent_narrow() -> None:
    plan = FaultPlan([Fault(kind="quota", operation="StopRuntimeSession"), Fault(kind="drop", agent="other")])
    assert kinds(plan, 1) == [0]
    assert kinds(plan, 1, operation="StopRuntimeSession") == [1]


def test_the_same_seed_gives_the_same_faults() -> None:
    rule = Fault(kind="server_error", probability=0.3)
    a, b, c, d = (kinds(FaultPlan([rule], seed=s), 200) for s in (1, 1, 2, 0))
    assert kinds(FaultPlan([rule]), 200) == d
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
        '[[fault]]\nkind = "slow_start"\ndelay_s = -1\n',
        '[[fault]]\nkind = "slow_start"\ndelay_s = nan\n',
        '[[fault]]\nkind = "throttle"\noperation = "Invoke"\n',
        "[[rule]]\n",
        "not toml",
    ):
        good.write_text(text)
        with pytest.raises(ConfigError):
            FaultPlan.load(good)


def test_a_rule_passes_over_what_its_kind_cannot_be_done_to() -> None:
    plan = FaultPlan([Fault(kind="kill", every=2), Fault(kind="drop", first=1), Fault(kind="slow_start", first=1)])
    assert kinds(plan, 2, operation="StopRuntimeSession") == [1, 0]  # the drop
    assert plan.draw("InvokeAgentRuntime", "math", starts=False) == []  # its session is there: nothing to be late
    assert kinds(plan, 3) == [2, 0, 1]  # the second and the fourth are killed, the first new session is late
    assert plan.injected == {"slow_start": 1, "drop": 1, "kill": 2}


@pytest.fixture
def plan(server: Server) -> Any:
    def put(*rules: dict[str, Any]) -> None:
        server.view.call("PUT", "/_local/faults", list(rules))

    yield put
    put()


def test_a_refused_request_never_reaches_the_agent(server: Server, plan: Any, session_id: str) -> None:
    plan({"kind": "throttle", "first": 1})
    with pytest.raises(ClientError) as error:
        server.invoke({}, session_id)
    assert error.value.response["Error"]["Code"] == "ThrottlingException"
    assert server.session(session_id) is None
    assert server.invoke({}, session_id)["calls"] == 1


def test_drop_before_never_reaches_the_agent_and_after_does(server: Server, plan: Any, session_id: str) -> None:
    server.invoke({}, session_id)
    for when, expected in (("before", 2), ("after", 4)):
        plan({"kind": "drop", "when": when, "first": 1})
        with pytest.raises((ConnectionClosedError, BotoConnectionError)):
            server.invoke({}, session_id)
        assert server.invoke({}, session_id)["calls"] == expected


def test_slow_start_delays_new_sessions_only(server: Server, plan: Any) -> None:
    plan({"kind": "slow_start", "delay_s": 0.8})
    session_id = new_session_id()
    server.invoke({}, session_id)
    assert server.session(session_id)["start_s"] > 0.8
    server.invoke({}, session_id)
    assert server.view.get("/_local/faults")["injected"] == {"slow_start": 1}  # by the first call alone


@pytest.mark.parametrize("when", ["before", "after"])
def test_commands_and_stops_are_dropped_too(server: Server, plan: Any, session_id: str, when: str) -> None:
    server.invoke({}, session_id)
    target = {"agentRuntimeArn": server.arn, "runtimeSessionId": session_id}

    plan({"kind": "drop", "when": when, "operation": "InvokeAgentRuntimeCommand", "first": 1})
    with pytest.raises((ConnectionClosedError, BotoConnectionError)):
        server.command(session_id, "echo done >> trace")
    assert shown(server.command(session_id, "cat trace 2>/dev/null")) == ("done\n" if when == "after" else "")
    plan({"kind": "drop", "when": when, "operation": "StopRuntimeSession", "first": 1})
    with pytest.raises((ConnectionClosedError, BotoConnectionError)):
        server.default_client.stop_runtime_session(**target)
    assert (server.session(session_id) is None) == (when == "after")
