"""Making a model call a tool: its own call format as a structural tag, which engines enforce while they sample.

The tag says: text as the model likes (reasoning, a preamble), then calls written exactly as the family's template
writes them, with arguments that fit the tool's schema. Nothing about the answer's form changes, so its tokens are those
the model would have sampled and the parser reads them as always.

Source: xgrammar.mlc.ai, "Structural tag"; vLLM and SGLang hand the tag on to xgrammar as it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .parsers import CallTag, Grammar

Format = dict[str, Any]


def call_format(
    grammar: Grammar, tools: Sequence[dict[str, Any]], *, choice: str, parallel: bool = True
) -> Format | None:
    """The structural tag for a tool choice ("required", or "tool:" and a name; "auto" with one call at most).

    None when nothing has to be enforced, or the family's calls cannot be.
    """
    form = grammar.tag
    if not tools or form is None or choice == "none" or (choice == "auto" and parallel):
        return None
    wanted = choice.removeprefix("tool:") if choice.startswith("tool:") else None
    functions = [tool["function"] for tool in tools]
    tags = [_tag(form, function) for function in functions if wanted is None or function["name"] == wanted]
    if choice == "auto":
        if not form.trigger:
            return None  # an answer may as well be text that begins like a call
        return {
            "type": "triggered_tags",
            "triggers": [form.trigger],
            "tags": tags,
            "at_least_one": False,
            "stop_after_first": True,
        }
    calls: Format = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.between,
        "at_least_one": True,
        "stop_after_first": not parallel or wanted is not None,
    }
    if not form.trigger:
        return calls
    return {"type": "sequence", "elements": [{"type": "any_text", "excludes": [form.trigger]}, calls]}


def _tag(form: CallTag, function: dict[str, Any]) -> Format:
    name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
    schema = function.get("parameters") or {"type": "object"}
    content = {"type": form.content, "json_schema": schema}
    return {"type": "tag", "begin": form.begin % name, "content": content, "end": form.end}
