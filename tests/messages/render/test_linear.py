"""The cost of a delta does not grow with the reply before it: 8 times the deltas take about 8 times the CPU time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentcore_rl_toolkit.messages.render import GRAMMARS

SHORT, LONG = 1_000, 8_000  # deltas
MOST = 2.3**3  # times the CPU time, for three doublings
LEAST_S = 2.5e-3  # a shorter time is mostly the clock's

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"q": {"type": "string"}}}}}
]
# How each family begins and ends a call, and what may come many times inside it.
CALLS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "hermes": ('<tool_call>\n{"name": "f", "arguments": {"q": "', '"}}\n</tool_call>', ("</tool_call>", "\\", '"')),
    "qwen_coder": (
        "<tool_call>\n<function=f>\n<parameter=q>\n",
        "\n</parameter>\n</function>\n</tool_call>",
        ("<parameter=", "</parameter>", "<function=", "</function>\n"),
    ),
    "glm": (
        "<tool_call>f\n<arg_key>q</arg_key>\n<arg_value>",
        "</arg_value>\n</tool_call>",
        ("<arg_key>", "</arg_key>", "<arg_key>a</arg_key><arg_value>"),
    ),
    "deepseek": (
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"q": "',
        '"}\n```<｜tool▁call▁end｜>',
        ("```\n", "<｜tool▁sep｜>"),
    ),
    "llama": ('{"name": "f", "parameters": {"q": "', '"}}', ('{"', "; ")),
    "harmony": (
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"q": "',
        '"}<|call|>',
        ("<|channel|>", "to=", "<|message|>"),
    ),
    "gemma": ('<|tool_call>call:f{q:<|"|>', '<|"|>}<tool_call|>', ("<tool_call|>", ",a:1", "call:", "{")),
    "kimi": (
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"q": "',
        '"}<|tool_call_end|>',
        ("<|tool_call_end|>", "<|tool_call_argument_begin|>", '"'),
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="q">',
        "</parameter>\n</invoke>\n</minimax:tool_call>",
        ("</parameter>", '<parameter name="a">', "</invoke>"),
    ),
    "mistral": ('[TOOL_CALLS]f[ARGS]{"q": "', '"}', ("[TOOL_CALLS]", '"', "{}[TOOL_CALLS]f[ARGS]")),
    "lfm": ("<|tool_call_start|>[f(q='", "')]<|tool_call_end|>", ("<|tool_call_end|>", "'", "\\", "(", "', a='")),
    "muse": (
        ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="q">',
        "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>",
        ("</atem:parameter>", '<atem:parameter name="a">', " to=", "<|message|>"),
    ),
    "plain": ("", "", ()),
}


def cpu_s(run: Callable[[int], object], n: int) -> float:
    started = time.thread_time()
    run(n)
    return time.thread_time() - started


def check(run: Callable[[int], object], what: str) -> None:
    """Compare the CPU times of a short and of a long reply. A busy machine gets further tries."""
    run(100)
    ratios = []
    for _ in range(4):
        short_s = max(cpu_s(run, SHORT), LEAST_S)
        ratios.append(cpu_s(run, LONG) / short_s)
        if ratios[-1] < MOST:
            break
    assert min(ratios) < MOST, f"{what}: {LONG // SHORT} times the deltas took {min(ratios):.1f} times the CPU time"


def parsing(grammar: str, word: str, *, inside: bool, whole: bool = False) -> None:
    opening, closing, _ = CALLS[grammar] if inside else ("", "", ())

    def run(n: int) -> None:
        parser = GRAMMARS[grammar].new_parser(tools=TOOLS)
        pieces = [opening, *[word] * n, closing]
        for piece in ["".join(pieces)] if whole else pieces:
            parser.feed(piece)
        parser.finish()

    check(run, f"{grammar}, {word!r}, {inside=}, {whole=}")


@pytest.mark.parametrize("grammar", sorted(GRAMMARS))
def test_reading_text_and_calls(grammar: str) -> None:
    for word in ("word ", "\n"):
        parsing(grammar, word, inside=False)
    for word in ("word ", *CALLS[grammar][2][:1]):
        parsing(grammar, word, inside=True)


def test_a_recipient_that_does_not_end() -> None:
    def run(n: int) -> None:
        parser = GRAMMARS["muse"].new_parser(tools=TOOLS)
        for piece in (" to=user<|message|>see to=", *"a" * n):
            parser.feed(piece)
        parser.finish()

    check(run, "muse, a recipient")


@pytest.mark.nightly
@pytest.mark.parametrize("grammar", sorted(GRAMMARS))
def test_reading_marks(grammar: str) -> None:
    own = GRAMMARS[grammar]
    words = ("word ", "\n", *CALLS[grammar][2], *own.skip, *(mark for block in own.blocks for mark in block))
    for word, inside, whole in itertools.product(words, (False, True), (False, True)):
        parsing(grammar, word, inside=inside, whole=whole)
