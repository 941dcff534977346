"""Which answers of a session a later request repeats or quotes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway.capture.flows import Flows

ANSWER = "the red house at the end of the long street belongs to the old baker"
ALMOST = "the red house at the end of the short road is empty since nobody wants to live there"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, *arguments: str) -> dict[str, Any]:
    calls = [{"id": f"c{i}", "function": {"name": "f", "arguments": each}} for i, each in enumerate(arguments)]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c0", "content": text}


def answered(flows: Flows, turn: str, asked: list[dict[str, Any]], reply: dict[str, Any], request: int = 0) -> None:
    flows.into(asked)
    flows.add(turn, reply, asked, request or hash(turn))


@pytest.mark.parametrize(
    ("reply", "after", "how"),
    [
        (said(ANSWER), [], "continued"),
        (said(ANSWER), [{"role": "system", "content": "go on"}], "continued"),
        (said(ANSWER), [user("go on")], "reviewed"),
        (said("", '{"x": 1}'), [result("5")], "continued"),
        (said("", '{"x": 1}'), [user("stop")], "continued"),
    ],
)
def test_an_answer_at_the_end_of_a_request_is_continued_or_reviewed(
    reply: dict[str, Any], after: list[dict[str, Any]], how: str
) -> None:
    flows = Flows()
    answered(flows, "a", [user("first")], reply)
    assert flows.into([user("first"), reply, *after]) == {"a": how}


def test_answers_before_the_last_one_count_only_if_its_own_request_had_them_not() -> None:
    flows = Flows()
    first, second = said(ANSWER), said("quite another text of some words")
    answered(flows, "a", [user("first")], first)
    answered(flows, "b", [user("first"), first, user("go on")], second)
    assert flows.into([user("first"), first, user("go on"), second, user("more")]) == {"b": "reviewed"}
    merged = [user("first"), first, user("other"), user("words"), second, user("more")]
    assert flows.into(merged) == {"a": "history", "b": "reviewed"}


def test_of_equal_answers_the_one_to_the_same_messages_counts_otherwise_the_last() -> None:
    flows = Flows()
    asked = {turn: [user("first"), user("second"), user(turn)] for turn in ("a", "b", "c")}
    for turn, messages in asked.items():
        answered(flows, turn, messages, said(ANSWER))
    for turn, messages in asked.items():
        assert flows.into([*messages, said(ANSWER)]) == {turn: "continued"}
    assert flows.into([user("first"), user("edited"), said(ANSWER)]) == {"c": "continued"}


def test_words_in_a_later_prompt_are_quoted_and_those_of_a_call_are_called() -> None:
    flows = Flows()
    answered(flows, "a", [user("first")], said(ANSWER))
    answered(
        flows,
        "b",
        [user("second")],
        said("", '{"text": "eleven other words that nobody here has used before today at all"}'),
    )
    assert flows.into([user(f"Summary:\n{ANSWER.upper().lower()}.")]) == {"a": "quoted"}
    assert flows.into([user("do: eleven other words that nobody here has used before today at all")]) == {"b": "called"}
    assert flows.into([user("the red house is old")]) == {}
    words = ANSWER.split()
    assert flows.into([user(" ".join(words[1:12]))]) == {"a": "quoted"}  # eleven words in a row
    assert flows.into([user(" ".join(words[:8]))]) == {}


@pytest.mark.parametrize(
    "text",
    [
        'l\u00e9 "chat"\nbl\u00e9u dort\ttr\u00e9s bien \u00e9tendu sur l\u00e9 lit du d\u00e9sert et r\u00e9ve',
        "检查员在北塔发现了开裂的螺栓",
    ],
)
def test_escaped_text_is_the_text(text: str) -> None:
    flows = Flows()
    answered(flows, "a", [user("first")], said(text))
    for written in (json.dumps(text), json.dumps(json.dumps(text))):
        assert flows.into([user(written)]) == {"a": "quoted"}


def test_a_short_answer_counts_only_as_the_whole_result_of_a_tool() -> None:
    flows = Flows()
    answered(flows, "a", [user("first")], said("42"))
    assert flows.into([result("42")]) == flows.into([result('{"value": " 42 "}')]) == {"a": "quoted"}
    assert flows.into([user("42")]) == flows.into([result("it is 42")]) == flows.into([result('"42"')]) == {}
    answered(flows, "b", [user("second")], said("twelve letter"))
    assert flows.into([user("it has twelve letter")]) == {"b": "quoted"}


def test_words_that_an_answer_has_from_its_own_prompt_are_no_flow() -> None:
    flows = Flows()
    answered(flows, "a", [user(ANSWER)], said(ANSWER))
    assert flows.into([user(f"again: {ANSWER}")]) == {}


def test_of_attempts_at_one_prompt_a_text_quotes_those_of_which_it_has_most() -> None:
    flows = Flows()
    for turn, text in (("a", ANSWER), ("b", ALMOST)):
        answered(flows, turn, [user("first")], said(text), request=7)
    assert flows.into([user(f"chosen: {ANSWER}")]) == {"a": "quoted"}
    assert flows.into([user(f"both: {ANSWER} {ALMOST}")]) == {"a": "quoted", "b": "quoted"}
