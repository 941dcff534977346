"""Histories as agent frameworks send them back: edited, reordered, with reasoning in the text, under other options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentcore_rl_toolkit.messages.render import Conversation, RenderedPrompt, Renderer
from agentcore_rl_toolkit.messages.wire.history import in_call_order

Load = Callable[[str], Renderer]
Message = dict[str, Any]

USER: Message = {"role": "user", "content": "hello there"}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"query": "x"}}\n</tool_call><|im_end|>'


def turn(
    renderer: Renderer, tools: Any, text: str, **options: Any
) -> tuple[Conversation, RenderedPrompt, list[int], Message]:
    """A session after its first turn, in which the model sampled this text."""
    conversation = renderer.conversation(now=0.0)
    prompt = renderer.render(conversation, [USER], tools, options)
    ids = renderer.encode(text)
    message = renderer.parse(ids, tools=tools, opens_reasoning=prompt.opens_reasoning).to_message()
    conversation.commit(prompt, ids, message, turn_id="t0")
    return conversation, prompt, ids, message


@pytest.mark.parametrize(
    ("back", "kept"),
    [
        ("Mail to ann@example.org is next.", True),
        ("Mail to ann@example.org\n\nis next.\n", True),
        (None, True),
        ("<think>\nhm\n</think>\n\nMail to ann@example.org is next.", True),
        ("Mail to [REDACTED_EMAIL] is next.", False),
        ("<think>\nhm\n</think>\n\nMail to [REDACTED_EMAIL] is next.", False),
    ],
)
@pytest.mark.parametrize("same_id", [True, False])
def test_words_that_an_agent_changed_beside_a_call_are_what_the_model_sees(
    back: str | None, kept: bool, same_id: bool, renderer_for: Load, tools: Any
) -> None:
    renderer = renderer_for("qwen3")
    conversation, prompt, ids, message = turn(renderer, tools, "Mail to ann@example.org is next.\n" + CALL)
    [call] = message["tool_calls"]
    call = call if same_id else {**call, "id": "other"}
    again = [
        USER,
        {"role": "assistant", "content": back, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "r"},
    ]
    following = renderer.render(conversation, again, tools)
    assert (following.parent_turn, following.branch_reason) == (("t0", None) if kept else (None, "history_rewritten"))
    sampled = [*prompt.token_ids, *ids]
    assert (following.token_ids[: len(sampled)] == sampled) is kept
    assert ("ann@example.org" in renderer.decode(following.token_ids)) is kept


@pytest.mark.parametrize(("family", "thought"), [("qwen3", "<think>\nhm\n</think>\n\n"), ("deepseek_r1", "hm</think>")])
def test_reasoning_that_comes_back_inside_the_text_is_the_sampled_one(
    family: str, thought: str, renderer_for: Load
) -> None:
    renderer = renderer_for(family)
    (stop, *_) = sorted(renderer.stop_token_ids)
    conversation, _, _, message = turn(renderer, None, thought + "It is 4." + renderer.tokenizer.text_of(stop))
    assert message["content"] == "It is 4."
    for text, known in (
        ("It is 4.", True),
        (thought + "It is 4.", True),
        ("<think>" + thought.strip() + "It is 4.", True),
        (thought + "It is 5.", False),
    ):
        following = renderer.render(conversation, [USER, {"role": "assistant", "content": text}, USER])
        assert (following.parent_turn == "t0") is known, text
        conversation.abandon(following)


def test_options_that_the_template_does_not_read_change_nothing(renderer_for: Load, tools: Any) -> None:
    renderer = renderer_for("qwen3")
    conversation, _, _, message = turn(renderer, tools, "It is 4.<|im_end|>")
    strict = [{**tools[0], "function": {**tools[0]["function"], "strict": True}}]
    for options in ({"reasoning_effort": "high"}, {"thinking_budget": 5}, {}):
        following = renderer.render(conversation, [USER, message, USER], strict, options)
        assert (following.parent_turn, following.branch_reason) == ("t0", None)
        conversation.abandon(following)


def test_a_change_of_options_or_tools_is_reported_as_such(renderer_for: Load, tools: Any) -> None:
    renderer = renderer_for("qwen3")
    conversation, _, _, message = turn(renderer, tools, "It is 4.<|im_end|>")
    grown = [USER, message, USER]
    quiet = renderer.render(conversation, grown, tools, {"enable_thinking": False})
    assert (quiet.branch_reason, quiet.parent_turn) == ("options_changed", None)
    other = [{"type": "function", "function": {**tools[0]["function"], "name": "other"}}]
    assert renderer.render(conversation, grown, [*tools, *other]).branch_reason == "tools_changed"
    system = {"role": "system", "content": "you plan"}
    assert renderer.render(conversation, [system, USER], other).branch_reason == "sub_agent"


def results(*calls: Message) -> list[Message]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": f"of {call['id']}"} for call in calls]


def test_results_after_two_messages_with_calls_are_in_the_order_of_all_their_calls() -> None:
    called = [{"role": "assistant", "content": "", "tool_calls": [{"id": name}]} for name in ("c1", "c2")]
    history = [USER, *called, *({"role": "tool", "tool_call_id": name} for name in ("c2", "c1"))]
    assert [message.get("tool_call_id") for message in in_call_order(history)[3:]] == ["c1", "c2"]


def test_without_ids_results_of_parallel_calls_are_shown_in_the_order_of_the_calls(
    renderer_for: Load, tools: Any
) -> None:
    renderer = renderer_for("qwen3")
    text = CALL.removesuffix("<|im_end|>")
    conversation, _, _, message = turn(renderer, tools, text + "\n" + text.replace('"x"', '"y"') + "<|im_end|>")
    one, two = message["tool_calls"]
    other = {"role": "tool", "tool_call_id": "of nobody", "content": "late"}
    history = [USER, message, other, *results(two, one)]
    following = renderer.render(conversation, history, tools)
    shown = renderer.decode(following.token_ids)
    assert following.parent_turn == "t0"
    assert 0 < shown.index(f"of {one['id']}") < shown.index(f"of {two['id']}") < shown.index("late")
    assert [m.get("tool_call_id") for m in history[2:]] == ["of nobody", two["id"], one["id"]]  # the caller's own list
