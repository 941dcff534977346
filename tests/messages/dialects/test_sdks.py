"""The providers' own clients, over HTTP, against what the dialects write."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from agentcore_rl_toolkit.messages.dialects import Choice, Delta, RequestError, ToolDelta, Usage, context_overflow

FUNCTION = {"name": "look_up", "description": "d", "parameters": {"type": "object", "properties": {}}}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOLS: Any = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": NOW}]
ASK: Any = [{"role": "user", "content": "hi"}]
ARGUMENTS = {"query": "naïve \n x", "limit": 3}


@pytest.fixture
def oai(provider):
    with openai.OpenAI(base_url=provider.url + "/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
def ant(provider):
    with anthropic.Anthropic(base_url=provider.url, api_key="k", max_retries=0) as client:
        yield client


def test_chat(oai, provider, full_reply) -> None:
    provider.reply = full_reply
    answer = oai.chat.completions.create(model="small", messages=ASK, tools=CHAT_TOOLS, max_tokens=50)
    message = answer.choices[0].message
    assert message.content == "Let me look."
    assert message.reasoning_content == "They want two things."
    assert [(c.id, c.function.name) for c in message.tool_calls] == [("call_a", "look_up"), ("call_b", "now")]
    assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (20, 5)
    assert provider.requests[0].sampling.max_tokens == 50
    # What the client got can be sent back as it is.
    again = [*ASK, message.model_dump(), {"role": "tool", "tool_call_id": "call_a", "content": "r"}]
    oai.chat.completions.create(model="small", messages=again, tools=CHAT_TOOLS)
    assert provider.requests[1].messages[1]["tool_calls"][0]["id"] == "call_a"


def test_chat_streamed_into_the_clients_own_accumulator(oai, provider, full_reply) -> None:
    provider.reply = full_reply
    with oai.chat.completions.stream(
        model="small", messages=ASK, tools=CHAT_TOOLS, stream_options={"include_usage": True}
    ) as stream:
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Let me look."
    assert [c.function.name for c in message.tool_calls] == ["look_up", "now"]
    assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS
    assert final.usage.total_tokens == 50


def test_chat_streamed_n_and_logprobs(oai, provider) -> None:
    entry = {"token": "a", "logprob": -0.25, "bytes": [97], "top_logprobs": []}
    provider.deltas = [
        Delta(choice=0, text="a", logprob_entries=[entry]),
        Delta(choice=1, text="b"),
        Delta(choice=0, finish_reason="stop"),
        Delta(choice=1, finish_reason="length"),
        Delta(usage=Usage(prompt_tokens=1, completion_tokens=2)),
    ]
    text = {0: "", 1: ""}
    logprobs = []
    finished = {}
    for chunk in oai.chat.completions.create(model="m", messages=ASK, n=2, logprobs=True, stream=True):
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            if choice.logprobs:
                logprobs += [e.logprob for e in choice.logprobs.content]
            if choice.finish_reason:
                finished[choice.index] = choice.finish_reason
    assert text == {0: "a", 1: "b"}
    assert logprobs == [-0.25]
    assert finished == {0: "stop", 1: "length"}


def test_completions(oai, provider) -> None:
    provider.reply.choices = [Choice(content="there", finish_reason="length")]
    answer = oai.completions.create(model="m", prompt="hi", max_tokens=3)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("there", "length")
    chunks = list(oai.completions.create(model="m", prompt=[1, 2, 3], stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "there"
    assert provider.requests[1].prompt == [1, 2, 3]


def test_responses(oai, provider, full_reply) -> None:
    provider.reply = full_reply
    tools: Any = [{"type": "function", **FUNCTION}, {"type": "function", **NOW}]
    answer = oai.responses.create(model="small", input="hi", tools=tools, instructions="be brief")
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output_text == "Let me look."
    assert answer.output[0].content[0].text == "They want two things."
    assert json.loads(answer.output[2].arguments) == ARGUMENTS
    assert (answer.status, answer.usage.total_tokens) == ("completed", 50)
    # The output goes back as input, the way agents do it.
    following: Any = [
        {"role": "user", "content": "hi"},
        *[item.model_dump(exclude_none=True) for item in answer.output],
        {"type": "function_call_output", "call_id": "call_a", "output": "r"},
        {"type": "function_call_output", "call_id": "call_b", "output": "s"},
    ]
    oai.responses.create(model="small", input=following, tools=tools)
    roles = [m["role"] for m in provider.requests[1].messages]
    assert roles == ["user", "assistant", "tool", "tool"]
    outcome = provider.requests[1].messages[1]
    assert (outcome["content"], outcome["reasoning_content"]) == ("Let me look.", "They want two things.")
    assert len(outcome["tool_calls"]) == 2


def test_responses_streamed_into_the_clients_own_accumulator(oai, provider, full_reply) -> None:
    provider.reply = full_reply
    kinds = []
    with oai.responses.stream(model="small", input="hi") as stream:
        for event in stream:
            kinds.append(event.type)
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert {"response.reasoning_text.delta", "response.output_text.delta"} <= set(kinds)
    assert final.output_text == "Let me look."
    assert [item.name for item in final.output if item.type == "function_call"] == ["look_up", "now"]
    assert final.usage.output_tokens_details.reasoning_tokens == 6


def test_structured_output_is_parsed_by_the_client(oai, provider) -> None:
    import pydantic

    class Point(pydantic.BaseModel):
        x: int

    provider.reply.choices = [Choice(content='{"x": 7}', finish_reason="stop")]
    answer = oai.chat.completions.parse(model="m", messages=ASK, response_format=Point)
    assert answer.choices[0].message.parsed == Point(x=7)
    assert provider.requests[0].response_format["json_schema"]["schema"]["properties"]["x"] == {
        "title": "X",
        "type": "integer",
    }
    other = oai.responses.parse(model="m", input="hi", text_format=Point)
    assert other.output_parsed == Point(x=7)


ANTHROPIC_TOOLS: Any = [{"name": "look_up", "description": "d", "input_schema": FUNCTION["parameters"]}]


def test_messages(ant, provider, full_reply) -> None:
    provider.reply = full_reply
    answer = ant.messages.create(model="small", max_tokens=50, messages=ASK, tools=ANTHROPIC_TOOLS, system="be brief")
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.content[0].thinking == "They want two things."
    assert answer.content[2].input == ARGUMENTS
    assert answer.stop_reason == "tool_use"
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (15, 5)
    following: Any = [
        *ASK,
        {"role": "assistant", "content": [b.model_dump() for b in answer.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_a", "content": "r"}]},
    ]
    ant.messages.create(model="small", max_tokens=50, messages=following, tools=ANTHROPIC_TOOLS)
    messages = provider.requests[1].messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool"]
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS


def test_messages_streamed_into_the_clients_own_accumulator(ant, provider, full_reply) -> None:
    provider.reply = full_reply
    with ant.messages.stream(model="small", max_tokens=50, messages=ASK, tools=ANTHROPIC_TOOLS) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert final.content[1].text == "Let me look."
    assert final.content[2].input == ARGUMENTS
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", 30)


def test_tool_arguments_arrive_in_pieces(ant, oai, provider) -> None:
    provider.deltas = [
        Delta(text="ok"),
        Delta(tool_calls=[ToolDelta(index=0, id="call_a", name="look_up", arguments='{"li')]),
        Delta(tool_calls=[ToolDelta(index=0, arguments='mit": 3}')]),
        Delta(finish_reason="tool_calls", usage=Usage(prompt_tokens=1, completion_tokens=2)),
    ]
    with ant.messages.stream(model="m", max_tokens=9, messages=ASK, tools=ANTHROPIC_TOOLS) as stream:
        assert stream.get_final_message().content[1].input == {"limit": 3}
    with oai.responses.stream(model="m", input="hi") as events:
        assert events.get_final_response().output[1].arguments == '{"limit": 3}'


@pytest.mark.parametrize(
    ("kind", "openai_error", "anthropic_error"),
    [
        ("invalid_request", openai.BadRequestError, anthropic.BadRequestError),
        ("authentication", openai.AuthenticationError, anthropic.AuthenticationError),
        ("permission", openai.PermissionDeniedError, anthropic.PermissionDeniedError),
        ("model_not_found", openai.NotFoundError, anthropic.NotFoundError),
        ("rate_limit", openai.RateLimitError, anthropic.RateLimitError),
        ("internal", openai.InternalServerError, anthropic.InternalServerError),
        ("upstream", openai.InternalServerError, anthropic.InternalServerError),
    ],
)
def test_errors_become_the_clients_own_classes(oai, ant, provider, kind, openai_error, anthropic_error) -> None:
    provider.error = RequestError("what went wrong", kind=kind, param="messages")
    for prompt, call in (
        ("messages", lambda: oai.chat.completions.create(model="m", messages=ASK)),
        ("input", lambda: oai.responses.create(model="m", input="hi")),
    ):
        with pytest.raises(openai_error, match="what went wrong") as caught:
            call()
        assert caught.value.param == prompt
    with pytest.raises(anthropic_error, match="what went wrong"):
        ant.messages.create(model="m", max_tokens=9, messages=ASK)


def test_context_overflow_is_what_agents_look_for(oai, ant, provider) -> None:
    provider.error = context_overflow(9000, 8192)
    with pytest.raises(openai.BadRequestError) as caught:
        oai.chat.completions.create(model="m", messages=ASK)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ant.messages.create(model="m", max_tokens=9, messages=ASK)


def test_an_error_in_the_middle_of_a_stream_is_raised(oai, ant, provider) -> None:
    provider.error_in_stream = RequestError("the engine died", kind="upstream")
    with pytest.raises(openai.APIError, match="the engine died"):
        list(oai.chat.completions.create(model="m", messages=ASK, stream=True))
    with (
        pytest.raises(anthropic.APIStatusError, match="the engine died"),
        ant.messages.stream(model="m", max_tokens=9, messages=ASK) as stream,
    ):
        stream.get_final_message()


def test_an_unknown_field_is_named_to_the_client(oai) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        oai.chat.completions.create(model="m", messages=ASK, extra_body={"lora_path": "x"})
    assert caught.value.param == "lora_path"
    assert caught.value.code == "unsupported_parameter"
