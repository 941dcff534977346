"""Reading answers back: every family's calls and reasoning, whole and in any slices."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from agentcore_rl_toolkit.errors import CaptureError
from agentcore_rl_toolkit.messages.render import GRAMMARS, TextDecoder, grammar_named
from agentcore_rl_toolkit.messages.render.parsers.base import held_back
from agentcore_rl_toolkit.messages.render.reply import StopCutter
from agentcore_rl_toolkit.messages.render.tokens import Tokenizer, TokenRow

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "deep": {"type": "boolean"},
                    "tags": {"type": "array"},
                    "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "mode": {"enum": ["fast", "slow"]},
                    "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "code": {"description": "a postal code"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def read(grammar: str, pieces: list[str], *, tools: Any = TOOLS, reasoning_open: bool = False) -> dict[str, Any]:
    parser = grammar_named(grammar).new_parser(tools=tools, reasoning_open=reasoning_open)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    return {
        "status": parser.status,
        "content": "".join(delta.text for delta in deltas),
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "calls": [(call.name, json.loads(call.arguments.encode(), parse_constant=str)) for call in calls],
    }


def expect(content: str = "", reasoning: str = "", status: str = "none", calls: Any = ()) -> dict[str, Any]:
    return {"status": status, "content": content, "reasoning": reasoning, "calls": list(calls)}


X = ("look_up", {"query": "x"})
DS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("hermes", "plain text", "Just text.", expect("Just text.")),
    ("hermes", "trailing blanks are part of an answer", "Text. \n", expect("Text. \n")),
    (
        "hermes",
        "reasoning, text and a call",
        '<think>\nwhy\n</think>\n\nSee:\n<tool_call>\n{"name": "look_up", "arguments": {"query": "x"}}\n</tool_call>',
        expect("See:", "why", "parsed", [X]),
    ),
    (
        "hermes",
        "two calls",
        '<tool_call>{"name": "look_up", "arguments": {"query": "x"}}</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        expect(status="parsed", calls=[X, ("now", {})]),
    ),
    (
        "hermes",
        "the closing mark is missing",
        '<tool_call>\n{"name": "look_up", "parameters": {"query": "x"}}',
        expect(status="parsed", calls=[X]),
    ),
    (
        "hermes",
        "arguments as a string of JSON",
        '<tool_call>{"name": "look_up", "arguments": "{\\"query\\": \\"x\\"}"}</tool_call>',
        expect(status="parsed", calls=[X]),
    ),
    (
        "hermes",
        "a raw line end inside a string",
        '<tool_call>{"name": "look_up", "arguments": {"query": "x\ny"}}</tool_call>',
        expect(status="parsed", calls=[("look_up", {"query": "x\ny"})]),
    ),
    (
        "hermes",
        "broken JSON stays visible",
        "Well\n<tool_call>\n{name: look_up}\n</tool_call> bye",
        expect("Well\n<tool_call>\n{name: look_up}\n</tool_call> bye", status="unparsed"),
    ),
    (
        "hermes",
        "one call good, one broken",
        '<tool_call>{"name": "now"}</tool_call><tool_call>{</tool_call>',
        expect("<tool_call>{</tool_call>", status="unparsed", calls=[("now", {})]),
    ),
    (
        "hermes",
        "cut off in the middle",
        '<tool_call>\n{"name": "look_up", "argu',
        expect('<tool_call>\n{"name": "look_up", "argu', status="unparsed"),
    ),
    (
        "hermes",
        "a call without its marks",
        '{"name": "look_up", "arguments": {"query": "x"}}',
        expect('{"name": "look_up", "arguments": {"query": "x"}}', status="unparsed"),
    ),
    ("hermes", "JSON that is no call", '{"name": "Bob"}', expect('{"name": "Bob"}')),
    ("hermes", "a closing mark alone", "x</tool_call>", expect("x</tool_call>", status="unparsed")),
    ("hermes", "reasoning that never ends", "<think>on and on \n", expect(reasoning="on and on")),
    (
        "hermes",
        "a call inside reasoning that never ends",
        '<think>so <tool_call>{"name": "now"}</tool_call>',
        expect(reasoning='so <tool_call>{"name": "now"}</tool_call>', status="unparsed"),
    ),
    (
        "hermes",
        "a call mentioned in reasoning that ends",
        "<think>a <tool_call> would do</think>No.",
        expect("No.", "a <tool_call> would do"),
    ),
    ("hermes", "the reasoning mark inside text", "a <think> b", expect("a <think> b")),
    ("hermes", "empty reasoning", "<think>\n\n</think>\n\nSo.", expect("So.")),
    (
        "qwen_coder",
        "values by their schema",
        "Go.\n<tool_call>\n<function=look_up>\n<parameter=query>\n42\n</parameter>\n<parameter=limit>\n42\n</parameter>\n"
        '<parameter=deep>\nTrue\n</parameter>\n<parameter=tags>\n["a", 1]\n</parameter>\n<parameter=maybe>\nnull\n'
        "</parameter>\n<parameter=mode>\nfast\n</parameter>\n</function>\n</tool_call>",
        expect(
            "Go.",
            status="parsed",
            calls=[
                (
                    "look_up",
                    {"query": "42", "limit": 42, "deep": True, "tags": ["a", 1], "maybe": None, "mode": "fast"},
                )
            ],
        ),
    ),
    (
        "qwen_coder",
        "lines of a value are kept",
        "<tool_call>\n<function=look_up>\n<parameter=query>\n\n a\n  b\n\n</parameter>\n</function>\n</tool_call>",
        expect(status="parsed", calls=[("look_up", {"query": "\n a\n  b\n"})]),
    ),
    (
        "qwen_coder",
        "without the outer marks",
        "<function=look_up>\n<parameter=query>\nx\n</parameter>\n</function>\n</tool_call>",
        expect(status="parsed", calls=[X]),
    ),
    (
        "qwen_coder",
        "no parameters",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        expect(status="parsed", calls=[("now", {})]),
    ),
    (
        "qwen_coder",
        "something else between the marks",
        '<tool_call>\n{"name": "now"}\n</tool_call>',
        expect('<tool_call>\n{"name": "now"}\n</tool_call>', status="unparsed"),
    ),
    ("qwen_coder", "half a mark in text", "if a <func", expect("if a <func")),
    ("llama", "text", "Hello [1].", expect("Hello [1].")),
    (
        "llama",
        "one call",
        '{"name": "look_up", "parameters": {"query": "x"}}',
        expect(status="parsed", calls=[X]),
    ),
    (
        "llama",
        "two calls behind the tag",
        '<|python_tag|>{"name": "look_up", "parameters": {"query": "x"}}; {"name": "now", "parameters": {}}',
        expect(status="parsed", calls=[X, ("now", {})]),
    ),
    (
        "llama",
        "Python",
        '[look_up(query="x", limit=3, deep=True, tags=["a"]), now()]',
        expect(
            status="parsed",
            calls=[("look_up", {"query": "x", "limit": 3, "deep": True, "tags": ["a"]}), ("now", {})],
        ),
    ),
    (
        "llama",
        "Python with everything in quotes",
        '[look_up(query="7", limit="7", deep="true")]',
        expect(status="parsed", calls=[("look_up", {"query": "7", "limit": 7, "deep": True})]),
    ),
    (
        "llama",
        "a list of calls",
        '[{"name": "look_up", "parameters": {"query": "x"}}, {"name": "now", "parameters": {}}]',
        expect(status="parsed", calls=[X, ("now", {})]),
    ),
    ("llama", "JSON as an answer", '{"answer": 42}', expect('{"answer": 42}')),
    ("llama", "a list as an answer", "[1, 2, 3]", expect("[1, 2, 3]")),
    (
        "llama",
        "an unknown tool",
        '{"name": "fly", "parameters": {}}',
        expect('{"name": "fly", "parameters": {}}', status="unparsed"),
    ),
    (
        "llama",
        "broken",
        '{"name": "look_up", "parameters": {"query": "x"',
        expect('{"name": "look_up", "parameters": {"query": "x"', status="unparsed"),
    ),
    ("llama", "code behind the tag", "<|python_tag|>print(1)", expect("<|python_tag|>print(1)", status="unparsed")),
    ("llama", "positional arguments", "[look_up(1)]", expect("[look_up(1)]", status="unparsed")),
    (
        "glm",
        "reasoning and a call",
        "\n<think>why</think>\nSee.\n<tool_call>look_up\n<arg_key>query</arg_key>\n<arg_value>7</arg_value>\n"
        "<arg_key>limit</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
        expect("See.", "why", "parsed", [("look_up", {"query": "7", "limit": 7})]),
    ),
    ("glm", "no arguments", "<tool_call>now\n</tool_call>", expect(status="parsed", calls=[("now", {})])),
    (
        "glm",
        "an argument without a value",
        "<tool_call>look_up\n<arg_key>query</arg_key>\n</tool_call>",
        expect("<tool_call>look_up\n<arg_key>query</arg_key>\n</tool_call>", status="unparsed"),
    ),
    (
        "deepseek",
        "V3: fenced",
        "See." + DS.format('function<｜tool▁sep｜>look_up\n```json\n{"query": "x"}\n```'),
        expect("See.", status="parsed", calls=[X]),
    ),
    (
        "deepseek",
        "an empty fence",
        DS.format("function<｜tool▁sep｜>now\n``````"),
        expect("", "", "parsed", [("now", {})]),
    ),
    ("deepseek", "V3.1: bare", DS.format('look_up<｜tool▁sep｜>{"query": "x"}'), expect(status="parsed", calls=[X])),
    (
        "deepseek",
        "two calls",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        expect(status="parsed", calls=[("now", {}), ("now", {})]),
    ),
    (
        "deepseek",
        "broken",
        "<｜tool▁call▁begin｜>look_up{}<｜tool▁call▁end｜>",
        expect("<｜tool▁call▁begin｜>look_up{}<｜tool▁call▁end｜>", status="unparsed"),
    ),
    (
        "deepseek",
        "marks without a call",
        "Well<｜tool▁calls▁begin｜>\nlook_up",
        expect("Well<｜tool▁calls▁begin｜>\nlook_up", status="unparsed"),
    ),
    (
        "harmony",
        "analysis and final",
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>So.",
        expect("So.", "why"),
    ),
    (
        "harmony",
        "a call",
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary to=functions.look_up "
        '<|constrain|>json<|message|>{"query": "x"}',
        expect("", "why", "parsed", [X]),
    ),
    (
        "harmony",
        "the recipient before the channel",
        ' to=functions.look_up<|channel|>commentary json<|message|>{"query": "x"}<|call|>',
        expect(status="parsed", calls=[X]),
    ),
    ("harmony", "a preamble", "<|channel|>commentary<|message|>Wait.<|end|>", expect("Wait.")),
    ("harmony", "no format at all", "Sorry.", expect("Sorry.")),
    (
        "harmony",
        "a call that is no JSON",
        "<|channel|>commentary to=functions.look_up<|message|>x",
        expect("<|channel|>commentary to=functions.look_up<|message|>x", status="unparsed"),
    ),
    (
        "plain",
        "a call that it cannot read",
        "<tool_call>x</tool_call>",
        expect("<tool_call>x</tool_call>", status="unparsed"),
    ),
    (
        "hermes",
        "a string without its end before a good call",
        '<tool_call>{"name": "now", "arguments": {"q": "a}}</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        expect(
            '<tool_call>{"name": "now", "arguments": {"q": "a}}</tool_call>', status="unparsed", calls=[("now", {})]
        ),
    ),
    (
        "hermes",
        "text between calls",
        'a\n<tool_call>{"name": "now"}</tool_call> b <tool_call>{"name": "now", "arguments": null}</tool_call>\n c',
        expect("a\nb\nc", status="parsed", calls=[("now", {}), ("now", {})]),
    ),
    (
        "hermes",
        "a whole call whose closing marker is cut",
        '<tool_call>{"name": "now"}\n</tool_c',
        expect(status="parsed", calls=[("now", {})]),
    ),
    (
        "hermes",
        "half of a surrogate pair is a character that is missing",
        '<tool_call>{"name": "look_up", "arguments": {"query": "\\ud83d"}}</tool_call>',
        expect(status="parsed", calls=[("look_up", {"query": "\ufffd"})]),
    ),
    (
        "hermes",
        "a number that is none",
        '<tool_call>{"name": "look_up", "arguments": {"limit": NaN}}</tool_call>',
        expect(status="parsed", calls=[("look_up", {"limit": "NaN"})]),
    ),
    (
        "qwen_coder",
        "half a call",
        "<tool_call><function=look_up><parameter=query>rm -rf /tmp",
        expect("<tool_call><function=look_up><parameter=query>rm -rf /tmp", status="unparsed"),
    ),
    (
        "qwen_coder",
        "an integer written as a float",
        "<tool_call><function=look_up><parameter=limit>3.0</parameter></function></tool_call>",
        expect(status="parsed", calls=[("look_up", {"limit": 3})]),
    ),
    (
        "glm",
        "a name without the rest",
        "<tool_call>look_up",
        expect("<tool_call>look_up", status="unparsed"),
    ),
    (
        "deepseek",
        "a name without the rest",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n",
        expect("<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n", status="unparsed"),
    ),
    (
        "llama",
        "a call after prose",
        'Sure: {"name": "look_up", "parameters": {}}',
        expect('Sure: {"name": "look_up", "parameters": {}}', status="unparsed"),
    ),
    ("llama", "a call without its brackets", "now()", expect("now()", status="unparsed")),
    (
        "llama",
        "an infinite number",
        "[look_up(limit=1e999)]",
        expect(status="parsed", calls=[("look_up", {"limit": "Infinity"})]),
    ),
    (
        "gemma",
        "reasoning, text and two calls",
        '<|channel>thought\nwhy\n<channel|>See:<|tool_call>call:look_up{query:<|"|>a}, b<|"|>,limit:3,deep:true,'
        'tags:[<|"|>x<|"|>,<|"|>7<|"|>],maybe:null}<tool_call|><|tool_call>call:now{}<tool_call|>',
        expect(
            "See:",
            "why",
            "parsed",
            [("look_up", {"query": "a}, b", "limit": 3, "deep": True, "tags": ["x", "7"], "maybe": None}), ("now", {})],
        ),
    ),
    (
        "gemma",
        "a call ends the reasoning",
        '<|channel>thought\nwhy <|tool_call>call:look_up{query:<|"|>x<|"|>}<tool_call|>',
        expect("", "why", "parsed", [X]),
    ),
    ("gemma", "a line end before the reasoning", "<|channel>\nthought\nwhy<channel|>Hi", expect("Hi", "why", "none")),
    (
        "gemma",
        "marks say that a value is a string, unless the schema takes none",
        '<|tool_call>call:look_up{text:<|"|>null<|"|>,code:<|"|>12345<|"|>,any:<|"|>1e5<|"|>,limit:<|"|>5<|"|>}<tool_call|>',
        expect(status="parsed", calls=[("look_up", {"text": "null", "code": "12345", "any": "1e5", "limit": 5})]),
    ),
    (
        "gemma",
        "None is a value, unless the schema takes strings",
        "<|tool_call>call:look_up{other:None,query:None}<tool_call|>",
        expect(status="parsed", calls=[("look_up", {"other": None, "query": "None"})]),
    ),
    ("gemma", "a call that is cut", "<|tool_call>call:now{", expect("<|tool_call>call:now{", status="unparsed")),
    (
        "kimi",
        "reasoning, text and two calls",
        "<think>why</think>See:<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0"
        '<|tool_call_argument_begin|>{"query": "x"}<|tool_call_end|><|tool_call_begin|>functions.now:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        expect("See:", "why", "parsed", [X, ("now", {})]),
    ),
    (
        "kimi",
        "an id without a number is no call",
        "<|tool_call_begin|>functions.now<|tool_call_argument_begin|>{}<|tool_call_end|>",
        expect("<|tool_call_begin|>functions.now<|tool_call_argument_begin|>{}<|tool_call_end|>", status="unparsed"),
    ),
    (
        "minimax",
        "text and two calls",
        'See:\n<minimax:tool_call>\n<invoke name="look_up">\n<parameter name="query">a</parameter> b</parameter>\n'
        '<parameter name="tags">["x"]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        expect("See:", status="parsed", calls=[("look_up", {"query": "a</parameter> b", "tags": ["x"]}), ("now", {})]),
    ),
    (
        "mistral",
        "reasoning, text and two calls",
        '[THINK]why[/THINK]See:[TOOL_CALLS]look_up[ARGS]{"query": "x"}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}',
        expect("See:", "why", "parsed", [X, ("now", {})]),
    ),
    *(
        (
            "mistral",
            "calls before one that is cut or cannot be read stay",
            f'[TOOL_CALLS]now{{}}[TOOL_CALLS]look_up[ARGS]{{"query": "x"}}{rest}',
            expect(rest, status="unparsed", calls=[("now", {}), X]),
        )
        for rest in (
            '[TOOL_CALLS]look_up[ARGS]{"query": "',
            "[TOOL_CALLS]now",
            "[TOOL_CALLS]look_up{x}[TOOL_CALLS]now{}",
        )
    ),
    *(
        ("mistral", "a name alone is no call", text, expect(text, status="unparsed"))
        for text in ("Its mark is `[TOOL_CALLS]`.", "[TOOL_CALLS] now.", "[TOOL_CALLS]now", "[TOOL_CALLS]now[ARGS]")
    ),
    (
        "lfm",
        "text around calls with quotes in quotes",
        "See:<|tool_call_start|>[look_up(query='it's \"x\"\ny', limit=3, deep=True, tags=['a', 'b']), now()]"
        "<|tool_call_end|>Done.",
        expect(
            "See:\nDone.",
            status="parsed",
            calls=[("look_up", {"query": 'it\'s "x"\ny', "limit": 3, "deep": True, "tags": ["a", "b"]}), ("now", {})],
        ),
    ),
    (
        "lfm",
        "escapes of a string, and backslashes that are none",
        r"<|tool_call_start|>[look_up(query='\x41\u00e9\U0001F600\101\7\t\q\x \u1 \\\'')]<|tool_call_end|>",
        expect(status="parsed", calls=[("look_up", {"query": "Aé😀A\x07\t\\q\\x \\u1 \\'"})]),
    ),
    (
        "lfm",
        "a value without a name is no call",
        "<|tool_call_start|>[look_up('x')]<|tool_call_end|>",
        expect("<|tool_call_start|>[look_up('x')]<|tool_call_end|>", status="unparsed"),
    ),
    (
        "muse",
        "reasoning, text and two calls",
        " to=self<|message|>why<|eom|><|start|>assistant to=user<|message|>See:<|eom|><|start|>assistant to=look_up<|message|>"
        '<atem:function_calls>\n<atem:invoke name="look_up">\n<atem:parameter name="query">5</atem:parameter>\n'
        '<atem:parameter name="limit">5</atem:parameter>\n</atem:invoke>\n<atem:invoke name="now">\n</atem:invoke>\n'
        "</atem:function_calls>",
        expect("See:", "why", "parsed", [("look_up", {"query": "5", "limit": 5}), ("now", {})]),
    ),
    (
        "muse",
        "the reasoning has no end mark, and the tool's name is said twice",
        ' to=self<|message|>I go to=x <b> to=now.now<|message|><atem:invoke name="now.now">\n</atem:invoke>',
        expect("", "I go to=x <b>", "parsed", [("now", {})]),
    ),
    (
        "lfm",
        "a string without an end does not take the next call",
        "<|tool_call_start|>[now(a='b)]<|tool_call_end|><|tool_call_start|>[look_up(query='x')]<|tool_call_end|>",
        expect("<|tool_call_start|>[now(a='b)]<|tool_call_end|>", status="unparsed", calls=[X]),
    ),
    (
        "harmony",
        "a string without an end does not take the next message",
        '<|channel|>commentary to=functions.now<|message|>{"a": "b}<|end|><|start|>assistant<|channel|>final<|message|>Hi',
        expect('<|channel|>commentary to=functions.now<|message|>{"a": "b}Hi', status="unparsed"),
    ),
    (
        "muse",
        "a value without an end does not take the next message",
        ' to=now<|message|><atem:invoke name="now"><atem:parameter name="a">b<|eom|><|start|>assistant to=look_up<|message|>'
        '<atem:invoke name="look_up"><atem:parameter name="query">x</atem:parameter></atem:invoke>',
        expect(' to=now<|message|><atem:invoke name="now"><atem:parameter name="a">b', status="unparsed", calls=[X]),
    ),
    ("harmony", "plain text in place of a channel", "<|channel|>The answer", expect("The answer")),
    ("harmony", "text that ends without a channel", "The answer<|end|>", expect("The answer")),
    (
        "harmony",
        "text without a channel before a message",
        "<|channel|>commentary??<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        expect("Hi", "commentary??\n"),
    ),
    ("plain", "a call in any family's form", "See <function=now>", expect("See <function=now>", status="unparsed")),
    *(
        ("llama", "a call that is cut", text, expect(text, status="unparsed"))
        for text in (
            '{"type": "function", "name": "look_up", "parameters": {"query": "x"',
            '{\n  "name": "look_up",\n  "parameters": {"query": "x"}',
            'So {"type": "function", "name": "look_up", "parameters": {}}',
        )
    ),
    ("hermes", "a call in another family's form", "[TOOL_CALLS]now{}", expect("[TOOL_CALLS]now{}", status="unparsed")),
]

CLOSED_INSIDE = [
    ("hermes", '<tool_call>{"name": "look_up", "arguments": {"query": "a </tool_call> b"}}</tool_call>'),
    ("qwen_coder", "<tool_call><function=look_up><parameter=query>a </tool_call> b</parameter></function></tool_call>"),
    ("qwen_coder", "<function=look_up><parameter=query>a </function> b</parameter></function>"),
    (
        "qwen_coder",
        "<tool_call><function=look_up><parameter=query></function></tool_call></parameter></function></tool_call>",
    ),
    ("deepseek", '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"q": "a<｜tool▁call▁end｜>b"}<｜tool▁call▁end｜>'),
    ("lfm", "<|tool_call_start|>[look_up(query='a<|tool_call_end|>b')]<|tool_call_end|>"),
    ("harmony", '<|channel|>commentary to=functions.look_up<|message|>{"query": "a<|end|>b"}<|call|>'),
]


@pytest.mark.parametrize(("grammar", "text"), CLOSED_INSIDE)
def test_a_call_whose_value_has_the_closing_mark_is_counted(grammar: str, text: str) -> None:
    found = read(grammar, [text])
    assert (found["status"], found["calls"]) == ("unparsed", [])


ARGUMENTS = {"query": "rm -rf <x> y", "limit": 3, "tags": ["a", "b"], "deep": True}
_PAIRS = {k: v if isinstance(v, str) else json.dumps(v) for k, v in ARGUMENTS.items()}


def _invoked(prefix: str) -> str:
    parameters = "".join(f'<{prefix}parameter name="{k}">{v}</{prefix}parameter>\n' for k, v in _PAIRS.items())
    return f'<{prefix}invoke name="look_up">\n{parameters}</{prefix}invoke>'


WRITTEN = {
    "hermes": "<tool_call>\n" + json.dumps({"name": "look_up", "arguments": ARGUMENTS}) + "\n</tool_call>",
    "qwen_coder": "<tool_call>\n<function=look_up>\n"
    + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in _PAIRS.items())
    + "</function>\n</tool_call>",
    "glm": "<tool_call>look_up\n"
    + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in _PAIRS.items())
    + "</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n"
    + json.dumps(ARGUMENTS)
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "llama": json.dumps({"name": "look_up", "parameters": ARGUMENTS}),
    "harmony": "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>"
    + json.dumps(ARGUMENTS)
    + "<|call|>",
    "gemma": '<|tool_call>call:look_up{query:<|"|>rm -rf <x> y<|"|>,limit:3,tags:[<|"|>a<|"|>,<|"|>b<|"|>],'
    "deep:true}<tool_call|>",
    "kimi": "<|tool_call_begin|>functions.look_up:0<|tool_call_argument_begin|>"
    + json.dumps(ARGUMENTS)
    + "<|tool_call_end|>",
    "lfm": "<|tool_call_start|>[look_up("
    + ", ".join(f"{k}={v!r}" for k, v in ARGUMENTS.items())
    + ")]<|tool_call_end|>",
    "minimax": _invoked(""),
    "mistral": "[TOOL_CALLS]look_up[ARGS]" + json.dumps(ARGUMENTS),
    "muse": " to=look_up<|message|>" + _invoked("atem:"),
}


@pytest.mark.parametrize("grammar", WRITTEN)
def test_half_a_call_is_no_call_wherever_the_answer_was_cut(grammar: str) -> None:
    text = WRITTEN[grammar]
    assert read(grammar, [text])["calls"] == [("look_up", ARGUMENTS)]
    for at in range(len(text)):
        assert read(grammar, [text[:at]])["calls"] in ([], [("look_up", ARGUMENTS)]), text[:at]


@pytest.mark.parametrize(("grammar", "what", "text", "expected"), CASES, ids=[f"{g}: {w}" for g, w, _, _ in CASES])
def test_an_answer_is_read_the_same_in_any_two_slices(grammar, what, text, expected) -> None:
    assert read(grammar, [text]) == expected
    for at in range(1, len(text)):
        assert read(grammar, [text[:at], text[at:]]) == expected, f"cut at {at}: {text[:at]!r}"
    assert read(grammar, list(text)) == expected


@pytest.mark.parametrize(
    ("grammar", "call"),
    [("qwen_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>"), ("glm", "<tool_call>now</tool_call>")],
)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hm CALL", expect("", "hm", "parsed", [("now", {})])),
        ("hm CALL\n</think>\n\nDone.", expect("Done.", "hm", "parsed", [("now", {})])),
        ("hm CALL So</think>Done.", expect("So\nDone.", "hm", "parsed", [("now", {})])),
        ("<tool_call> is how I call.</think>CALL", expect("", "<tool_call> is how I call.", "parsed", [("now", {})])),
        ("<tool_call> is all", expect("", "<tool_call> is all", "unparsed")),
    ],
)
def test_a_call_before_the_end_of_the_reasoning_is_executed(
    grammar: str, call: str, text: str, expected: dict[str, Any]
) -> None:
    text = text.replace("CALL", call)
    for at in range(len(text) + 1):
        assert read(grammar, [text[:at], text[at:]], reasoning_open=True) == expected


@pytest.mark.parametrize(
    ("text", "held"), [("a", 0), ("a<", 1), ("a<tool_cal", 9), ("a<tool_call>", 0), ("<tool <", 1)]
)
def test_the_end_of_a_text_is_held_back_while_it_may_begin_a_marker(text: str, held: int) -> None:
    assert held_back(text, ["<tool_call>", "<think>"]) == held


def test_the_text_ends_before_the_stop_string_that_is_complete_first() -> None:
    cutter = StopCutter(["abcd", "bc"])
    assert cutter.feed("xabcdy") == "xa"
    assert cutter.stopped == "bc"
    assert cutter.feed("more", final=True) == ""


def test_text_that_may_begin_a_stop_string_is_held_back_until_the_end() -> None:
    cutter = StopCutter(["abcd", "bc"])
    assert [cutter.feed("xa"), cutter.feed("ya"), cutter.feed("", final=True), cutter.stopped] == ["x", "ay", "a", None]
    assert [cutter.feed("bc"), cutter.stopped] == ["", "bc"]


MARKERS = sorted(
    {marker for g in GRAMMARS.values() for block in g.blocks for marker in block}
    | {"<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "<|python_tag|>"}
    | {"<parameter=", "</parameter>", "<arg_key>", "</arg_key>", "<｜tool▁sep｜>", "to=functions.now", "analysis"}
    | {' name="now">', ' name="a" string="false">', ' name="b" string="true">'}
)
FRAGMENTS = st.lists(
    st.one_of(
        st.sampled_from(MARKERS),
        st.sampled_from(['"', "\\ud83d", "NaN", "1e999", '{"name": "now", "arguments": {"a": ']),
        st.sampled_from(['{"name": "now"}', "now", "now()", "[", "{", "<", "｜", " ", "\n", "\n\n", "x", "final"]),
        st.text(max_size=3),
    ),
    max_size=8,
).map("".join)


@given(st.sampled_from(sorted(GRAMMARS)), FRAGMENTS, st.data(), st.booleans(), st.booleans())
def test_slices_never_change_what_is_read(grammar, text, data, with_tools, opened) -> None:
    tools = TOOLS if with_tools else None
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(grammar, [text], tools=tools, reasoning_open=opened)
    assert read(grammar, pieces, tools=tools, reasoning_open=opened) == whole
    assert (whole["status"] == "parsed") <= bool(whole["calls"])
    if not with_tools:
        assert whole["calls"] == []


@given(st.sampled_from(["hermes", "qwen_coder", "glm", "deepseek"]), FRAGMENTS)
def test_an_answer_without_a_call_is_given_exactly_as_sampled(grammar, text) -> None:
    found = read(grammar, [text])
    if not found["calls"] and "<think>" not in text:
        assert found["content"] == text.lstrip("\n")


@pytest.mark.parametrize(("written", "meant"), [("\\ud83d", "\ufffd"), ("\\ud83d\\ude00", "😀"), ("a\nb", "a\nb")])
@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": %s}</tool_call>'),
        ("llama", '{"name": "now", "parameters": %s}'),
        ("mistral", "[TOOL_CALLS]now[ARGS]%s"),
        ("kimi", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>%s<|tool_call_end|>"),
        ("deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>%s<｜tool▁call▁end｜>"),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>%s<|call|>"),
        ("lfm", "<|tool_call_start|>[now(a=%s)]<|tool_call_end|>"),
    ],
)
def test_half_characters_and_raw_line_ends_in_arguments(grammar: str, text: str, written: str, meant: str) -> None:
    text %= f'"{written}"' if grammar == "lfm" else f'{{"a": "{written}"}}'
    parser = grammar_named(grammar).new_parser(tools=TOOLS)
    [call] = [piece for delta in [*parser.feed(text), *parser.finish()] for piece in delta.tool_calls]
    assert msgspec.json.decode(call.arguments) == {"a": meant}  # as strict as any


NUMBERS = '{"limit":   NaN, "deep": [-Infinity,1e999], "query": "NaN \\" Infinity"}'


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ("deepseek", f"<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{NUMBERS}<｜tool▁call▁end｜>"),
        ("harmony", f"<|channel|>commentary to=functions.look_up<|message|>{NUMBERS}<|call|>"),
    ],
)
def test_numbers_that_json_does_not_have_stay_as_they_were_sampled(grammar, text) -> None:
    parser = grammar_named(grammar).new_parser(tools=TOOLS)
    [call] = [piece for delta in [*parser.feed(text), *parser.finish()] for piece in delta.tool_calls]
    assert (parser.status, call.name, call.arguments) == ("parsed", "look_up", NUMBERS)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ("qwen_coder", "<tool_call><function=look_up>{}</function></tool_call>"),
        ("glm", "<tool_call>look_up{}</tool_call>"),
    ],
)
def test_where_json_is_written_here_such_numbers_are_strings(grammar, text) -> None:
    pair = "<arg_key>{}</arg_key><arg_value>{}</arg_value>" if grammar == "glm" else "<parameter={}>{}</parameter>"
    kinds = {"n": "number", "i": "integer", "o": "object", "s": "string", "l": "array"}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"properties": {}}}}
    tool["function"]["parameters"]["properties"] = {k: {"type": t} for k, t in kinds.items()}  # type: ignore[index]
    values = {"n": "NaN", "i": "Infinity", "o": '{"a": NaN}', "s": "-Infinity", "l": "[1, 1e999]"}
    text = text.format("".join(pair.format(k, v) for k, v in values.items()))
    parser = grammar_named(grammar).new_parser(tools=[tool])
    [call] = [piece for delta in [*parser.feed(text), *parser.finish()] for piece in delta.tool_calls]
    reply = msgspec.json.decode(call.arguments)  # as strict as any
    assert reply == {"n": "NaN", "i": "Infinity", "o": {"a": "NaN"}, "s": "-Infinity", "l": [1, "Infinity"]}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=4),
    st.sampled_from(["hermes", "deepseek", "harmony"]),
)
def test_any_json_arguments_come_back_as_they_were(arguments, grammar) -> None:
    written = json.dumps(arguments, ensure_ascii=False)
    if any(marker in written for marker in MARKERS):
        return
    text = {
        "hermes": f'<tool_call>\n{{"name": "now", "arguments": {written}}}\n</tool_call>',
        "deepseek": f"<｜tool▁call▁begin｜>now<｜tool▁sep｜>{written}<｜tool▁call▁end｜>",
        "harmony": f"<|channel|>commentary to=functions.now<|message|>{written}<|call|>",
    }[grammar]
    assert read(grammar, [text]) == expect(status="parsed", calls=[("now", arguments)])


@given(data=st.data())
def test_decoding_in_slices_is_decoding_the_whole(data, renderer_for) -> None:
    tokenizer = renderer_for(data.draw(st.sampled_from(["qwen3", "harmony"]))).tokenizer
    some_text = st.text(max_size=12).map(tokenizer.encode)
    any_ids = st.lists(st.integers(0, tokenizer.vocabulary_size - 1), max_size=12)
    ids = data.draw(st.lists(some_text | any_ids, max_size=4).map(lambda parts: [i for part in parts for i in part]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    decoder = TextDecoder(tokenizer)
    pieces = [decoder.feed(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join([*pieces, decoder.finish()]) == tokenizer.decode(ids)


BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
WORDS = st.integers(256, 260).map(lambda word: [word])
CHARACTERS = st.sampled_from("😀é中").map(lambda text: list(text.encode()))


@given(parts=st.lists(WORDS | CHARACTERS | st.integers(0, 255).map(lambda byte: [byte]), max_size=20))
def test_byte_fallback_tokens_are_shown_with_the_token_behind_them(parts: list[list[int]]) -> None:
    """A wrong byte changes the text of the whole bytes beside it."""
    backend = Backend(
        models.BPE({**BYTES, "▁": 256, "a": 257, "b": 258, "▁a": 259, "\ufffd": 260}, [], byte_fallback=True)
    )
    written = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(written)
    ids, decoder = [token for part in parts for token in part], TextDecoder(Tokenizer(backend))
    assert "".join([*(decoder.feed([token]) for token in ids), decoder.finish()]) == backend.decode(ids)
    decoder.feed(ids)
    assert decoder.feed([257]).endswith("a")


@given(data=st.data())
def test_streaming_ids_gives_what_parsing_gives(data, renderer_for) -> None:
    renderer = renderer_for("qwen3")
    stop = renderer.tokenizer.id_of("<|im_end|>")
    text = data.draw(FRAGMENTS)
    ids = [*renderer.encode(text), *data.draw(st.sampled_from([[], [stop]]))]
    whole = renderer.parse(ids, tools=TOOLS)
    stream = renderer.stream(tools=TOOLS)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        stream.feed(ids[a:b])
    stream.feed((), final=True)
    parsed = stream.parsed()
    assert (parsed.content, parsed.reasoning, parsed.parse_status) == (
        whole.content,
        whole.reasoning,
        whole.parse_status,
    )
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [(c.name, c.arguments) for c in whole.tool_calls]
    assert "<|im_end|>" not in whole.content or "<|im_end|>" in text
    assert [stream.parsed(reason).finish_reason for reason in ("stop", "length", None)] == [
        *("tool_calls" if whole.tool_calls else "stop", "length", None)
    ]


def test_rows_share_their_tokens_until_they_part() -> None:
    row = TokenRow().extended([1, 2])
    longer, other = row.extended([3]), row.extended([4, 5])
    assert (longer.buffer is row.buffer, other.buffer is row.buffer) == (True, False)
    shown = [(each.ids().tolist(), each.json(), each.tail(2).tolist()) for each in (row, longer, other, TokenRow())]
    assert shown == [
        ([1, 2], b"[1,2]", [1, 2]),
        ([1, 2, 3], b"[1,2,3]", [2, 3]),
        ([1, 2, 4, 5], b"[1,2,4,5]", [4, 5]),
        ([], b"[]", []),
    ]
    row.cut()
    assert row.extended([6]).json() == b"[1,2,6]"


def test_each_token_has_a_logprob(renderer_for) -> None:
    renderer = renderer_for("qwen3")
    [entry] = renderer.logprob_entries(renderer.encode("a"), [-0.5])
    assert entry == {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    with pytest.raises(CaptureError):
        renderer.logprob_entries(renderer.encode("a"), [-0.5, -0.5])


@pytest.mark.parametrize("grammar", sorted(GRAMMARS))
def test_calls_deeper_than_python_reads_are_unparsed(grammar) -> None:
    deep = '{"name": "now", "arguments": {"a": ' + "[" * 50_000
    for text in (f"<tool_call>{deep}</tool_call>", deep, deep + "]" * 50_000 + "}}"):
        assert read(grammar, [text])["status"] != "parsed"


@pytest.mark.parametrize(
    "schema", [{"type": [{}]}, {"type": 5}, {"enum": 5}, {"const": {}, "enum": None}, {"anyOf": 5, "oneOf": [5, {}]}, 5]
)
def test_a_value_whose_schema_is_none_is_read_as_without_one(schema) -> None:
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"properties": {"at": schema}}}}]
    text = "<tool_call>now\n<arg_key>at</arg_key>\n<arg_value>here</arg_value>\n</tool_call>"
    assert read("glm", [text], tools=tools) == expect(status="parsed", calls=[("now", {"at": "here"})])
