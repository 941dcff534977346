"""Requests of Gemini's API: what each member and part becomes."""

from __future__ import annotations

from typing import Any

import pytest

from agentcore_rl_toolkit.messages.errors import RequestError
from agentcore_rl_toolkit.messages.wire.canonical import Usage
from agentcore_rl_toolkit.messages.wire.gemini import parse_request, standard_schema, usage_dict


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def call(*names: str) -> dict[str, Any]:
    return {"role": "model", "parts": [{"functionCall": {"name": name, "args": {}}} for name in names]}


def result(name: str) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"result": "done"}}}


def test_a_result_without_an_id_is_of_the_latest_call_that_is_open() -> None:
    contents = [user({"text": "go"}), call("s"), user({"text": "stop, once more"}), call("s", "t", "s")]
    contents += [user(result("s"), result("t"), result("s")), call("t"), user(result("t")), user(result("s"))]
    messages = parse_request({"contents": contents}).messages
    ids = [call["id"] for message in messages for call in message.get("tool_calls", [])]
    answered = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert answered == [*ids[1:], ids[0]]


def test_a_member_that_is_null_is_absent() -> None:
    for name in ("functionCall", "functionResponse", "inlineData"):
        assert parse_request({"contents": [user({name: None, "text": "hi"})]}).messages[0]["content"] == "hi"
    said = {"role": "model", "parts": [{"functionCall": None, "text": "so"}]}
    assert parse_request({"contents": [user({"text": "a"}), said, user({"text": "b"})]}).messages[1]["content"] == "so"


def test_a_part_has_one_kind_of_data_and_perhaps_members_about_it() -> None:
    image = {"mediaResolution": {"level": "HIGH"}, "inlineData": {"mimeType": "image/png", "data": "eA=="}}
    [part] = parse_request({"contents": [user(image)]}).messages[0]["content"]
    assert part["type"] == "image_url"
    with pytest.raises(RequestError, match=r"contents\[0\]: a part must have one of text, functionResponse"):
        parse_request({"contents": [user({"text": "lost", **result("s")})]})


def test_googles_form_of_a_schema_becomes_a_json_schema() -> None:
    long = "1" * 20
    assert standard_schema(
        {
            **{"type": "OBJECT", "propertyOrdering": ["a"], "example": 1, "description": "d"},
            **{"min_properties": long[1:], "maxItems": 5, "maxLength": "x", "minLength": long, "title": "7"},
            "additional_properties": {"type": "STRING"},
            "items": {"type": "TYPE_UNSPECIFIED", "nullable": True},
            "anyOf": [{"type": "INTEGER", "nullable": True}, {"nullable": True, "anyOf": [{"type": "NUMBER"}]}],
            "prefixItems": [{"type": "STRING", "nullable": False}, 5],
            "properties": {"a": {"type": "BOOLEAN"}},
            "$defs": {"b": {"type": ["ARRAY"]}},
            "defs": [{"type": "STRING"}],
        }
    ) == {
        **{"type": "object", "description": "d", "minProperties": int(long[1:]), "maxItems": 5, "maxLength": "x"},
        **{"minLength": long, "title": "7", "additionalProperties": {"type": "string"}, "items": {}},
        "anyOf": [{"type": ["integer", "null"]}, {"anyOf": [{"type": "number"}, {"type": "null"}]}],
        "prefixItems": [{"type": "string"}, 5],
        **{"properties": {"a": {"type": "boolean"}}, "$defs": {"b": {}}, "defs": [{"type": "STRING"}]},
    }


def test_thoughts_are_no_part_of_the_candidates_tokens() -> None:
    zero = {"promptTokenCount": 0, "candidatesTokenCount": 0, "totalTokenCount": 0}
    assert usage_dict(Usage()) == zero
    for thoughts, shown in ((2, 1), (3, 0), (4, 0)):
        usage = Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2, reasoning_tokens=thoughts)
        counts = {"promptTokenCount": 5, "candidatesTokenCount": shown, "totalTokenCount": 8}
        assert usage_dict(usage) == {**counts, "thoughtsTokenCount": thoughts, "cachedContentTokenCount": 2}


@pytest.mark.parametrize("more", [{}, {"responseSchema": {"type": "STRING", "enum": ["A", "B"]}}])
def test_an_answer_can_be_text_or_json_only(more: dict[str, Any]) -> None:
    config = {"responseMimeType": "text/x.enum", **more}
    with pytest.raises(RequestError, match=r"generationConfig\.responseMimeType"):
        parse_request({"contents": [user({"text": "a"})], "generationConfig": config})
