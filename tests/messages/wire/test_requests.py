"""Requests of every dialect -> one canonical request; what cannot be honoured is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentcore_rl_toolkit.messages.wire import (
    DIALECTS,
    Choice,
    Delta,
    ModelRequest,
    Reply,
    RequestError,
    ToolCall,
    ToolDelta,
    Usage,
    context_overflow,
    error_body,
)
from agentcore_rl_toolkit.messages.wire.anthropic import usage_dict as anthropic_usage
from agentcore_rl_toolkit.messages.wire.chat import overlay, parse_parameters
from agentcore_rl_toolkit.messages.wire.responses import usage_dict as responses_usage

FUNCTION = {"name": "look_up", "description": "d", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
ANTHROPIC_TOOL = {"name": "look_up", "description": "d", "input_schema": FUNCTION["parameters"]}
RESPONSES_TOOL = {"type": "function", **FUNCTION, "strict": None}
BASE: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "responses": {"model": "m", "input": "hi"},
    "anthropic": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "gemini": {"model": "m", "contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    "bedrock": {"messages": [{"role": "user", "content": [{"text": "hi"}]}]},
    "bedrock-invoke": {"anthropic_version": "", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
}


def parse(name: str, **fields: Any) -> ModelRequest:
    return DIALECTS[name].parse_request(json.dumps({**BASE[name], **fields}).encode())


def refused(name: str, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(name, **fields)
    assert caught.value.status == 400
    return caught.value


CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": 1}'}}
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "Looking.", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "found"},
    {"role": "user", "content": "thanks"},
]


def test_one_conversation_in_three_dialects_is_the_same() -> None:
    chat = parse("chat", messages=CONVERSATION, tools=[CHAT_TOOL])
    anthropic = parse(
        "anthropic",
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"q": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "found"}]},
                    {"type": "text", "text": "thanks"},
                ],
            },
        ],
        tools=[ANTHROPIC_TOOL],
    )
    responses = parse(
        "responses",
        instructions="be brief",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
            {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": '{"q": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "found"},
            {"role": "user", "content": "thanks"},
        ],
        tools=[RESPONSES_TOOL],
    )
    assert chat.messages == anthropic.messages == responses.messages == CONVERSATION
    assert chat.tools == anthropic.tools == responses.tools == [CHAT_TOOL]


def test_sampling_parameters_of_each_dialect() -> None:
    chat = parse(
        "chat",
        max_completion_tokens=50,
        max_tokens=40,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop="END",
        top_k=5,
        min_p=0.1,
    )
    assert chat.sampling.to_dict() == {
        "max_tokens": 40,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "stop": ["END"],
        "top_k": 5,
        "min_p": 0.1,
    }
    anthropic = parse("anthropic", temperature=1, top_k=4, stop_sequences=["A", "B"])
    assert anthropic.sampling.to_dict() == {"max_tokens": 9, "temperature": 1, "top_k": 4, "stop": ["A", "B"]}
    assert parse("responses", max_output_tokens=7).sampling.to_dict() == {"max_tokens": 7}
    assert parse("chat", ignore_eos=True, stop_token_ids=[3]).sampling.other == {
        "ignore_eos": True,
        "stop_token_ids": [3],
    }


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("chat", "required", "required"),
        ("chat", {"type": "function", "function": {"name": "look_up"}}, "tool:look_up"),
        ("anthropic", {"type": "any"}, "required"),
        ("anthropic", {"type": "tool", "name": "look_up"}, "tool:look_up"),
        ("anthropic", {"type": "none"}, "none"),
        ("responses", {"type": "function", "name": "look_up"}, "tool:look_up"),
        ("responses", "none", "none"),
        ("gemini", {"mode": "AUTO"}, "auto"),
        ("gemini", {"mode": "VALIDATED"}, "auto"),
        ("gemini", {"mode": "NONE"}, "none"),
        ("gemini", {"mode": "ANY"}, "required"),
        ("gemini", {"mode": "ANY", "allowedFunctionNames": ["look_up"]}, "tool:look_up"),
        ("bedrock", {"auto": {}}, "auto"),
        ("bedrock", {"any": {}}, "required"),
        ("bedrock", {"tool": {"name": "look_up"}}, "tool:look_up"),
    ],
)
def test_tool_choice_of_each_dialect(name, given, expected) -> None:
    if name == "gemini":
        more = {"tools": [{"functionDeclarations": [FUNCTION]}], "toolConfig": {"functionCallingConfig": given}}
    elif name == "bedrock":
        more = {"toolConfig": {"tools": [{"toolSpec": {"name": "look_up", "inputSchema": {}}}], "toolChoice": given}}
    else:
        tool = {"chat": CHAT_TOOL, "anthropic": ANTHROPIC_TOOL, "responses": RESPONSES_TOOL}[name]
        more = {"tools": [tool], "tool_choice": given}
    request = parse(name, **more)
    assert request.tool_choice == expected
    named = {"type": "function", "function": {"name": "look_up"}}
    sent = {"tool:look_up": named, "auto": None}.get(expected, expected)
    assert request.to_chat_body().get("tool_choice") == sent


@pytest.mark.parametrize("name", ["chat", "responses", "anthropic", "gemini", "bedrock", "bedrock-invoke"])
def test_each_dialect_takes_the_templates_variables_and_the_choice_of_single_calls(name: str) -> None:
    more = {"chat_template_kwargs": {"enable_thinking": False}, "parallel_tool_calls": False}
    asked = parse(name, **({"additionalModelRequestFields": more} if name == "bedrock" else more))
    assert (asked.template_kwargs, asked.parallel_tool_calls) == ({"enable_thinking": False}, False)


def test_a_tool_that_is_to_be_held_to_its_schema_says_so_in_each_dialect() -> None:
    chat = parse("chat", tools=[{"type": "function", "function": {**FUNCTION, "strict": True}}])
    anthropic = parse("anthropic", tools=[{**ANTHROPIC_TOOL, "strict": True}])
    responses = parse("responses", tools=[{**RESPONSES_TOOL, "strict": True}])
    assert chat.tools == anthropic.tools == responses.tools
    assert chat.tools[0]["function"]["strict"] is True


@pytest.mark.parametrize(
    ("name", "fields", "param"),
    [
        ("chat", {"functions": [{}]}, "functions"),
        ("chat", {"temperature": "hot"}, "temperature"),
        ("chat", {"temperature": True}, "temperature"),
        ("chat", {"max_tokens": 1.5}, "max_tokens"),
        ("chat", {"stop": [1]}, "stop[0]"),
        ("chat", {"top_logprobs": 3}, "top_logprobs"),
        ("chat", {"tool_choice": "sometimes"}, "tool_choice"),
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ("chat", {"tools": [{"type": "custom"}]}, "tools[0]"),
        ("chat", {"kv_transfer_params": {"x": 1}}, "kv_transfer_params"),
        ("chat", {"response_format": {"type": "xml"}}, "response_format.type"),
        ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": "hi"}, "messages"),
        ("chat", {"messages": [{"role": "alien"}]}, "messages[0]"),
        ("chat", {"messages": [{"role": "user", "content": 3}]}, "messages[0]"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0]"),
        ("chat", {"echo": True}, "echo"),
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"conversation": "c"}, "conversation"),
        ("responses", {"background": True}, "background"),
        ("responses", {"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0]"),
        ("responses", {"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ("anthropic", {"max_tokens": None}, "max_tokens"),
        ("anthropic", {"temperature": 1.5}, "temperature"),
        ("anthropic", {"tool_choice": {"type": "tool", "name": "nope"}}, "tool_choice"),
        ("anthropic", {"thinking": {"type": "deep"}}, "thinking.type"),
        ("anthropic", {"messages": [{"role": "user"}]}, "messages[0]"),
        ("bedrock", {"messages": [{"role": "user", "content": None}]}, "messages[0]"),
        (
            "anthropic",
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "messages[1]",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(name, fields, param) -> None:
    error = refused(name, **fields)
    assert error.param == param
    body = json.loads(error_body(name, error))
    assert param in json.dumps(body)


def said(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


STORED = {"type": "image", "source": {"type": "file", "file_id": "f"}}
UPLOADED = "https://generativelanguage.googleapis.com/v1beta/files/f"


@pytest.mark.parametrize(
    ("name", "field", "item"),
    [
        ("chat", "messages", said("user", {"type": "image_url", "image_url": {"file_id": "f"}})),
        ("responses", "input", said("user", {"type": "input_image", "file_id": "f"})),
        ("responses", "input", {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}),
        ("anthropic", "messages", said("user", STORED)),
        ("anthropic", "messages", said("user", {"type": "tool_result", "tool_use_id": "c", "content": [STORED]})),
        ("bedrock-invoke", "messages", said("user", STORED)),
        *(
            ("gemini", "contents", {"parts": [{"fileData": {"mimeType": "image/png", "fileUri": uri}}]})
            for uri in (UPLOADED, "gs://bucket/image.png")
        ),
    ],
)
def test_an_image_by_the_id_of_a_file_is_refused_with_the_ways_to_send_it(name: str, field: str, item: Any) -> None:
    error = refused(name, **{field: [item]})
    assert error.param == f"{field}[0]"
    assert "send the image's data (base64 or a data URL), or its URL" in json.dumps(error_body(name, error).decode())


def test_what_the_model_cannot_be_given_of_a_messages_request_is_text_or_left_out() -> None:
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "QQ=="}}
    note = {
        "type": "document",
        "title": "notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "buy milk"},
    }
    loaded = {"type": "tool_reference", "tool_name": "Grep"}
    call = {"type": "tool_use", "id": "c1", "name": "look_up", "input": {}}
    results = [
        {"type": "tool_result", "tool_use_id": each, "content": content, "is_error": failed}
        for each, content, failed in (("c1", [pdf, note], False), ("c2", [loaded], False), ("c3", "", True))
    ]
    request = parse(
        "anthropic",
        system="x-anthropic-billing-header: cc_version=2.1.332.28c; cch=abc;\nbe brief",
        messages=[
            said("user", {"type": "text", "text": "hi"}),
            said("assistant", {"type": "redacted_thinking", "data": "x"}, {"type": "server_tool_use", "id": "s"}, call),
            said("user", *results, {"type": "container_upload", "file_id": "f"}),
        ],
        tools=[ANTHROPIC_TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        mcp_servers=[{"url": "x"}],
        wings=2,
    )
    assert request.messages[0] == {"role": "system", "content": "be brief"}
    texts = [m["content"] for m in request.messages[3:]]
    assert texts == [
        "[document (application/pdf): the model reads text only; extract the text with another tool]\nnotes\nbuy milk",
        "The tool Grep is available now.",
        "The tool failed and said nothing.",
        "[container_upload: the model reads text only]",
    ]
    assert [tool["function"]["name"] for tool in request.tools] == ["look_up"]
    assert request.unknown == {"wings": 2, "mcp_servers": [{"url": "x"}]}


FREEFORM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "d",
    "format": {"syntax": "lark", "definition": "g"},
}


def test_what_the_model_cannot_be_given_of_a_responses_request_is_a_function_or_left_out() -> None:
    spaced = {"type": "namespace", "name": "multi_agent_v1", "tools": [RESPONSES_TOOL, FREEFORM]}
    request = parse(
        "responses",
        input=[
            {"type": "compaction", "encrypted_content": "sealed elsewhere"},
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_file", "file_id": "f"}]},
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin\n"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
            {
                "type": "function_call",
                "call_id": "c2",
                "name": "look_up",
                "namespace": "multi_agent_v1",
                "arguments": "{}",
            },
            {"type": "function_call_output", "call_id": "c2", "output": "found"},
        ],
        tools=[RESPONSES_TOOL, spaced, FREEFORM, {"type": "web_search"}],
        client_metadata={"turn_id": "t"},
        text={"verbosity": "low"},
        include=["reasoning.encrypted_content", "web_search_call.results"],
        truncation="auto",
    )
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == [
        "look_up",
        "multi_agent_v1__look_up",
        "multi_agent_v1__apply_patch",
        "apply_patch",
    ]
    assert "lark" in request.tools[3]["function"]["description"]
    calls = [c["function"] for m in request.messages for c in m.get("tool_calls", ())]
    assert calls == [
        {"name": "apply_patch", "arguments": '{"input": "*** Begin\\n"}'},
        {"name": "multi_agent_v1__look_up", "arguments": "{}"},
    ]
    assert request.messages[0]["content"] == "hi[input_file: the model reads text only]"


def test_calls_go_back_in_the_form_in_which_the_agent_declared_the_tool() -> None:
    request = parse(
        "responses",
        tools=[{"type": "namespace", "name": "ns", "tools": [RESPONSES_TOOL]}, FREEFORM],
    )
    calls = [
        ToolCall(id="c1", name="ns__look_up", arguments='{"q": 1}'),
        ToolCall(id="c2", name="apply_patch", arguments='{"input": "*** Begin"}'),
        ToolCall(id="c3", name="apply_patch", arguments="no JSON"),
    ]
    dialect = DIALECTS["responses"]
    reply = Reply(id="chatcmpl-1", choices=[Choice(tool_calls=calls, finish_reason="tool_calls")])
    whole = json.loads(dialect.encode_reply(reply, request))["output"]
    assert [{k: v for k, v in item.items() if k not in ("id", "status")} for item in whole] == [
        {"type": "function_call", "call_id": "c1", "name": "look_up", "namespace": "ns", "arguments": '{"q": 1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call", "call_id": "c3", "name": "apply_patch", "input": "no JSON"},
    ]
    encoder = dialect.encoder(request, reply_id="chatcmpl-1", model="m")
    sent = encoder.start()
    for i, call in enumerate(calls):
        sent += encoder.feed(Delta(tool_calls=[ToolDelta(index=i, id=call.id, name=call.name)]))
        for piece in (call.arguments[:4], call.arguments[4:]):
            sent += encoder.feed(Delta(tool_calls=[ToolDelta(index=i, arguments=piece)]))
    sent += encoder.feed(Delta(finish_reason="tool_calls")) + encoder.finish()
    events = [json.loads(line[6:]) for line in sent.decode().splitlines() if line.startswith("data: ")]
    assert events[-1]["response"]["output"] == whole
    inputs = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert inputs == ["*** Begin", "no JSON"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"null"])
@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_body_that_is_no_object_is_a_400(name, body) -> None:
    with pytest.raises(RequestError) as caught:
        DIALECTS[name].parse_request(body)
    assert caught.value.status == 400


NAMES = "role content type text name function input toolUse toolResult document source"
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(-2, 2) | st.sampled_from(["user", "text", "x", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES.split()), inner, max_size=4),
    max_leaves=8,
)
KINDS = "text image image_url tool_use tool_result thinking input_text input_image refusal"
PARTS = "text image_url source content input name id tool_use_id is_error thinking refusal detail"
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS.split())}, optional=dict.fromkeys(PARTS.split(), ANY_JSON)
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer"])},
        optional={
            "content": st.text(max_size=3) | st.lists(BLOCKS | ANY_JSON, max_size=2) | ANY_JSON,
            "tool_calls": st.lists(st.fixed_dictionaries({"function": ANY_JSON}) | ANY_JSON, max_size=2) | ANY_JSON,
            "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output"]),
            "summary": ANY_JSON,
            "output": ANY_JSON,
            "arguments": ANY_JSON,
            "reasoning": ANY_JSON,
        },
    ),
    max_size=3,
)
FIELDS = """
    messages input prompt system tools tool_choice temperature stop stop_sequences n logprobs top_logprobs stream
    stream_options response_format text reasoning thinking output_config metadata include max_tokens instructions
    inferenceConfig toolConfig outputConfig additionalModelRequestFields guardrailConfig
"""


@given(
    name=st.sampled_from(sorted(DIALECTS)),
    fields=st.dictionaries(st.sampled_from(FIELDS.split()), ANY_JSON, max_size=3),
    messages=st.none() | MESSAGES,
    tools=st.none() | st.lists(ANY_JSON, max_size=2),
)
@example(name="responses", fields={}, messages=None, tools=[{"type": []}])
@example(name="responses", fields={}, messages=[{"type": []}], tools=None)
def test_no_body_can_do_worse_than_a_400(name, fields, messages, tools) -> None:
    if messages is not None:
        fields["input" if name == "responses" else "messages"] = messages
    if tools is not None:
        fields["tools"] = tools
    body = json.dumps({**BASE[name], **fields}).encode()
    error = None
    try:
        json.dumps(DIALECTS[name].parse_request(body).to_chat_body())
    except RequestError as refusal:
        error = refusal
    if error is not None:
        assert error.status == 400
        assert json.loads(error_body(name, error))


GOOGLE_PARTS = """text thought functionCall functionResponse inlineData fileData function_response"""
GOOGLE_MEMBERS = """type TYPE nullable anyOf items properties minItems name args id response parts mimeType data fileUri mode
    allowedFunctionNames functionCallingConfig functionDeclarations parameters maxOutputTokens stopSequences responseSchema
    thinkingConfig thinkingBudget thinkingLevel responseMimeType candidateCount responseModalities"""
GOOGLE_FIELDS = "contents systemInstruction tools toolConfig generationConfig cachedContent"
GOOGLE_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.sampled_from(["add", "ANY", "OBJECT", "5", "\u00b2", ""]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(GOOGLE_MEMBERS.split()), inner, max_size=4)
    ),
    max_leaves=8,
)
GOOGLE_CONTENTS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "model", "function", None]),
            "parts": st.lists(
                st.dictionaries(st.sampled_from(GOOGLE_PARTS.split()), GOOGLE_JSON, max_size=2), max_size=2
            ),
        }
    ),
    max_size=3,
)


@given(
    fields=st.dictionaries(st.sampled_from(GOOGLE_FIELDS.split()), GOOGLE_JSON, max_size=3),
    contents=st.none() | GOOGLE_CONTENTS,
)
@example(fields={"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": 5}}}, contents=None)
@example(fields={"generationConfig": {"responseSchema": {"nullable": True, "anyOf": 5}}}, contents=None)
def test_no_body_of_google_can_do_worse_than_a_400(fields, contents) -> None:
    if contents is not None:
        fields["contents"] = contents
    error = RequestError()
    try:
        json.dumps(parse("gemini", **fields).to_chat_body())
    except RequestError as refusal:
        error = refusal
    assert json.loads(error_body("gemini", error))["error"]["status"] == "INVALID_ARGUMENT"


def test_a_prompt_that_is_too_long_is_said_in_each_providers_words() -> None:
    error = context_overflow(9000, 8192, max_tokens=100)
    chat = json.loads(error_body("chat", error))
    assert chat["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 8192 tokens" in chat["error"]["message"]
    anthropic = json.loads(error_body("anthropic", error))
    assert anthropic["error"]["type"] == "invalid_request_error"
    assert anthropic["error"]["message"].startswith("prompt is too long: 9000 tokens > 8192 maximum")
    foreign = RequestError("too many tokens", kind="context_overflow", param="input_ids")
    assert json.loads(error_body("anthropic", foreign))["error"]["message"] == "prompt is too long: too many tokens"
    assert json.loads(error_body("responses", foreign))["error"]["param"] == "input"
    google = json.loads(error_body("gemini", error))["error"]
    assert google["message"].startswith("The input token count exceeds the maximum number of tokens allowed")
    for message, shown in (("too large", "n: too large"), ("n is no number", "n is no number")):
        body = json.loads(error_body("anthropic", RequestError(message, param="sampling_params.n")))
        assert (body["error"]["message"], body["error"]["type"]) == (shown, "invalid_request_error")


def test_reasoning_effort_reaches_the_template() -> None:
    assert parse("chat", reasoning_effort="low").template_options() == {"reasoning_effort": "low"}
    quiet = parse("responses", reasoning={"effort": "none"}, chat_template_kwargs={"x": 1})
    assert quiet.template_options() == {"x": 1, "reasoning_effort": "none", "enable_thinking": False}


def test_no_usage_is_negative() -> None:
    usage = Usage(prompt_tokens=10, completion_tokens=1, cached_tokens=16)
    assert anthropic_usage(usage)["input_tokens"] == 0
    for details in (usage.to_dict()["prompt_tokens_details"], responses_usage(usage)["input_tokens_details"]):
        assert details["cached_tokens"] == 10
    for cached, prompt, shown in ((None, 5, 0), (3, None, 0), (-1, 5, 0), (2, 5, 2)):
        assert Usage(prompt_tokens=prompt, cached_tokens=cached).cached == shown


@pytest.mark.parametrize(
    ("dialect", "field", "lowest", "highest"),
    [
        ("chat", "top_logprobs", 0, 20),
        ("chat", "n", 1, 128),
        ("chat", "temperature", 0, 2),
        ("chat", "top_p", 0, 1),
        ("chat", "min_p", 0, 1),
        ("chat", "presence_penalty", -2, 2),
        ("chat", "frequency_penalty", -2, 2),
        ("chat", "max_tokens", 1, 2**63 - 1),
        ("chat", "seed", 1 - 2**63, 2**63 - 1),
        ("chat", "top_k", -1, 2**63 - 1),
        ("responses", "top_logprobs", 0, 20),
        ("responses", "max_output_tokens", 1, 2**63 - 1),
        ("anthropic", "temperature", 0, 1),
        ("anthropic", "max_tokens", 1, 2**63 - 1),
    ],
)
def test_numbers_are_taken_up_to_their_bounds(dialect: str, field: str, lowest: int, highest: int) -> None:
    for value in (lowest, highest):
        parse(dialect, logprobs=True, **{field: value})
    for value in (lowest - 1, highest + 1):
        assert refused(dialect, logprobs=True, **{field: value}).param == field


def test_a_budget_of_thinking_is_a_count() -> None:
    parse("anthropic", thinking={"type": "enabled", "budget_tokens": 0})
    assert refused("anthropic", thinking={"type": "enabled", "budget_tokens": -1}).param == "thinking.budget_tokens"


def test_the_schema_of_a_response_has_the_members_that_chat_completions_know() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {}, "strict": None, "description": "d", "more": 1}
    shape = parse("responses", text={"format": form}).response_format
    assert shape == {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "description": "d"}}
    for missing in ({"type": "json_schema"}, {"type": "grammar", "schema": {}}):
        assert refused("responses", text={"format": missing}).param == "text.format.type"


@pytest.mark.parametrize(
    ("dialect", "tool", "choice"),
    [
        ("chat", CHAT_TOOL, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}),
        ("responses", RESPONSES_TOOL, {"type": "allowed_tools", "mode": "required", "tools": []}),
    ],
)
def test_allowed_tools_are_required_where_their_mode_says_so(dialect: str, tool: Any, choice: Any) -> None:
    assert parse(dialect, tools=[tool], tool_choice=choice).tool_choice == "required"
    assert parse(dialect, tool_choice=choice).tool_choice == "auto"
    free = json.loads(json.dumps(choice).replace("required", "auto"))
    assert parse(dialect, tools=[tool], tool_choice=free).tool_choice == "auto"


def test_a_chat_body_has_what_was_asked_for_and_nothing_else() -> None:
    assert parse("chat").to_chat_body() == BASE["chat"]
    asked: dict[str, Any] = {
        **{"tools": [CHAT_TOOL], "parallel_tool_calls": False, "n": 2, "logprobs": True, "top_logprobs": 3},
        **{"response_format": {"type": "json_object"}, "reasoning_effort": "low", "chat_template_kwargs": {"x": 1}},
        **{"temperature": 0.5, "stream": True, "stream_options": {"include_usage": True}},
    }
    assert parse("chat", **asked).to_chat_body() == {**BASE["chat"], **asked}
    call = {"id": "c", "type": "function", "function": {"name": "f"}}
    [message] = parse("chat", messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_what_needs_an_ability_of_the_engine_is_listed() -> None:
    tool = {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    shape = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}
    asked = parse("anthropic", stop_sequences=["A"], **tool, **shape)
    assert asked.features() == ["tool_choice", "parallel_tool_calls", "response_format", "stop"]
    assert parse("chat", tools=[CHAT_TOOL], seed=3).features() == ["seed"]
    penalties = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}
    neutral = parse("chat", parallel_tool_calls=False, top_k=-1, min_p=0, best_of=1, **penalties)
    assert neutral.features() == []


def test_logprobs_of_a_response_are_asked_for_in_two_ways() -> None:
    included = parse("responses", include=["message.output_text.logprobs"])
    assert (included.logprobs, included.top_logprobs) == (True, 0)
    assert (parse("responses", top_logprobs=2).logprobs, parse("responses").logprobs) == (True, False)


def test_a_sessions_parameters_are_read_and_laid_over_a_request() -> None:
    forced = {"type": "function", "function": {"name": "look_up"}}
    assert parse_parameters({"temperature": 0.5, "tool_choice": forced}).tool_choice == "tool:look_up"
    for params in ({"tool_choice": {"type": "allowed_tools"}}, {"tools": [{"type": "web_search"}]}):
        with pytest.raises(RequestError):
            parse_parameters(params)
    asked = parse("chat", temperature=1, seed=5)
    overlay(asked, {"messages": [], "temperature": 0.5, "wings": 2})
    assert asked.messages == BASE["chat"]["messages"]
    assert asked.sampling.to_dict() == {"temperature": 0.5, "wings": 2}
