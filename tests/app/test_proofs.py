"""Agents that prove their records: the proof is right, the secret stays with the toolkit, and a forged record is no obstacle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import parse_record
from agentcore_rl_toolkit.proof import Proof, check

from .conftest import wait_for

SECRET = "5ec7e7" * 10
AGENT = """
import base64, pathlib

@app.rollout_entrypoint
def run(payload, context):
    what = payload.get("do", "answer")
    if what == "raise":
        raise ValueError("no luck")
    if what == "wait":
        flag = pathlib.Path(payload["flag"])
        while not flag.exists():
            time.sleep(0.01)
    if what == "save":
        key = payload["_rollout"]["exp_id"] + "/" + payload["_rollout"]["input_id"] + "/" + context.session_id + ".json"
        app.save_result({"rewards": 0.25}, payload["_rollout"], key, payload)
    if what == "large":
        return {"rewards": 1.0, "text": "x" * 3_000_000}
    return {"rewards": 0.5, "_proof": "mine", "proof": "by induction", "seen": sorted(payload["_rollout"]), "payload": payload}
"""


@pytest.fixture(scope="module")
def agent(start_shared_agent: Any) -> Any:
    return start_shared_agent(AGENT)


@pytest.mark.parametrize("do", ["answer", "raise", "large"])
def test_every_kind_of_record_is_proven(agent: Any, do: str) -> None:
    path, reply = agent.rollout({"do": do}, proof_key=SECRET)
    assert reply["proof"] == "hmac-sha256"
    agent.record(path)
    assert check(path.read_bytes(), reply["result_key"], SECRET) is Proof.PROVEN
    assert list(parse_record(path.read_bytes()))[-1] == "_proof"


def test_the_agents_own_fields_stay_and_its_code_does_not_see_the_secret(agent: Any) -> None:
    path, _ = agent.rollout({}, proof_key=SECRET)
    record = agent.record(path)
    assert record["proof"] == "by induction"
    assert record["seen"] == ["exp_id", "input_id", "s3_bucket"]
    assert record["payload"]["_rollout"]["proof_key"] == "[redacted]"
    assert SECRET not in path.read_text()
    assert SECRET not in agent.log


def test_a_record_that_the_session_did_not_write_is_replaced(agent: Any, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    path, reply = agent.rollout({"do": "wait", "flag": str(flag)}, proof_key=SECRET)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rewards": 100.0, "_agent": {"outcome": "ok", "attempt": 9}}))
    flag.touch()
    wait_for(lambda: check(path.read_bytes(), reply["result_key"], SECRET) is Proof.PROVEN)
    assert agent.record(path)["rewards"] == 0.5
    assert f"security: {reply['result_key']} contained a record that this session did not write" in agent.log


def test_a_result_stored_by_hand_is_proven_too_and_stays(agent: Any) -> None:
    path, reply = agent.rollout({"do": "save"}, session="h" * 40, input_id="by-hand", proof_key=SECRET)
    wait_for(lambda: agent.ping() == "Healthy")
    assert agent.record(path)["rewards"] == 0.25
    assert check(path.read_bytes(), reply["result_key"], SECRET) is Proof.PROVEN
