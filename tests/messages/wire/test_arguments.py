"""Arguments of tool calls that are JSON to Python and not to others."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentcore_rl_toolkit.messages.wire.anthropic import tool_input
from agentcore_rl_toolkit.messages.wire.arguments import standard, value_of

OWN = '{"x":  NaN, "y": [-Infinity, 1e999, 1.50], "text": "NaN \\" Infinity", "big": 12345678901234567890}'
MEANT = {"x": "NaN", "y": ["-Infinity", "Infinity", 1.5], "text": 'NaN " Infinity', "big": 12345678901234567890}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats()
    | st.text(alphabet='aNI-"\\\n{}é')
    | st.just("NaN"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=15,
)


def named(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, list):
        return [named(v) for v in value]
    return {k: named(v) for k, v in value.items()} if isinstance(value, dict) else value


@given(value=values, ascii_only=st.booleans())
def test_such_numbers_are_strings_with_their_names(value: Any, ascii_only: bool) -> None:
    assert msgspec.json.decode(standard(json.dumps(value, ensure_ascii=ascii_only))) == named(value)


@given(text=st.text(alphabet='aN"\\ e19-{}:,', max_size=30))
@example(text="1" * 1000)
def test_whatever_else_it_is_stays_as_it_is(text: str) -> None:
    if all(name not in text for name in ("NaN", "Infinity", "e9", "e1")):
        assert standard(text) == text


def test_half_of_a_text_is_no_value() -> None:
    assert value_of(OWN) == MEANT
    assert value_of("") == {}
    for text in ('{"a": NaN', "nan", '{"a": Nan}', "{a: 1}"):
        with pytest.raises(msgspec.DecodeError):
            value_of(text)


def test_half_a_character_is_shown_as_one_that_is_missing() -> None:
    assert tool_input('{"a": "\\ud83dx", "b": "\\ud83d\\ude00"}') == {"a": "\ufffdx", "b": "😀"}
