"""Engines' answers as they come: exactly the sampled tokens into the record, exactly the answer's text to the agent."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.gateway.capture.record import Captured, unpack_ids, unpack_logprobs
from agentcore_rl_toolkit.gateway.engines import TOKEN_ENGINES
from agentcore_rl_toolkit.gateway.testing import Seen, logprob_of
from agentcore_rl_toolkit.gateway.testing.engine import Sampled
from agentcore_rl_toolkit.gateway.token_calls.reply import TokenReply
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.messages.wire import Choice, Delta, ModelRequest
from agentcore_rl_toolkit.messages.wire.canonical import Sampling
from scripted_engine import ScriptedEngine, sglang_answer

from ..asking import MODEL

RENDERER = Renderer.from_path(MODEL)
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>'
ENGINES = ("vllm", "sglang")


def events(engine: str, ids: list[int], step: int, *, finish: str = "stop", stop: str | None = None) -> list[bytes]:
    """The stream of an answer, one entry per event of ``step`` tokens."""
    if engine == "vllm":
        seen = Seen("POST", "/v1/completions", {}, {"logprobs": 1, "return_token_ids": True}, prompt_ids=[1])
        reply = list(ScriptedEngine().text_chunks(seen, [Sampled(ids=ids, finish=finish, stop=stop)], step=step))
    else:
        reply = [
            sglang_answer(0, ids[:count], finish if count >= len(ids) else None, weight_version=3, stop=stop)
            for count in range(step, len(ids) + step, step)
        ]
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in reply]


def read(asked: ModelRequest, engine: str, pieces: list[bytes]) -> tuple[TokenReply, list[Delta]]:
    sampled = TokenReply(RENDERER, asked, None)
    sampled.read_event = TOKEN_ENGINES[engine].reader()
    return sampled, [delta for data in pieces for delta in sampled.feed(data)]


def recorded(sampled: TokenReply) -> tuple[Captured, Choice]:
    """What is recorded of an answer, and its choice as a client reads it."""
    captured = sampled.captured()
    [record] = captured.choices
    message = json.loads(record.message)
    return captured, Choice(
        content=message["content"] or "",
        reasoning=message.get("reasoning_content", ""),
        tool_calls=message.get("tool_calls", []),
        finish_reason=record.finish_reason,
        stop_sequence=record.stop_sequence,
        logprob_entries=sampled.choices[0].logprob_entries,
    )


def check(sampled: TokenReply, deltas: list[Delta], ids: list[int], text: str) -> None:
    """The record has everything, the agent its part; streamed and whole say the same."""
    streamed = Choice(
        content="".join(delta.text for delta in deltas),
        finish_reason=next(delta.finish_reason for delta in deltas if delta.finish_reason is not None),
        stop_sequence=next((delta.stop_sequence for delta in deltas if delta.stop_sequence is not None), None),
        logprob_entries=[entry for delta in deltas for entry in delta.logprob_entries or []],
    )
    captured, whole = recorded(sampled)
    assert captured.complete
    assert captured.problem is None
    [record] = captured.choices
    assert unpack_ids(record.ids) == ids
    assert unpack_logprobs(record.logprobs or b"") == [logprob_of(i) for i in ids]
    assert (whole.content, streamed.content) == (text, text)
    assert (whole.logprob_entries or []) == (streamed.logprob_entries or [])
    assert [e["logprob"] for e in whole.logprob_entries or []] == [logprob_of(i) for i in ids]
    assert (streamed.finish_reason, streamed.stop_sequence) == (whole.finish_reason, whole.stop_sequence)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("expected", "stops", "text", "ended_by"),
    [
        ("The answer is 5 and more", [" and"], "The answer is 5", " and"),
        ("one\n\nObservation: two", ["Observation:", "\n\nObs"], "one", "\n\nObs"),
        ("Grüße 漢字 end", ["漢字"], "Grüße ", "漢字"),
        ("no such thing", ["END", "ENDE"], "no such thing", None),
        ("ends in a half ST", ["STOP"], "ends in a half ST", None),
        ("aaab", ["aab"], "a", "aab"),
    ],
)
def test_an_answer_ends_before_its_stop_string_wherever_the_events_are_cut(
    engine: str, expected: str, stops: list[str], text: str, ended_by: str | None
) -> None:
    letters = [i for c in expected for i in RENDERER.encode(c)]  # tokens of one character: the finest boundaries
    asked = ModelRequest(dialect="chat", model="m", sampling=Sampling(stop=stops), logprobs=True)
    for ids in (letters, RENDERER.encode(expected)):
        for step in range(1, len(ids) + 1):
            sampled, deltas = read(asked, engine, events(engine, ids, step, stop=ended_by))
            check(sampled, deltas, ids, text)
            _, choice = recorded(sampled)
            assert (choice.finish_reason, choice.stop_sequence) == ("stop", ended_by)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_string_counts_where_it_was_sampled_in_reasoning_or_a_call_as_well(engine: str) -> None:
    for entries, stop, content, reasoning, calls in (
        ("<think>first, second</think>so", ", ", "", "first", 0),
        (f"look:{CALL} and then", " and", "look:", "", 1),
        (f"look:{CALL}", "</tool_call>", "look:", "", 1),
    ):
        ids = RENDERER.encode(entries)
        asked = ModelRequest(dialect="chat", model="m", tools=TOOLS, sampling=Sampling(stop=[stop]))
        for step in (1, 3, len(ids)):
            sampled, _ = read(asked, engine, events(engine, ids, step, finish="length"))
            _, choice = recorded(sampled)
            assert (choice.content, choice.reasoning, len(choice.tool_calls)) == (content, reasoning, calls)
            assert choice.finish_reason == ("tool_calls" if calls else "stop")
            assert choice.stop_sequence == stop
            assert sampled.answers[0][:2] == (0, ids)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stream_may_be_cut_at_any_byte(engine: str) -> None:
    ids = [*RENDERER.encode("5 and"), min(RENDERER.stop_token_ids)]
    asked = ModelRequest(dialect="chat", model="m", sampling=Sampling(stop=[" and"]), logprobs=True)
    data = b"".join([*events(engine, ids, 2, stop=" and"), b"data: [DONE]\n\n"])
    for at in range(1, len(data), 3):
        sampled, deltas = read(asked, engine, [data[:at], data[at:]])
        check(sampled, deltas, ids, "5")


@given(data=st.data())
def test_any_text_any_stops_any_cut(data: st.DataObject) -> None:
    answer = data.draw(st.text(alphabet="ab <>ü漢\n", min_size=1, max_size=24))
    stops = data.draw(st.lists(st.text(alphabet="ab <ü\n", min_size=1, max_size=4), max_size=3))
    ids = [i for c in answer for i in RENDERER.encode(c)] if data.draw(st.booleans()) else RENDERER.encode(answer)
    engine, step = data.draw(st.sampled_from(ENGINES)), data.draw(st.integers(1, len(ids)))
    asked = ModelRequest(dialect="chat", model="m", sampling=Sampling(stop=stops), logprobs=True)
    sampled, deltas = read(asked, engine, events(engine, ids, step))
    ends = [(answer.find(s) + len(s), answer.find(s), s) for s in stops if s in answer]
    raw = answer[: min(ends)[1]] if ends else answer
    _, choice = recorded(sampled)
    assert choice.stop_sequence == (min(ends)[2] if ends else None)
    check(sampled, deltas, ids, RENDERER.parse(RENDERER.encode(raw)).content)
