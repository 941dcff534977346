"""Required calls as structural tags: engines' own grammar library takes what models write, and nothing else.

That half of the tests runs where `xgrammar` is installed (`pip install xgrammar`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.messages.render import AnswerForm, Renderer, answer_form, relaxed, sampled_body

FORCED = ["hermes", "qwen3", "qwen_coder", "llama3"]
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
NO_ARGUMENTS = {"type": "function", "function": {"name": "now"}}


def calling(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_00001", "type": "function", "function": function}],
    }


def form_of(renderer: Renderer, tools: Any, *, opens_reasoning: bool = False, **wanted: Any) -> AnswerForm | None:
    return answer_form(renderer.grammar, tools, thinking=renderer.thinking, opened=opens_reasoning, **wanted)


@pytest.mark.parametrize("family", ["glm", "harmony", "deepseek_v3", "pythonic"])
def test_families_whose_calls_are_no_tagged_json_are_not_forced(
    family: str, renderer_for: Callable[[str], Renderer], tools: list[dict[str, Any]]
) -> None:
    renderer = renderer_for(family)
    expected = family == "pythonic"  # Llama's parser takes JSON from these models too
    assert (form_of(renderer, tools, choice="required") is not None) == expected


def test_nothing_is_forced_where_nothing_is_required(renderer_for: Callable[[str], Renderer], tools: Any) -> None:
    renderer = renderer_for("hermes")
    assert form_of(renderer, tools, choice="auto", parallel=False) is None
    assert form_of(renderer, tools, choice="none", parallel=False) is None
    assert form_of(renderer, [], choice="required") is None
    assert form_of(renderer, tools, choice="none", schema=SCHEMA) is None  # the engine's own form for schemas does it


@pytest.fixture(scope="module")
def accepts(
    model_dir: Callable[[str], Path], renderer_for: Callable[[str], Renderer]
) -> Callable[[str, AnswerForm, str], bool]:
    """``accepts(family, format, text)``: may an answer be this text, whole, under the tag?"""
    xgrammar = pytest.importorskip("xgrammar")
    from transformers import PreTrainedTokenizerFast

    compilers: dict[str, Any] = {}

    def accepts(family: str, wanted: AnswerForm, text: str) -> bool:
        if family not in compilers:
            file = str(model_dir(family) / "tokenizer.json")
            end = renderer_for(family).tokenizer.special_tokens["eos_token"]
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token=end)
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
            compilers[family] = (xgrammar.GrammarCompiler(info), tokenizer.eos_token_id)
        compiler, eos = compilers[family]
        tag = json.dumps({"type": "structural_tag", "format": wanted.format})
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))
        return bool(matcher.accept_string(text) and matcher.accept_token(eos))

    return accepts


@pytest.mark.nightly
@pytest.mark.parametrize("family", FORCED)
def test_the_engines_grammar_takes_the_templates_own_calls_and_no_answer_without(
    family: str, renderer_for: Callable[[str], Renderer], tools: Any, accepts: Callable[..., bool]
) -> None:
    renderer = renderer_for(family)
    tools = [*tools, NO_ARGUMENTS]
    wanted = form_of(renderer, tools, choice="required")
    assert wanted is not None
    arguments = {"query": 'a "b"\n✓', "limit": 3, "deep": True, "tags": ["x"]}
    body = sampled_body(renderer, calling("look_up", arguments), tools=tools)
    assert body
    closer = renderer.facts.closers[0]
    whole = renderer.decode(body).removesuffix(closer).strip()
    assert accepts(family, wanted, whole), whole  # Qwen3's begins with empty reasoning
    call = whole.rpartition("</think>")[2].strip()
    assert [c.name for c in renderer.parse(renderer.encode(call), tools=tools).tool_calls] == ["look_up"]
    assert not accepts(family, wanted, "I would rather not.")
    assert not accepts(family, wanted, call.replace("look_up", "look_down"))
    between = "; " if family == "llama3" else "\n"
    two = call + between + call
    assert accepts(family, wanted, two)
    assert len(renderer.parse(renderer.encode(two), tools=tools).tool_calls) == 2
    only = form_of(renderer, tools, choice="required", parallel=False)
    assert only is not None
    assert accepts(family, only, call)
    assert not accepts(family, only, two)
    named = form_of(renderer, tools, choice="tool:now")
    assert named is not None
    assert not accepts(family, named, call)
    if family != "llama3":
        thinks = family == "qwen3"
        assert accepts(family, wanted, "<think>\nhm\n</think>\n\nLet me see.\n" + call)
        # Without the template's marks of thinking, they are text.
        assert accepts(family, wanted, "<think>\nhm\n" + call) is not thinks
        assert not accepts(family, wanted, call + "\nand some text")


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"query": "x"}}\n</tool_call>'
BOUND = '{"answer": 4}'


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "opened", "text", "taken"),
    [
        ("hermes", False, CALL, True),
        ("hermes", False, BOUND, True),
        ("hermes", False, "The answer is 4.", False),
        ("hermes", False, '{"made": "up"}', False),
        ("qwen3", False, "<think>\nIt is {4}.\n</think>\n\n" + CALL, True),
        ("qwen3", False, "<think>\nIt is 4.\n</think>\n\n" + BOUND, True),
        ("qwen3", False, BOUND, True),
        ("qwen3", False, "<think>\n" + CALL, False),
        ("qwen3", True, "It is 4.\n</think>\n\n" + BOUND, True),
        ("qwen3", True, "Let me look.\n</think>\n\n" + CALL + "\n" + CALL, True),
        ("qwen3", True, CALL, False),
        ("qwen3", True, BOUND, False),
    ],
)
def test_beside_tools_a_schema_leaves_the_calls_possible_and_thinking_free(
    family: str,
    opened: bool,
    text: str,
    taken: bool,
    renderer_for: Callable[[str], Renderer],
    tools: Any,
    accepts: Callable[..., bool],
) -> None:
    form = form_of(renderer_for(family), tools, choice="auto", schema=SCHEMA, opens_reasoning=opened)
    assert form is not None
    assert accepts(family, form, text) is taken


@pytest.mark.nightly
def test_a_call_inside_open_thinking_is_not_taken(
    renderer_for: Callable[[str], Renderer], tools: Any, accepts: Callable[..., bool]
) -> None:
    for choice in ("required", "tool:look_up"):
        form = form_of(renderer_for("qwen3"), tools, choice=choice, parallel=False, opens_reasoning=True)
        assert form is not None
        assert not accepts("qwen3", form, CALL)
        assert accepts("qwen3", form, "I would call <tool_call> now.\n</think>\n\n" + CALL)


@pytest.mark.parametrize(
    ("asked", "text", "free"),
    [
        ({"choice": "required"}, "<think>\nhm\n</think>|\n\n" + CALL, True),
        ({"choice": "required"}, "|Let me see.\n" + CALL, False),
        ({"choice": "required", "opens_reasoning": True}, "hm\n</think>|\n\n" + CALL, True),
        ({"choice": "required", "opens_reasoning": True}, "it was cut in its thoughts|", True),
        ({"choice": "auto", "schema": SCHEMA}, "<think>\n{}</think>|" + BOUND, True),
        ({"choice": "auto", "schema": SCHEMA}, "|" + BOUND, False),
    ],
)
def test_the_tokens_before_the_form_are_free(
    asked: dict[str, Any], text: str, free: bool, renderer_for: Callable[[str], Renderer], tools: Any
) -> None:
    renderer = renderer_for("qwen3")
    form = form_of(renderer, tools, **asked)
    assert form is not None
    before, _, after = text.partition("|")
    count = len(renderer.encode(before))
    assert renderer.free_tokens([*renderer.encode(before), *renderer.encode(after)], form) == count
    assert (count > 0) is free


BFCL = {
    "type": "dict",
    "properties": {"rate": {"type": "float"}, "rows": {"$ref": "#/$defs/Row"}},
    "required": ["rate"],
}
REFUSED = [
    *(BFCL, "nothing", {"type": "object", "properties": {"x": {"type": "any"}}}, {"properties": {"x": {"enum": []}}}),
    *({"anyOf": [{"$ref": "other.json#/anyOf"}]}, {"items": {"$ref": "#/$defs/Row"}}, {"type": ["str", "null"]}),
    *({"type": "object", "required": None}, {"properties": {"x": {"type": "string", "enum": None}}}),
]
ROW = {"type": "object", "properties": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}}}
GOOD = [
    {"properties": {"x": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "y": {"$ref": "#/properties/x/anyOf/0"}}},
    {"type": "object", "properties": {"type": {"enum": ["dict"]}, "x": {"$ref": "#"}}, "required": ["x"]},
    {
        "$defs": {"Row": ROW},
        "type": "object",
        "properties": {"rows": {"type": "array", "items": {"$ref": "#/$defs/Row"}}},
    },
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "additionalProperties": False},
]


def test_schemas_that_compilers_refuse_are_those_of_any_object() -> None:
    assert [relaxed(schema) for schema in REFUSED] == [{"type": "object"}] * len(REFUSED)
    assert [relaxed(schema) for schema in GOOD] == GOOD


ARRAY = {"type": "array", "items": {}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "array", "items": [{"type": "number"}, {"type": "any"}]}, ARRAY),
        ({**ARRAY, "items": [], "minItems": 2, "maxItems": 2}, {**ARRAY, "minItems": 2, "maxItems": 2}),
        ({"type": "array", "minItems": 1}, {**ARRAY, "minItems": 1}),
        (
            {"type": "array", "prefixItems": [{"type": "number"}]},
            {"type": "array", "prefixItems": [{"type": "number"}]},
        ),
        ({"enum": [{"items": [1]}]}, {"enum": [{"items": [1]}]}),
    ],
)
def test_a_tuple_is_any_array_and_the_rest_of_the_schema_stays(given: Any, expected: Any) -> None:
    def around(inner: Any) -> dict[str, Any]:
        properties = {"at": {"anyOf": [inner, {"type": "null"}]}, "rows": {"type": "array", "items": inner}}
        return {"type": "object", "properties": properties, "required": ["at"], "additionalProperties": False}

    assert relaxed(around(given)) == around(expected)


TUPLE = {
    "type": "object",
    "properties": {"rate": {"type": "number"}, "rows": {"type": "array", "items": [{}, {}], "minItems": 2}},
    "required": ["rate", "rows"],
}


@pytest.mark.nightly
@pytest.mark.parametrize(("schema", "exact"), [(BFCL, False), (TUPLE, True)])
def test_a_relaxed_schema_compiles(
    schema: dict[str, Any], exact: bool, renderer_for: Callable[[str], Renderer], accepts: Callable[..., bool]
) -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": schema}}
    call = '<tool_call>\n{"name": "odd", "arguments": {"rate": 0.5, "rows": [1, "a"]%s}}\n</tool_call>'
    for asked in ({"choice": "required"}, {"choice": "auto", "schema": schema}):
        form = form_of(renderer_for("hermes"), [odd], **asked)
        assert form is not None
        assert accepts("hermes", form, call % "")
        assert accepts("hermes", form, call % ', "kind": null') is not exact
