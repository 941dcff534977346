"""What the engines are asked for, and what is read of their replies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import CaptureError
from agentcore_rl_toolkit.gateway.engines import TOKEN_ENGINES, Piece, TokenRequest
from agentcore_rl_toolkit.messages.wire.canonical import ModelRequest

TAG = {"type": "structural_tag", "format": {}}
TAG_TEXT = '{"type":"structural_tag","format":{}}'


@pytest.mark.parametrize(
    ("form", "vllm", "sglang"),
    [
        (None, None, {}),
        ({"type": "text"}, None, {}),
        ({}, None, {}),
        ({"type": "json_object"}, {"json_object": True}, {"json_schema": '{"type": "object"}'}),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}},
            {"json": {"type": "array"}},
            {"json_schema": '{"type":"array"}'},
        ),
        (TAG, {"structural_tag": TAG_TEXT}, {"structural_tag": TAG_TEXT}),
    ],
)
@pytest.mark.parametrize(("n", "stream"), [(1, False), (1, True), (2, False)])
def test_a_request_has_the_prompt_the_form_and_the_samples_that_were_asked_for(
    form: Any, vllm: Any, sglang: Any, n: int, stream: bool
) -> None:
    asked = ModelRequest(dialect="chat", model="m", response_format=form, n=n)
    wanted = TokenRequest(
        prompt=b"[1,2]", asked=asked, sampling={"seed": 3}, name="a", max_tokens=4, stop_token_ids=[2], stream=stream
    )
    more = {**({"n": n} if n > 1 else {}), "stop_token_ids": [2], "skip_special_tokens": False}
    path, body = TOKEN_ENGINES["vllm"].request(wanted)
    sampling = {**({"structured_outputs": vllm} if vllm else {}), "seed": 3, "max_tokens": 4, "logprobs": 1, **more}
    if stream:
        wrapped: dict[str, Any] = {"prompt": [1, 2], "stream": True, "return_token_ids": True, **sampling}
    else:
        wrapped = {"token_ids": [1, 2], "sampling_params": sampling}
    assert (path, json.loads(body)) == (
        b"/v1/completions" if stream else b"/inference/v1/generate",
        {"model": "m", **wrapped},
    )
    path, body = TOKEN_ENGINES["sglang"].request(wanted)
    assert json.loads(body) == {
        "input_ids": [1, 2],
        "sampling_params": {**sglang, "sampling_seed": 3, "max_new_tokens": 4, **more},
        **{"return_logprob": True, "logprob_start_len": -1, "stream": stream, "rid": "a"},
    }


def of_vllm(choice: dict[str, Any], **more: Any) -> Piece:
    [piece] = TOKEN_ENGINES["vllm"].reader()(
        json.dumps({"choices": [{"token_ids": [7, 8], **choice}], **more}).encode()
    )
    return piece


SPANS = [{"version": "3", "start": 0}, {"version": "4", "start": 1}]


@pytest.mark.parametrize(
    ("choice", "more", "read"),
    [
        ({}, {}, {}),
        ({"index": 2, "finish_reason": "stop"}, {}, {"choice": 2, "finish_reason": "stop"}),
        ({"logprobs": {"content": [{"logprob": -1}, {}]}}, {}, {"logprobs": [-1.0, None]}),
        ({"logprobs": {"content": [], "token_logprobs": [-1]}}, {}, {"logprobs": []}),
        ({"logprobs": {"token_logprobs": [-1, None]}}, {}, {"logprobs": [-1.0, None]}),
        ({"stop_reason": 2}, {}, {}),
        ({"stop_reason": "END"}, {}, {"stop_sequence": "END"}),
        ({}, {"weight_version": 5}, {"weight_version": 5}),
        (
            {"weight_version_first": 0, "weight_version_last": 0},
            {"weight_version": 5},
            {"weight_version": 0, "weight_version_first": 0},
        ),
        (
            {"weight_versions": SPANS},
            {},
            {"weight_version_first": "3", "weight_version": "4", "spans": [(0, 3), (1, 4)]},
        ),
        ({"weight_versions": SPANS[:1]}, {}, {"weight_version_first": "3", "weight_version": "3"}),
        ({"weight_versions": []}, {"weight_version": 5}, {"weight_version": 5}),
    ],
)
def test_a_choice_of_vllm_is_a_piece_with_its_tokens(
    choice: dict[str, Any], more: dict[str, Any], read: dict[str, Any]
) -> None:
    assert of_vllm(choice, **more) == Piece(ids=[7, 8], **read)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(("error", "shown"), [({"code": 400}, {"code": 400}), ("words", {"message": "words"})])
def test_an_error_in_a_reply_is_a_piece_without_tokens(engine: str, error: Any, shown: Any) -> None:
    assert TOKEN_ENGINES[engine].reader()(json.dumps({"error": error}).encode()) == [Piece(error=shown)]


def test_a_choice_of_vllm_without_token_ids_is_refused() -> None:
    with pytest.raises(CaptureError, match="return_token_ids"):
        of_vllm({"token_ids": None})


def of_sglang(*ids: int, logged: list[int] | None = None, total: int | None = None, **more: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {"completion_tokens": total}
    if logged is not None:
        meta["output_token_logprobs"] = [[-i, i, None] for i in logged]
    return {"output_ids": list(ids), "meta_info": meta, **more}


@pytest.mark.parametrize(
    ("events", "read"),
    [
        ([of_sglang(1, 2), of_sglang(1, 2, 3)], [[1, 2], [3]]),  # without a count every event repeats all
        ([of_sglang(1, 2, total=2), of_sglang(1, 2, 3, total=3)], [[1, 2], [3]]),
        ([of_sglang(1, 2, total=2), of_sglang(3, total=3)], [[1, 2], [3]]),
        ([of_sglang(1, total=1), of_sglang(2, 3, total=3)], [[1], [2, 3]]),
        ([of_sglang(1, 2, total=2), of_sglang(1, 2, total=2)], [[1, 2], []]),
        ([of_sglang(1, 2, logged=[1, 2, 9], total=2)], [[1, 2]]),  # a token that was sampled after a stop
        ([of_sglang(1, total=1), of_sglang(1, 2, logged=[1, 2, 9], total=2)], [[1], [2]]),
        ([of_sglang(1, 2, total=2), of_sglang(3, logged=[1, 2, 3], total=3)], [[1, 2], [3]]),
        ([of_sglang(1, total=1), of_sglang(5, total=1, index=1)], [[1], [5]]),
        ([[of_sglang(1, 2, total=2), of_sglang(3, total=1)]], [[1, 2], [3]]),
    ],
)
def test_events_of_sglang_give_each_token_once(events: list[Any], read: list[list[int]]) -> None:
    reader = TOKEN_ENGINES["sglang"].reader()
    pieces = [piece for event in events for piece in reader(json.dumps(event).encode())]
    assert [piece.ids for piece in pieces] == read


@pytest.mark.parametrize(
    "second",
    [
        of_sglang(1, 2, total=4),
        of_sglang(1, 2, total=1),
        of_sglang(1, 2, 3, logged=[1, 2, 4], total=3),
        of_sglang(1, 2, 3, logged=[3], total=4),
    ],
)
def test_an_event_of_sglang_whose_tokens_do_not_fit_together_is_refused(second: dict[str, Any]) -> None:
    reader = TOKEN_ENGINES["sglang"].reader()
    reader(json.dumps(of_sglang(1, 2, total=2)).encode())
    if second["meta_info"]["completion_tokens"] == 4:
        second = {**second, "output_ids": [3]}
    with pytest.raises(CaptureError):
        reader(json.dumps(second).encode())
