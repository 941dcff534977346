"""Streams and whole replies read once, for the agent and for the record: as engines send them, and as none should."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from agentcore_rl_toolkit.errors import CaptureError, UpstreamError
from agentcore_rl_toolkit.gateway.capture.record import CallRecord, Captured, unpack_ids, unpack_logprobs
from agentcore_rl_toolkit.gateway.capture.replay import reply_of
from agentcore_rl_toolkit.gateway.capture.reply import ReplyReader
from agentcore_rl_toolkit.messages.wire import DIALECTS, ModelRequest

from .reading import read_reply, read_stream


def chunk(**body: object) -> bytes:
    return b"data: " + json.dumps({"id": "chatcmpl-1", "model": "m", "created": 5, **body}).encode() + b"\n\n"


ENTRY = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}
FIRST = [
    {"index": 0, "delta": {"content": "Hi"}, "logprobs": {"content": [ENTRY]}, "token_ids": [7]},
    {"index": 1, "delta": {"reasoning_content": "hm"}, "logprobs": {"content": [ENTRY]}, "token_ids": [9]},
]
LAST = [
    {"index": 1, "delta": {}, "finish_reason": "length"},
    {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "END"},
]
STREAM = [
    chunk(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}], prompt_token_ids=[1, 2, 3]),
    chunk(choices=FIRST, weight_version=4),
    chunk(choices=LAST, weight_version=5),
    chunk(
        choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    ),
    b"data: [DONE]\n\n",
]


@pytest.mark.parametrize("entries", [False, True])
def test_one_reader_serves_the_agent_and_the_record(entries: bool) -> None:
    reader = ReplyReader(entries=entries)
    deltas = [delta for event in STREAM for delta in reader.feed(event)]
    assert "".join(d.text for d in deltas if d.choice == 0) == "Hi"
    assert "".join(d.reasoning for d in deltas if d.choice == 1) == "hm"
    assert [d.stop_sequence for d in deltas if d.finish_reason == "stop"] == ["END"]
    [usage] = [d.usage for d in deltas if d.usage is not None]
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 2, 1)
    assert [d.logprob_entries for d in deltas if d.logprob_entries] == ([[ENTRY], [ENTRY]] if entries else [])
    captured = reader.captured()
    assert captured.problem is None
    assert captured == read_stream(STREAM, entries=entries)
    assert [unpack_ids(c.ids) for c in captured.choices] == [[7], [9]]
    assert [unpack_logprobs(c.logprobs or b"") for c in captured.choices] == [[-0.5], [-0.5]]


@pytest.mark.parametrize("entries", [False, True])
def test_where_only_tokens_are_at_fault_the_agent_gets_its_text(entries: bool) -> None:
    reader = ReplyReader(entries=entries)
    bad = [{"index": 0, "delta": {"content": "Hi"}, "token_ids": ["x"], "finish_reason": "stop"}]
    assert [d.text for d in reader.feed(chunk(choices=bad))] == ["Hi"]
    assert "cannot be read" in (reader.captured().problem or "")
    whole = {"choices": [{"index": 0, "message": {"content": "Hi"}, "token_ids": ["x"], "finish_reason": "stop"}]}
    captured = read_reply(json.dumps(whole).encode(), entries=entries)
    assert json.loads(captured.choices[0].message) == {"content": "Hi"}
    assert "cannot be read" in (captured.problem or "")


def test_the_texts_of_a_content_with_parts_are_read() -> None:
    """Some providers behind a plain endpoint write parts."""
    parts = [{"type": "text", "text": "Hi"}, {"type": "thinking", "thinking": []}]
    event = chunk(choices=[{"index": 0, "delta": {"content": parts}, "finish_reason": "stop"}])
    [passed] = ReplyReader(relayed=True).feed(event)
    assert (passed.event, passed.final) == (event, True)
    assert [delta.text for delta in ReplyReader().feed(event)] == ["Hi"]
    assert json.loads(read_stream([event]).choices[0].message)["content"] == "Hi"


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: [1]\n\n", b"data: \xff\n\n"])
def test_an_engine_that_sends_nonsense_is_an_upstream_error(data: bytes) -> None:
    with pytest.raises(UpstreamError):
        ReplyReader().feed(data)


def test_an_agent_that_speaks_chat_may_understand_a_broken_event_and_no_page() -> None:
    broken = b'data: {"choices":[{"delta":\n\n'
    [passed] = ReplyReader(relayed=True).feed(broken)
    assert (passed.event, passed.final) == (broken, False)
    with pytest.raises(UpstreamError, match="not an event"):
        ReplyReader(relayed=True).feed(b"data: <html>\n\n")


@pytest.mark.parametrize("member", ["reasoning_content", "reasoning", "refusal"])
def test_each_kind_of_text_of_a_stream_is_in_the_message(member: str) -> None:
    pieces = [chunk(choices=[{"index": 0, "delta": {member: text}}]) for text in ("one ", "two")]
    captured = read_stream([*pieces, chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])])
    name = "reasoning_content" if member == "reasoning" else member
    assert json.loads(captured.choices[0].message)[name] == "one two"
    deltas = [delta for piece in pieces for delta in ReplyReader().feed(piece)]
    assert [d.text or d.reasoning for d in deltas] == ["one ", "two"]


def test_the_pieces_of_a_call_are_one_call_of_the_message() -> None:
    begun = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    pieces = [begun, {"index": 0, "function": {"arguments": ": 1}"}}]
    events = [chunk(choices=[{"index": 0, "delta": {"tool_calls": [piece]}}]) for piece in pieces]
    [choice] = read_stream([*events, chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}])]).choices
    [call] = json.loads(choice.message)["tool_calls"]
    assert (call["id"], call["function"]) == ("c", {"name": "f", "arguments": '{"a": 1}'})
    assert (json.loads(choice.message)["content"], choice.parse_status) == (None, "parsed")


def record_of(captured: Captured) -> CallRecord:
    about: dict[str, Any] = dict.fromkeys(CallRecord.__struct_fields__[: CallRecord.__struct_fields__.index("choices")])
    return CallRecord(
        **about | {"started_s": 1.0, "call_id": "c", "reply_id": captured.reply_id, "usage": captured.usage},
        choices=captured.choices,
    )


def test_a_recorded_reply_has_the_model_and_the_id_of_the_engines_reply() -> None:
    record = record_of(read_stream(STREAM))
    record.model = "m"
    reply = reply_of(record)
    assert (reply.model, reply.id, reply.created) == ("m", "chatcmpl-1", 1)
    record.model, record.reply_id = None, None
    assert (reply_of(record).model, reply_of(record).id) == ("", "c")


CHUNK = {
    "id": "chatcmpl-1",
    "created": 1,
    "model": "m",
    "prompt_token_ids": [1],
    "choices": [
        {
            "index": 0,
            "delta": {
                "role": "assistant",
                "content": "x",
                "reasoning_content": "y",
                "tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}],
            },
            "logprobs": {"content": [{"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": []}]},
            "token_ids": [7],
            "finish_reason": "stop",
        },
        {"index": 1, "delta": {"content": "x"}, "logprobs": {"content": [{"token": "x", "logprob": -1.0}]}},
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}},
}


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for name, member in members for found in places(member, (*path, name)))]


ODD = [None, True, -1, 1.5, "", "x", [], {}, [None], [1], ["x"], [{}], {"a": 1}, 10**30]


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_no_answer_of_an_engine_can_do_worse_than_an_upstream_error(name: Any) -> None:
    request = ModelRequest(dialect=name, model="m", stream=True, include_usage=True, logprobs=True)
    read_well = 0
    for path in places(CHUNK)[1:]:
        for odd in ODD:
            chunk = json.loads(json.dumps(CHUNK))
            inner = chunk
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = odd
            choices = chunk["choices"] if isinstance(chunk["choices"], list) else []
            whole = {
                **chunk,
                "choices": [{**c, "message": c.get("delta")} if isinstance(c, dict) else c for c in choices],
            }
            encoder = DIALECTS[name].encoder(request, reply_id="chatcmpl-9")
            reader = ReplyReader(entries=True)
            try:
                captured = read_reply(json.dumps(whole).encode(), entries=True)
                asked = msgspec.structs.replace(request, stream=False)
                DIALECTS[name].encode_reply(reply_of(record_of(captured)), asked)
                deltas = reader.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                reader.captured()
            except (CaptureError, UpstreamError):
                continue
            assert encoder.start() + b"".join(map(encoder.feed, deltas)) + encoder.finish()
            read_well += 1
    assert read_well > 100
