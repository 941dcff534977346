"""The verdict of a stored record, and records that are scored again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentcore_rl_toolkit.client import RolloutClient
from agentcore_rl_toolkit.client.records import Verdict, judge
from agentcore_rl_toolkit.contract import Cause, Outcome
from agentcore_rl_toolkit.errors import (
    AgentError,
    ConfigError,
    ContractError,
    GatewayError,
    InvalidResultError,
    RolloutCancelledError,
    RolloutError,
    RolloutLostError,
    RolloutThrottledError,
    RolloutTimeoutError,
)
from agentcore_rl_toolkit.proof import Proof, seal

KEY, SECRET = "e/i/s.json", "s" * 32


def ended(outcome: str, **fields: Any) -> dict[str, Any]:
    block = {name: fields.pop(name) for name in ("cause", "failure") if name in fields}
    return {"stop_reason": "why", "_agent": {"outcome": outcome, **block}, **fields}


@pytest.mark.parametrize(
    ("record", "error", "text", "cause"),
    [
        (ended("agent_error", error_type="KeyError"), AgentError, "the agent failed: why", Cause.AGENT),
        (ended("agent_error", cause="policy", failure="turns"), AgentError, "the policy failed: why", Cause.POLICY),
        (ended("lost"), RolloutLostError, "the infrastructure failed the agent: why", Cause.INFRASTRUCTURE),
        (ended("timeout", stage="run"), RolloutTimeoutError, "ran out of time: why", Cause.INFRASTRUCTURE),
        (ended("throttled"), RolloutThrottledError, "why", Cause.INFRASTRUCTURE),
        (ended("cancelled"), RolloutCancelledError, "why", None),
        (ended("invalid"), InvalidResultError, "the record cannot be used: why", Cause.AGENT),
        (ended("ok", rewards="high"), InvalidResultError, "reward must be a finite number", Cause.AGENT),
    ],
)
def test_a_record_of_a_failure_becomes_its_error(
    record: dict[str, Any], error: type[RolloutError], text: str, cause: Cause | None
) -> None:
    verdict = judge(json.dumps(record).encode(), KEY)
    assert type(verdict.error) is error
    assert str(verdict.error).endswith(text) or text in str(verdict.error)
    assert (verdict.outcome, verdict.cause) == (Outcome(error.outcome), cause)
    assert verdict.error.key == KEY
    assert verdict.record == record


def test_a_good_record_has_no_error() -> None:
    verdict = judge(b'{"rewards": 1.0, "_agent": {"outcome": "ok"}}', KEY)
    assert (verdict.outcome, verdict.error, verdict.proof) == (Outcome.OK, None, Proof.UNPROVEN)
    errors = (ConfigError("x"), GatewayError("x"), ValueError("x"))
    assert [Verdict(error=error).outcome for error in errors] == [Outcome.INVALID, Outcome.LOST, Outcome.LOST]


@pytest.mark.parametrize(
    ("body", "expected", "proof", "usable"),
    [
        (seal(b'{"rewards": 1.0}', KEY, SECRET), {"secret": SECRET, "required": True}, Proof.PROVEN, True),
        (b'{"rewards": 1.0}', {"secret": SECRET}, Proof.UNPROVEN, True),
        (b'{"rewards": 1.0}', {"secret": SECRET, "promised": True}, Proof.FORGED, False),
        (b'{"rewards": 1.0}', {"secret": SECRET, "required": True}, Proof.UNPROVEN, False),
        (b'{"rewards": 1.0}', {"promised": True}, Proof.UNPROVEN, True),  # no secret to check it with
        (seal(b'{"rewards": 1.0}', "e/i/t.json", SECRET), {"secret": SECRET}, Proof.FORGED, False),
    ],
)
def test_the_proof_decides_if_a_record_is_used(
    body: bytes, expected: dict[str, Any], proof: Proof, usable: bool
) -> None:
    verdict = judge(body, KEY, **expected)
    assert (verdict.proof, verdict.record is not None, verdict.outcome is Outcome.OK) == (proof, usable, usable)
    assert verdict.cause is (None if usable else Cause.INFRASTRUCTURE)


def test_stored_records_are_scored_again_and_failures_are_not(client: RolloutClient) -> None:
    client.store.put("exp/a/s.json", json.dumps({"rewards": 0.5, "payload": {"n": 3}}).encode())
    client.store.put("exp/b/s.json", json.dumps(ended("agent_error", rewards=0.0)).encode())
    client.store.put("exp/c/s.json", json.dumps({"rewards": 1.0, "payload": {}}).encode())
    client.store.put("exp/d/s.json", b"no json")

    async def reward(record: dict[str, Any], payload: dict[str, Any]) -> float:
        return float(payload["n"])

    good, failed, broken, unusable = client.replay(reward)
    assert client.replay(lambda record, payload: payload["n"])[0] == good
    assert (good.stored, good.reward, good.changed, good.error) == (0.5, 3.0, True, None)
    assert (failed.stored, failed.reward, failed.changed, failed.outcome) == (None, None, False, Outcome.AGENT_ERROR)
    assert (broken.stored, broken.reward, broken.input_id, broken.session_id) == (1.0, None, "c", "s")
    assert isinstance(broken.error, KeyError)
    assert (unusable.outcome, unusable.reward) == (Outcome.INVALID, None)
    assert [one.reward for one in client.replay(input_id="a")] == [None]
    (without,) = client.replay(lambda record, payload: None, input_id="a")
    assert (without.reward, type(without.error)) == (None, ContractError)
