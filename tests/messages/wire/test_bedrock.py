"""Requests of Bedrock's Converse API: what each member and block becomes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from botocore.eventstream import EventStream
from botocore.exceptions import EventStreamError
from botocore.parsers import create_parser
from botocore.session import get_session

from agentcore_rl_toolkit.messages.errors import KINDS, RequestError
from agentcore_rl_toolkit.messages.wire import ModelRequest
from agentcore_rl_toolkit.messages.wire.bedrock import (
    CONVERSE,
    COUNT,
    INVOKE,
    error_event,
    parse_request,
    route_of,
)
from agentcore_rl_toolkit.messages.wire.fields import with_path

USER = {"role": "user", "content": [{"text": "hi"}]}


def parse(*messages: Any, **more: Any) -> ModelRequest:
    return parse_request({"messages": list(messages) or [USER], **more})


def test_the_path_has_the_model_the_kind_of_reply_and_perhaps_a_key() -> None:
    arn = b"arn%3Aaws%3Abedrock%3Aus-west-2%3A1%3Ainference-profile%2Fus.m-v1%3A0"
    for begin in (b"bedrock/model/", b"bedrock/sk-1/model/"):
        for operation, pattern, stream in (
            (b"converse", CONVERSE, False),
            (b"converse-stream", CONVERSE, True),
            (b"invoke", INVOKE, False),
            (b"invoke-with-response-stream", INVOKE, True),
            (b"count-tokens", COUNT, False),
        ):
            route = route_of(begin + arn + b"/" + operation)
            assert route == (pattern, "arn:aws:bedrock:us-west-2:1:inference-profile/us.m-v1:0", stream)
    assert route_of(b"bedrock/model/m/async-invoke") is route_of(b"bedrock/model/m") is None
    route = route_of(b"bedrock/model/m/converse-stream")
    assert route is not None
    asked = parse_request(with_path(b'{"messages": [{"role": "user", "content": [{"text": "hi"}]}]}', route))
    assert (asked.model, asked.stream) == ("m", True)


@pytest.mark.parametrize("given", [b"", b'"model": "other", "stream": true', b'"stream": true, "model": "other"'])
def test_the_path_decides_the_model_and_the_kind_of_reply(given: bytes) -> None:
    route = route_of(b"bedrock/model/m/invoke")
    assert route is not None
    body = msgspec.json.decode(with_path(b" {%s }\n" % given, route))
    assert body == {"model": "m", "stream": False}
    for broken in (b"", b"[]", b'{"a": 1', b'{"a": 1,}', b'{"a": 1}}', b'{"a": {"b": 1}'):
        with pytest.raises(msgspec.DecodeError):
            msgspec.convert(msgspec.json.decode(with_path(broken, route)), dict)


def test_fields_of_the_model_and_the_effort_are_read() -> None:
    fields = {"top_k": 4, "thinking": {"type": "enabled", "budget_tokens": 9}, "wings": 2}
    asked = parse(additionalModelRequestFields=fields, inferenceConfig={"topP": 0.5}, outputConfig={"effort": "low"})
    assert (asked.sampling.top_k, asked.sampling.top_p, asked.reasoning_effort) == (4, 0.5, "low")
    assert (asked.template_kwargs, asked.unknown) == ({"enable_thinking": True}, {"wings": 2})


class _Sent:
    """The body of a streamed reply, as botocore reads it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def stream(self) -> Iterator[bytes]:
        yield self._data


@pytest.mark.parametrize("operation", ["ConverseStream", "InvokeModelWithResponseStream"])
@pytest.mark.parametrize("kind", KINDS)
def test_botocore_reads_the_name_and_the_words_of_each_error_in_a_stream(operation: str, kind: str) -> None:
    shape = get_session().get_service_model("bedrock-runtime").operation_model(operation).get_event_stream_output()
    sent = error_event(RequestError("some words", kind=kind))
    parser = create_parser("rest-json")._event_stream_parser
    with pytest.raises(EventStreamError, match=r"\(\w+Exception\).*some words"):
        list(EventStream(_Sent(sent), shape, parser, operation))


def test_blocks_of_an_assistant() -> None:
    blocks = [
        {"reasoningContent": {"reasoningText": {"text": "hmm", "signature": "s"}}},
        {"reasoningContent": {"redactedContent": "eA=="}},
        {"text": "a"},
        {"citationsContent": {"content": [{"text": "b"}], "citations": []}},
        {"cachePoint": {"type": "default"}},
        {"toolUse": {"toolUseId": "1", "name": "add", "input": {"x": 1}}},
    ]
    asked = parse(USER, {"role": "assistant", "content": blocks}, USER)
    message = asked.messages[1]
    assert (message["content"], message["reasoning_content"]) == ("ab", "hmm")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x": 1}'}
    assert asked.left_out == {"redactedContent": 1, "citations": 1}


def test_a_member_that_is_null_is_absent() -> None:
    assert parse({"role": "user", "content": [{"text": "a", "image": None}]}).messages[0]["content"] == "a"


def test_blocks_of_a_user_and_of_tool_results() -> None:
    result = {"toolUseId": "1", "content": [{"json": [1]}, {"searchResult": {}}], "status": "error"}
    guarded = {"guardContent": {"text": {"text": "g"}}}
    note = {"document": {"name": "n", "context": "why", "source": {"content": [{"text": "d"}]}}}
    asked = parse({"role": "user", "content": [guarded, {"toolResult": result}, note]}, system=[{"text": "s"}, guarded])
    assert asked.messages == [
        {"role": "system", "content": "s\ng"},
        {"role": "tool", "tool_call_id": "1", "content": "[1]\n[searchResult: the model reads text only]"},
        {"role": "user", "content": "g\nn\nwhy\nd"},
    ]
    assert asked.left_out == {"status": 1, "searchResult": 1}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"inferenceConfig": {"maxTokens": "x"}}, "maxTokens"),
        ({"toolConfig": {"tools": [{"toolSpec": {"name": 1}}]}}, "toolConfig.tools[0]"),
        ({"toolConfig": {"tools": [], "toolChoice": {"any": {}}}}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": [{"text": "It is"}]}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"text": "a", "cachePoint": {}}]}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": []}]}, "messages[0]"),
        ({"additionalModelRequestFields": {"tools": [{"type": "bash"}]}}, "additionalModelRequestFields.tools"),
    ],
)
def test_an_error_names_its_field(more: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**more)
    assert (caught.value.status, caught.value.param) == (400, param)
