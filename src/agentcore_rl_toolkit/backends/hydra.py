"""Values in the words of hydra's override grammar (hydra.cc/docs/advanced/override_grammar/basic)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Text that means itself without quotes. What begins like a number, or is a word of the grammar, does not.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_WORDS = frozenset({"true", "false", "null", "nan", "inf"})
_KEY, _ESCAPED = re.compile(r"([\\()\[\]{}:=, \t])"), r"\\\1"  # keys of a mapping take no quotes
_BEFORE_QUOTE = re.compile(r"(\\+)(?='|$)")


def hydra_value(value: Any) -> str:
    """A value as an override's right side: numbers, booleans and null as such, text always as text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_KEY.sub(_ESCAPED, str(k))}:{hydra_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    # In quotes a backslash is itself unless it stands before a quote.
    return "'" + _BEFORE_QUOTE.sub(lambda m: m[1] * 2, text).replace("'", "\\'") + "'"


def unquoted(text: str) -> str:
    """The text that a quoted value means; any other as it is."""
    if len(text) < 2 or text[0] not in "'\"" or text[-1] != text[0]:
        return text
    quote = text[0]
    inner = re.sub(rf"(\\+)(?={quote})", lambda m: "\\" * (len(m[1]) // 2), text[1:-1])
    return re.sub(r"(\\+)$", lambda m: "\\" * (len(m[1]) // 2), inner)
