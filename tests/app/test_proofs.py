"""Agents that prove their records: the proof is right, the secret stays with the toolkit, and a forged record is no obstacle."""

from __future__ import annotations

from typing import Any

import pytest

from agentcore_rl_toolkit.contract import parse_record
from agentcore_rl_toolkit.proof import Proof, check

SECRET = "5ec7e7" * 10
AGENT = """
@app.rollout_entrypoint
def run(payload):
    what = payload.get("do", "answer")
    if what == "raise":
        raise ValueError("no luck")
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
