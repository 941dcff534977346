"""A self-test of a model directory: do turns extend each other, are calls read back, and do answers end?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ...errors import AgentCoreRLError
from ...messages.render import Renderer, sampled_body, unread_calls
from ...messages.render.habits import EFFORTS
from .finding import Finding, fail, ok

_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look something up.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}, "deep": {"type": "boolean"}},
                "required": ["query"],
            },
        },
    }
]
NO_TOOLS = "this model's chat template drops tools: use a model whose template has tools, or an agent without tools"
ADVICE = "docs/rendering.md explains each check"
_ARGUMENTS = '{"query": "naïve \\"q\\" 5 < 7 \\u2713\\nline two", "limit": 3, "deep": true}'
_TEXT = "Grüße 🙂\n\tdef f(x): return x ** 2  # 漢字 1234567 \u200b end"


def examine(renderer: Renderer) -> list[Finding]:
    """Run every check that applies to the model. A check that raises has failed; its error is the text."""
    tests: tuple[tuple[str, Callable[[Renderer], tuple[bool | None, str]]], ...] = (
        ("tokenizer", _tokenizer),
        ("stop tokens", _stops),
        ("tools", _tools),
        ("prefix extension, text", _extends_text),
        ("prefix extension, tool calls", _extends_calls),
        ("parser round trip, tool calls", _round_trip),
        ("parser round trip, reasoning", _reasoning),
        ("system messages anywhere", _systems),
        ("unusual histories", _unusual),
        ("markers in text", _markers),
    )
    found = []
    for name, test in tests:
        try:
            passed, text = test(renderer)
        except AgentCoreRLError as e:
            passed, text = False, f"{type(e).__name__}: {e}"
        if passed is not None:  # else it does not apply
            found.append(ok(name, text) if passed else fail(name, text, ADVICE))
    return found


def _tokenizer(renderer: Renderer) -> tuple[bool, str]:
    ids = renderer.encode(_TEXT)
    back = renderer.decode(ids)
    if back.strip() != _TEXT.strip():
        return False, f"text does not survive encoding: {back!r}"
    return True, f"{renderer.tokenizer.vocabulary_size} tokens, text survives encoding"


def _stops(renderer: Renderer) -> tuple[bool, str]:
    if not renderer.stop_token_ids:
        return False, "no stop token: neither generation_config.json nor the tokenizer has one"
    names = ", ".join(repr(renderer.tokenizer.text_of(i)) for i in sorted(renderer.stop_token_ids))
    if not renderer.facts.closers:
        return False, f"{names}, but the template closes answers with none of them"
    return True, names


_HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def _extends(
    renderer: Renderer,
    answer: dict[str, Any],
    following: list[dict[str, Any]],
    tools: Any,
    opening: list[dict[str, Any]] = _HELLO,
) -> tuple[bool, str]:
    completion = sampled_body(renderer, answer, tools=tools)
    if not completion:
        return False, "the template's text of an answer cannot be separated from its prompt"
    conversation = renderer.conversation(now=0.0)
    first = renderer.render(conversation, opening, tools)
    conversation.commit(first, completion, answer, turn_id="t1")
    second = renderer.render(conversation, [*opening, answer, *following], tools)
    sampled = first.token_ids + completion
    if not second.extended:
        return False, "; ".join(
            renderer.facts.problems
        ) or "conversations of this form are rendered again in every turn"
    if second.token_ids[: len(sampled)] != sampled:
        return False, "turn 2 does not start with turn 1"
    added = renderer.decode(second.token_ids[len(sampled) :])
    missing = [m["content"] for m in following if m["content"] not in added]
    if missing:
        return False, f"the new messages are not in the suffix: {missing}"
    calls = bool(answer.get("tool_calls"))
    cheap = renderer.facts.after_calls if calls else renderer.facts.after_text
    note = "" if cheap else " (the template looks back: the history's text is rendered each turn)"
    return True, f"turn 2 = turn 1 + {len(second.token_ids) - len(sampled)} tokens{note}"


def _extends_text(renderer: Renderer) -> tuple[bool, str]:
    answer = {"role": "assistant", "content": "An answer."}
    return _extends(renderer, answer, [{"role": "user", "content": "and then?"}], None)


def _calling() -> dict[str, Any]:
    function = {"name": "look_up", "arguments": _ARGUMENTS}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0000a", "type": "function", "function": function}],
    }


def _tools(renderer: Renderer) -> tuple[bool | None, str]:
    return (True, "the template shows them to the model") if renderer.facts.tools_shown else (None, NO_TOOLS)


def _extends_calls(renderer: Renderer) -> tuple[bool | None, str]:
    if not renderer.facts.tools_supported:
        return None, "the template has no tool calls"
    result = {"role": "tool", "tool_call_id": "call_0000a", "name": "look_up", "content": "found it"}
    return _extends(renderer, _calling(), [result], _TOOLS)


def _round_trip(renderer: Renderer) -> tuple[bool | None, str]:
    if not renderer.facts.tools_supported:
        return None, "the template has no tool calls"
    body = sampled_body(renderer, _calling(), tools=_TOOLS)
    if body is None:
        return False, "the template's text of a call cannot be cut out"
    parsed = renderer.parse(body, tools=_TOOLS)
    if not parsed.tool_calls and (problem := unread_calls(renderer)) is not None:
        return False, problem
    if parsed.parse_status != "parsed":
        return False, f"the template's own call is read as {parsed.parse_status}: {renderer.decode(body)!r}"
    got = [(c.name, msgspec.json.decode(c.arguments)) for c in parsed.tool_calls]
    wanted = [("look_up", msgspec.json.decode(_ARGUMENTS))]
    return (True, "calls are read back as written") if got == wanted else (False, f"{got} instead of {wanted}")


def _reasoning(renderer: Renderer) -> tuple[bool | None, str]:
    answer = {"role": "assistant", "content": "An answer.", "reasoning_content": "Some thought."}
    body = sampled_body(renderer, answer, tools=None)
    if body is None or "Some thought." not in renderer.decode(body):
        return None, "the template does not write reasoning into an answer"
    marks = renderer.grammar.reasoning
    opened = marks is not None and not renderer.decode(body).lstrip().startswith(marks[0])
    parsed = renderer.parse(body, opens_reasoning=opened)
    if parsed.reasoning.strip() == "Some thought." and parsed.content.strip() == "An answer.":
        return True, "reasoning and answer are separated"
    return False, f"reasoning {parsed.reasoning!r}, content {parsed.content!r}"


def _systems(renderer: Renderer) -> tuple[bool, str]:
    said = [
        {"role": role, "content": f"rule {n}"} for n, role in enumerate(("system", "developer", "system", "system"))
    ]
    opening = [*said[:2], {"role": "user", "content": "hello"}, said[2]]
    answer = {"role": "assistant", "content": "An answer."}
    for tools in (None, _TOOLS) if renderer.facts.tools_supported else (None,):
        ok, detail = _extends(renderer, answer, [{"role": "user", "content": "and then?"}, said[3]], tools, opening)
        if not ok:
            return False, detail
    return True, "turns with them extend each other"


def _unusual(renderer: Renderer) -> tuple[bool, str]:
    offers = (None, _TOOLS) if renderer.facts.tools_supported else (None,)
    system = {"role": "system", "content": "be brief"}
    for tools in offers:
        renderer.count([system], tools)
        renderer.count([system, {"role": "assistant", "content": "hi"}, *_HELLO], tools)
    for text in ("{broken", "[1]", '"text"', "") if len(offers) > 1 else ():
        call = {"id": "call_0000a", "type": "function", "function": {"name": "look_up", "arguments": text}}
        result = {"role": "tool", "tool_call_id": "call_0000a", "name": "look_up", "content": "no such call"}
        renderer.count([*_HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, result], _TOOLS)
    for effort in EFFORTS:
        renderer.count(_HELLO, options={"reasoning_effort": effort})
    return True, str(renderer.template.habits)


def _markers(renderer: Renderer) -> tuple[bool, str]:
    special = sorted(renderer.tokenizer.special_ids)
    forged = "".join(map(renderer.tokenizer.text_of, special))
    ids = [renderer.render(renderer.conversation(now=0.0), _said(text)).token_ids for text in ("x", f"x{forged}x")]
    plain, tried = ([i for i in each if i in renderer.tokenizer.special_ids] for each in ids)
    if plain != tried:
        return False, "a marker in a user's text becomes a token of the conversation"
    return True, f"{len(special)} markers in a user's text stay text"


def _said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
