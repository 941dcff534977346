"""What an agent does with an invocation, seen from outside: reply, ping, record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import MAX_DEPTH, Outcome, record_outcome
from serving import wait_for

from .conftest import agents_in

AGENT = """
import random
calls = []

@app.rollout_entrypoint
async def run(payload, context):
    calls.append(context.session_id)
    what = payload.get("do", "answer")
    if what == "wait":
        while not os.path.exists(payload["until"]):
            await asyncio.sleep(0.01)
    elif what == "echo":
        payload["added"] = 1
        return payload
    elif what == "return":
        return eval(payload["value"])
    elif what == "leak":
        raise RuntimeError("could not log in with " + payload["_rollout"]["api_key"])
    return {"rewards": 0.5, "calls": len(calls), "random": random.random()}
"""


@pytest.fixture(scope="module")
def agent(start_shared_agent: Any) -> Any:
    return start_shared_agent(AGENT)


@pytest.fixture(scope="module")
def other(agent: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An agent with its own handler of pings, and with a list of the stores that it may write to."""
    folder = tmp_path_factory.mktemp("other")
    env = {"AGENTCORE_RL_ALLOWED_BUCKETS": f"team-*, file://{folder}/results_0, {agent.store_url}"}
    with agents_in(folder) as start:
        yield start(AGENT + '\n@app.ping\ndef ping():\n    return "Healthy"\n', env=env)


def idle(agent: Any) -> None:
    wait_for(lambda: agent.ping() == "Healthy")


def test_ping_says_busy_while_a_rollout_runs_whatever_the_agents_own_handler_says(other: Any, tmp_path: Path) -> None:
    idle(other)
    path, _ = other.rollout({"do": "wait", "until": str(tmp_path / "released")})
    busy = other.request("GET", "/ping")
    assert busy[1]["status"] == "HealthyBusy"
    assert other.request("GET", "/ping") == busy  # the time is that of the change
    (tmp_path / "released").touch()
    other.record(path)
    idle(other)


@pytest.mark.parametrize(
    "block",
    [
        {"exp_id": "../../etc"},
        {"input_id": "a/../../b"},
        {"exp_id": "/abs"},
        {"s3_bucket": "file:///a/../b"},
        {"s3_bucket": "/etc"},
        {"s3_bucket": ["b"]},
        {"attempt": "first"},
    ],
)
def test_a_block_that_would_write_elsewhere_is_refused(agent: Any, block: dict[str, Any]) -> None:
    calls = agent.run()["calls"]
    status, reply = agent.invoke({"_rollout": {"exp_id": "e", "input_id": "i", "s3_bucket": agent.store_url, **block}})
    assert status == 500
    assert reply["error"]
    assert agent.run()["calls"] == calls + 1


def test_an_empty_input_id_is_a_fresh_one_and_the_same_for_the_same_delivery(agent: Any) -> None:
    block = {"exp_id": "e", "input_id": "", "s3_bucket": agent.store_url}
    calls = agent.run()["calls"]
    (_, first), (_, again), (_, other) = (agent.invoke({"_rollout": block}, x * 40) for x in "aab")
    assert first["result_key"] == again["result_key"] != other["result_key"]
    assert "//" not in first["result_key"]
    assert agent.record(agent.results / first["result_key"])["input_id"] == first["result_key"].split("/")[1]
    agent.record(agent.results / other["result_key"])
    assert agent.run()["calls"] == calls + 3


def test_secrets_never_reach_the_store(agent: Any) -> None:
    path, _ = agent.rollout({"do": "leak", "db": {"password": "hunter2"}}, api_key="sk-very-secret")
    record = agent.record(path)
    text = path.read_text()
    assert "sk-very-secret" not in text
    assert "hunter2" not in text
    assert record["stop_reason"] == "could not log in with [redacted]"
    assert record["payload"]["db"] == {"password": "[redacted]"}


def test_a_payload_as_deep_as_a_record_is_stored_and_a_deeper_one_is_refused(agent: Any) -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH - 2):
        deep = [deep]
    assert agent.run({"x": deep})["payload"]["x"] == deep
    block = {"exp_id": "exp", "input_id": "input", "s3_bucket": agent.store_url}
    status, reply = agent.invoke({"x": [deep], "_rollout": block}, "9" * 40)
    assert (status, reply["error"]) == (500, "the payload is nested too deeply to be stored")


def test_the_agents_own_status_and_stop_reason_win(agent: Any) -> None:
    value = "{'rewards': 0, 'status_code': 404, 'stop_reason': 'gave up', 'outcome': 'resolved', 'input_id': 'x', '_agent': 1}"
    record = agent.run({"do": "return", "value": value})
    assert (record["status_code"], record["stop_reason"]) == (404, "gave up")
    assert record["outcome"] == "resolved"
    assert record["input_id"] == "input"
    assert record["_agent"]["outcome"] == "agent_error"
    assert record_outcome(record) is Outcome.AGENT_ERROR
    assert record_outcome(agent.run({"do": "return", "value": "{'outcome': 'lost'}"})) is Outcome.OK


def test_an_allow_list_keeps_callers_from_writing_elsewhere(other: Any) -> None:
    assert other.run()["rewards"] == 0.5
    folder = other.results.parent
    for elsewhere in ("someone-elses-bucket", f"file://{folder}/elsewhere", f"file://{folder}/results_00"):
        status, reply = other.invoke({"_rollout": {"exp_id": "e", "input_id": "i", "s3_bucket": elsewhere}})
        assert status == 500
        assert "may not write to" in reply["error"]
    assert not (folder / "elsewhere").exists()


def test_a_payload_that_is_no_object_is_an_error(agent: Any) -> None:
    status, answer = agent.invoke([1, 2])
    assert status == 500
    assert "must be a JSON object, got list" in str(answer)


@pytest.mark.system
def test_the_agents_own_log_lines_carry_the_ids(start_agent: Any) -> None:
    agent = start_agent(
        """
        import logging
        @app.rollout_entrypoint
        def run(payload):
            logging.getLogger("my.agent").warning("tried %s", "hard")
            return {}
        """
    )
    record = agent.run(session="l" * 40)
    (line,) = [json.loads(text) for text in agent.log.splitlines() if "tried hard" in text]
    assert (line["session_id"], line["input_id"], line["exp_id"]) == ("l" * 40, "input", "exp")
    assert record["status_code"] == 200
