"""Chooses the parser of a model's output: by its chat template, or by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import ConfigError
from .base import Call, Grammar, MarkerParser, OutputParser
from .dsml import DSML
from .families import DEEPSEEK, GLM, HERMES, PLAIN, QWEN_CODER
from .harmony import HARMONY, HarmonyParser
from .llama import LLAMA, LlamaParser

GRAMMARS: dict[str, Grammar] = {g.name: g for g in (HERMES, QWEN_CODER, GLM, DEEPSEEK, DSML, LLAMA, HARMONY, PLAIN)}

# The first entry of which all strings stand in the template decides; the more particular formats come first.
_SIGNS: tuple[tuple[Grammar, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    (DSML, ("｜DSML｜",)),
    (DEEPSEEK, ("<｜tool▁call▁begin｜>",)),
    (QWEN_CODER, ("<function=",)),
    (GLM, ("<arg_key>",)),
    (HERMES, ("<tool_call>",)),
    (LLAMA, ("<|python_tag|>",)),
    (LLAMA, ("ipython",)),
)


def grammar_of(template: str) -> Grammar:
    """The grammar whose markers stand in the template's text; plain text when none do."""
    for grammar, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return grammar
    return PLAIN


def grammar_named(name: str) -> Grammar:
    """Raises: ConfigError that lists the names."""
    if name not in GRAMMARS:
        raise ConfigError(f"there is no output parser {name!r}; known: {', '.join(sorted(GRAMMARS))}")
    return GRAMMARS[name]


def new_parser(
    grammar: Grammar, *, tools: Sequence[dict[str, Any]] | None = None, reasoning_open: bool = False
) -> OutputParser:
    """A parser for one reply. Without ``tools`` nothing is read as a call."""
    if grammar is HARMONY:
        return HarmonyParser(tools=tools)
    if grammar is LLAMA:
        return LlamaParser(tools=tools)
    return MarkerParser(grammar, tools=tools, reasoning_open=reasoning_open)


__all__ = ["GRAMMARS", "Call", "Grammar", "OutputParser", "grammar_named", "grammar_of", "new_parser"]
