"""An invoke that the runtime answered with 500 or 503: what is sent again, what is not, and how soon that is known."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agentcore_rl_toolkit.client import Deadlines
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.errors import RolloutLostError
from scripted_runtime import ScriptedRuntime

from .conftest import MakeClient, script

QUICK = Deadlines(confirm_s=0.5)


def published(**what: Any) -> dict[str, Any]:
    """An agent of the published toolkit: no heartbeat, and it runs as often as it is called."""
    return script(heartbeat=False, runs_once=False, **what)


@pytest.mark.parametrize("fault", ["500", "500_after"])
def test_an_agent_that_runs_once_is_asked_again_with_the_same_session(
    make_client: MakeClient, runtime: ScriptedRuntime, fault: str
) -> None:
    client = make_client(deadlines=QUICK)
    client.invoke(script()).result(60)  # from its reply the client knows
    runtime.faults.extend([fault, fault])
    began_s = time.monotonic()
    future = client.invoke(script(run_s=0.2, result={"n": 1}))
    assert future.result(60)["n"] == 1
    assert time.monotonic() - began_s < 45  # pauses of at most 0.5 and 1 s, where it once took 60 s to give up
    assert future.attempt == 1
    sent = 1 if fault == "500_after" else 3  # a session that shows itself is not asked again
    assert (runtime.requests["invoke"], client.stats["server_errors"]) == (1 + sent, max(1, sent - 1))
    assert runtime.sessions[future.session_id].runs == 1
    client.flush()
    assert runtime.live == []


def test_errors_without_end_are_lost_within_seconds_and_the_session_is_stopped(
    make_client: MakeClient, runtime: ScriptedRuntime
) -> None:
    client = make_client(deadlines=QUICK, max_retry_attempts=3)
    client.invoke(script()).result(60)
    client.flush()
    runtime.faults.extend(["500"] * 100)
    began_s = time.monotonic()
    future = client.submit(script())
    error = future.exception(60)
    assert isinstance(error, RolloutLostError)
    assert "InternalServerException" in str(error)
    assert "3 times" in str(error)
    assert time.monotonic() - began_s < 45
    assert runtime.requests["invoke"] == 1 + 3
    client.flush()
    assert runtime.requests["stop"] == 2


def test_a_session_that_runs_although_every_answer_was_an_error_is_followed(
    make_client: MakeClient, runtime: ScriptedRuntime
) -> None:
    client = make_client(max_retry_attempts=2)
    client.invoke(script()).result(60)
    runtime.faults.extend(["500_after"] * 100)
    future = client.invoke(script(run_s=2.0, result={"n": 1}))  # returns when the session showed life
    assert not future.done()
    assert future.result(30)["n"] == 1
    assert runtime.sessions[future.session_id].runs == 1


def test_an_agent_that_may_run_twice_is_not_asked_again_where_its_session_exists(
    make_client: MakeClient, runtime: ScriptedRuntime
) -> None:
    client = make_client(deadlines=QUICK)
    client.invoke(published()).result(60)
    runtime.faults.append("500_after")
    began_s = time.monotonic()
    future = client.submit(published(run_s=60))
    assert isinstance(future.exception(60), RolloutLostError)
    assert time.monotonic() - began_s < 45  # the rollout would run for 60 s
    assert runtime.sessions[future.session_id].runs == 1
    assert runtime.requests["invoke"] == 2
    client.flush()
    assert runtime.live == []


def test_a_batch_loses_none_of_its_rollouts_to_passing_errors(
    make_client: MakeClient, runtime: ScriptedRuntime
) -> None:
    runtime.faults.extend([None, "500", None, "503", "500_after"] * 2)
    client = make_client(deadlines=QUICK)
    items = client.map([script(run_s=0.1, result={"n": n}) for n in range(12)], 8, timeout=60)
    assert [item.outcome for item in items] == [Outcome.OK] * 12
    assert [item.attempt for item in items] == [1] * 12
    assert all(session.runs == 1 for session in runtime.sessions.values())
    client.flush()
    assert runtime.live == []


@pytest.mark.parametrize(
    ("faults", "outcome", "stops"),
    [
        (["403"], Outcome.INVALID, 0),  # a session does not exist
        (["off"], Outcome.INVALID, 1),  # the agent refused, so its session runs
        (["500", "403"], Outcome.INVALID, 1),  # the first invoke may have started the session
        (["424"], Outcome.LOST, 1),
    ],
)
def test_a_session_is_stopped_unless_it_cannot_exist(
    make_client: MakeClient, runtime: ScriptedRuntime, faults: list[str], outcome: Outcome, stops: int
) -> None:
    client = make_client(deadlines=Deadlines(confirm_s=0.1))
    client.invoke(script()).result(60)  # the client learns that sessions run once
    client.flush()
    runtime.faults.extend(faults)
    future = client.submit(script())
    assert future.exception(60) is not None
    assert future.outcome is outcome
    client.close()
    assert runtime.requests["stop"] == 1 + stops
