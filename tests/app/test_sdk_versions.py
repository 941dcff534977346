"""The same agent, over HTTP, on the oldest supported, a middle and the installed bedrock-agentcore."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from serving import wait_for

SRC = Path(__file__).parents[2] / "src"

AGENT = """
from bedrock_agentcore.runtime.context import BedrockAgentCoreContext

@app.rollout_entrypoint
async def run(payload, context):
    if payload.get("fail"):
        raise ValueError("no luck")
    time.sleep(payload.get("block", 0))
    await asyncio.sleep(payload.get("s", 0))
    return {"rewards": [0.0, 1.0], "session": context.session_id, "seen": BedrockAgentCoreContext.get_session_id()}
"""

VERSIONS = {
    "sdk-oldest": ["bedrock-agentcore==1.8.0", "obstore==0.11.*"],
    "sdk-1.17": ["bedrock-agentcore==1.17.*", "obstore"],
    "sdk-here": [],  # the newest, in an environment just made
}


@pytest.fixture(scope="module", params=sorted(VERSIONS))
def python(request: pytest.FixtureRequest, make_environment: Any) -> str:
    wanted = VERSIONS[request.param]
    return str(make_environment(request.param, *wanted, upon_this=True)) if wanted else sys.executable


@pytest.mark.nightly
def test_the_agent_behaves_the_same(python: str, start_agent: Any, faulty_s3: Any) -> None:
    env = {"PYTHONPATH": str(SRC), "PYTHONWARNINGS": "ignore", **faulty_s3.env}
    agent = start_agent(AGENT, python=python, env=env)
    session = "v" * 40

    assert agent.invoke({}, session) == (200, {"rewards": [0.0, 1.0], "session": session, "seen": session})
    record = agent.run(session=session)
    assert (record["rewards"], record["status_code"], record["stop_reason"]) == ([0.0, 1.0], 200, "end_turn")
    assert record["session"] == record["seen"] == session

    failed = agent.run({"fail": True})
    assert (failed["status_code"], failed["stop_reason"], failed["error_type"]) == (500, "no luck", "ValueError")

    blocked, _ = agent.rollout({"block": 1})
    assert agent.ping() == "HealthyBusy"
    assert not blocked.exists()
    agent.record(blocked)

    status, reply = agent.invoke({"_rollout": {"exp_id": "../e", "input_id": "i", "s3_bucket": "b-b"}})
    assert status == 500
    assert "exp_id" in reply["error"]

    _, reply = agent.rollout(s3_bucket="the-bucket", session="w" * 40)
    alive = "exp/input/" + "w" * 40 + ".alive"
    wait_for(lambda: reply["result_key"] in faulty_s3.objects and alive not in faulty_s3.objects)
    assert json.loads(faulty_s3.objects[reply["result_key"]])["rewards"] == [0.0, 1.0]

    interrupted, _ = agent.rollout({"s": 600})
    wait_for(interrupted.with_suffix(".alive").exists)
    agent.process.send_signal(signal.SIGTERM)
    agent.process.wait(60)
    assert json.loads(interrupted.read_text())["error_type"] == "Interrupted"
    assert os.listdir(interrupted.parent).count(interrupted.name) == 1
