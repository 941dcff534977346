"""Chooses the parser of a model's output: by its chat template, or by name.

To add a family, write its `Grammar` in a file and list it in `_KNOWN`. A format without marked blocks has its own parser
(`channels`, `llama`).
"""

from __future__ import annotations

from dataclasses import replace

from ....errors import ConfigError
from .base import Call, CallTag, Grammar, OutputParser
from .families import DEEPSEEK, GLM, HERMES, PLAIN, QWEN_CODER
from .gemma import GEMMA
from .harmony import HARMONY
from .invoke import MINIMAX, MUSE
from .kimi import KIMI
from .llama import LLAMA
from .mistral import MISTRAL
from .pythonic import LFM

# The first family whose signs are in a template counts, so the more specific formats come first.
_KNOWN = (MUSE, HARMONY, DEEPSEEK, GEMMA, KIMI, MINIMAX, MISTRAL, LFM, QWEN_CODER, GLM, HERMES, LLAMA, PLAIN)
# A call in another model's form was meant as a call, too.
HINTS = tuple(dict.fromkeys(hint for grammar in _KNOWN for hint in grammar.hints))
_PAIRS = tuple(dict.fromkeys(pair for grammar in _KNOWN for pair in grammar.hint_pairs))
GRAMMARS: dict[str, Grammar] = {g.name: replace(g, hints=HINTS, hint_pairs=_PAIRS) for g in _KNOWN}


def grammar_of(template: str) -> Grammar:
    """Return the grammar whose signs are in the template's text, or plain text."""
    for grammar in GRAMMARS.values():
        if any(all(sign in template for sign in signs) for signs in grammar.signs):
            return grammar
    return GRAMMARS["plain"]


def grammar_named(name: str) -> Grammar:
    """Return a grammar by its name. Raises: ConfigError that lists the names."""
    if name not in GRAMMARS:
        raise ConfigError(f"there is no output parser {name!r}; known: {', '.join(sorted(GRAMMARS))}")
    return GRAMMARS[name]


__all__ = [
    "GRAMMARS",
    "HINTS",
    "Call",
    "CallTag",
    "Grammar",
    "OutputParser",
    "grammar_named",
    "grammar_of",
]
