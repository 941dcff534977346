"""Turns of a conversation as tokens, for every family of templates."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.cli.doctor.template import examine
from agentcore_rl_toolkit.messages.render import (
    ChatTemplate,
    Renderer,
    sampled_body,
)
from agentcore_rl_toolkit.messages.wire import RequestError
from agentcore_rl_toolkit.policy import WEIGHTS_DIR

USER = {"role": "user", "content": "hello there"}
SYSTEM = {"role": "system", "content": "be brief"}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calling(*names: str, query: str = "x") -> dict[str, Any]:
    calls = [
        {"id": f"call_{i:05}", "type": "function", "function": {"name": n, "arguments": json.dumps({"query": query})}}
        for i, n in enumerate(names)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(text: str, i: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{i:05}", "content": text}


def body_of(renderer: Renderer, family: Any, message: dict[str, Any], following: str, tools: Any) -> list[int]:
    """What a model that writes exactly like its template would sample."""
    body = sampled_body(renderer, message, tools=tools)
    assert body
    if family.name == "glm":  # its answers end with the opening mark of what comes next
        mark = renderer.tokenizer.id_of("<|observation|>" if following == "tool" else "<|user|>")
        assert mark is not None
        body = [*body, mark]
    return body


def play(
    renderer: Renderer, family: Any, script: list[tuple[dict[str, Any], list[dict[str, Any]]]], tools: Any
) -> list[tuple[list[int], list[int]]]:
    """Render, answer, go on; returns (prompt ids, completion ids) of every turn and checks that each extends the last."""
    conversation = renderer.conversation(now=0.0)
    messages = [SYSTEM, USER]
    turns: list[tuple[list[int], list[int]]] = []
    for number, (entries, following) in enumerate(script):
        prompt = renderer.render(conversation, list(messages), tools)
        if turns:
            before = [*turns[-1][0], *turns[-1][1]]
            assert prompt.extended
            assert prompt.branch_reason is None
            assert prompt.reused_tokens == len(before)
            assert prompt.token_ids[: len(before)] == before
            assert prompt.parent_turn == f"t{number - 1}"
        assert json.loads(prompt.json) == prompt.token_ids
        assert prompt.length == len(prompt.token_ids)
        completion = body_of(renderer, family, entries, following[0]["role"] if following else "user", tools)
        turns.append((prompt.token_ids, completion))
        conversation.commit(prompt, completion, entries, turn_id=f"t{number}")
        messages += [entries, *following]
    return turns


SCRIPT = [
    (answer("An answer of some words."), [{"role": "user", "content": "and then?"}]),
    (calling("look_up"), [result("found it")]),
    (answer("So it is."), [{"role": "user", "content": "thanks\n\nand more"}]),
    (calling("look_up", query="Grüße"), [result("nothing"), {"role": "user", "content": "go on"}]),
    (answer("Done."), []),
]


def test_each_turn_extends_the_one_before(family, renderer, tools) -> None:
    turns = play(renderer, family, SCRIPT, tools)
    assert len(turns) == len(SCRIPT)


# A model that writes like its template leaves nothing for the renderer to differ in, unless the template writes history
# differently from answers: gpt-oss ends them with another token; Qwen3, GLM and R1 put reasoning marks in or leave them
# out.
@pytest.mark.parametrize("name", ["hermes", "qwen_coder", "llama3", "pythonic", "deepseek_v3"])
def test_extension_equals_a_full_rendering_when_answers_are_the_templates_own(name, renderer_for, tools) -> None:
    renderer = renderer_for(name)
    turns = play(renderer, SimpleNamespace(name=name), SCRIPT, tools)
    messages = [SYSTEM, USER]
    for (prompt, _), (entries, following) in zip(turns, SCRIPT, strict=True):
        assert renderer.decode(prompt) == renderer.template.render(messages, tools=tools, now=0.0)
        messages += [entries, *following]


@pytest.mark.parametrize("name", ["hermes", "qwen3", "qwen_coder", "glm", "deepseek_v3", "deepseek_r1", "pythonic"])
def test_results_of_parallel_calls_come_in_one_step(name, renderer_for, tools) -> None:
    script = [(calling("look_up", "look_up"), [result("one"), result("two", 1)]), (answer("Both."), [])]
    turns = play(renderer_for(name), SimpleNamespace(name=name), script, tools)
    added = renderer_for(name).decode(turns[1][0][len(turns[0][0]) + len(turns[0][1]) :])
    assert added.index("one") < added.index("two")


def first_turn(renderer: Renderer, completion: list[int], message: dict[str, Any], tools: Any = None) -> Any:
    conversation = renderer.conversation(now=0.0)
    prompt = renderer.render(conversation, [USER], tools)
    conversation.commit(prompt, completion, message, turn_id="t0")
    return conversation, [*prompt.token_ids, *completion]


def test_sampled_tokens_that_do_not_retokenise_are_kept_as_they_are(family, renderer) -> None:
    letters = [renderer.tokenizer.id_of(c) for c in "hello"]
    stop = min(renderer.tokenizer.eos_ids)
    completion = [*letters, stop]
    assert renderer.encode("hello") != letters  # a merge exists, the model took the long way
    conversation, before = first_turn(renderer, completion, answer("hello"))
    prompt = renderer.render(conversation, [USER, answer("hello"), {"role": "user", "content": "go on"}])
    assert prompt.token_ids[: len(before)] == before
    assert "go on" in renderer.decode(prompt.token_ids[len(before) :])


class Watched(ChatTemplate):
    """A template that shows what it was given."""

    given: list[Any]

    def render(self, messages, *, tools=None, options=None, **more) -> str:  # type: ignore[no-untyped-def,override]
        self.__dict__.setdefault("given", []).append([messages, tools, options])
        return super().render(messages, tools=tools, options=options, **more)

    def words(self) -> list[str]:
        """What stood in the place of an answer, in all renderings so far."""
        return re.findall(r"zqx\w+?qxz", json.dumps(self.given))


@pytest.fixture
def watched(family, renderer) -> Any:
    template = Watched(renderer.template.source, special_tokens=renderer.tokenizer.special_tokens)
    return Renderer(renderer.tokenizer, template, grammar=renderer.grammar)


def test_no_word_of_the_renderer_cuts_a_message(family, watched, tools) -> None:
    message, results = calling("look_up"), [result("found it")]
    turns: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [(answer("one"), [USER]), (message, results)]
    play(watched, family, turns, tools)
    known = watched.template.words()
    assert known
    # Whoever has seen every word so far, and writes them into texts, results, ids, tools and options, loses nothing.
    spoilt = "before " + " ".join(["zqxSAMPLEDqxz", *known]) + " after"
    spoilt_tools = [
        *tools,
        {"type": "function", "function": {"name": "other", "description": spoilt, "parameters": {}}},
    ]
    conversation = watched.conversation(now=0.0)
    messages: list[dict[str, Any]] = [USER]
    following = [[{"role": "user", "content": spoilt}], [result(spoilt)], [{"role": "user", "content": spoilt}]]
    for number, (message, more) in enumerate(
        zip([answer("hi"), calling("look_up"), answer("ok")], following, strict=True)
    ):
        prompt = watched.render(conversation, list(messages), spoilt_tools, {"note": spoilt})
        completion = body_of(watched, family, message, more[0]["role"], spoilt_tools)
        conversation.commit(prompt, completion, message, turn_id=f"t{number}")
        messages += [message, *more]
        after = watched.render(conversation, list(messages), spoilt_tools, {"note": spoilt})
        assert after.extended
        assert spoilt in watched.decode(after.token_ids[prompt.length + len(completion) :])
        conversation.abandon(after)
    fresh = watched.template.words()[len(known) :]
    assert not set(known) & {word for word in fresh if word not in spoilt}


@pytest.mark.parametrize(
    ("name", "sampled", "content", "goes_on"),
    [
        ("hermes", "an unfinished", "an unfinished", "<|im_end|>\n<|im_start|>user\n"),  # cut by its length
        ("qwen3", "over<|endoftext|>", "over", "\n<|im_start|>user\n"),
        ("harmony", "<|channel|>final<|message|>ok<|return|>", "ok", "<|start|>user<|message|>"),
        ("glm", "\n<think></think>\nok<|observation|>", "ok", "<|user|>\n"),  # opens the wrong role
    ],
)
def test_an_answer_is_closed_by_what_its_template_writes_behind_it(
    name, sampled, content, goes_on, renderer_for
) -> None:
    renderer = renderer_for(name)
    conversation, before = first_turn(renderer, renderer.encode(sampled), answer(content))
    prompt = renderer.render(conversation, [USER, answer(content), USER])
    assert renderer.decode(prompt.token_ids[len(before) :]).startswith(goes_on)


@pytest.mark.parametrize(
    "sent_back",
    [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [("c9", '{"limit":3,"query":"x"}')]},
        {"role": "assistant", "content": "Let me see.\n", "tool_calls": [("c9", '{"query": "x", "limit": 3}')]},
        {"role": "assistant", "content": None, "tool_calls": [("c9", '{"query": "x", "limit": 3}')]},
        {"role": "assistant", "content": "", "tool_calls": [("other", '{"query": "x", "limit": 3}')], "refusal": None},
    ],
)
def test_what_frameworks_do_to_an_answer_does_not_hide_it(sent_back, renderer_for, tools) -> None:
    renderer = renderer_for("hermes")
    text = '<tool_call>\n{"name": "look_up", "arguments": {"query": "x", "limit": 3}}\n</tool_call><|im_end|>'
    completion = renderer.encode("Let me see.\n" + text)
    conversation = renderer.conversation()
    prompt = renderer.render(conversation, [USER], tools)
    parsed = renderer.parse(completion, tools=tools, opens_reasoning=prompt.opens_reasoning)
    assert parsed.parse_status == "parsed"
    assert parsed.content == "Let me see."
    conversation.commit(prompt, completion, parsed.to_message(), turn_id="t0")
    calls = [
        {"id": i, "type": "function", "function": {"name": "look_up", "arguments": a}}
        for i, a in sent_back["tool_calls"]
    ]
    again = {**sent_back, "tool_calls": calls}
    following = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "r"}
    second = renderer.render(conversation, [USER, again, following], tools)
    assert second.extended
    assert second.token_ids[: len(prompt.token_ids) + len(completion)] == [*prompt.token_ids, *completion]
    # and a third turn still finds the second
    done = renderer.encode("ok<|im_end|>")
    conversation.commit(second, done, answer("ok"), turn_id="t1")
    third = renderer.render(conversation, [USER, again, following, answer("ok"), USER], tools)
    assert third.parent_turn == "t1"


def test_defaults_that_an_agent_fills_into_its_calls_do_not_hide_them(
    renderer_for: Callable[[str], Renderer], tools: list[dict[str, Any]]
) -> None:
    renderer = renderer_for("qwen3")
    user = {"role": "user", "content": "hello"}
    for sent, goes_on in (
        ('{"deep": false, "query": "x"}', True),
        ('{"query": "y"}', False),
        ('{"deep": false}', False),
    ):
        function = {"name": "look_up", "arguments": '{"query": "x"}'}
        answer = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
        conversation = renderer.conversation(now=0.0)
        first = renderer.render(conversation, [user], tools)
        ids = [300, 301, 302]
        conversation.commit(first, ids, answer, turn_id="t1")
        back = {**answer, "tool_calls": [{"id": "c1", "type": "function", "function": {**function, "arguments": sent}}]}
        result = {"role": "tool", "tool_call_id": "c1", "content": "found"}
        second = renderer.render(conversation, [user, back, result], tools)
        assert second.extended == goes_on
        assert (second.token_ids[: first.length + 3] == [*first.token_ids, *ids]) == goes_on


def test_an_edited_answer_opens_a_branch_at_the_last_turn_that_still_stands(renderer_for) -> None:
    renderer = renderer_for("hermes")
    conversation = renderer.conversation()
    messages = [SYSTEM, USER]
    for number, entries in enumerate(["one", "two"]):
        prompt = renderer.render(conversation, messages)
        completion = renderer.encode(f"{entries}<|im_end|>")
        conversation.commit(prompt, completion, answer(entries), turn_id=f"t{number}")
        messages = [*messages, answer(entries), USER]
    edited = [*messages[:4], answer("TWO"), USER]
    prompt = renderer.render(conversation, edited)
    assert prompt.branch_reason == "history_rewritten"
    assert prompt.parent_turn == "t0"
    assert renderer.decode(prompt.token_ids) == renderer.template.render(edited)


def test_reasons_for_branches(renderer_for, tools) -> None:
    renderer = renderer_for("hermes")
    conversation = renderer.conversation()
    first = renderer.render(conversation, [SYSTEM, USER])
    assert first.branch_reason is None
    side = renderer.render(conversation, [{"role": "system", "content": "you plan"}, USER])
    assert side.branch_reason == "sub_agent"
    tooled = renderer.render(conversation, [SYSTEM, USER], tools)
    assert tooled.branch_reason == "sub_agent"
    same = renderer.render(conversation, [SYSTEM, USER])
    assert same.branch_reason == "parallel_calls"
    assert same.token_ids == first.token_ids
    beside = renderer.render(conversation, [SYSTEM, {"role": "user", "content": "other"}])
    assert beside.branch_reason == "parallel_calls"
    done = renderer.encode("ok<|im_end|>")
    for number, prompt in enumerate([first, side, tooled, same, beside]):
        conversation.commit(prompt, done, answer(f"ok {number}"), turn_id=f"t{number}")
    assert renderer.render(conversation, [SYSTEM, USER]).branch_reason == "resampled"
    left = renderer.render(conversation, [SYSTEM, USER, answer("ok 0"), {"role": "user", "content": "left"}])
    right = renderer.render(conversation, [SYSTEM, USER, answer("ok 0"), {"role": "user", "content": "right"}])
    assert (left.branch_reason, right.branch_reason) == (None, "parallel_calls")
    before = [*first.token_ids, *done]
    assert left.token_ids[: len(before)] == right.token_ids[: len(before)] == before
    assert "left" in renderer.decode(left.token_ids)
    assert "left" not in renderer.decode(right.token_ids)
    compacted = [SYSTEM, {"role": "user", "content": "summary of it all"}]
    conversation.commit(left, done, answer("l"), turn_id="tl")
    conversation.commit(right, done, answer("r"), turn_id="tr")
    assert renderer.render(conversation, compacted).branch_reason in ("parallel_calls", "history_rewritten")


def test_tools_that_are_added_in_mid_conversation_are_a_reason_of_their_own(renderer_for, tools) -> None:
    renderer = renderer_for("hermes")
    conversation = renderer.conversation()
    messages, asked = [SYSTEM, USER], renderer.render(conversation, [SYSTEM, USER], tools)
    done = renderer.encode("ok<|im_end|>")
    conversation.commit(asked, done, answer("ok"), turn_id="t0")
    messages = [*messages, answer("ok"), {"role": "user", "content": "and then?"}]
    loaded = {"type": "function", "function": {**tools[0]["function"], "name": "loaded_since"}}
    more = renderer.render(conversation, messages, [*tools, loaded])
    assert (more.branch_reason, more.parent_turn) == ("tools_changed", None)
    conversation.commit(more, done, answer("ok"), turn_id="t1")
    other = renderer.render(conversation, [{"role": "system", "content": "edited"}, *messages[1:]], tools)
    assert other.branch_reason == "history_rewritten"


def test_a_failed_call_leaves_the_session_as_it_was(renderer_for) -> None:
    renderer = renderer_for("hermes")
    conversation, before = first_turn(renderer, renderer.encode("a<|im_end|>"), answer("a"))
    messages = [USER, answer("a"), USER]
    failed = renderer.render(conversation, messages)
    tokens = failed.token_ids
    conversation.abandon(failed)
    again = renderer.render(conversation, messages)
    assert again.branch_reason is None
    assert again.token_ids == tokens
    conversation.abandon(again)
    other = renderer.render(conversation, [USER, answer("a"), {"role": "user", "content": "something else"}])
    assert other.branch_reason is None
    assert other.token_ids[: len(before)] == before
    assert other.asked.row.buffer is failed.asked.row.buffer  # not a copy of the session's tokens
    assert sum(asked.running for asked in conversation.asked.values()) == 1


def test_one_of_two_equal_calls_that_fails_leaves_the_prompt_to_the_other(renderer_for) -> None:
    renderer = renderer_for("hermes")
    conversation = renderer.conversation()
    first, second = (renderer.render(conversation, [USER]) for _ in range(2))
    conversation.abandon(second)
    assert renderer.render(conversation, [USER]).branch_reason == "parallel_calls"
    conversation.commit(first, renderer.encode("ok<|im_end|>"), answer("ok"), turn_id="t")
    assert renderer.render(conversation, [USER, answer("ok"), USER]).parent_turn == "t"


def test_an_agent_after_a_call_of_one_message_is_another_agent(renderer_for, tools) -> None:
    renderer = renderer_for("hermes")
    conversation = renderer.conversation()
    renderer.render(conversation, [USER])
    assert renderer.render(conversation, [SYSTEM, USER], tools).branch_reason == "sub_agent"


def test_two_choices_of_one_call_are_both_at_hand(renderer_for) -> None:
    renderer = renderer_for("hermes")
    conversation = renderer.conversation()
    prompt = renderer.render(conversation, [USER])
    one, two = renderer.encode("one<|im_end|>"), renderer.encode("two<|im_end|>")
    conversation.commit(prompt, one, answer("one"), turn_id="t0.0", more=True)
    conversation.commit(prompt, two, answer("two"), turn_id="t0.1")
    assert sum(asked.running for asked in conversation.asked.values()) == 0
    for entries, ids, turn_id in (("one", one, "t0.0"), ("two", two, "t0.1")):
        following = renderer.render(conversation, [USER, answer(entries), USER])
        assert following.parent_turn == turn_id
        assert following.token_ids[: prompt.length + len(ids)] == [*prompt.token_ids, *ids]


def test_a_template_that_looks_back_extends_too(renderer_for) -> None:
    renderer = renderer_for("counting")
    assert not renderer.facts.after_text
    assert renderer.facts.problems
    completion = [*(i for c in "hello" for i in renderer.encode(c)), renderer.tokenizer.id_of("<|im_end|>")]
    conversation, before = first_turn(renderer, completion, answer("hello"))
    prompt = renderer.render(conversation, [USER, answer("hello"), USER])
    assert prompt.extended
    assert prompt.token_ids[: len(before)] == before
    assert renderer.decode(prompt.token_ids) == renderer.template.render([USER, answer("hello"), USER])
    assert "looks back" in str(examine(renderer))


def test_a_template_without_marks_is_rendered_in_full(renderer_for) -> None:
    renderer = renderer_for("markless")
    conversation, _ = first_turn(renderer, renderer.encode(" a"), answer("a"))
    prompt = renderer.render(conversation, [USER, answer("a"), USER])
    assert not prompt.extended
    assert (prompt.reused_tokens, prompt.parent_turn) == (0, None)
    assert renderer.decode(prompt.token_ids) == renderer.template.render([USER, answer("a"), USER])
    assert "fail" in {finding.level for finding in examine(renderer)}


def test_a_template_that_takes_arguments_as_text_gets_the_models_own_characters(renderer_for, tools) -> None:
    renderer = renderer_for("deepseek_v3")
    odd = '{"query":   "x", "limit": 1.0e2}'
    message = {**calling("look_up"), "tool_calls": [{"id": "c", "function": {"name": "look_up", "arguments": odd}}]}
    assert odd in renderer.template.render([USER, message], tools=tools)
    message["tool_calls"] = [{"id": "c", "function": {"name": "look_up", "arguments": {"query": "x"}}}]
    assert '{"query": "x"}' in renderer.template.render([USER, message], tools=tools)


@pytest.mark.parametrize(("own", "shown"), [({}, "look_up"), ({"name": "mine"}, "mine")])
def test_a_tool_result_has_its_own_name_or_that_of_its_call(own: dict[str, str], shown: str) -> None:
    template = ChatTemplate("{% for m in messages %}{% if m.role == 'tool' %}{{ m.name }}{% endif %}{% endfor %}")
    call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "1", **own}
    assert template.render([USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]) == shown


def test_threads_of_one_session_do_not_mix_their_tokens(renderer_for) -> None:
    renderer = renderer_for("hermes")
    conversation, before = first_turn(renderer, renderer.encode("a<|im_end|>"), answer("a"))
    seen: dict[int, list[int]] = {}
    turn = threading.Lock()  # a conversation is used by one thread at a time

    def call(number: int) -> None:
        messages = [USER, answer("a"), {"role": "user", "content": f"question {number}"}]
        for step in range(5):
            content = f"answer {number} {step}"
            ids = renderer.encode(content + "<|im_end|>")
            with turn:
                prompt = renderer.render(conversation, messages)
            with turn:
                conversation.commit(prompt, ids, answer(content), turn_id=f"{number}.{step}")
            messages = [*messages, answer(content), {"role": "user", "content": f"step {step}"}]
        with turn:
            seen[number] = renderer.render(conversation, messages).token_ids

    threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(8):
        text = renderer.decode(seen[number])
        assert seen[number][: len(before)] == before
        assert all(f"answer {number} {step}" in text for step in range(5))
        assert all(f"question {other}" not in text for other in range(8) if other != number)


def test_what_the_template_refuses_is_the_agents_error(renderer_for, tools) -> None:
    renderer = renderer_for("llama3")
    with pytest.raises(RequestError, match="one tool call at a time") as caught:
        renderer.render(renderer.conversation(), [USER, calling("look_up", "look_up"), result("x")], tools)
    assert caught.value.status == 400
    with pytest.raises(RequestError, match="empty"):
        renderer.render(renderer.conversation(), [])
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    with pytest.raises(RequestError) as caught:
        renderer.render(renderer.conversation(), [image])
    assert caught.value.param == "messages[0].content[0]"


def test_template_options_belong_to_the_history(renderer_for) -> None:
    renderer = renderer_for("qwen3")
    conversation = renderer.conversation()
    quiet = renderer.render(conversation, [USER], options={"enable_thinking": False})
    assert renderer.decode(quiet.token_ids).endswith("<think>\n\n</think>\n\n")
    completion = renderer.encode("a<|im_end|>")
    conversation.commit(quiet, completion, answer("a"), turn_id="t0")
    following = renderer.render(conversation, [USER, answer("a"), USER], options={"enable_thinking": False})
    assert following.extended
    assert renderer.decode(following.token_ids).endswith("<think>\n\n</think>\n\n")
    other = renderer.render(conversation, [USER, answer("a"), USER])
    assert not other.extended


def test_reasoning_that_the_prompt_opened_is_read_as_reasoning(renderer_for) -> None:
    renderer = renderer_for("deepseek_r1")
    conversation = renderer.conversation()
    prompt = renderer.render(conversation, [USER])
    assert prompt.opens_reasoning
    parsed = renderer.parse(renderer.encode("because</think>\n\nSo."), opens_reasoning=prompt.opens_reasoning)
    assert (parsed.reasoning, parsed.content) == ("because", "So.")


def test_a_named_template_for_tools_is_used_when_there_are_some(tmp_path, model_dir, tools) -> None:
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_bytes((model_dir("hermes") / name).read_bytes())
    for names in (("tool_use", "default"), ("other", "tool_use")):  # without a default, the first is for other calls
        sources = {"tool_use": "tooled <tool_call>{{ loud }}"}
        templates = [{"name": name, "template": sources.get(name, "plain")} for name in names]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        template = ChatTemplate.from_path(tmp_path)
        assert template.render([USER]) == "plain"
        assert template.render([USER], tools=tools, options=template.options({"loud": "!"})) == "tooled <tool_call>!"


def test_rendering_equals_what_transformers_gives(family, model_dir, renderer, tools) -> None:
    transformers = pytest.importorskip("transformers")
    folder = model_dir(family.name)
    loaded = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=family.bos, eos_token=family.eos[0]
    )
    loaded.chat_template = (folder / "chat_template.jinja").read_text("utf-8")
    message = calling("look_up")
    prepared = renderer.template.prepare([SYSTEM, USER, message, result("r")])
    theirs = loaded.apply_chat_template(
        prepared, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    ours = renderer.encode(renderer.template.render([SYSTEM, USER, message, result("r")], tools=tools))
    assert ours == list(theirs)


def test_contents_in_parts_are_told_apart() -> None:
    renderer = Renderer.from_path(WEIGHTS_DIR)
    conversation = renderer.conversation()
    for words in ("add 1 and 2", "something else"):
        prompt = renderer.render(conversation, [{"role": "user", "content": [{"type": "text", "text": words}]}])
        assert words in renderer.decode(prompt.token_ids)
    renderer.render(conversation, [{"role": "user", "content": ""}])
