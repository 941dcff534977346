"""Details of the protocols that only show with the providers' own clients: bounds, positions, states, who is named at fault."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.types.exceptions import ContextWindowOverflowException

import agentcore_rl_toolkit
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.testing import Fault, ScriptedEngine
from agentcore_rl_toolkit.gateway.testing.script import error_body
from agentcore_rl_toolkit.messages.render import Renderer

MODEL = Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights"
USER: Any = [{"role": "user", "content": "What is 2 + 3?"}]
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
FUNCTION = {"name": "calculator", "description": "computes", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS: Any = [{"type": "function", **FUNCTION}]
ANTHROPIC_TOOLS: Any = [{"name": "calculator", "input_schema": PARAMETERS}]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call>'

Start = Callable[..., Awaitable[Gateway]]


def gpt(session: SessionHandle) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)


def claude(session: SessionHandle) -> anthropic.AsyncAnthropic:
    url = session.base_url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=url, api_key=session.api_key, max_retries=0)


@pytest.fixture
def rendered(engine: ScriptedEngine, start_gateway: Start) -> Callable[..., Awaitable[SessionHandle]]:
    """Open a session on a gateway that renders prompts itself: ``await rendered(context_tokens=..., max_tokens=...)``."""

    async def opened(*, context_tokens: int | None = None, kind: str = "vllm", **settings: Any) -> SessionHandle:
        engine.first_id, engine.last_id = 300, 500
        gateway = await start_gateway(engine, engine=kind, model_dir=str(MODEL), context_tokens=context_tokens)
        return (await GatewayClient(gateway.url).create_sessions_async([new_session_id()], **settings))[0]

    return opened


Rendered = Callable[..., Awaitable[SessionHandle]]


def says(engine: ScriptedEngine, text: str) -> None:
    renderer = Renderer.from_path(str(MODEL))
    ids = renderer.encode(text, add_special_tokens=False)
    engine.replies.append({"token_ids": [*ids, min(renderer.stop_token_ids)]})


# -- text completions over token ids


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tokens_of_a_text_prompt_are_counted(
    engine: ScriptedEngine, rendered: Rendered, stream: bool
) -> None:
    async with gpt(await rendered()) as llm:
        asked: Any = {"model": "m", "prompt": [301, 302, 303], "max_tokens": 4}
        if stream:
            options: Any = {"include_usage": True}
            events = [e async for e in await llm.completions.create(**asked, stream=True, stream_options=options)]
            usage = events[-1].usage
        else:
            usage = (await llm.completions.create(**asked)).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 4, 7)


RAW_TEXTS = [
    "  two blanks lead",
    "\n\n\tline ends and a tab\n\n ",
    "   ",
    "<think>\nso it is\n</think>\n\nan answer",
    "</think> closed what the prompt opened",
    "<think>never closed",
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "<think></think>",
]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_completion_is_what_was_sampled(
    engine: ScriptedEngine, rendered: Rendered, stream: bool, kind: str
) -> None:
    """No blank is left out and nothing is read into it, also when it is told again."""
    session = await rendered(kind=kind)
    async with gpt(session) as llm:
        for number, text in enumerate(RAW_TEXTS):
            says(engine, text)
            asked: Any = {"model": "m", "prompt": f"<think>{number}", "max_tokens": 99}
            for retry in ("0", "1"):
                headers = {"x-stainless-retry-count": retry}
                reply = await llm.completions.create(**asked, stream=stream, extra_headers=headers)
                if stream:
                    assert "".join([c.text async for event in reply for c in event.choices]) == text
                else:
                    assert reply.choices[0].text == text
    assert len(engine.calls) == len(RAW_TEXTS)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_a_text_completion_where_it_begins(
    engine: ScriptedEngine, rendered: Rendered, stream: bool
) -> None:
    async with gpt(await rendered()) as llm:
        says(engine, "\n\n <think>so STOP behind")
        reply: Any = await llm.completions.create(model="m", prompt="x", max_tokens=99, stop="STOP", stream=stream)
        text = "".join([c.text async for e in reply for c in e.choices]) if stream else reply.choices[0].text
    assert text == "\n\n <think>so "


async def test_offsets_of_streamed_tokens_are_where_their_text_begins(
    engine: ScriptedEngine, rendered: Rendered
) -> None:
    """Two choices whose pieces come in turns."""
    engine.stream_step = 2
    async with gpt(await rendered()) as llm:
        asked: Any = {"model": "m", "prompt": "x", "max_tokens": 6, "logprobs": 0, "n": 2}
        tokens: dict[int, list[str]] = {0: [], 1: []}
        offsets: dict[int, list[int]] = {0: [], 1: []}
        async for event in await llm.completions.create(**asked, stream=True):
            for choice in event.choices:
                if choice.logprobs is not None:
                    tokens[choice.index] += choice.logprobs.tokens or []
                    offsets[choice.index] += choice.logprobs.text_offset or []
    for index in (0, 1):
        assert len(tokens[index]) == 6
        assert offsets[index] == [sum(map(len, tokens[index][:i])) for i in range(6)]


async def test_the_window_bounds_text_prompts_too(engine: ScriptedEngine, rendered: Rendered) -> None:
    async with gpt(await rendered(context_tokens=100)) as llm:
        with pytest.raises(openai.BadRequestError) as caught:
            await llm.completions.create(model="m", prompt=[301] * 100, max_tokens=5)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "prompt"
        assert engine.calls == []
        await llm.completions.create(model="m", prompt=[301] * 90, max_tokens=5)


@pytest.mark.parametrize("prompt", ["", [], [-1, 301], [2**40], [True]])
async def test_a_prompt_of_nothing_or_of_no_tokens_is_refused_here(
    engine: ScriptedEngine, rendered: Rendered, prompt: Any
) -> None:
    async with gpt(await rendered()) as llm:
        with pytest.raises(openai.BadRequestError, match="prompt must") as caught:
            await llm.completions.create(model="m", prompt=prompt)
    assert caught.value.param == "prompt"
    assert engine.calls == []


# -- the window


async def test_an_answer_that_does_not_fit_is_not_called_a_prompt_that_is_too_long(
    engine: ScriptedEngine, rendered: Rendered
) -> None:
    session = await rendered(context_tokens=100)
    async with gpt(session) as llm, claude(session) as other:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 100 tokens") as chat:
            await llm.chat.completions.create(model="m", messages=USER, max_tokens=500)
        assert "prompt is too long" not in chat.value.message
        assert (chat.value.code, chat.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(openai.BadRequestError) as responses:
            await llm.responses.create(model="m", input="hi " * 200)
        assert (responses.value.code, responses.value.param) == ("context_length_exceeded", "input")
        # Words that agents on this provider look for: of a prompt alone, and of a prompt together with its answer.
        with pytest.raises(anthropic.BadRequestError, match="input and output tokens exceed your context limit"):
            await other.messages.create(model="m", messages=USER, max_tokens=500)
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await other.messages.create(model="m", messages=[{"role": "user", "content": "hi " * 200}], max_tokens=5)


async def test_an_agent_knows_an_engines_overflow_for_what_it_is(
    engine: ScriptedEngine, session: SessionHandle
) -> None:
    """As an agent of Strands does, which then makes its history shorter: by code or, with Anthropic, by words."""
    url, key = session.base_url, session.api_key
    root: Any = {"base_url": url.removesuffix("/v1"), "api_key": key, "max_retries": 0}
    keyed: Any = {"base_url": url, "api_key": key, "max_retries": 0}
    claudes = AnthropicModel(client_args=root, model_id="m", max_tokens=5)
    models = [claudes, OpenAIModel(client_args=keyed, model_id="m")]
    reply = error_body(400, "This model's maximum context length is 10 tokens. However, you requested 20 tokens.")
    for model in models:
        engine.faults.append(Fault(status=400, body=reply))
        with pytest.raises(ContextWindowOverflowException):
            _ = [event async for event in model.stream([{"role": "user", "content": [{"text": "hi"}]}])]
    await claudes.client.close()


LATE = {"message": "The input (9 tokens) is longer than the model's context length (5 tokens)."}


@pytest.mark.parametrize("wanted", [LATE, {**LATE, "type": "BadRequestError", "param": None, "code": 400}])
@pytest.mark.parametrize(
    ("kind", "renders", "dialect"),
    [
        ("sglang", False, "chat"),
        ("sglang", False, "completions"),
        ("sglang", False, "responses"),
        ("sglang", False, "anthropic"),
        ("vllm", True, "chat"),
        ("sglang", True, "chat"),
        ("sglang", True, "completions"),
        ("sglang", True, "responses"),
        ("sglang", True, "anthropic"),
    ],
)
async def test_an_overflow_that_the_engine_tells_within_its_stream_is_a_400(
    engine: ScriptedEngine, start_gateway: Start, kind: str, renders: bool, dialect: str, wanted: dict[str, Any]
) -> None:
    gateway = await start_gateway(engine, engine=kind, model_dir=str(MODEL) if renders else None)
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    event = b"data: " + json.dumps({"error": wanted}).encode() + b"\n\ndata: [DONE]\n\n"
    engine.faults.append(Fault(body=event, headers=(("content-type", "text/event-stream"),)))
    async with gpt(session) as llm, claude(session) as other:
        asks: dict[str, Callable[[], Awaitable[Any]]] = {
            "chat": lambda: llm.chat.completions.create(model="m", messages=USER, stream=True),
            "completions": lambda: llm.completions.create(model="m", prompt="hi", stream=True),
            "responses": lambda: llm.responses.create(model="m", input="hi", stream=True),
            "anthropic": lambda: other.messages.create(model="m", messages=USER, max_tokens=5, stream=True),
        }
        expected = anthropic.BadRequestError if dialect == "anthropic" else openai.BadRequestError
        with pytest.raises(expected, match=r"longer than the model's context length \(5 tokens\)") as caught:
            await asks[dialect]()
    if isinstance(caught.value, openai.BadRequestError):
        assert caught.value.code == "context_length_exceeded"
    else:
        assert "'message': \"prompt is too long: The input (9 tokens)" in caught.value.message


async def test_what_the_session_bounds_is_not_too_long_for_the_window(
    engine: ScriptedEngine, rendered: Rendered
) -> None:
    async with gpt(await rendered(context_tokens=100, max_tokens=10)) as llm:
        await llm.chat.completions.create(model="m", messages=USER, max_tokens=5000)
    assert engine.calls[-1].body["sampling_params"]["max_tokens"] == 10


async def test_a_field_that_only_the_engine_was_sent_is_not_named_to_the_agent(
    engine: ScriptedEngine, rendered: Rendered
) -> None:
    session = await rendered()
    reply = error_body(400).replace(b'"param": null', b'"param": "token_ids"')
    async with gpt(session) as llm:
        for path, ask in {
            "messages": lambda: llm.chat.completions.create(model="m", messages=USER),
            "prompt": lambda: llm.completions.create(model="m", prompt=[301]),
            "input": lambda: llm.responses.create(model="m", input="hi"),
        }.items():
            engine.faults.append(Fault(status=400, body=reply))
            with pytest.raises(openai.BadRequestError) as caught:
                await ask()
            assert caught.value.param == path


async def test_a_sampling_parameter_that_the_engine_refuses_has_the_agents_name(
    engine: ScriptedEngine, rendered: Rendered
) -> None:
    reply = error_body(400).replace(b'"param": null', b'"param": "sampling_params.top_p"')
    async with gpt(await rendered()) as llm:
        engine.faults.append(Fault(status=400, body=reply))
        with pytest.raises(openai.BadRequestError) as caught:
            await llm.chat.completions.create(model="m", messages=USER, top_p=0)
    assert caught.value.param == "top_p"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
async def test_what_a_template_gets_from_the_request_cannot_be_given_past_it(rendered: Rendered, name: str) -> None:
    given: Any = {"chat_template_kwargs": {"enable_thinking": False, name: False}}
    async with gpt(await rendered()) as llm:
        with pytest.raises(openai.BadRequestError) as caught:
            await llm.chat.completions.create(model="m", messages=USER, extra_body=given)
        assert caught.value.param == f"chat_template_kwargs.{name}"
        with pytest.raises(openai.BadRequestError) as caught:
            await llm.responses.create(model="m", input="hi", extra_body=given)
    assert caught.value.param == f"chat_template_kwargs.{name}"


# -- tools


async def test_no_call_is_made_of_an_answer_that_must_hold_none(engine: ScriptedEngine, rendered: Rendered) -> None:
    session = await rendered()
    says(engine, CALL)
    async with gpt(session) as llm:
        asked: Any = {"model": "m", "tools": TOOLS, "tool_choice": "none"}
        [choice] = (await llm.chat.completions.create(messages=USER, **asked)).choices
        assert (choice.message.tool_calls, choice.message.content, choice.finish_reason) == (None, CALL, "stop")
        assistant: Any = choice.message.model_dump(exclude_none=True)
        await llm.chat.completions.create(messages=[*USER, assistant, *USER], **asked)
    first, second = engine.calls
    assert second.body["token_ids"][: len(first.body["token_ids"]) + len(first.completion_ids[0])] == [
        *first.body["token_ids"],
        *first.completion_ids[0],
    ]


@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic"])
async def test_a_call_cannot_be_required_of_an_agent_without_tools(
    engine: ScriptedEngine, rendered: Rendered, dialect: str
) -> None:
    session = await rendered()
    any_call: Any = {"type": "any"}
    async with gpt(session) as llm, claude(session) as other:
        asks: dict[str, Callable[[], Awaitable[Any]]] = {
            "chat": lambda: llm.chat.completions.create(model="m", messages=USER, tool_choice="required"),
            "responses": lambda: llm.responses.create(model="m", input="hi", tool_choice="required"),
            "anthropic": lambda: other.messages.create(model="m", messages=USER, max_tokens=5, tool_choice=any_call),
        }
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="tool_choice"):
            await asks[dialect]()
    assert engine.calls == []


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "input[0].name"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {"x": 1}}, "input[0].arguments"),
        ({"type": "function_call_output", "call_id": "c"}, "input[0].output"),
        ({"type": "function_call_output", "output": "5"}, "input[0].call_id"),
    ],
)
async def test_an_item_of_a_call_that_lacks_a_part_is_named(session: SessionHandle, item: Any, param: str) -> None:
    async with gpt(session) as llm:
        with pytest.raises(openai.BadRequestError) as caught:
            await llm.responses.create(model="m", input=[item])
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("role", "block", "param"),
    [
        ("assistant", {"type": "tool_use", "name": "f", "input": {}}, "id"),
        ("assistant", {"type": "tool_use", "id": "t", "input": {}}, "name"),
        ("assistant", {"type": "tool_use", "id": "t", "name": "f", "input": "x"}, "input"),
        ("user", {"type": "tool_result", "content": "5"}, "tool_use_id"),
        ("user", {"type": "tool_result", "tool_use_id": "t", "content": "5", "is_error": "true"}, "is_error"),
        ("user", {"type": "tool_result", "tool_use_id": "t", "is_error": True}, "content"),
        ("user", {"type": "tool_result", "tool_use_id": "t", "content": " \n", "is_error": True}, "content"),
        (
            "user",
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": ""}], "is_error": True},
            "content",
        ),
    ],
)
async def test_a_block_of_a_call_that_lacks_a_part_is_named(
    session: SessionHandle, role: str, block: Any, param: str
) -> None:
    messages: Any = [*USER, {"role": role, "content": [block]}, *USER]
    async with claude(session) as llm:
        with pytest.raises(anthropic.BadRequestError, match=rf"messages\[1\]\.content\[0\]\.{param}"):
            await llm.messages.create(model="m", max_tokens=5, messages=messages)


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_own_tool_runner_goes_on_behind_tools_that_fail(
    engine: ScriptedEngine, session: SessionHandle, stream: bool
) -> None:
    @anthropic.beta_async_tool
    async def open_file(path: str) -> str:
        """Open a file."""
        if path == "missing":
            raise FileNotFoundError(path)
        return ""

    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps({"path": path})}}
        for i, (name, path) in enumerate([("open_file", "missing"), ("open_file", "empty"), ("no_tool", "x")])
    ]
    engine.replies.append({"content": None, "tool_calls": calls})
    async with claude(session) as llm:
        asked: Any = {"model": "m", "max_tokens": 50, "messages": USER, "tools": [open_file], "stream": stream}
        runner: Any = llm.beta.messages.tool_runner(**asked)
        with pytest.warns(UserWarning, match="no_tool"):
            last = await runner.until_done()
    assert last.stop_reason == "end_turn"
    assert len(engine.calls) == 2  # it asks for a thread first, is told that there are none, and goes on without
    results = [m for m in engine.calls[1].body["messages"] if m["role"] == "tool"]
    assert [m["content"] for m in results] == ["FileNotFoundError('missing')", "", "Error: Tool 'no_tool' not found"]
    assert [sorted(m) for m in results] == [["content", "role", "tool_call_id"]] * 3  # engines know nothing else


async def test_a_conversation_that_the_server_is_to_hold_is_refused_in_words_that_clients_understand(
    engine: ScriptedEngine, session: SessionHandle
) -> None:
    async with claude(session) as llm:
        asked: Any = {"model": "m", "max_tokens": 50, "messages": USER, "thread": {"type": "create"}}
        with pytest.raises(anthropic.BadRequestError, match=r"thread.*send all messages") as caught:
            await llm.beta.messages.create(**asked)
    assert engine.calls == []
    body: Any = caught.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


@pytest.mark.parametrize("kept", ["content", "encrypted_content"])
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_comes_back_by_whichever_part_of_its_item_a_client_keeps(
    engine: ScriptedEngine, session: SessionHandle, stream: bool, kept: str
) -> None:
    engine.replies.append({"content": "w1", "reasoning_content": "naïve, at first"})
    asked: Any = {"model": "m", "include": ["reasoning.encrypted_content"], "store": False}
    async with gpt(session) as llm:
        if stream:
            async with llm.responses.stream(input="hi", **asked) as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await llm.responses.create(input="hi", **asked)
        [reasoning, message] = [item.model_dump(exclude_none=True) for item in answer.output]
        item: Any = {"type": "reasoning", "id": reasoning["id"], "summary": [], kept: reasoning[kept]}
        await llm.responses.create(input=[*USER, item, message, *USER], **asked)
        assert engine.calls[-1].body["messages"][1]["reasoning_content"] == "naïve, at first"
        # What another provider sealed cannot be read, and what was only begun is none.
        for foreign in ("gAAAAABo", "base64:!", "base64:/w==", ""):
            item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": foreign}
            await llm.responses.create(input=[*USER, item, message, *USER], **asked)
            assert "reasoning_content" not in engine.calls[-1].body["messages"][1]


async def test_a_developers_message_reaches_templates_that_know_no_such_role(
    engine: ScriptedEngine, session: SessionHandle
) -> None:
    items: Any = [{"role": "developer", "content": "be kind"}, *USER]
    async with gpt(session) as llm:
        await llm.responses.create(model="m", input=items, instructions="be brief")
    answer = engine.calls[-1].body["messages"]
    assert [(m["role"], m["content"]) for m in answer[:2]] == [("system", "be brief"), ("system", "be kind")]


# -- what streams and answers say of themselves


async def test_a_message_stream_begins_with_the_size_of_its_prompt(engine: ScriptedEngine, rendered: Rendered) -> None:
    async with claude(await rendered()) as llm:
        events = [e async for e in await llm.messages.create(model="m", messages=USER, max_tokens=5, stream=True)]
    [began] = [e for e in events if e.type == "message_start"]
    assert began.message.usage.input_tokens == len(engine.calls[0].prompt_ids) > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_items_of_an_answer_that_was_cut_off_are_incomplete(
    engine: ScriptedEngine, session: SessionHandle, stream: bool
) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": '{"expr'}}
    engine.faults.append(Fault(edit=_cut))
    engine.replies.append({"content": "w1 w2", "reasoning_content": "hm", "tool_calls": [call]})
    closed: list[Any] = []
    async with gpt(session) as llm:
        asked: Any = {"model": "m", "input": "hi", "tools": RESPONSES_TOOLS}
        if stream:
            async for event in await llm.responses.create(**asked, stream=True):
                if event.type == "response.output_item.done":
                    closed.append(event.item)
                elif event.type == "response.incomplete":
                    answer = event.response
            assert closed == answer.output
        else:
            answer = await llm.responses.create(**asked)
    assert answer.status == "incomplete"
    last = answer.output[-1]
    assert last.type == "function_call"
    assert (last.arguments, last.status) == ('{"expr', "incomplete")
    assert answer.output[0].status == "completed"


def _cut(reply: dict[str, Any]) -> dict[str, Any]:
    for choice in reply["choices"]:
        if choice["finish_reason"] is not None:
            choice["finish_reason"] = "length"
    return reply


async def test_a_stop_string_that_the_agent_did_not_name_is_not_told_as_its_own(
    engine: ScriptedEngine, session: SessionHandle
) -> None:
    """SGLang also names the strings that its own conversation templates end with."""

    def stopped(reply: dict[str, Any]) -> dict[str, Any]:
        for choice in reply["choices"]:
            choice["matched_stop"] = choice.pop("stop_reason", None) or "<|im_end|>"
        return reply

    async with claude(session) as llm:
        engine.faults += [Fault(edit=stopped)] * 2
        reply = await llm.messages.create(model="m", max_tokens=50, messages=USER, stop_sequences=["zz"])
        assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
        async with llm.messages.stream(model="m", max_tokens=50, messages=USER) as events:
            reply = await events.get_final_message()
        assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)


async def test_thinking_counts_in_the_count_of_tokens(engine: ScriptedEngine, session: SessionHandle) -> None:
    async with claude(session) as llm:
        await llm.messages.count_tokens(model="m", messages=USER, thinking={"type": "disabled"})
    assert engine.requests[-1].path == "/tokenize"
    assert engine.requests[-1].body["chat_template_kwargs"] == {"enable_thinking": False}
