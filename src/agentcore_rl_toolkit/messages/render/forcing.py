"""Making a model call a tool: its own call format as a structural tag, which engines enforce while they sample.

The tag says: text as the model likes (reasoning, a preamble), then calls written exactly as the family's template
writes them, with arguments that fit the tool's schema. Nothing about the answer's form changes, so its tokens are those
the model would have sampled and the parser reads them as always.

Source: xgrammar.mlc.ai, "Structural tag"; vLLM and SGLang hand the tag on to xgrammar as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from .parsers import Grammar

Format = dict[str, Any]


def _hermes(name: str, schema: Any) -> Format:
    content = {"type": "json_schema", "json_schema": schema}
    return _tag(
        f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', content, "}\n</tool_call>"
    )


def _coder(name: str, schema: Any) -> Format:
    content = {"type": "qwen_xml_parameter", "json_schema": schema}
    return _tag(f"<tool_call>\n<function={name}>\n", content, "\n</function>\n</tool_call>")


def _llama(name: str, schema: Any) -> Format:
    content = {"type": "json_schema", "json_schema": schema}
    return _tag(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": ', content, "}")


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


# family -> how one call is written, what opens calls in the text ("": the answer is nothing but calls), what is between two
_FAMILIES: dict[str, tuple[Callable[[str, Any], Format], str, str]] = {
    "hermes": (_hermes, "<tool_call>", "\n"),
    "qwen_coder": (_coder, "<tool_call>", "\n"),
    "llama": (_llama, "", "; "),
}


def call_format(
    grammar: Grammar, tools: Sequence[dict[str, Any]], *, choice: str, parallel: bool = True
) -> Format | None:
    """The structural tag for a tool choice ("required", or "tool:" and a name; "auto" with one call at most).

    None when nothing has to be enforced, or the family's calls cannot be.
    """
    if not tools or grammar.name not in _FAMILIES or choice == "none" or (choice == "auto" and parallel):
        return None
    written, opening, between = _FAMILIES[grammar.name]
    wanted = choice.removeprefix("tool:") if choice.startswith("tool:") else None
    tags = [
        written(function["name"], function.get("parameters") or {"type": "object"})
        for function in (tool["function"] for tool in tools)
        if wanted is None or function["name"] == wanted
    ]
    if choice == "auto":
        if not opening:
            return None  # an answer may as well be text that begins like a call
        return {
            "type": "triggered_tags",
            "triggers": [opening],
            "tags": tags,
            "at_least_one": False,
            "stop_after_first": True,
        }
    calls: Format = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": between,
        "at_least_one": True,
        "stop_after_first": not parallel or wanted is not None,
    }
    if not opening:
        return calls
    return {"type": "sequence", "elements": [{"type": "any_text", "excludes": [opening]}, calls]}
