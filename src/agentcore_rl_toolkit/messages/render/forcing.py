"""Holding an answer to a form: a model's own call format, or a schema, as a structural tag that engines enforce.

The tag begins with the model's thinking, as its family marks it. Then come calls, written exactly as the family's template writes
them, with arguments that fit the tool's schema; or text that fits the agent's schema. The answer's form does not change, so
its tokens are those that the model would sample, and the parser reads them as usual.

Source: xgrammar.mlc.ai, "Structural tag"; vLLM and SGLang hand the tag on to xgrammar as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .parsers import CallTag, Grammar

Format = dict[str, Any]

_BLANKS: Format = {"type": "regex", "pattern": "[ \\n]{0,4}"}  # the templates' text after thinking
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
# Names of Python, Java and Go in the schemas of published tool collections.
_OTHER_TYPES = {
    **{"dict": "object", "map": "object", "hashmap": "object", "struct": "object", "int": "integer", "long": "integer"},
    **{"float": "number", "double": "number", "list": "array", "tuple": "array", "arraylist": "array", "set": "array"},
    **{"str": "string", "char": "string", "text": "string", "bool": "boolean", "none": "null"},
}


_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "enum", "required")  # the first four are of schemas


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """A grammar for an answer, and the part of the answer that it leaves free.

    ``thinking`` are the marks around the thinking with which the answer may begin, ``opened`` if the prompt has the first one.
    ``trigger`` opens the part with the form. None: all of the answer after the thinking has it.
    """

    format: Format
    thinking: tuple[str, str] | None
    opened: bool
    trigger: str | None = None

    def free_characters(self, text: str) -> int:
        """Return the length of the beginning of an answer that was sampled freely: its thinking, and text without a form."""
        end = 0
        if self.thinking is not None and (self.opened or text.lstrip().startswith(self.thinking[0])):
            found = text.find(self.thinking[1])
            if found < 0:
                return len(text)
            end = found + len(self.thinking[1])
        if self.trigger is None:
            return end
        found = text.find(self.trigger, end)
        return len(text) if found < 0 else found


def can_call(grammar: Grammar, choice: str) -> bool:
    """Return True if calls of this family can be enforced. ``choice`` "auto": an answer with one call at most."""
    return grammar.tag is not None and (choice != "auto" or bool(grammar.tag.trigger))


def answer_form(
    grammar: Grammar,
    tools: Sequence[dict[str, Any]],
    *,
    choice: str = "auto",
    parallel: bool = True,
    schema: Any = None,
    thinking: tuple[str, str] | None = None,
    opened: bool = False,
) -> AnswerForm | None:
    """Return the form for a tool choice ("required", or "tool:" and a name; "auto" with one call at most), or for a ``schema``.

    With a schema, "auto" allows calls or text that fits the schema. None when nothing has to be enforced, the family's calls
    cannot be, or the engine's own form for a schema does as well.
    """
    found = _rest(grammar.tag, tools if choice != "none" else (), choice, parallel, schema, thinking)
    if found is None:
        return None
    rest, trigger = found
    if thinking is not None:
        thought: Format = {
            "type": "tag",
            "begin": "" if opened else thinking[0],
            "content": {"type": "any_text"},
            "end": thinking[1],
        }
        after: Format = {"type": "sequence", "elements": [thought, rest]}
        rest = after if opened else {"type": "or", "elements": [after, rest]}
    return AnswerForm(format=rest, thinking=thinking, opened=opened, trigger=trigger)


def _rest(
    form: CallTag | None,
    tools: Sequence[Any],
    choice: str,
    parallel: bool,
    schema: Any,
    thinking: tuple[str, str] | None,
) -> tuple[Format, str | None] | None:
    """Return the form after the thinking, and the text that opens it (None: it begins at once). None without a form."""
    forced = choice not in ("auto", "none")
    if schema is not None and not forced:
        text: Format = {"type": "json_schema", "json_schema": relaxed(schema)}
        if tools and form is not None:
            text = {"type": "or", "elements": [_calls(form, tools, None, one=not parallel), text]}
        elif thinking is None:
            return None
        return {"type": "sequence", "elements": [_BLANKS, text]}, None
    if not tools or form is None or (not forced and (parallel or not form.trigger)):
        return None  # without a trigger, an answer may as well be text that begins like a call
    wanted = choice.removeprefix("tool:") if choice.startswith("tool:") else None
    calls = _calls(form, tools, wanted, one=not parallel or wanted is not None)
    if not form.trigger:
        return calls, None
    excluded = [form.trigger] if thinking is None else [form.trigger, thinking[0]]
    if forced:
        return {"type": "sequence", "elements": [{"type": "any_text", "excludes": excluded}, calls]}, None
    free: Format = {"type": "triggered_tags", "triggers": [form.trigger], "tags": calls["tags"]}
    return {**free, "at_least_one": False, "stop_after_first": True, "excludes": excluded[1:]}, form.trigger


def _calls(form: CallTag, tools: Sequence[dict[str, Any]], wanted: str | None, *, one: bool) -> Format:
    functions = [tool["function"] for tool in tools]
    return {
        "type": "tags_with_separator",
        "tags": [_tag(form, function) for function in functions if wanted is None or function["name"] == wanted],
        "separator": form.between,
        "at_least_one": True,
        "stop_after_first": one,
    }


def _tag(form: CallTag, function: dict[str, Any]) -> Format:
    name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
    content = {"type": form.content, "json_schema": relaxed(function.get("parameters") or {"type": "object"})}
    return {"type": "tag", "begin": form.begin % name, "content": content, "end": form.end}


def relaxed(schema: Any) -> Any:
    """Return the schema without the parts that grammar compilers refuse: unknown types, and references to nothing."""
    return _relaxed(schema, schema) if isinstance(schema, Mapping) else {"type": "object"}


def _relaxed(schema: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(schema, Mapping):
        return schema if isinstance(schema, bool) else {}
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "type":
            kinds = [_type(kind) for kind in (value if isinstance(value, list) else [value])]
            value = None if None in kinds or not kinds else kinds if isinstance(value, list) else kinds[0]
        elif name in ("properties", "$defs", "definitions", "patternProperties"):
            value = {key: _relaxed(each, root) for key, each in value.items()} if isinstance(value, Mapping) else {}
        elif name in _LISTS[:4]:
            value = [_relaxed(each, root) for each in value] if isinstance(value, list) else []
        elif name in ("items", "additionalProperties"):
            value = _relaxed(value, root)
        refused = (name == "type" and value is None) or (name == "$ref" and not _resolves(value, root))
        if not refused and (name not in _LISTS or (value and isinstance(value, list))):
            found[name] = value
    return found


def _type(kind: Any) -> str | None:
    """Return JSON's name of a type, or None for a name that stands for any type, or for nothing."""
    lowered = kind.lower() if isinstance(kind, str) else ""
    return lowered if lowered in _TYPES else _OTHER_TYPES.get(lowered)


def _resolves(reference: Any, root: Any) -> bool:
    """Return True if a reference is to a place in the schema."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return False
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(root, Mapping) or name not in root:
            return False
        root = root[name]
    return True
