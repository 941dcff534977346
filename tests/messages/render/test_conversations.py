"""Laws of rendering, on made-up agents: they go on, go back, edit, start sub-agents, ask twice, fail, and call in parallel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agentcore_rl_toolkit
from agentcore_rl_toolkit.cli.doctor.template import examine
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.trajectory import Turn, build_trajectory

FAMILIES = ["hermes", "qwen3", "qwen_coder", "glm", "harmony", "deepseek_v3", "deepseek_r1"]
WORDS = st.sampled_from(["hello world", "what is 2 + 2?", "Grüße 漢字", "a\n\nb", "  spaced  ", "<tool_call>", "{}"])


@dataclass(frozen=True)
class Answered:
    """What the agent knows of a call: what it sent, and what it got."""

    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    tools: bool
    ids: list[int]


def key(messages: list[dict[str, Any]], tools: bool) -> str:
    """A history as the renderer is meant to see it: answers without ids, reasoning and blanks around them."""
    shown: list[Any] = []
    for m in messages:
        calls = [[c["function"]["name"], json.loads(c["function"]["arguments"])] for c in m.get("tool_calls") or []]
        content = m["content"] or ""
        if m["role"] == "assistant":
            content = "" if calls else content.strip()
        shown.append([m["role"], content, calls])
    return json.dumps([tools, shown], sort_keys=True)


def sampled(data: st.DataObject, renderer: Renderer) -> list[int]:
    """A completion: canonical words, words in unusual tokens, a call, or noise; ended by a stop token or cut."""
    how = data.draw(st.sampled_from(["words", "letters", "call", "noise"]))
    if how == "call" and renderer.grammar.name == "hermes":
        text = '<tool_call>\n{"name": "look_up", "arguments": {"query": "%s"}}\n</tool_call>'
        ids = renderer.encode(text % data.draw(st.sampled_from(["x", "y"])))
    elif how == "noise":
        ids = data.draw(st.lists(st.integers(0, 250), min_size=1, max_size=6))
    elif how == "letters":
        ids = [i for c in data.draw(WORDS) for i in renderer.encode(c)]
    else:
        ids = renderer.encode(data.draw(WORDS))
    stop = data.draw(st.sampled_from([*sorted(renderer.stop_token_ids), None]))
    return [*ids, stop] if stop is not None else ids


def following(data: st.DataObject, answer: dict[str, Any]) -> list[dict[str, Any]]:
    new: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": call["id"], "content": data.draw(WORDS)}
        for call in answer.get("tool_calls") or []
    ]
    if not new or data.draw(st.booleans()):
        new.append({"role": "user", "content": data.draw(WORDS)})
    return new


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_an_agent_does_its_turns_extend_each_other(data, renderer_for, tools) -> None:
    renderer: Renderer = renderer_for(data.draw(st.sampled_from(FAMILIES)))
    conversation = renderer.conversation(now=0.0)
    known: list[Answered] = []
    turns: list[Turn] = []
    for index in range(data.draw(st.integers(1, 8))):
        do = data.draw(st.sampled_from(["on", "on", "on", "back", "edit", "fresh", "again", "fail"]))
        before = known[-1] if known else None
        if known and do in ("back", "again"):
            before = data.draw(st.sampled_from(known))
        if before is None or do == "fresh":
            system = data.draw(st.sampled_from([[], [{"role": "system", "content": "be brief"}]]))
            messages = [*system, {"role": "user", "content": data.draw(WORDS)}]
            with_tools = data.draw(st.booleans())
            before = None
        else:
            with_tools = before.tools
            messages = [*before.messages, before.answer, *following(data, before.answer)]
            if do == "again":
                messages, before = before.messages, None
            elif do == "edit":
                at = data.draw(st.integers(0, len(messages) - 1))
                if messages[at]["role"] == "user":
                    messages = [*messages[:at], {"role": "user", "content": "edited"}, *messages[at + 1 :]]
        messages = json.loads(json.dumps(messages))  # off the wire: equal, never the same objects
        prompt = renderer.render(conversation, messages, tools if with_tools else None)
        if do == "fail":
            conversation.abandon(prompt)
            continue
        ids = prompt.token_ids
        histories = [
            a
            for a in known
            for cut in [len(a.messages) + 1]
            if len(messages) > cut and key(messages[:cut], with_tools) == key([*a.messages, a.answer], a.tools)
        ]
        if histories:
            deepest = max(len(a.messages) for a in histories)
            assert any(ids[: len(a.ids)] == a.ids for a in histories if len(a.messages) == deepest)
            new = messages[deepest + 1 :]
            tail = renderer.decode(ids[prompt.reused_tokens :])
        else:
            new, tail = messages, renderer.decode(ids)
        for m in new:
            if m["role"] in ("user", "tool"):
                written = json.dumps(m["content"], ensure_ascii=False) if renderer.name == "harmony" else m["content"]
                assert m["content"].strip() in tail or written in tail
        completion = sampled(data, renderer)
        parsed = renderer.parse(completion, tools=tools if with_tools else None, opens_reasoning=prompt.opens_reasoning)
        answer = parsed.to_message()
        conversation.commit(prompt, completion, answer, turn_id=f"t{index}")
        known.append(Answered(messages, answer, with_tools, [*ids, *completion]))
        turns.append(
            Turn(
                turn_id=f"t{index}",
                index=index,
                prompt_ids=ids,
                completion_ids=completion,
                logprobs=[-0.5] * len(completion),
                finish_reason="stop",
                parent_turn=prompt.parent_turn,
                branch_reason=prompt.branch_reason,
            )
        )
    assert not any(asked.running for asked in conversation.asked.values())
    report = build_trajectory("s", turns).report
    assert report.trained_token_share in (1.0, None)
    assert "retokenized" not in report.branch_reasons


def test_the_built_in_policy_passes_the_self_test() -> None:
    weights = Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights"
    renderer = Renderer.from_path(weights)
    report = examine(renderer)
    assert {finding.level for finding in report} == {"ok"}, report
    assert renderer.grammar.name == "hermes"
