"""Tool calls in text: whole, broken, and growing."""

from __future__ import annotations

import json

import pytest

from agentcore_rl_toolkit.policy.tool_calls import StreamParser, parse_tool_calls

GOOD = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call>'


def test_a_call_is_read_and_its_arguments_stay_as_written() -> None:
    odd = GOOD.replace('{"expression": "2 + 3"}', '{"expression":"2 + 3"  ,"b":1}')
    parsed = parse_tool_calls(odd)
    assert (parsed.status, parsed.content) == ("parsed", "")
    (call,) = parsed.calls
    assert (call.name, call.arguments) == ("calculator", '{"expression":"2 + 3"  ,"b":1}')
    assert call.arguments_object == {"expression": "2 + 3", "b": 1}


def test_text_before_calls_stays_and_calls_have_ids_of_their_own() -> None:
    parsed = parse_tool_calls(f"I compute.\n{GOOD}\n{GOOD}")
    assert parsed.content == "I compute.\n"
    assert len({call.id for call in parsed.calls}) == 2


def test_arguments_named_twice_are_not_mistaken() -> None:
    tricky = '<tool_call>{"note": "\\"arguments\\": {}", "name": "f", "arguments": {"a": 1}}</tool_call>'
    (call,) = parse_tool_calls(tricky).calls
    assert json.loads(call.arguments) == {"a": 1}


def test_plain_text_is_no_call() -> None:
    parsed = parse_tool_calls("The answer is 5.")
    assert (parsed.status, parsed.content, parsed.calls) == ("none", "The answer is 5.", [])


@pytest.mark.parametrize(
    "text",
    [
        GOOD.removesuffix("</tool_call>"),
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        f"{GOOD} and then some",
        f"{GOOD}<tool_call>broken</tool_call>",
        "</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_cannot_be_read_is_kept_whole_as_text(text: str) -> None:
    parsed = parse_tool_calls(text)
    assert (parsed.status, parsed.content, parsed.calls) == ("unparsed", text, [])


@pytest.mark.parametrize(
    "text",
    ["Just text, <tool, not a call.", f"Before {GOOD}", GOOD, "Before <tool_call>{broken}</tool_call> after", "<tool_"],
)
def test_a_stream_gives_what_the_whole_text_gives_at_every_cut(text: str) -> None:
    parser = StreamParser()
    sent = "".join(parser.feed(text[:n]) for n in range(1, len(text) + 1))
    assert text.startswith(sent)
    assert "<tool_call>" not in sent
    rest, parsed = parser.finish(text)
    assert sent + rest == parse_tool_calls(text).content == parsed.content


def test_a_stream_holds_back_beginnings_of_stop_strings_and_cut_characters() -> None:
    parser = StreamParser(stops=("END",), tools=False)
    assert parser.feed("abEN") == "ab"
    assert parser.feed("abENx\ufffd") == "ENx"
    assert parser.finish("abENxé")[0] == "é"
