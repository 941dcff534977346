"""What is refused of a request that is relayed unread: fields nobody would honour, and what would spoil the record."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.messages.wire import RequestError
from agentcore_rl_toolkit.messages.wire.passthrough import asked_forms, check, check_session, forms, read

MESSAGES = [{"role": "user", "content": "hi"}]


def checked(body: bytes, *, more: tuple[str, ...] | None = ()) -> int:
    fields = read(body)
    check(fields, more=more)
    return fields.get("n") or 1


def refused(**asked: Any) -> str | None:
    with pytest.raises(RequestError) as caught:
        checked(json.dumps({"model": "m", **asked}).encode())
    assert caught.value.status == 400
    assert str(caught.value.param) in str(caught.value)
    return caught.value.param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("echo", True),
        ("best_of", 4),
        ("use_beam_search", True),
        ("kv_transfer_params", {"remote_host": "10.0.0.1"}),
        ("bootstrap_host", "10.0.0.1"),
        ("custom_logit_processor", "x"),
        ("rid", "somebody-elses"),
        ("lora_path", "/other"),
        ("n", 0),
        ("n", 129),
        ("n", "2"),
        ("n", 2.0),
        ("n", True),
        ("stream", 1),
        ("stream", "true"),
    ],
)
def test_what_cannot_be_honoured_is_named(name: str, value: Any) -> None:
    assert refused(messages=MESSAGES, **{name: value}) == name


@pytest.mark.parametrize(
    "asked",
    [
        {"functions": None, "audio": None, "echo": False, "functionz": None},
        {"modalities": ["text"], "best_of": 1, "verbosity": "medium", "use_beam_search": False},
        {"top_k": 5, "structured_outputs": {"json": {}}, "thinking_token_budget": 9, "return_routed_experts": True},
        {"n": None, "stream": None},
        {"stream": False, "user": "ü", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    ],
)
def test_what_asks_for_nothing_or_is_known_passes(asked: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", **asked}, separators=(",", ":"), ensure_ascii=False).encode()
    assert checked(body) == 1


def test_fields_of_the_operators_own_engine_pass_and_a_plain_endpoint_judges_for_itself() -> None:
    body = json.dumps({"model": "m", "wings": 2, "n": 3}).encode()
    assert checked(body, more=("wings",)) == 3
    assert checked(body, more=None) == 3


def test_what_asks_in_vain_is_left_out() -> None:
    asked = {"wings": 2, "audio": {"voice": "x"}, "verbosity": "low", "modalities": ["text"], "prediction": None}
    body = json.dumps({"model": "m", **asked}).encode()
    fields = read(body)
    check(fields, more=())
    assert fields.keys() == {"model"}


@pytest.mark.parametrize("text", [b"\xff", b"caf\xe9", b"\xed\xa0\x80"])
def test_bytes_that_are_no_utf8_are_refused(text: bytes) -> None:
    with pytest.raises(UnicodeDecodeError):
        read(b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["n", "stream", "prompt", "echo", "best_of", "wings"]) | st.text(), JSON))
def test_no_body_can_do_worse_than_a_400(asked: dict[str, Any]) -> None:
    try:
        reply = checked(json.dumps(asked).encode())
    except RequestError as e:
        reply = e.status or 0
    except msgspec.DecodeError:
        return  # a lone surrogate: refused before it comes here
    assert reply == 400 or 1 <= reply <= 128


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"response_format": {"type": "text"}, "regex": ""}, []),
        ({"response_format": {"type": "json_object"}}, ["response_format"]),
        ({"response_format": {"type": "structural_tag"}, "regex": "a+"}, ["regex", "response_format"]),
    ],
)
def test_forms_of_an_answer_are_found(asked: dict[str, Any], names: list[str]) -> None:
    fields = read(json.dumps(asked).encode())
    assert forms(fields) == asked_forms(fields) == names


def test_a_session_has_no_parameter_that_the_engine_does_not_know() -> None:
    check_session(["temperature", "top_k", "wings"], ["wings"])
    for name in ("wings", "regex"):
        with pytest.raises(RequestError, match=f"allow_fields={name}") as caught:
            check_session(["temperature", name], [])
        assert caught.value.param == f"sampling_params.{name}"
