"""Results to JSON: each kind of value by its fixed rule, or refused with its path."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import uuid
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcore_rl_toolkit.app.record import (
    MAX_TRACEBACK_CHARS,
    Encoder,
    RolloutInfo,
    check_policy_reward,
    describe,
    find_secrets,
    success_body,
)
from agentcore_rl_toolkit.contract import REDACTED, RolloutConfig
from agentcore_rl_toolkit.errors import AgentError, InvalidResultError


def encoded(fields: dict[Any, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    encoder = Encoder()
    text = "{" + encoder.members(fields) + "}"
    return json.loads(text, parse_constant=lambda name: pytest.fail(name)), encoder.conversions


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Point:
    x: int
    y: Any


class Model(pydantic.BaseModel):
    n: int
    at: dt.date


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, (2, 3)), [1, [2, 3]]),
        (Pair(1, 2), [1, 2]),
        ({"b", "a"}, ["a", "b"]),
        (frozenset({10, 9, "a"}), ["a", 10, 9]),
        (Color.RED, "red"),
        (Level.HIGH, 3),
        (dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC), "2026-01-02T03:04:05Z"),
        (dt.time(3, 4), "03:04:00"),
        (dt.timedelta(minutes=1.5), 90.0),
        (decimal.Decimal("0.25"), 0.25),
        (fractions.Fraction(1, 4), 0.25),
        (ipaddress.ip_address("10.0.0.1"), "10.0.0.1"),
        (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (pathlib.PurePosixPath("/a/b"), "/a/b"),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.datetime64("2026-01-02T03:04:05"), "2026-01-02T03:04:05"),
        (Point(1, Point(2, None)), {"x": 1, "y": {"x": 2, "y": None}}),
        (Model(n=1, at=dt.date(2026, 1, 2)), {"n": 1, "at": "2026-01-02"}),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (collections.deque([1, 2]), [1, 2]),
        ({7: "a", None: "b", True: "c", 2.5: "d"}, {"7": "a", "true": "c", "null": "b", "2.5": "d"}),
        ({np.int64(4): 1, Color.RED: 2}, {"4": 1, "red": 2}),
        ("\ud800 lone surrogate \U0001f600", "\ud800 lone surrogate \U0001f600"),
        (10**100, 10**100),
    ],
)
def test_a_value_takes_its_documented_form(value: Any, expected: Any) -> None:
    fields, notes = encoded({"v": value, "nested": [{"v": value}]})
    assert fields["v"] == expected
    assert type(fields["v"]) is type(expected)
    assert fields["nested"] == [{"v": expected}]
    assert notes == {}


@pytest.mark.parametrize(
    ("value", "expected", "notes"),
    [
        (float("nan"), None, {"v": "nan became null"}),
        ([1.0, float("-inf")], [1.0, None], {"v[1]": "-inf became null"}),
        (np.array([1.0, np.nan]), [1.0, None], {"v[1]": "nan became null"}),
        (np.float64("nan"), None, {"v": "nan became null"}),
        (decimal.Decimal("NaN"), None, {"v": "nan became null"}),
        ({"a": {"b": float("inf")}}, {"a": {"b": None}}, {"v.a.b": "inf became null"}),
        (b"\x00\xff", "AP8=", {"v": "bytes became base64"}),
        ([bytearray(b"x")], ["eA=="], {"v[0]": "bytes became base64"}),
        (memoryview(b"x"), "eA==", {"v": "bytes became base64"}),
    ],
)
def test_a_value_that_loses_something_is_noted(value: Any, expected: Any, notes: dict[str, str]) -> None:
    assert encoded({"v": value}) == ({"v": expected}, notes)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"a": inner}], ids=["lists", "dicts"])
def test_a_result_has_at_most_two_hundred_levels(wrap: Any) -> None:
    value: Any = 1
    for _ in range(199):
        value = wrap(value)
    assert encoded({"v": value})[0] == {"v": value}
    with pytest.raises(InvalidResultError, match="more than 200 levels deep"):
        encoded({"v": wrap(value)})


def test_of_many_values_that_lose_something_fifty_are_noted() -> None:
    fields, notes = encoded({"v": [float("nan")] * 60})
    assert fields == {"v": [None] * 60}
    assert list(notes) == [f"v[{n}]" for n in range(50)]


@pytest.mark.parametrize("key", ["rewards", "reward"])
@pytest.mark.parametrize(
    "value", [float("nan"), [0.5, float("inf")], {"reward": float("nan")}, np.array([np.nan]), np.float32("inf")]
)
def test_a_reward_that_is_not_finite_is_refused(key: str, value: Any) -> None:
    with pytest.raises(InvalidResultError, match=rf"result\[{key}.* a reward must be a finite number"):
        encoded({key: value})


cyclic_dict: dict[str, Any] = {}
cyclic_dict["me"] = cyclic_dict
deep: list[Any] = []
for _ in range(5000):
    deep = [deep]


class NoTime(dt.datetime):
    """A date without a value, such as pandas' NaT."""

    year = month = day = float("nan")  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"result\[v\] is a builtins.object, which has no JSON form"),
        ([NoTime(2026, 1, 2)], r"result\[v\[0\]\] is a .*NoTime, which has no JSON form"),
        ([{"a": print}], r"result\[v\[0\].a\] is a builtins.builtin_function_or_method"),
        ((i for i in range(3)), r"result\[v\] is a builtins.generator"),
        (Point, r"result\[v\] is a builtins.type"),
        ({(1, 2): 3}, r"result\[v\] has a key of type tuple"),
        ({b"k": 3}, r"result\[v\] has a key of type bytes"),
        ({1: "a", "1": "b"}, r"result\[v\] has two keys that are both '1' in JSON"),
        (cyclic_dict, "is nested more than 200 levels deep"),
        (deep, "is nested more than 200 levels deep"),
    ],
    ids=lambda p: p if isinstance(p, str) else type(p).__name__,
)
def test_what_has_no_json_form_is_refused_with_its_path(value: Any, message: str) -> None:
    with pytest.raises(InvalidResultError, match=message):
        encoded({"v": value})


def test_a_rollout_block_that_is_nested_too_deeply_is_refused_with_its_path() -> None:
    block: dict[str, Any] = {}
    for _ in range(250):
        block = {"a": block}
    info = RolloutInfo(config=RolloutConfig(), session_id="s", result_key="k")
    with pytest.raises(InvalidResultError, match=r"result\[_rollout\.a\..* is nested more than 200 levels deep"):
        success_body(info, {"_rollout": block}, max_bytes=10**6)


def test_secrets_are_blanked_in_texts_alone() -> None:
    secrets = ("12345678", "response", 'quo"ted\u00e9')
    fields = {"rewards": 0.12345678, "response": ["a 12345678 b", {"x": 'quo"ted\u00e9!'}], "n": 123456789}
    text = Encoder(secrets).members(fields)
    assert json.loads("{" + text + "}") == {
        "rewards": 0.12345678,
        "response": [f"a {REDACTED} b", {"x": f"{REDACTED}!"}],
        "n": 123456789,
    }


def test_secrets_are_those_of_eight_characters_that_are_no_part_of_the_rollouts_ids() -> None:
    block = {
        "api_key": "12345678",
        "proof_key": "p" * 32,
        "token": "1234567",
        "password": 12345678,
        "Secret": "of session",
    }
    config = RolloutConfig.from_dict({**block, "model_id": "no secret at all"})
    assert sorted(find_secrets(config, "the id of session", "key")) == ["12345678", "p" * 32]


def test_a_record_has_at_most_as_many_bytes_in_each_half() -> None:
    info = RolloutInfo(config=RolloutConfig(), session_id="s", result_key="k")
    own = '"text": "", "status_code": 200, "stop_reason": "end_turn"'
    assert success_body(info, {"text": "x" * 500}, max_bytes=500 + len(own))[0].startswith(b'{"text": "xxx')
    for result, more in (({"text": "x" * 501}, {}), ({}, {"payload": {"text": "x" * 600}})):
        with pytest.raises(InvalidResultError, match=f"larger than {500 + len(own)} bytes"):
            success_body(RolloutInfo(**{**vars(info), **more}), result, max_bytes=500 + len(own))


@pytest.mark.parametrize("value", [None, 0, -1, 0.5, {"reward": 0.1, "metric": 3}])
def test_a_reward_for_failures_of_the_policy_is_a_number_or_none(value: Any) -> None:
    assert check_policy_reward(value) == value


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=4), inner, max_size=8),
    max_leaves=25,
)


@settings(max_examples=25)
@given(st.dictionaries(st.text(max_size=5), plain_values, max_size=6))
def test_plain_data_is_as_json_dumps_writes_it(fields: dict[str, Any]) -> None:
    encoder = Encoder()
    assert "{" + encoder.members(fields) + "}" == json.dumps(fields)
    assert encoder.conversions == {}


def test_a_text_is_cut_in_its_middle_above_the_limit() -> None:
    at_limit = "x" * MAX_TRACEBACK_CHARS
    assert describe(ValueError(at_limit)) == (at_limit, "ValueError")
    half = MAX_TRACEBACK_CHARS // 2 * "x"
    assert describe(ValueError(f"{half}y{half}"))[0] == f"{half}\n... 1 characters left out ...\n{half}"
    assert describe(AgentError("", error_type="Odd")) == ("Odd", "Odd")
    assert describe(AgentError("why")) == ("why", "AgentError")


def test_a_reward_that_was_not_awaited_is_refused_with_the_way_to_repair_it() -> None:
    async def score() -> float:
        return 1.0

    reward = score()
    with pytest.raises(InvalidResultError, match=r"result\[rewards\] is a builtins.coroutine, .*; await it$"):
        Encoder().members({"rewards": reward})
    reward.close()
