"""Numbers of replies: packed to the last bit, and cut out of what an agent gets without a change of anything else."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.gateway.capture.reply import ReplyReader

from .reading import read_reply, read_stream

NUMBERS = ("prompt_token_ids", "token_ids", "logprobs")
TEXTS = st.text(max_size=8) | st.sampled_from(
    ['"token_ids":[1]', "see [11]", '\\"logprobs":null', "\u2028", "data: x\n\n"]
)
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)


@st.composite
def choices(draw: st.DrawFn, text: str) -> dict[str, Any]:
    ids = draw(IDS)
    values = draw(st.lists(st.floats(-200, 0), min_size=len(ids), max_size=len(ids)))
    entries = [{"token": draw(TEXTS), "logprob": value, "bytes": [11], "top_logprobs": []} for value in values]
    said = {"role": "assistant", "content": draw(TEXTS)}
    whole = {"index": 0, text: said, "logprobs": {"content": entries}, "finish_reason": "stop", "token_ids": ids}
    return {"index": 0, **{name: whole[name] for name in draw(st.permutations(list(whole)))}}


def without(reply: dict[str, Any]) -> dict[str, Any]:
    """The same without its numbers."""
    cut = {name: value for name, value in reply.items() if name not in NUMBERS}
    cut["choices"] = [{n: v for n, v in choice.items() if n not in NUMBERS} for choice in reply["choices"]]
    return cut


@given(st.data(), st.booleans(), st.booleans())
def test_all_else_of_a_reply_stays_as_it_is(data: st.DataObject, ascii_only: bool, long: bool) -> None:
    prompt = list(range(3000)) if long else data.draw(IDS)

    def written(reply: dict[str, Any]) -> bytes:
        return json.dumps(reply, separators=(",", ":"), ensure_ascii=ascii_only).encode()

    choice = data.draw(choices("message"))
    reply = {"id": "r", "choices": [choice], "prompt_token_ids": prompt}
    reader = ReplyReader(plain=True)
    reader.read(written(reply))
    captured = reader.captured()
    assert json.loads(reader.answer) == without(reply)
    [record] = captured.choices
    values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert record.ids == struct.pack(f"<{len(values)}I", *choice["token_ids"])
    assert record.logprobs == struct.pack(f"<{len(values)}f", *values)

    events = [{"id": "r", "prompt_token_ids": prompt, "choices": [data.draw(choices("delta"))]} for _ in range(3)]
    stream = b"".join(b"data: %b\n\n" % written(event) for event in events)
    passed = b"".join(delta.event for delta in ReplyReader(relayed=True, plain=True).feed(stream)).split(b"\n\n")[:-1]
    assert [json.loads(event.removeprefix(b"data: ")) for event in passed] == [without(event) for event in events]
    [record] = read_stream([stream]).choices
    entries = [e for event in events for e in event["choices"][0]["logprobs"]["content"]]
    assert record.logprobs == struct.pack(f"<{len(entries)}f", *[entry["logprob"] for entry in entries])


def test_logprobs_are_rounded_as_floats_are() -> None:
    values = [-0.0, -1e-45, -math.pi, -700.25, -1.1920928244535389e-07]
    numbers = {"content": [{"logprob": value} for value in values]}
    reply = {"choices": [{"index": 0, "token_ids": [1] * 5, "logprobs": numbers, "message": {"content": "x"}}]}
    assert read_reply(json.dumps(reply).encode()).choices[0].logprobs == struct.pack("<5f", *values)


@pytest.mark.parametrize(
    ("ids", "logprobs", "problem"),
    [
        ([2**31], [-1.0], "32-bit"),
        ([-1], [-1.0], "32-bit"),
        ([1.0], [-1.0], "ids or logprobs cannot be read"),
        ([1], [None], "ids or logprobs cannot be read"),
        ([1], [-1e39], "not a float32"),
        ([1], ["-1"], "ids or logprobs cannot be read"),
        ([1, 2], [-1.0], "2 token ids and 1 logprobs"),
        ([1], None, "1 token ids and no logprobs"),
    ],
)
def test_numbers_that_are_none_are_a_problem_of_the_turn(ids: Any, logprobs: Any, problem: str) -> None:
    numbers = None if logprobs is None else {"content": [{"logprob": value} for value in logprobs]}
    said = {"message": {"content": "x"}, "delta": {"content": "x"}}
    choice = {"index": 0, **said, "finish_reason": "stop", "token_ids": ids, "logprobs": numbers}
    reply = json.dumps({"choices": [choice], "prompt_token_ids": [1]}).encode()
    for captured in (read_reply(reply), read_stream([b"data: %b\n\n" % reply])):
        assert problem in (captured.problem or "")
        assert json.loads(captured.choices[0].message)["content"] == "x"


def test_an_event_of_several_lines_or_another_kind_stays_as_it_is() -> None:
    for event in (
        b": wait",
        b'data: {"choices":[{"token_ids":[1,2,3],\ndata: "x":1}]}',
        b'data: {"choices":[{"delta":{"content":"\\"token_ids\\":[1,2,3]"}}]}',
        b"data: [DONE]",
    ):
        assert [d.event for d in ReplyReader(relayed=True, plain=True).feed(event + b"\n\n")] == [event + b"\n\n"]
    named = b'event: x\ndata: {"choices":[{"index":0,"token_ids":[1,2]}]}'
    [passed] = ReplyReader(relayed=True, plain=True).feed(named + b"\n\n")
    assert passed.event == b'event: x\ndata: {"choices":[{"index":0}]}\n\n'
