"""What SGLang's /generate is asked for, and what is read of its answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway.engines import TOKEN_ENGINES, Piece, TokenRequest
from agentcore_rl_toolkit.messages.wire.canonical import ModelRequest

# Types of the fields as SGLang 0.5.23 declares them (`managers/io_struct.py`, `sampling/sampling_params.py`). Another sampling
# parameter than these is refused there with 400.
NUMBER = (int, float)
GENERATE: dict[str, Any] = {
    "input_ids": list,
    "rid": str,
    "sampling_params": dict,
    "return_logprob": bool,
    "logprob_start_len": int,
    "stream": bool,
    "return_routed_experts": bool,
}
SAMPLING: dict[str, Any] = {
    "max_new_tokens": int,
    "min_new_tokens": int,
    "stop": (str, list),
    "stop_token_ids": list,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": int,
    "min_p": NUMBER,
    "frequency_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "n": int,
    "json_schema": str,
    "regex": str,
    "ebnf": str,
    "structural_tag": str,
    "ignore_eos": bool,
    "skip_special_tokens": bool,
    "logit_bias": dict,
    "sampling_seed": int,
}


def sent(engine: str, asked: ModelRequest) -> tuple[bytes, bytes]:
    sampling = asked.sampling.to_dict()
    wanted = TokenRequest(
        prompt=b"[1,2]", asked=asked, sampling=sampling, name="a", max_tokens=4, stop_token_ids=[2], stream=True
    )
    return TOKEN_ENGINES[engine].request(wanted)


@pytest.mark.parametrize(
    "form",
    [
        None,
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}}},
    ],
)
def test_all_that_is_asked_for_has_the_name_and_the_type_that_sglang_takes(form: dict[str, Any] | None) -> None:
    engine = TOKEN_ENGINES["sglang-experts"]
    asked = ModelRequest(dialect="chat", model="m", response_format=form, n=2)
    asked.sampling.temperature, asked.sampling.top_p, asked.sampling.stop = 0.7, 0.9, ["end"]
    asked.sampling.other = {"seed": 3, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [7]}
    asked.sampling.other |= {"top_k": 5, "min_p": 0.1, "logit_bias": {"5": 1.0}, "presence_penalty": 0.1}
    asked.sampling.other |= {"frequency_penalty": 0.1, "repetition_penalty": 1.1}
    path, body = sent("sglang-experts", asked)
    assert path == b"/generate"
    reply = json.loads(body)
    assert set(asked.sampling.other) <= engine.features
    assert reply.keys() == GENERATE.keys()
    assert all(isinstance(value, GENERATE[name]) for name, value in reply.items())
    sampling = reply["sampling_params"]
    assert sampling.keys() <= SAMPLING.keys()
    assert all(isinstance(value, SAMPLING[name]) for name, value in sampling.items())
    assert engine.features - {"response_format", "tool_choice", "parallel_tool_calls", "seed", "min_tokens"} <= set(
        SAMPLING
    )


def answer(*spans: tuple[str, int, int], upto: int, first: int = 0, finish: str | None = "stop") -> dict[str, Any]:
    """An answer of so many tokens, or what is new of it."""
    meta: dict[str, Any] = {
        "finish_reason": finish and {"type": finish},
        "completion_tokens": upto,
        "output_token_logprobs": [[-0.5, i, None] for i in range(first, upto)],
        "weight_version": spans[-1][0],
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
    }
    return {"output_ids": list(range(first, upto)), "meta_info": meta}


def versions(piece: Piece) -> tuple[Any, ...]:
    return piece.weight_version_first, piece.weight_version, piece.spans


def test_versions_of_a_choice_whose_weights_changed_are_read_span_by_span() -> None:
    engine = TOKEN_ENGINES["sglang"]
    [piece] = engine.reader()(json.dumps(answer(("3", 0, 2), ("4", 2, 5), upto=5)).encode())
    assert versions(piece) == ("3", "4", [(0, 3), (2, 4)])
    [piece] = engine.reader()(json.dumps(answer(("default", 0, 5), upto=5)).encode())
    assert versions(piece) == ("default", "default", None), "as it was started: no version was published to it"
    read = engine.reader()
    events = [answer(("3", 0, 2), upto=2, finish=None), answer(("3", 0, 2), ("4", 2, 5), upto=5)]
    pieces = [p for e in events for p in read(json.dumps(e).encode())]
    assert [p.ids for p in pieces] == [[0, 1], [2, 3, 4]]
    assert [versions(p) for p in pieces] == [("3", "3", None), ("3", "4", [(0, 3), (2, 4)])]


@pytest.mark.parametrize(("tokens", "read"), [(200, 20), (4000, 3)])
def test_each_short_event_is_read_and_of_long_ones_that_repeat_tokens_some(tokens: int, read: int) -> None:
    """A long answer would cost the square of its length. The last event has all that was left out."""
    reader = TOKEN_ENGINES["sglang"].reader()
    events = [answer(("3", 0, n), upto=n, finish=None) for n in range(tokens, tokens + 20)]
    events[-1]["meta_info"]["finish_reason"] = {"type": "stop"}
    found = [reader(json.dumps(event).encode()) for event in events]
    counts = [len(pieces) for pieces in found]
    assert (sum(counts), counts[0], counts[-1]) == (read, 1, 1)
    assert [i for pieces in found for piece in pieces for i in piece.ids] == list(range(tokens + 19))


@pytest.mark.parametrize("numbers", [("default", 0), ("3", 2**31), ("3", -1), (str(2**31), 0)])
def test_spans_with_numbers_that_a_record_cannot_have_are_left_out(numbers: tuple[str, int]) -> None:
    version, start = numbers
    whole = json.dumps(answer(("2", 0, 2), (version, start, 5), upto=5)).encode()
    [piece] = TOKEN_ENGINES["sglang"].reader()(whole)
    assert versions(piece) == ("2", version, None)
