"""Holding an answer to a form: a model's own call format, or a schema, as a structural tag that engines enforce.

The tag begins with the model's thinking, as its family marks it. Then come calls, written exactly as the family's template writes
them, with arguments that fit the tool's schema; or text that fits the agent's schema. The answer's form does not change, so
its tokens are those that the model would sample, and the parser reads them as usual.

Source: xgrammar.mlc.ai, "Structural tag"; vLLM and SGLang hand the tag on to xgrammar as it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .parsers import CallTag, Grammar

Format = dict[str, Any]

_BLANKS: Format = {"type": "regex", "pattern": "[ \\n]{0,4}"}  # the templates' text after thinking
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """A grammar for an answer, and the part of the answer that it leaves free.

    ``thinking`` are the marks around the thinking with which the answer may begin, ``opened`` if the prompt has the first one.
    """

    format: Format
    thinking: tuple[str, str] | None
    opened: bool

    def free_characters(self, text: str) -> int:
        """Return the length of the beginning of an answer that was sampled freely: its thinking."""
        if self.thinking is None or not (self.opened or text.lstrip().startswith(self.thinking[0])):
            return 0
        found = text.find(self.thinking[1])
        return len(text) if found < 0 else found + len(self.thinking[1])


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
    """Return the form for a tool choice ("required", or "tool:" and a name), or for a ``schema``.

    With a schema, "auto" allows calls or text that fits the schema. None when nothing has to be enforced, the family's calls
    cannot be, or the engine's own form for a schema does as well.
    """
    rest = _rest(grammar.tag, tools if choice != "none" else (), choice, parallel, schema, thinking)
    if rest is None:
        return None
    if thinking is not None:
        thought: Format = {
            "type": "tag",
            "begin": "" if opened else thinking[0],
            "content": {"type": "any_text"},
            "end": thinking[1],
        }
        after: Format = {"type": "sequence", "elements": [thought, rest]}
        rest = after if opened else {"type": "or", "elements": [after, rest]}
    return AnswerForm(format=rest, thinking=thinking, opened=opened)


def _rest(
    form: CallTag | None,
    tools: Sequence[Any],
    choice: str,
    parallel: bool,
    schema: Any,
    thinking: tuple[str, str] | None,
) -> Format | None:
    """Return the form after the thinking. None without a form."""
    forced = choice not in ("auto", "none")
    if schema is not None and not forced:
        text: Format = {"type": "json_schema", "json_schema": relaxed(schema)}
        if tools and form is not None:
            text = {"type": "or", "elements": [_calls(form, tools, None, one=not parallel), text]}
        elif thinking is None:
            return None
        return {"type": "sequence", "elements": [_BLANKS, text]}
    if not tools or form is None or not forced:
        return None
    wanted = choice.removeprefix("tool:") if choice.startswith("tool:") else None
    calls = _calls(form, tools, wanted, one=not parallel or wanted is not None)
    if not form.trigger:
        return calls
    excluded = [form.trigger] if thinking is None else [form.trigger, thinking[0]]
    return {"type": "sequence", "elements": [{"type": "any_text", "excludes": excluded}, calls]}


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
    """Return the schema, in which a tuple (``items`` as a list) is any array.

    It is that of any object if grammar compilers refuse it: unknown types, or references to nothing.
    """
    found = _without_tuples(schema)
    return found if isinstance(found, dict) and _compiles(found, found) else {"type": "object"}


# The members of a schema that are a schema, that have schemas by name, and that are a list of schemas.
_ONE = ("items", "additionalProperties")
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")


def _without_tuples(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name in _ONE:
            found[name] = _without_tuples(value)
        elif name in _NAMED and isinstance(value, dict):
            found[name] = {key: _without_tuples(inner) for key, inner in value.items()}
        elif name in _LISTED and isinstance(value, list):
            found[name] = [_without_tuples(inner) for inner in value]
    # xgrammar also refuses an array with a least length and without a schema of its items.
    unbounded = "minItems" in schema and "items" not in schema and "prefixItems" not in schema
    return {**found, "items": {}} if unbounded or isinstance(schema.get("items"), list) else found


def _compiles(schema: Any, root: Any) -> bool:
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    kinds = schema.get("type", [])
    inner = [schema[name] for name in _ONE if name in schema]
    for name in _NAMED:
        named = schema.get(name, {})
        inner += named.values() if isinstance(named, dict) else [None]
    for name in _LISTED:
        inner += schema[name] if isinstance(schema.get(name), list) else [None] if name in schema else []
    return (
        all(kind in _TYPES for kind in (kinds if isinstance(kinds, list) else [kinds]))
        and all(isinstance(schema.get(name, []), list) for name in ("enum", "required"))
        and schema.get("enum") != []
        and ("$ref" not in schema or _resolves(schema["$ref"], root))
        and all(_compiles(each, root) for each in inner)
    )


def _resolves(reference: Any, root: Any) -> bool:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return False
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list):
            root = dict(zip(map(str, range(len(root))), root, strict=True))
        if not isinstance(root, dict) or name not in root:
            return False
        root = root[name]
    return True
