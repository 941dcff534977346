"""Streams of all dialects: written, read again, in any slices; and engines' streams as they really look."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcore_rl_toolkit.messages.dialects import (
    DIALECTS,
    Choice,
    Delta,
    ModelRequest,
    Reply,
    RequestError,
    Sampling,
    ToolCall,
    ToolDelta,
    Usage,
    deltas_of,
)

from .readers import REPLIES, STREAMS

CHATTY = ["chat", "responses", "anthropic"]


def stream(name: str, deltas: list[Delta], *, n: int = 1, logprobs: bool = False) -> bytes:
    request = ModelRequest(dialect=name, model="m", n=n, stream=True, include_usage=True, logprobs=logprobs)
    encoder = DIALECTS[name].encoder(request, reply_id="chatcmpl-9", model="m", created=5)
    return encoder.start() + b"".join(encoder.feed(delta) for delta in deltas) + encoder.finish()


def read(name: str, pieces: list[bytes]) -> Reply:
    decoder = STREAMS[name]()
    for piece in pieces:
        decoder.feed(piece)
    decoder.finish()
    assert decoder.done or name == "completions"
    return decoder.reply()


def parts_of(choice: Choice) -> tuple:
    calls = [(c.id, c.name, json.loads(c.arguments)) for c in choice.tool_calls]
    return choice.content, choice.reasoning, calls, choice.finish_reason


@pytest.mark.parametrize("name", CHATTY)
def test_what_is_written_is_read_at_every_cut(name, full_reply) -> None:
    data = stream(name, deltas_of(full_reply))
    wanted = parts_of(full_reply.choices[0])
    for at in range(0, len(data), 3):
        reply = read(name, [data[:at], data[at:]])
        assert parts_of(reply.choices[0]) == wanted, f"cut at {at}"
    assert reply.complete
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (20, 30)
    assert parts_of(read(name, [data[i : i + 1] for i in range(len(data))]).choices[0]) == wanted


@pytest.mark.parametrize("name", CHATTY)
def test_a_whole_answer_is_read_as_it_was_written(name, full_reply) -> None:
    dialect = DIALECTS[name]
    body = dialect.encode_reply(full_reply, ModelRequest(dialect=name, model="m"))
    reply = REPLIES[name](body)
    assert parts_of(reply.choices[0]) == parts_of(full_reply.choices[0])
    assert reply.complete
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 20


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


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(CHATTY),
    thoughts=st.lists(WORDS, max_size=3),
    texts=st.lists(WORDS, max_size=4),
    calls=CALLS,
    data=st.data(),
)
def test_any_answer_survives_any_dialect_in_any_slices(name, thoughts, texts, calls, data) -> None:
    deltas = [Delta(reasoning=t) for t in thoughts] + [Delta(text=t) for t in texts]
    for index, call in enumerate(calls):
        half = data.draw(st.integers(0, len(call.arguments)))
        first = ToolDelta(index=index, id=call.id, name=call.name, arguments=call.arguments[:half])
        deltas.append(Delta(tool_calls=[first]))
        if half < len(call.arguments):
            deltas.append(Delta(tool_calls=[ToolDelta(index=index, arguments=call.arguments[half:])]))
    finish = "tool_calls" if calls else data.draw(st.sampled_from(["stop", "length"]))
    deltas.append(Delta(finish_reason=finish, usage=Usage(prompt_tokens=1, completion_tokens=2)))
    stream_bytes = stream(name, deltas)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream_bytes)), max_size=8)))
    pieces = [stream_bytes[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream_bytes)], strict=True)]
    reply = read(name, pieces)
    wanted = [(c.id, c.name, json.loads(c.arguments)) for c in calls]
    assert parts_of(reply.choices[0]) == ("".join(texts), "".join(thoughts), wanted, finish)
    assert reply.complete


@pytest.mark.parametrize("name", ["responses", "anthropic"])
def test_interleaved_parallel_calls_end_up_whole(name) -> None:
    pieces = [
        ToolDelta(index=0, id="a", name="f"),
        ToolDelta(index=1, id="b", name="g"),
        ToolDelta(index=0, arguments='{"x"'),
        ToolDelta(index=1, arguments='{"y"'),
        ToolDelta(index=0, arguments=": 1}"),
        ToolDelta(index=1, arguments=": 2}"),
    ]
    deltas = [Delta(tool_calls=[piece]) for piece in pieces] + [Delta(finish_reason="tool_calls")]
    (choice,) = read(name, [stream(name, deltas)]).choices
    assert parts_of(choice)[2] == [("a", "f", {"x": 1}), ("b", "g", {"y": 2})]


def test_items_of_a_response_stream_come_one_after_the_other() -> None:
    pieces = [ToolDelta(index=i, id=f"c{i}", name="f") for i in range(2)]
    pieces += [ToolDelta(index=i, arguments="{}") for i in range(2)]
    deltas = [Delta(tool_calls=[piece]) for piece in pieces] + [Delta(finish_reason="tool_calls")]
    lines = [line for line in stream("responses", deltas).decode().splitlines() if line.startswith("data: {")]
    places = [json.loads(line[6:]).get("output_index") for line in lines]
    assert [p for p in places if p is not None] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_choices_of_one_stream_do_not_mix() -> None:
    deltas = []
    for step in range(3):
        for index in range(2):
            deltas.append(Delta(choice=index, text=f"{index}{step} "))
    deltas += [Delta(choice=i, finish_reason="stop") for i in range(2)]
    reply = read("chat", [stream("chat", deltas, n=2)])
    assert [c.content for c in reply.choices] == ["00 01 02 ", "10 11 12 "]


@pytest.mark.parametrize("name", ["responses", "anthropic"])
def test_an_error_written_into_a_stream_is_read_as_one(name) -> None:
    encoder = DIALECTS[name].encoder(ModelRequest(dialect=name, model="m", stream=True), reply_id="x")
    data = encoder.start() + encoder.feed(Delta(text="a"))
    data += encoder.error(RequestError("the engine died", kind="upstream"))
    decoder = STREAMS[name]()
    decoder.feed(data)
    assert decoder.error is not None
    assert "the engine died" in decoder.error["message"]
    assert not decoder.reply().complete


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
    assert body["status"] == responses
