"""Histories that the model cannot be given as they are: what becomes of each part, and what is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentcore_rl_toolkit.messages.wire import DIALECTS, Delta, ModelRequest, RequestError, ToolDelta, responses
from agentcore_rl_toolkit.messages.wire.fields import read_body, replace_half_surrogates

PIECES = ["\ud83d", "\ude00", "\U0001f600", "\\", "u", "d83d", "é", "x", '"', "\n"]


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
@example("\ud83d\ud83d\ude00\ude00")
@example("\\ud83d \\\ud83d")
def test_half_surrogates_become_the_replacement_character_and_nothing_else_changes(text: str) -> None:
    units = text.encode("utf-16-le", "surrogatepass")
    wanted = units.decode("utf-16-le", "replace")
    body, count = replace_half_surrogates(json.dumps({"text": text}).encode())
    escaped_pair = "\\ud83d\ude00" in text or "d83d\ude00" in text  # an escape that is shown, before a half
    if not escaped_pair:
        assert json.loads(body) == {"text": wanted}
        assert count == wanted.count("\ufffd")


def test_a_body_is_read_again_only_where_that_can_help() -> None:
    assert read_body(b'"\\ud83d"', json.loads) == ("\ud83d", 0), "a decoder that takes it gets it as it is"
    assert read_body(b'{"a": 1}', json.loads) == ({"a": 1}, 0)
    with pytest.raises(RequestError, match="JSON object"):
        DIALECTS["chat"].parse_request(b'{"messages": ')


def parse(dialect: str, history: list[Any]) -> ModelRequest:
    field = "input" if dialect == "responses" else "messages"
    more = {"max_tokens": 5} if dialect == "anthropic" else {}
    return DIALECTS[dialect].parse_request({field: history, **more})


def said(**message: Any) -> dict[str, Any]:
    return {"role": "assistant", **message}


USER = {"role": "user", "content": "hi"}
# Dialect, a message or item, the canonical messages that it becomes, and what is counted.
HISTORIES: list[tuple[str, Any, list[Any], dict[str, int]]] = [
    ("chat", said(content=None, refusal="I will not."), [said(content="I will not.", refusal="I will not.")], {}),
    ("chat", said(content="x", audio={"id": "a"}), [said(content="x", audio={"id": "a"})], {"audio": 1}),
    (
        "chat",
        said(content=[{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "y"}]),
        [said(content="y")],
        {"redacted_thinking": 1},
    ),
    (
        "chat",
        said(content="y", reasoning_details=[{"type": "reasoning.encrypted", "data": "x"}, {"type": "other"}]),
        [said(content="y")],
        {"reasoning.encrypted": 1},
    ),
    (
        "chat",
        {"role": "user", "content": [{"type": "thinking", "thinking": "a user does not think"}]},
        [{"role": "user", "content": "[thinking: the model reads text only]"}],
        {"thinking": 1},
    ),
    (
        "anthropic",
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "no", "is_error": True}]},
        [{"role": "tool", "tool_call_id": "c", "content": "no"}],
        {"is_error": 1},
    ),
    (
        "anthropic",
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "is_error": True}]},
        [{"role": "tool", "tool_call_id": "c", "content": "The tool failed and said nothing."}],
        {},
    ),
    (
        "anthropic",
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "", "is_error": False}]},
        [{"role": "tool", "tool_call_id": "c", "content": ""}],
        {},
    ),
    (
        "anthropic",
        {
            "role": "user",
            "content": [
                {
                    "type": "document",
                    "title": "T",
                    "context": "C",
                    "source": {"type": "text", "media_type": "text/plain", "data": "D"},
                }
            ],
        },
        [{"role": "user", "content": "T\nC\nD"}],
        {},
    ),
    (
        "anthropic",
        {
            "role": "user",
            "content": [
                {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
            ],
        },
        [
            {
                "role": "user",
                "content": "[document (application/pdf): the model reads text only; extract the text with another tool]",
            }
        ],
        {"document": 1},
    ),
    (
        "anthropic",
        said(content=[{"type": "text", "text": "x", "citations": [{"cited_text": "y"}]}]),
        [said(content="x")],
        {"citations": 1},
    ),
    (
        "responses",
        said(content=[{"type": "output_text", "text": "x", "annotations": [{"type": "url_citation"}]}]),
        [said(content="x")],
        {"annotations": 1},
    ),
    ("responses", {"type": "web_search_call", "id": "w"}, [], {"web_search_call": 1}),
    (
        "responses",
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "theirs"},
        [said(content="", reasoning_content="s")],
        {"encrypted_content": 1},
    ),
    ("responses", {"type": "reasoning", "summary": []}, [said(content="")], {}),
    (
        "responses",
        {"type": "reasoning", "encrypted_content": "base64:!"},
        [said(content="")],
        {"encrypted_content": 1},
    ),
]


@pytest.mark.parametrize(("dialect", "item", "messages", "left_out"), HISTORIES)
def test_what_the_model_is_not_given_is_counted(
    dialect: str, item: Any, messages: list[Any], left_out: dict[str, int]
) -> None:
    parsed = parse(dialect, [item, USER])
    assert parsed.messages == [*messages, USER]
    assert parsed.left_out == left_out
    assert parse(dialect, [item, item, USER]).left_out == {kind: 2 * count for kind, count in left_out.items()}


def test_a_call_in_the_form_before_tools_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        parse("chat", [said(content=None, function_call={"name": "f", "arguments": "{}"}), USER])
    assert caught.value.param == "messages[0]"
    assert parse("chat", [said(content="x", function_call=None), USER]).left_out == {}


CALLS = [
    {"id": "c1", "function": {"name": "f", "arguments": "{}"}},
    {"id": "", "function": {"name": "g", "arguments": "[]"}},
]
RECORDED = {
    "r": said(content="text", reasoning_content="thought", tool_calls=CALLS),
    "other-reply": said(content=None, reasoning="thought", refusal="no"),
}


def resolved(*ids: str) -> list[dict[str, Any]]:
    asked = {"input": [{"type": "item_reference", "id": i} for i in ids]}
    return responses.parse_request(asked, recorded=RECORDED.get).messages


def test_a_reference_stands_for_its_item_alone() -> None:
    calls = [{"type": "function", **CALLS[0]}, {"type": "function", **CALLS[1], "id": "call_r-1"}]
    whole = said(content="text", reasoning_content="thought", tool_calls=calls)
    assert resolved("rs_r-0", "msg_r-0", "fc_r-0", "fc_r-1") == [whole]
    assert resolved("rs_r-0", "msg_r-0", "rs_r-1", "msg_r-1", "fc_r-0", "fc_r-1") == [whole]  # its text came in pieces
    assert resolved("fc_r-1") == [said(content="", tool_calls=calls[1:])]
    assert resolved("rs_other-reply-0", "msg_other-reply-0") == [said(content="no", reasoning_content="thought")]


@pytest.mark.parametrize("item_id", ["fc_r-2", "msg_x-0", "msg_r", "msg_r-x", "r-0", "", "xs_r-0", "msg_-0"])
def test_a_reference_to_another_item_is_refused(item_id: str) -> None:
    with pytest.raises(RequestError, match="store: false") as caught:
        resolved("msg_r-0", item_id)
    assert caught.value.param == "input[1]"
    with pytest.raises(RequestError, match="store: false"):
        parse("responses", [{"type": "item_reference", "id": "msg_r-0"}])


def test_references_to_a_reply_whose_text_came_in_pieces_stand_for_all_of_it() -> None:
    encoder = DIALECTS["responses"].encoder(parse("responses", [USER]), reply_id="chatcmpl-r")
    encoder.start()
    for piece in ({"reasoning": "a"}, {"text": "b"}, {"reasoning": "c"}, {"text": "d"}):
        encoder.feed(Delta(**piece))
    calls = [ToolDelta(index=0, id="c1", name="f", arguments="{}"), ToolDelta(index=1, name="g", arguments="[]")]
    encoder.feed(Delta(tool_calls=calls, finish_reason="tool_calls"))
    encoder.finish()
    ids = [item["id"] for item in encoder.body["output"]]
    assert ids == ["rs_r-0", "msg_r-0", "rs_r-1", "msg_r-1", "fc_r-0", "fc_r-1"]
    [message] = resolved(*ids)
    assert message == resolved("rs_r-0", "msg_r-0", "fc_r-0", "fc_r-1")[0]
