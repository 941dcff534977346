"""Ids, keys, the `_rollout` block and the record: what agents and clients of any version must agree on."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit import contract
from agentcore_rl_toolkit.contract import Cause, Outcome, RolloutConfig
from agentcore_rl_toolkit.errors import AgentError, ConfigError, ContractError, RolloutCancelledError
from agentcore_rl_toolkit.store.base import check_key

IDS = {"exp_id": "e", "input_id": "i", "s3_bucket": "bucket"}


def test_a_failure_has_its_cause_from_our_own_block_only() -> None:
    def error(**fields: object) -> Any:
        return contract.record_error({"status_code": 500, **fields})

    assert error(_agent={"cause": "policy", "failure": "tokens"}).cause == contract.Cause.POLICY
    assert error(_agent={"cause": "infrastructure"}).cause == contract.Cause.INFRASTRUCTURE
    assert error(cause="policy", failure="tokens").cause == contract.Cause.AGENT  # the agent's own keys
    assert error(_agent="policy").cause == contract.Cause.AGENT
    assert error(_agent={"cause": "the moon"}).cause == contract.Cause.AGENT  # of a later version
    assert error(_agent={"cause": ["policy"]}).cause == contract.Cause.AGENT
    # Only an agent that raised leaves a choice: no other outcome becomes the policy's.
    policy = {"cause": "policy", "failure": "tokens"}
    causes = {str(o): contract.cause_of(error(_agent={**policy, "outcome": o.value})) for o in contract.Outcome}
    assert causes == {
        "ok": None,
        "agent_error": "policy",
        "cancelled": None,
        "invalid": "agent",
        "lost": "infrastructure",
        "timeout": "infrastructure",
        "throttled": "infrastructure",
    }
    assert error(_agent=policy).failure == "tokens"
    assert error(_agent={**policy, "outcome": "ok"}) is None
    assert error(_agent={"cause": "policy", "failure": "patience"}).failure == "other"


@pytest.mark.parametrize(
    ("outcome", "text", "bare"),
    [
        ("agent_error", "the agent failed: why", "the agent failed: KeyError"),
        ("lost", "the infrastructure failed the agent: why", "the infrastructure failed the agent: KeyError"),
        ("timeout", "the agent ran out of time: why", "the agent ran out of time: "),
        ("throttled", "why", ""),
        ("cancelled", "why", "the agent was cancelled"),
        ("invalid", "the record cannot be used: why", "the record cannot be used: invalid"),
    ],
)
def test_an_error_has_the_fields_of_its_record(outcome: str, text: str, bare: str) -> None:
    record = {"outcome": outcome, "error_type": "KeyError", "traceback": "line 1", "stage": "run"}
    error = contract.record_error({**record, "stop_reason": "why"}, "e/i/s.json")
    assert error is not None
    assert (str(error), str(contract.record_error(record))) == (text, bare)
    assert (error.error_type, error.agent_traceback, error.key) == ("KeyError", "line 1", "e/i/s.json")
    assert getattr(error, "stage", None) == ("run" if outcome == "timeout" else None)
    bare_error = contract.record_error({"outcome": outcome})
    assert bare_error is not None
    assert (bare_error.error_type, bare_error.agent_traceback, bare_error.key) == (None, None, None)
    assert ("no reason given" in str(bare_error)) == (outcome in ("agent_error", "lost"))


def test_an_error_has_its_cause() -> None:
    assert contract.cause_of(AgentError("x")) is Cause.AGENT
    assert contract.cause_of(KeyError("x")) is Cause.INFRASTRUCTURE
    assert contract.cause_of(RolloutCancelledError("x")) is None


def test_a_fresh_session_id_is_one_of_its_own_kind() -> None:
    fresh = {contract.check_session_id(contract.new_session_id()) for _ in range(100)}
    assert {len(session_id) for session_id in fresh} == {40}
    assert len(fresh) == 100


def test_ids_of_traces_and_spans_are_those_of_opentelemetry() -> None:
    for make, digits in ((contract.trace_id_of, 32), (contract.span_id_of, 16)):
        assert re.fullmatch(f"[0-9a-f]{{{digits}}}", make("s"))
        assert make("s") == make("s") != make("t")
        assert make("\ud800")  # half a character has one, too


@pytest.mark.parametrize(
    "good",
    ["a" * 33, "!" * 256, "~" * 256, "session:2026-01-01 07/" + "x" * 33, "5f0c1d2e-7a4b-4c3d-9e8f-0a1b2c3d4e5f"],
)
def test_a_session_id_may_be_what_the_service_takes(good: str) -> None:
    assert contract.check_session_id(good) == good


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "short",
        "a" * 32,
        "a" * 257,
        "a" * 40 + "\n",
        " " + "a" * 40,
        "a" * 40 + " ",
        "é" * 40,
        "a" * 40 + "/../b",
        None,
        5,
    ],
)
def test_a_session_id_that_no_header_carries_or_that_leaves_its_place_is_refused(bad: object) -> None:
    with pytest.raises(ContractError):
        contract.check_session_id(bad)  # type: ignore[arg-type]  # the caller may send anything


# What the published package takes as input id, and the part of the key that it writes for it.
TAKEN = [
    ("e", "e"),
    ("team/run-7", "team/run-7"),
    (7, "7"),
    (0, "0"),
    (-1.5, "-1.5"),
    (1e22, "1e+22"),
    (True, "True"),
    *((text, text) for text in ("a b", "x=+,:@.-_y", "..a", "a..b", "...", "é日\U0001f600", "a*", "a" * 900)),
    *((text, text) for text in ("\"quoted\" 'twice'", "100%", "a%2Fb", "a?b", "a#b", "a&b", "a\\b")),
]


@pytest.mark.parametrize(("value", "part"), TAKEN)
def test_what_the_published_package_takes_is_taken_and_keyed_as_there(value: contract.IdValue, part: str) -> None:
    assert contract.check_id(value, "input_id") == part
    assert (
        contract.result_key("exp", value, "s" * 40) == f"exp/{value}/{'s' * 40}.json" == f"exp/{part}/{'s' * 40}.json"
    )


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "..",
        "../a",
        "a/../b",
        "a/.",
        "a\0b",
        "a\tb",
        "a\x7fb",
        "\ud800",
        None,
        ["a"],
        {"a": 1},
        float("nan"),
        1e150,
        10**2000,
        "a" * 1025,
        "é" * 513,
    ],
)
def test_ids_that_could_leave_their_place_are_refused_with_what_to_do(bad: object) -> None:
    with pytest.raises(ContractError, match=r"no empty part|text or a number"):
        contract.check_id(bad, "exp_id")  # type: ignore[arg-type]  # the caller may send anything


def test_an_id_and_a_key_have_at_most_1024_bytes() -> None:
    assert contract.check_id("a" * 1024, "exp_id") == "a" * 1024
    contract.result_key("e", "i" * 975, "s" * 40)
    with pytest.raises(ContractError, match=r"the key .*at most 1024 bytes"):
        contract.result_key("e", "i" * 976, "s" * 40)  # the record's key has 1024 bytes, the heartbeat's 1025


@given(st.text(), st.text(), st.text())
def test_a_key_is_refused_or_stays_below_its_experiment(exp_id: str, input_id: str, session_id: str) -> None:
    try:
        key = contract.result_key(exp_id, input_id, session_id)
    except ContractError:
        return
    assert key == f"{exp_id}/{input_id}/{session_id}.json"
    assert not {"", ".", ".."} & set(key.split("/"))
    assert len(key.encode()) <= contract.MAX_KEY_BYTES
    assert contract.alive_key(key) == f"{exp_id}/{input_id}/{session_id}.alive"
    assert check_key(key) == key
    assert check_key(contract.alive_key(key))


@pytest.mark.parametrize("missing", sorted(IDS))
def test_ids_come_together_or_not_at_all(missing: str) -> None:
    block = {k: v for k, v in IDS.items() if k != missing}
    with pytest.raises(ContractError, match=f"Missing required rollout config field: '{missing}'"):
        RolloutConfig.from_payload({"_rollout": block})


def test_unknown_fields_reach_the_agent_and_come_back_out() -> None:
    block = {**IDS, "temperature": 0.5, "api_key": "k" * 10, "attempt": 3}
    config = RolloutConfig.from_payload({"_rollout": block})
    assert config is not None
    assert config.extra == {"temperature": 0.5}
    assert config.attempt == 3
    assert config.to_dict() == block
    assert RolloutConfig.from_dict(block) == config
    assert RolloutConfig.from_dict({**IDS, "input_id": "", "attempt": 1, "proof_key": None}).input_id == ""
    assert RolloutConfig.from_dict({"s3_region": None}) == RolloutConfig(attempt=1)
    assert RolloutConfig.from_payload({"exp_id": "e"}) is None
    assert "kkkk" not in repr(config)


@pytest.mark.parametrize(
    "field",
    [
        {"attempt": 0},
        {"attempt": "1"},
        {"attempt": True},
        {"heartbeat_s": "often"},
        {"heartbeat_s": float("nan")},
        {"proof_key": 5},
        {"proof_key": "x" * 31},
        {"proof_key": "x" * 513},
        {"s3_bucket": ["b"]},
        {"s3_region": 5},
        {"s3_region": "us-east-1.example.org/"},
        {"exp_id": "../x"},
        {"input_id": "../x"},
    ],
)
def test_a_field_of_the_wrong_kind_is_refused(field: dict[str, object]) -> None:
    with pytest.raises(ContractError):
        RolloutConfig.from_payload({"_rollout": {**IDS, **field}})


def test_redaction_copies_and_leaves_the_original_alone() -> None:
    payload = {"a": [{"api_key": "s", "Authorization": "b", "password": None, "n": 1}], "_rollout": {"api_key": "s"}}
    before = json.dumps(payload)
    assert contract.redact(payload) == {
        "a": [{"api_key": "[redacted]", "Authorization": "[redacted]", "password": None, "n": 1}],
        "_rollout": {"api_key": "[redacted]"},
    }
    assert json.dumps(payload) == before


def test_what_grants_something_is_hidden_in_the_rollout_block_only() -> None:
    payload = {"proof_key": "mine", "_rollout": {"proof_key": "k" * 40, "base_url": "http://u:p@gw/v1", "n": 1}}
    assert contract.redact_payload(payload) == {
        "proof_key": "mine",
        "_rollout": {"proof_key": "[redacted]", "base_url": "http://[redacted]@gw/v1", "n": 1},
    }
    assert payload["_rollout"] == {"proof_key": "k" * 40, "base_url": "http://u:p@gw/v1", "n": 1}
    for odd in ({"_rollout": {"proof_key": None, "base_url": 5}}, {"_rollout": ["proof_key"]}, [1]):
        assert contract.redact_payload(odd) == odd


def test_redaction_of_absurd_depth_is_a_contract_error() -> None:
    deep: list[object] = []
    for _ in range(contract.MAX_DEPTH - 2):
        deep = [deep]
    assert contract.redact_payload(deep) == deep
    assert contract.redact({"a": deep}) == {"a": deep}
    with pytest.raises(ContractError, match="nested too deeply"):
        contract.redact({"a": {"a": deep}})
    for redact in (contract.redact_payload, contract.redact):
        deep = [deep]
        with pytest.raises(ContractError, match="nested too deeply"):
            redact(deep)
        assert contract.redact(deep[0]) == deep[0]
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ContractError, match="nested too deeply"):
        contract.redact(deep)
    while deep:  # taking it apart link by link: the interpreter's own destructor recurses
        deep = deep[0]  # type: ignore[assignment]  # each link holds the next


@pytest.mark.parametrize(
    ("record", "outcome"),
    [
        ({"status_code": 200}, Outcome.OK),
        ({"status_code": 299}, Outcome.OK),
        ({"status_code": 300}, Outcome.AGENT_ERROR),
        ({"status_code": 199}, Outcome.AGENT_ERROR),
        ({}, Outcome.OK),
        ({"_agent": {"outcome": "ok", "cause": "infrastructure"}}, Outcome.OK),
        ({"_agent": {"outcome": "agent_error", "cause": "infrastructure"}}, Outcome.LOST),
        ({"status_code": 500}, Outcome.AGENT_ERROR),
        ({"status_code": "200"}, Outcome.INVALID),
        ({"status_code": True}, Outcome.INVALID),
        ({"status_code": 500, "outcome": "lost"}, Outcome.LOST),
        ({"status_code": 200, "outcome": "resolved"}, Outcome.OK),
        ({"status_code": 500, "outcome": "resolved"}, Outcome.AGENT_ERROR),
        ({"status_code": 200, "outcome": {"a": 1}}, Outcome.OK),
        ({"status_code": 200, "outcome": "lost", "_agent": {"outcome": "ok"}}, Outcome.OK),
        ({"status_code": 200, "_agent": {"outcome": "of the future"}}, Outcome.INVALID),
    ],
)
def test_the_outcome_of_a_record(record: dict[str, object], outcome: Outcome) -> None:
    assert contract.record_outcome(record) is outcome


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b'{"r": NaN}',
        b'{"r": -Infinity}',
        b"\xff{}",
        b'{"n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "list", "string", "nan", "infinity", "not-utf8", "long-number", "deep"],
)
def test_a_body_that_is_no_strict_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ContractError):
        contract.parse_record(body)


@pytest.mark.parametrize(
    ("record", "reward"),
    [
        ({"rewards": 0.5}, 0.5),
        ({"rewards": 0}, 0.0),
        ({"rewards": True}, 1.0),
        ({"rewards": [0.1, 0.9]}, 0.9),
        ({"rewards": []}, None),
        ({"rewards": None}, None),
        ({}, None),
        ({"reward": 2}, 2.0),
        ({"rewards": {"reward": 0.25, "format": 1}}, 0.25),
        ({"rewards": {"format": 1}}, None),
        ({"rewards": 1, "turn_rewards": {"a": 2}}, 1.0),
        ({"turn_rewards": {}}, None),
    ],
)
def test_the_reward_of_a_record(record: dict[str, object], reward: float | None) -> None:
    assert contract.extract_reward(record) == reward


@pytest.mark.parametrize(
    "value",
    ["1.0", 1e150, float("nan"), float("inf"), [[1.0]], ["x"], 10**400, 10**5000, {"reward": "a"}],
    ids=["text", "large", "nan", "inf", "nested", "list-of-text", "beyond-floats", "beyond-repr", "dict-of-text"],
)
def test_a_reward_that_is_no_finite_number_is_an_error_and_never_zero(value: object) -> None:
    for record in ({"rewards": value}, {"rewards": [value, 1.0]}, {"rewards": 1.0, "turn_rewards": {"a": value}}):
        with pytest.raises(ContractError, match="finite number"):
            contract.extract_reward(record)
    with pytest.raises(ContractError, match="turn_rewards must be a dict"):
        contract.extract_reward({"rewards": 1.0, "turn_rewards": [1.0]})


@pytest.mark.parametrize("rule", ["main", "judge", "judge,writer-2", "x" * 64])
def test_a_rule_of_what_trains_is_a_word_or_tags(rule: str) -> None:
    assert contract.check_train(rule) == rule
    assert contract.record_train({"_agent": {"train": rule}}) == rule
    assert contract.record_train({"_agent": {"train": [rule]}}) is contract.record_train(None) is None


@pytest.mark.parametrize("tag", ["", "task", "a b", "x" * 65])
def test_a_tag_is_short_and_no_word_of_the_rules(tag: str) -> None:
    with pytest.raises(ConfigError, match="a tag has 1 to 64"):
        contract.check_tag(tag)
    with pytest.raises(ConfigError, match="a tag has 1 to 64"):
        contract.check_train(f"judge,{tag}")


@pytest.mark.parametrize("length", [32, 512])
def test_a_proof_key_has_32_to_512_characters(length: int) -> None:
    assert RolloutConfig.from_dict({**IDS, "proof_key": "x" * length}).proof_key == "x" * length


def test_a_value_is_shown_with_at_most_200_characters() -> None:
    assert contract.short("x" * 198) == repr("x" * 198)
    assert contract.short("x" * 199) == f"'{'x' * 199}..."


def test_calls_that_did_not_arrive_are_named_once_for_a_run() -> None:
    def advice(*calls: tuple[int, dict[str, int]]) -> str:
        return contract.advise_on_calls({"_calls": {"gateway": n, "elsewhere": elsewhere}} for n, elsewhere in calls)

    other = [f"{name}.example/v1/chat/completions (another host)" for name in "abcdef"]
    text = advice((0, dict(zip(other, (7, 6, 5, 4, 3, 2), strict=True))), (0, {other[0]: 1}))
    places = ", ".join(f"{n} x {place}" for n, place in zip((8, 6, 5, 4, 3), other, strict=False))
    ways = "; ".join(f"--model-host {name}.example sends these calls to the gateway" for name in "abc")
    assert text == (f"no model call of the agent arrived at the gateway. Calls to other addresses: {places}. {ways}")
    assert "--policy-model" in advice((0, {"api.openai.com/v1/chat/completions (model judge)": 1}))
    assert "none that this toolkit sees. See app.model()" in advice((0, {}))
    assert advice((0, {other[0]: 1}), (1, {})) == ""
    assert contract.advise_on_calls([{"rewards": 1}, None]) == ""
    assert "app.model()" in contract.advise_on_calls([{"_calls": {"of": "an agent's own"}}])
