"""Data from outside: prompts of public templates, and what vLLM's parsers read in the same outputs.

`scripts/family_reference.py` writes the files and says how. Outputs are compared by reasoning, content, and the names and typed
arguments of the calls. Blanks at the ends are left aside. Each difference has a reason, and the number per family is fixed.
"""

from __future__ import annotations

import datetime
import functools
import json
import lzma
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.messages.render import grammar_named
from agentcore_rl_toolkit.messages.render.template import ChatTemplate

FOLDER = Path(__file__).parent / "reference"
NOW = datetime.datetime(2026, 11, 29, 12).timestamp()  # the date of the reference prompts
# Their prompts end inside the reasoning.
OPEN = {"minimax", "hermes", "qwen_coder", "glm", "deepseek"}
_MARKS = re.compile(r"</?think>|\[/?THINK\]|<\|channel>(?:thought\n)?|<channel\|>")


@functools.cache
def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()))
    return found


def decoded(value: Any) -> Any:
    """A value without the difference between text and what the text says."""
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError:
            return value
        return value if found == value else decoded(found)
    if isinstance(value, dict):
        return {key: decoded(item) for key, item in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value


def strings(value: Any) -> list[str]:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [value] if isinstance(value, str) else [text for item in inner for text in strings(item)]


# Reasons for a difference. The first one that holds counts.
REASONS: dict[str, Callable[[str, dict[str, Any], dict[str, Any]], bool]] = {
    # vLLM drops the call, or gives it with half of its arguments.
    "a call that cannot be read is text": lambda status, _ours, _theirs: status == "unparsed",
    # vLLM drops it.
    "text after the end is shown": lambda _, ours, theirs: (
        (ours["calls"], ours["reasoning"]) == (theirs["calls"], theirs["reasoning"])
        and ours["content"].startswith(theirs["content"])
    ),
    # vLLM reads a string of Muse Glimmer's as JSON, and leaves values that no schema describes as text.
    "a string stays one, other values are JSON": lambda _, ours, theirs: (
        decoded(ours["calls"]) == decoded(theirs["calls"]) and ours["calls"] != theirs["calls"]
    ),
    # vLLM keeps what is left of the mark in the arguments, and blanks in the name.
    "a name has no blanks, arguments are JSON": lambda _, ours, theirs: (
        [name for name, _ in ours["calls"]] == [name.strip() for name, _ in theirs["calls"]]
        and ("not JSON" in str(theirs) or ours["calls"] == [[name.strip(), each] for name, each in theirs["calls"]])
        and ours["calls"] != theirs["calls"]
    ),
    # vLLM drops marks that open or close nothing, and takes reasoning to be open where the prompt has not opened it.
    "a lone mark of reasoning is text": lambda _, ours, theirs: (
        ours["calls"] == theirs["calls"]
        and sorted(_MARKS.sub("", ours["reasoning"] + ours["content"]))
        == sorted(_MARKS.sub("", theirs["reasoning"] + theirs["content"]))
    ),
    # A value may hold the words of the markup. In a damaged call it holds the damage too.
    "a closing tag counts only where one can stand": lambda _, ours, theirs: (
        len(ours["calls"]) <= len(theirs["calls"]) and any(re.search(r"<\s*/", text) for text in strings(ours["calls"]))
    ),
    # vLLM needs the marks around it, and takes no blank in a tag of Muse Glimmer's.
    "a call that is whole counts": lambda _, ours, theirs: (
        len(ours["calls"]) > len(theirs["calls"])
        or sum(len(each) for _, each in ours["calls"]) > sum(len(each) for _, each in theirs["calls"])
    ),
    # vLLM leaves some of them in the text and drops the text behind others.
    "a damaged header is no text": lambda _, ours, theirs: ours["calls"] == theirs["calls"],
}
NO_CALL, AFTER, TYPES, NAME, LONE, TAG, WHOLE, HEADER = REASONS
DIFFERENCES: dict[str, dict[str, int]] = {
    "deepseek": {NO_CALL: 67, AFTER: 24, NAME: 8, LONE: 2, WHOLE: 24},
    "gemma": {NO_CALL: 68, AFTER: 26, TYPES: 1, LONE: 4},
    "glm": {NO_CALL: 55, AFTER: 25, TYPES: 5},
    "hermes": {NO_CALL: 41, AFTER: 25, WHOLE: 7},
    "kimi": {NO_CALL: 75, AFTER: 24, NAME: 7, LONE: 3, WHOLE: 3},
    "lfm": {NO_CALL: 8, WHOLE: 12},
    "llama": {NO_CALL: 34, WHOLE: 7},
    "minimax": {NO_CALL: 34, AFTER: 37, TAG: 9, WHOLE: 3},
    "mistral": {NO_CALL: 75, AFTER: 24, NAME: 5, LONE: 2},
    "muse": {NO_CALL: 60, AFTER: 31, TYPES: 43, TAG: 6, WHOLE: 6, HEADER: 21},
    "qwen_coder": {NO_CALL: 53, AFTER: 16, TYPES: 3, TAG: 12},
}


def read(family: str, text: str, *, reasoning_open: bool, pieces: int) -> tuple[str, dict[str, Any]]:
    parser = grammar_named(family).new_parser(tools=load("outputs")["tools"], reasoning_open=reasoning_open)
    size = pieces or max(len(text), 1)
    deltas = [delta for at in range(0, len(text), size) for delta in parser.feed(text[at : at + size])]
    deltas += parser.finish()
    return parser.status, {
        "reasoning": "".join(delta.reasoning for delta in deltas).strip(),
        "content": "".join(delta.text for delta in deltas).strip(),
        "calls": [[call.name, json.loads(call.arguments)] for delta in deltas for call in delta.tool_calls],
    }


def arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"not JSON": text}


@pytest.mark.parametrize("family", sorted(load("outputs")["families"]))
def test_outputs_are_read_as_vllm_reads_them(family: str) -> None:
    found: Counter[str] = Counter()
    for case in load("outputs")["families"][family]:
        is_open = case["reasons"] and family in OPEN
        status, ours = read(family, case["text"], reasoning_open=is_open, pieces=0)
        assert (status, ours) == read(family, case["text"], reasoning_open=is_open, pieces=7), case["text"]
        theirs = {
            "reasoning": case["reasoning"].strip(),
            "content": case["content"].strip(),
            "calls": [[name, arguments(text)] for name, text in case["calls"]],
        }
        if ours != theirs:
            reason = next((name for name, holds in REASONS.items() if holds(status, ours, theirs)), None)
            assert reason is not None, f"{case['text']!r}\n{ours}\n{theirs}"
            assert case["how"] == "mutation" or reason == TYPES, case["text"]
            found[reason] += 1
    assert dict(found) == DIFFERENCES[family]


PROMPTS = [(family, name) for family, each in load("prompts")["prompts"].items() for name in each]


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "name"), PROMPTS, ids=[name for _, name in PROMPTS])
def test_prompts_are_those_of_the_public_template(family: str, name: str, in_archive: Path) -> None:
    data = load("prompts")
    template = ChatTemplate((in_archive / f"{name}.jinja").read_text("utf-8"), special_tokens=data["special"])
    compared = 0
    for conversation, wanted in zip(data["conversations"], data["prompts"][family][name], strict=True):
        if wanted is None:
            continue  # transformers cannot render it
        tools = data["tools"] if conversation["tools"] else None
        assert template.render(conversation["messages"], tools=tools, now=NOW) == wanted
        compared += 1
    assert compared >= 10
