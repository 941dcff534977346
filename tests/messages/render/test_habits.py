"""What templates refuse is written in another way: system messages anywhere, no user, unreadable arguments, efforts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.cli.doctor.template import examine
from agentcore_rl_toolkit.messages.render import Renderer, sampled_body
from agentcore_rl_toolkit.messages.render.habits import Habits
from agentcore_rl_toolkit.messages.render.template import ChatTemplate

from .conftest import TEMPLATES

# As Qwen3.5 and its successors refuse things.
STRICT = """
{%- set ns = namespace(asked=false) -%}
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('System message must be at the beginning.') }}{%- endif -%}
{%- if m.role == 'user' -%}{%- set ns.asked = true -%}{%- endif -%}
{%- for c in m.tool_calls or [] -%}{%- for k, v in c.function.arguments.items() -%}{%- endfor -%}{%- endfor -%}
{%- endfor -%}
{%- if not ns.asked -%}{{ raise_exception('No user query found in messages.') }}{%- endif -%}
{%- if reasoning_effort is defined and reasoning_effort not in ('low', 'medium', 'xhigh') -%}
{{ raise_exception('effort') }}{%- endif -%}
"""
SYSTEM, LATE = {"role": "system", "content": "rule one"}, {"role": "system", "content": "rule two"}
USER = {"role": "user", "content": "hello"}
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def strict(model_dir: Callable[[str], Path], tmp_path: Path) -> Renderer:
    template = tmp_path / "strict.jinja"
    template.write_text(STRICT + (TEMPLATES / "qwen_coder.jinja").read_text("utf-8"))
    return Renderer.from_path(model_dir("qwen_coder"), template=template)


def test_the_doctor_says_what_becomes_of_each_thing_that_a_template_refuses(strict: Renderer) -> None:
    report = examine(strict)
    assert {finding.level for finding in report} == {"ok"}, report
    said = {finding.name: finding.text for finding in report}
    assert said["unusual histories"] == (
        "leading system messages are merged; later system messages are written in place, as the user's; "
        "an empty message of the user is put in front; unreadable arguments are an object; "
        "reasoning efforts: low, medium, xhigh"
    )


def test_what_a_template_refuses_only_beside_tools_is_found_too(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{%- for m in messages -%}{%- if tools and m.role == 'system' and not loop.first -%}"
        "{{ raise_exception('System message must be at the beginning.') }}{%- endif -%}{%- endfor -%}"
        + (TEMPLATES / "qwen_coder.jinja").read_text("utf-8")
    )
    report = examine(Renderer.from_path(model_dir("qwen_coder"), template=template))
    assert {finding.level for finding in report} == {"ok"}, report
    said = {finding.name: finding.text for finding in report}
    assert "written in place, as the user's" in said["unusual histories"]


def test_system_messages_are_written_in_place_and_turns_extend_each_other(
    strict: Renderer, tools: list[dict[str, Any]]
) -> None:
    conversation = strict.conversation(now=0.0)
    messages: list[dict[str, Any]] = [SYSTEM, {**LATE, "role": "developer"}, USER, LATE]
    before: list[int] = []
    for turn in range(4):
        prompt = strict.render(conversation, json.loads(json.dumps(messages)), tools, {"reasoning_effort": "high"})
        assert prompt.token_ids[: len(before)] == before
        assert prompt.extended == bool(turn)
        answer = {"role": "assistant", "content": f"answer {turn}"}
        completion = sampled_body(strict, answer, tools=tools)
        assert completion
        conversation.commit(prompt, completion, answer, turn_id=f"t{turn}")
        before = [*prompt.token_ids, *completion]
        messages += [answer, {"role": "user", "content": "go on"}, {"role": "system", "content": f"note {turn}"}]
    text = strict.decode(before)
    assert "rule one\n\nrule two" in text  # those in front
    assert text.count("<|im_start|>system") == 1
    assert "<|im_start|>user\nrule two<|im_end|>" in text  # in place, behind the user's
    assert text.index("answer 0") < text.index("note 0") < text.index("answer 1")


def test_calls_that_no_object_can_be_read_from_are_part_of_the_history(
    strict: Renderer, tools: list[dict[str, Any]]
) -> None:
    for arguments in ("{broken", "[1]", '"text"'):
        call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER]
        text = strict.template.render(messages, tools=tools)
        assert arguments in text


def test_templates_that_put_system_messages_in_front_leave_them_out_or_want_turns_to_alternate() -> None:
    hoists = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    hoists += "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    drops = "{% for m in messages %}{% if loop.first or m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    alternates = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}"
    )
    alternates += "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    history = [SYSTEM, USER, LATE]
    for source, wanted in (
        (CHATML, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>system\nrule two"),
        (hoists, "rule one[user]hello[user]rule two"),
        (drops, "[system]rule one[user]hello[user]rule two"),
        (alternates, "[user]rule one\n\nhello\n\nrule two"),
    ):
        assert wanted in ChatTemplate(source).render(history)
    assert ChatTemplate(CHATML).habits == Habits()


CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "found"}
ANSWER = {"role": "assistant", "content": "first"}
# Each template refuses the orders of roles that its family refuses.
ORDERS = {
    "an answer comes first": ([ANSWER, USER], ("first", "hello")),
    "answers in a row": ([USER, ANSWER, {**ANSWER, "content": "second"}, USER], ("first", "second", "hello")),
    "a result without its call": ([USER, RESULT], ("hello", "found")),
    "a result after an answer": ([USER, ANSWER, RESULT, USER], ("first", "found", "hello")),
    "a user's message after a result": ([USER, CALLED, RESULT, {**USER, "content": "and?"}], ("found", "and?")),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", ["mistral", "minimax", "gemma", "harmony", "kimi", "glm", "llama3"])
def test_unusual_orders_of_roles_are_written(
    family: str, order: str, renderer_for: Callable[[str], Renderer], tools: list[dict[str, Any]]
) -> None:
    messages, words = ORDERS[order]
    text = renderer_for(family).template.render(messages, tools=tools, now=0.0)
    at = -1
    for word in words:
        at = text.find(word, at + 1)
        assert at >= 0, text


def test_ids_of_calls_have_the_form_that_the_model_was_trained_with(
    renderer_for: Callable[[str], Renderer], tools: list[dict[str, Any]]
) -> None:
    history = [USER, CALLED, RESULT, {**CALLED, "tool_calls": [{**CALLED["tool_calls"][0], "id": "call00002"}]}]
    history.append({**RESULT, "tool_call_id": "call00002"})
    kimi = renderer_for("kimi").template.render(history, tools=tools)
    assert kimi.count("functions.look_up:0") == kimi.count("functions.look_up:1") == 2
    mistral = renderer_for("mistral").template.render(history, tools=tools)
    assert re.findall(r"\[CALL_ID\](\w{9})\[ARGS\]", mistral) == re.findall(r"\[TOOL_RESULTS\](\w{9})\[", mistral)
    assert "call_1" not in kimi + mistral
    assert mistral.count("call00002") == 2  # it has nine letters and digits
