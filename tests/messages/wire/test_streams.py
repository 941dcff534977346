"""Streams of all dialects, as they are written."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
from botocore.eventstream import EventStreamBuffer
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.messages.wire import (
    DIALECTS,
    Choice,
    Delta,
    ModelRequest,
    Reply,
    ToolCall,
    ToolDelta,
    Usage,
)
from agentcore_rl_toolkit.messages.wire.canonical import Sampling, new_id, own_id

CHATTY = ["chat", "responses", "anthropic", "bedrock", "bedrock-invoke"]
Call = tuple[str, str, str]


def stream(name: str, deltas: list[Delta], **more: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    request = ModelRequest(dialect=name, model="m", stream=True, include_usage=True, **more)
    encoder = DIALECTS[name].encoder(request, reply_id="chatcmpl-9", model="m", created=5)
    data = encoder.start() + b"".join(encoder.feed(delta) for delta in deltas) + encoder.finish()
    if name.startswith("bedrock"):
        buffer = EventStreamBuffer()
        buffer.add_data(data)
        return [{"type": m.headers[":event-type"], **json.loads(m.payload)} for m in buffer]
    return [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: {")]


def of_chat(events: list[dict[str, Any]]) -> tuple[str, str, list[Call], str]:
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(c["delta"].get("content") or "" for c in choices)
    thoughts = "".join(c["delta"].get("reasoning_content", "") for c in choices)
    calls: dict[int, list[str]] = {}
    for piece in (piece for c in choices for piece in c["delta"].get("tool_calls", ())):
        call = calls.setdefault(piece["index"], [piece.get("id", ""), piece["function"].get("name", ""), ""])
        call[2] += piece["function"]["arguments"]
    return text, thoughts, [(a, b, c) for a, b, c in calls.values()], choices[-1]["finish_reason"]


def of_anthropic(events: list[dict[str, Any]]) -> tuple[str, str, list[Call], str]:
    blocks: list[dict[str, Any]] = []
    pieces: list[list[str]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            pieces.append([])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            pieces[event["index"]].append(delta.get("text") or delta.get("thinking") or delta.get("partial_json") or "")
    found = [(block, "".join(piece)) for block, piece in zip(blocks, pieces, strict=True)]
    reason = next(event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta")
    return (
        "".join(text for block, text in found if block["type"] == "text"),
        "".join(text for block, text in found if block["type"] == "thinking"),
        [(block["id"], block["name"], text) for block, text in found if block["type"] == "tool_use"],
        {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}[reason],
    )


def of_responses(events: list[dict[str, Any]]) -> tuple[str, str, list[Call], str]:
    response = events[-1]["response"]
    items = response["output"]
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    thoughts = "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["content"])
    calls = [(item["call_id"], item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    streamed = ["".join(d["delta"] for d in deltas if d["output_index"] == place) for place in range(len(items))]
    assert [text for text in streamed if text] == [arguments for _, _, arguments in calls]
    finish = "length" if response["status"] == "incomplete" else "tool_calls" if calls else "stop"
    return text, thoughts, calls, finish


def of_gemini(events: list[dict[str, Any]]) -> tuple[str, str, list[Call], str]:
    parts = [part for event in events for part in event["candidates"][0]["content"]["parts"]]
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    reason = {"STOP": "tool_calls" if calls else "stop", "MAX_TOKENS": "length"}
    assert [("finishReason" in event["candidates"][0], "usageMetadata" in event) for event in events] == [
        *[(False, False)] * (len(events) - 1),
        (True, True),
    ]
    return (
        "".join(part["text"] for part in parts if "text" in part and "thought" not in part),
        "".join(part["text"] for part in parts if part.get("thought")),
        [(call["id"], call["name"], json.dumps(call["args"])) for call in calls],
        reason[events[-1]["candidates"][0]["finishReason"]],
    )


def of_bedrock(events: list[dict[str, Any]]) -> tuple[str, str, list[Call], str]:
    calls: dict[int, list[str]] = {}
    text = thoughts = ""
    for event in events:
        if event["type"] == "contentBlockStart":
            call = event["start"]["toolUse"]
            calls[event["contentBlockIndex"]] = [call["toolUseId"], call["name"], ""]
        elif event["type"] == "contentBlockDelta":
            delta = event["delta"]
            text += delta.get("text", "")
            thoughts += delta.get("reasoningContent", {}).get("text", "")
            if "toolUse" in delta:
                calls[event["contentBlockIndex"]][2] += delta["toolUse"]["input"]
    reason = next(event["stopReason"] for event in events if event["type"] == "messageStop")
    finish = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}[reason]
    return text, thoughts, [(a, b, c) for a, b, c in calls.values()], finish


def of_invoke(events: list[dict[str, Any]]) -> tuple[str, str, list[Call], str]:
    return of_anthropic([json.loads(base64.b64decode(event["bytes"])) for event in events])


READERS = {
    "chat": of_chat,
    "anthropic": of_anthropic,
    "responses": of_responses,
    "gemini": of_gemini,
    "bedrock": of_bedrock,
    "bedrock-invoke": of_invoke,
}

WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
CALLS = st.lists(
    st.builds(
        ToolCall,
        id=st.uuids().map(lambda u: f"call_{u.hex[:8]}"),
        name=st.sampled_from(["look_up", "now"]),
        arguments=st.dictionaries(WORDS, st.integers() | WORDS, max_size=3).map(json.dumps),
    ),
    max_size=3,
    unique_by=lambda c: c.id,
)


@given(
    name=st.sampled_from(sorted(READERS)),
    thoughts=st.lists(WORDS, max_size=3),
    texts=st.lists(WORDS, max_size=4),
    calls=CALLS,
    data=st.data(),
)
def test_any_answer_survives_any_dialect(name, thoughts, texts, calls, data) -> None:
    deltas = [Delta(reasoning=t) for t in thoughts] + [Delta(text=t) for t in texts]
    halves = [data.draw(st.integers(1, len(call.arguments))) for call in calls]
    first = [
        ToolDelta(index=i, id=c.id, name=c.name, arguments=c.arguments[:h])
        for i, (c, h) in enumerate(zip(calls, halves, strict=True))
    ]
    rest = [ToolDelta(index=i, arguments=c.arguments[h:]) for i, (c, h) in enumerate(zip(calls, halves, strict=True))]
    pieces = (
        [*first, *rest] if data.draw(st.booleans()) else [p for pair in zip(first, rest, strict=True) for p in pair]
    )
    deltas += [Delta(tool_calls=[piece]) for piece in pieces]
    finish = "tool_calls" if calls else data.draw(st.sampled_from(["stop", "length"]))
    deltas.append(Delta(finish_reason=finish, usage=Usage(prompt_tokens=1, completion_tokens=2)))
    wanted = [(c.id, c.name, c.arguments) for c in calls]
    assert READERS[name](stream(name, deltas)) == ("".join(texts), "".join(thoughts), wanted, finish)
    if name not in ("chat", "responses"):
        rest = [delta for delta in deltas if not delta.reasoning]
        assert stream(name, deltas, include_thinking=False) == stream(name, rest)


ENTRY = {"token": "b"}
ANSWER = [
    Delta(reasoning="a"),
    Delta(text="b", logprob_entries=[ENTRY]),
    Delta(choice=1, text="of another choice"),
    Delta(tool_calls=[ToolDelta(index=0, name="f", arguments="{}")]),
    Delta(tool_calls=[ToolDelta(index=1, name="g")]),
    Delta(finish_reason="length", usage=Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2)),
]


def test_a_response_stream_has_numbered_events_and_whole_items_at_the_end() -> None:
    events = stream("responses", ANSWER, logprobs=True)
    assert [event["sequence_number"] for event in events] == list(range(22))
    assert [(e["output_index"], e["content_index"], e["item_id"]) for e in events if "content_index" in e] == [
        *[(0, 0, "rs_9-0")] * 4,
        *[(1, 0, "msg_9-0")] * 4,
    ]
    assert [(e["output_index"], e["item"]["id"], e["item"]["status"]) for e in events if "item" in e] == [
        *((0, "rs_9-0", "in_progress"), (0, "rs_9-0", "completed")),
        *((1, "msg_9-0", "in_progress"), (1, "msg_9-0", "completed")),
        *((2, "fc_9-0", "in_progress"), (2, "fc_9-0", "completed")),
        *((3, "fc_9-1", "in_progress"), (3, "fc_9-1", "incomplete")),
    ]
    called = [(e["type"].split(".")[-1], e["output_index"], e["item_id"]) for e in events if "call_arg" in e["type"]]
    assert called == [("delta", 2, "fc_9-0"), ("done", 2, "fc_9-0"), ("done", 3, "fc_9-1")]
    text = {"type": "output_text", "text": "b", "annotations": [], "logprobs": [ENTRY]}
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "base64:YQ=="}
    thought |= {"id": "rs_9-0", "status": "completed", "content": [{"type": "reasoning_text", "text": "a"}]}
    said = {"type": "message", "role": "assistant", "id": "msg_9-0", "status": "completed", "content": [text]}
    assert events[-1]["response"]["output"][:2] == [thought, said]
    assert [e["part"] for e in events if "part" in e][1::2] == [thought["content"][0], text]
    assert [(e["text"], e.get("logprobs")) for e in events if "text" in e] == [("a", None), ("b", [ENTRY])]


def test_a_message_stream_and_the_whole_message_have_the_same_blocks() -> None:
    request = ModelRequest(dialect="anthropic", model="m", counted=Usage(prompt_tokens=7))
    encoder = DIALECTS["anthropic"].encoder(request, reply_id="chatcmpl-9")
    data = encoder.start() + b"".join(map(encoder.feed, ANSWER)) + encoder.finish()
    events = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: {")]
    assert [(e["type"].removeprefix("content_block_"), e["index"]) for e in events if "index" in e] == [
        *(("start", 0), ("delta", 0), ("delta", 0), ("stop", 0), ("start", 1), ("delta", 1), ("stop", 1)),
        *(("start", 2), ("delta", 2), ("stop", 2), ("start", 3), ("stop", 3)),
    ]
    assert [e["content_block"] for e in events if "content_block" in e] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "toolu_9-0", "name": "f", "input": {}},
        {"type": "tool_use", "id": "toolu_9-1", "name": "g", "input": {}},
    ]
    unused = {"cache_creation_input_tokens": 0}
    started = {"input_tokens": 7, "output_tokens": 0, "cache_read_input_tokens": 0, **unused}
    assert events[0]["message"]["usage"] == started
    assert encoder.body == {
        **{"id": "msg_9", "type": "message", "role": "assistant", "model": "m"},
        "content": [
            {"type": "thinking", "thinking": "a", "signature": "c2VsZi1ob3N0ZWQ="},
            {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "toolu_9-0", "name": "f", "input": {}},
            {"type": "tool_use", "id": "toolu_9-1", "name": "g", "input": {}},
        ],
        **{"stop_reason": "max_tokens", "stop_sequence": None},
        "usage": {"input_tokens": 5, "output_tokens": 3, "cache_read_input_tokens": 2, **unused},
    }


def test_anthropic_arguments_that_are_no_object_are_shown_as_they_are() -> None:
    choice = Choice(tool_calls=[ToolCall(id="a", name="f", arguments="[1, 2")], finish_reason="tool_calls")
    body = json.loads(
        DIALECTS["anthropic"].encode_reply(
            Reply(id="1", choices=[choice]), ModelRequest(dialect="anthropic", model="m")
        )
    )
    assert body["content"][0]["input"] == {"_raw": "[1, 2"}


@pytest.mark.parametrize(
    ("finish", "stop_sequence", "anthropic", "responses"),
    [
        ("stop", None, "end_turn", "completed"),
        ("stop", "END", "stop_sequence", "completed"),
        ("length", None, "max_tokens", "incomplete"),
        ("tool_calls", None, "tool_use", "completed"),
        ("content_filter", None, "refusal", "incomplete"),
    ],
)
def test_reasons_to_finish_in_each_dialects_words(finish, stop_sequence, anthropic, responses) -> None:
    choice = Choice(content="x", finish_reason=finish, stop_sequence=stop_sequence)
    reply = Reply(id="1", choices=[choice])
    request = ModelRequest(dialect="anthropic", model="m", sampling=Sampling(stop=["END"]))
    body = json.loads(DIALECTS["anthropic"].encode_reply(reply, request))
    assert (body["stop_reason"], body["stop_sequence"]) == (anthropic, stop_sequence)
    body = json.loads(DIALECTS["responses"].encode_reply(reply, ModelRequest(dialect="responses", model="m")))
    why = {"length": {"reason": "max_output_tokens"}, "content_filter": {"reason": "content_filter"}}.get(finish)
    assert (body["status"], body["output"][0]["status"], body["incomplete_details"]) == (responses, responses, why)
    body = json.loads(DIALECTS["gemini"].encode_reply(reply, ModelRequest(dialect="gemini", model="m")))
    reason = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}.get(finish, "STOP")
    assert body["candidates"] == [
        {"content": {"role": "model", "parts": [{"text": "x"}]}, "finishReason": reason, "index": 0}
    ]


@pytest.mark.parametrize("name", ["responses", "anthropic", "gemini"])
def test_a_name_that_an_engine_repeats_in_each_piece_of_a_call_is_one_name(name) -> None:
    pieces = [ToolDelta(index=0, id="c", name="f", arguments="{"), ToolDelta(index=0, id="c", name="f", arguments="}")]
    deltas = [*(Delta(tool_calls=[piece]) for piece in pieces), Delta(finish_reason="tool_calls")]
    assert READERS[name](stream(name, deltas))[2] == [("c", "f", "{}")]


def test_a_chat_reply_whole_and_streamed_has_its_logprobs_its_stop_string_and_its_usage() -> None:
    entry = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}
    calls = [ToolCall(id="c", name="f", arguments="{}")]
    choices = [
        Choice(content="x", finish_reason="stop", stop_sequence="END", logprob_entries=[entry]),
        Choice(index=1, tool_calls=calls, finish_reason="tool_calls", logprob_entries=[entry]),
    ]
    usage = Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=2, reasoning_tokens=1)
    reply = Reply(id="chatcmpl-1", choices=choices, usage=usage)
    counted = {
        **{"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
        **{"prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens_details": {"reasoning_tokens": 1}},
    }
    request = ModelRequest(dialect="chat", model="m", n=2, logprobs=True)
    whole = json.loads(DIALECTS["chat"].encode_reply(reply, request))
    assert [c["message"]["content"] for c in whole["choices"]] == ["x", None]
    assert [c.get("stop_reason") for c in whole["choices"]] == ["END", None]
    assert [c["logprobs"]["content"] for c in whole["choices"]] == [[entry], [entry]]
    assert whole["usage"] == counted
    unasked = json.loads(DIALECTS["chat"].encode_reply(reply, ModelRequest(dialect="chat", model="m", n=2)))
    assert [c["logprobs"] for c in unasked["choices"]] == [None, None]
    bare = Reply(id="chatcmpl-1", choices=[Choice(content="x")])
    [shown] = json.loads(DIALECTS["chat"].encode_reply(bare, request))["choices"]
    assert (shown["logprobs"], shown["finish_reason"], "stop_reason" in shown) == (None, "stop", False)
    request.stream = request.include_usage = True
    lines = DIALECTS["chat"].encode_reply(reply, request).decode().split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [(p["index"], p["finish_reason"], p.get("stop_reason")) for p in parts if p["finish_reason"]] == [
        (0, "stop", "END"),
        (1, "tool_calls", None),
    ]
    assert [(p["index"], p["logprobs"]["content"]) for p in parts if "logprobs" in p] == [(0, [entry]), (1, [entry])]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], counted)


@pytest.mark.parametrize("name", CHATTY)
def test_a_reply_of_which_nothing_was_counted_used_no_tokens(name: str) -> None:
    reply = Reply(id="chatcmpl-1", choices=[Choice(content="x", finish_reason="stop")])
    usage = json.loads(DIALECTS[name].encode_reply(reply, ModelRequest(dialect=name, model="m")))["usage"]
    numbers = [n for value in usage.values() for n in (value.values() if isinstance(value, dict) else [value])]
    assert set(numbers) == {0}


def test_an_id_of_its_own_is_like_the_providers() -> None:
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", new_id("chatcmpl-"))
    ids = [own_id("msg_", "chatcmpl-ab", place) for place in (None, 0, 1)]
    assert ids == ["msg_ab", "msg_ab-0", "msg_ab-1"]
    assert own_id("msg_", "") != own_id("msg_", "")
