"""The tokens of an answer as the template writes it, for checks of a model without its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .habits import probe_answer
from .renderer import Renderer
from .template import PROBE_TOOL


def sampled_body(
    renderer: Renderer, answer: dict[str, Any], *, tools: Sequence[dict[str, Any]] | None
) -> list[int] | None:
    """Return the ids of an answer, as the template writes it. None: it cannot be cut out of a history."""
    user = {"role": "user", "content": "hello"}
    opening = renderer.template.render([user], tools=tools, now=0.0)
    whole = renderer.template.render([user, answer], tools=tools, add_generation_prompt=False, now=0.0)
    reasoning = renderer.grammar.reasoning
    mark = opening.rfind(reasoning[0]) if reasoning is not None else -1
    if whole.startswith(opening):
        body = whole[len(opening) :]
    elif mark >= 0 and whole.startswith(opening[:mark]):
        # In history the template writes the reasoning that a new answer begins with differently, or leaves it out.
        body = whole[mark:]
        if reasoning is not None and opening.rstrip().endswith(reasoning[1]):
            body = body.removeprefix(reasoning[1])  # the prompt has closed it
    else:
        return None
    closers = ("<|call|>", "<|return|>") if renderer.grammar.name == "harmony" else renderer.facts.closers
    if ends := [(at, closer) for closer in closers if (at := body.find(closer)) >= 0]:
        at, closer = min(ends)
        body = body[: at + len(closer)]
    return renderer.encode(body)


def unread_calls(renderer: Renderer) -> str | None:
    """Describe a call that the template writes and the parser does not read. None: it reads calls, or there are none."""
    if not renderer.facts.tools_supported:
        return None
    try:
        body = sampled_body(renderer, probe_answer('{"s": "probe"}', "call_0000a"), tools=[PROBE_TOOL])
    except Exception as e:  # a template is a third party's program, which may raise anything
        return f"{renderer.name}'s chat template fails on a history with a call: {type(e).__name__}: {e}"
    if body is None or renderer.parse(body, tools=[PROBE_TOOL]).tool_calls:
        return None
    return (
        f"no output parser reads the calls of {renderer.name}'s chat template, so they reach an agent as text: "
        f"{renderer.decode(body)!r} (parser {renderer.grammar.name}). Choose another with --parser, or add the model's family"
    )
