"""The chat template and the tokenizer, against transformers and against themselves."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import PolicyError
from agentcore_rl_toolkit.policy.tokens import ChatTokenizer
from agentcore_rl_toolkit.policy.word_problems.demonstrations import (
    EXAMPLE_AGENT,
    demonstrate,
    tool_spec,
    varied_surroundings,
)
from agentcore_rl_toolkit.policy.word_problems.problems import problems

CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "calculator", "arguments": '{"expression": "2 + 3"}'},
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Solve the problem."},
    {"role": "user", "content": "Tom has 2 apples and buys 3 more."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0", "content": "5"},
    {"role": "assistant", "content": "The answer is 5."},
    {"role": "user", "content": "Thanks"},
]
TEXTS = [
    "",
    " ",
    "Tom has 12 apples.",
    "a\n\n b\t",
    "déjà vu — 数学 🧮",
    "x <tool_call> y",
    "<|im_start|>user\nhi<|im_end|>",
    "\x00\x7f",
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_survives_a_round_trip(tokenizer: ChatTokenizer, hf: tuple[Any, Any], text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids == hf[1](text)["input_ids"]


def test_tokens_are_about_five_hundred_and_digits_single(tokenizer: ChatTokenizer) -> None:
    assert 500 <= tokenizer.vocabulary_size <= 600
    assert len(tokenizer.encode("4096")) == 4
    assert len(tokenizer.encode("<tool_call>")) == 1


def test_bytes_of_tokens_join_to_the_text(tokenizer: ChatTokenizer) -> None:
    for text in TEXTS:
        assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text)) == text.encode()


def test_rendering_equals_transformers(tokenizer: ChatTokenizer, hf: tuple[Any, Any]) -> None:
    rng = random.Random(3)
    for problem in problems("train", 30):
        around = varied_surroundings(rng)
        messages = demonstrate(problem, around, rng)
        for add in (True, False):
            want = hf[1].apply_chat_template(messages, tools=around.tools, add_generation_prompt=add, tokenize=False)
            assert tokenizer.render(messages, tools=around.tools, add_generation_prompt=add) == want
            want_ids = hf[1].apply_chat_template(messages, tools=around.tools, add_generation_prompt=add)["input_ids"]
            assert tokenizer.encode_chat(messages, tools=around.tools, add_generation_prompt=add) == want_ids


def test_each_turn_extends_the_one_before(tokenizer: ChatTokenizer) -> None:
    tools = EXAMPLE_AGENT.tools
    first = tokenizer.encode_chat(CONVERSATION[:2], tools=tools)
    answer = tokenizer.encode(
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call><|im_end|>'
    )
    second = tokenizer.encode_chat(CONVERSATION[:4], tools=tools)
    assert second[: len(first) + len(answer)] == first + answer
    assert (
        tokenizer.decode(second[len(first) + len(answer) :])
        == "\nuser\n<tool_response>\n5\n</tool_response>\nassistant\n"
    )


def test_order_of_keys_in_tools_does_not_matter(tokenizer: ChatTokenizer) -> None:
    tool = tool_spec()
    shuffled = json.loads(json.dumps(tool))
    shuffled["function"] = dict(reversed(list(shuffled["function"].items())))
    shuffled["function"]["parameters"] = dict(reversed(list(shuffled["function"]["parameters"].items())))
    reordered = dict(reversed(list(shuffled.items())))
    assert list(reordered) != list(tool)
    assert tokenizer.render(CONVERSATION, tools=[reordered]) == tokenizer.render(CONVERSATION, tools=[tool])


def test_forms_of_content_and_arguments_render_alike(tokenizer: ChatTokenizer) -> None:
    plain = tokenizer.render(CONVERSATION)
    other: list[dict[str, Any]] = json.loads(json.dumps(CONVERSATION))
    other[1]["content"] = [{"type": "text", "text": "Tom has 2 apples"}, {"type": "text", "text": " and buys 3 more."}]
    other[2]["content"] = ""
    other[2]["tool_calls"][0]["function"]["arguments"] = {"expression": "2 + 3"}
    other[3]["content"] = [{"type": "text", "text": "5"}]
    assert tokenizer.render(other) == plain
    del other[2]["content"]
    assert tokenizer.render(other) == plain
    assert "None" not in plain


def test_an_empty_system_prompt_and_none_differ_only_where_there_are_no_tools(tokenizer: ChatTokenizer) -> None:
    user = CONVERSATION[1:2]
    empty = [{"role": "system", "content": ""}, *user]
    assert tokenizer.render(user, tools=EXAMPLE_AGENT.tools) == tokenizer.render(empty, tools=EXAMPLE_AGENT.tools)
    assert not tokenizer.render(user).startswith("<|im_start|>system")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "robot", "content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    ],
)
def test_what_cannot_be_rendered_is_refused(tokenizer: ChatTokenizer, message: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="chat template"):
        tokenizer.render([message])


def test_a_folder_without_tokenizer_is_refused(tmp_path: Any) -> None:
    with pytest.raises(PolicyError, match="no usable tokenizer"):
        ChatTokenizer.from_directory(tmp_path)
