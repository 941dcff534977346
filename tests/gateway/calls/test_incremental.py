"""Long requests are read in two parts, and mean the same as when they are read whole."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.gateway.capture.prefix_index import Prefixes, Seen
from agentcore_rl_toolkit.gateway.wire.long_requests import understand

TEXTS = st.text(max_size=12) | st.sampled_from(['"messages":[', "],", '"messages":[{"role":"user"}]', "\\", '"', "é"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS})
    | st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(st.fixed_dictionaries({"text": TEXTS}))}),
    max_size=5,
)


def written(body: dict[str, Any], *, compact: bool = True) -> bytes:
    return json.dumps(body, separators=(",", ":") if compact else None, ensure_ascii=False).encode()


def remembered(*lists: list[Any], compact: bool = True) -> Prefixes:
    known = Prefixes()
    for i, messages in enumerate(lists):
        request = understand(written({"messages": messages}, compact=compact), Prefixes())
        assert request is not None
        known.add(Seen(request.text, i, 0, crc=request.crc))
    return known


def meaning(body: bytes, known: Prefixes) -> tuple[Any, int]:
    request = understand(body, known)
    assert request is not None
    return msgspec.json.decode(b"".join(request.pieces(request.fields))), request.digest()


@given(
    MESSAGES,
    MESSAGES,
    MESSAGES,
    st.booleans(),
    st.booleans(),
    st.sampled_from([{}, {"model": "m"}, {"n": 2, "x": [1]}]),
)
def test_what_was_seen_before_changes_neither_meaning_nor_digest(
    before: list[Any], more: list[Any], other: list[Any], compact: bool, first: bool, rest: dict[str, Any]
) -> None:
    asked = {"messages": before + more, **rest} if first else {**rest, "messages": before + more}
    body = written(asked, compact=compact)
    fresh = meaning(body, Prefixes())
    assert fresh[0] == asked
    for known in (
        remembered(before, compact=compact),
        remembered(before, other, compact=compact),
        remembered(before + more, compact=compact),
        remembered(other, compact=compact),
    ):
        assert meaning(body, known) == fresh


@pytest.mark.parametrize("inside", [[{"role": "user", "content": "a"}], [{"role": "user", "content": "a"}, {"b": 1}]])
def test_messages_inside_another_field_are_not_taken_for_the_request_s(inside: list[Any]) -> None:
    seen = [{"role": "user", "content": "a"}]
    asked = {"metadata": {"messages": inside}, "messages": [{"b": 1}]}
    assert meaning(written(asked), remembered(seen))[0] == asked


def test_the_last_of_two_lists_of_messages_counts_as_it_does_when_read_whole() -> None:
    body = b'{"messages":[{"role":"user"},{"a":1}],"messages":[{"b":1}]}'
    assert meaning(body, remembered([{"role": "user"}])) == meaning(body, Prefixes())


def test_only_what_is_new_is_decoded() -> None:
    history = [{"role": "user", "content": "x" * 1000} for _ in range(50)]
    request = understand(written({"model": "m", "messages": [*history, {"role": "user"}]}), remembered(history))
    assert request is not None
    assert len(request.read) < 100


@pytest.mark.parametrize("body", [b'{"messages":[{"role":"user"},]}', b'{"messages":[{"role":"user"}}', b"[]"])
def test_what_is_no_json_object_is_an_error_also_after_a_known_history(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        understand(body, remembered([{"role": "user"}]))


def test_a_request_without_messages_is_not_taken_apart() -> None:
    assert understand(b'{"prompt":"x"}', Prefixes()) is None
    assert understand(b'{"messages":"x"}', Prefixes()) is None
