"""Reading replies: the same result wherever a stream was cut, and however it was framed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.gateway.capture.record import Captured, unpack_ids, unpack_logprobs

from .reading import read_reply, read_stream


def chunks(texts: list[str]) -> list[dict[str, Any]]:
    first = {
        "id": "x",
        "model": "m",
        "prompt_token_ids": [5, 6, 7],
        "choices": [{"index": 0, "delta": {"role": "assistant"}}],
    }
    rest = [
        {
            "id": "x",
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": text},
                    "token_ids": [i],
                    "logprobs": {"content": [{"token": text, "logprob": -0.25 * i}]},
                    "finish_reason": "stop" if i == len(texts) - 1 else None,
                }
            ],
        }
        for i, text in enumerate(texts)
    ]
    return [first, *rest]


def framed(texts: list[str], *, newline: str = "\n", space: str = " ", compact: bool = True) -> bytes:
    separators = (",", ":") if compact else (", ", ": ")
    events = [json.dumps(c, separators=separators, ensure_ascii=False) for c in chunks(texts)]
    return "".join(f"data:{space}{e}{newline}{newline}" for e in [*events, "[DONE]"]).encode()


def check(captured: Captured, texts: list[str]) -> None:
    [choice] = captured.choices
    assert captured.complete
    assert captured.problem is None
    assert captured.prompt is not None
    assert json.loads(bytes(captured.prompt)) == [5, 6, 7]
    assert unpack_ids(choice.ids) == list(range(len(texts)))
    assert choice.logprobs is not None
    assert unpack_logprobs(choice.logprobs) == [-0.25 * i for i in range(len(texts))]
    assert json.loads(choice.message)["content"] == "".join(texts)


TEXTS = st.lists(st.text(max_size=12), min_size=1, max_size=8)


@given(TEXTS, st.lists(st.integers(0, 10_000), max_size=12))
def test_a_stream_says_the_same_wherever_it_is_cut(texts: list[str], cuts: list[int]) -> None:
    data = framed(texts)
    places = sorted({c % (len(data) + 1) for c in cuts} | {0, len(data)})
    check(read_stream([data[a:b] for a, b in itertools.pairwise(places) if a < b]), texts)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("space", ["", " "])
@pytest.mark.parametrize("compact", [True, False])
def test_a_stream_is_read_in_any_framing(newline: str, space: str, compact: bool) -> None:
    texts = ["one", " two\n\ndata: {", '"prompt_token_ids":[', "é€"]
    data = framed(texts, newline=newline, space=space, compact=compact)
    check(read_stream([b": keep-alive" + newline.encode() * 2, data]), texts)
    check(read_stream([data]), texts)


@given(st.integers(1, 2000))
def test_a_stream_that_breaks_off_is_never_complete(cut: int) -> None:
    data = framed(["a", "b", "c"])
    end = data.rfind(b"data: {")
    captured = read_stream([data[: min(cut, end + 20)]])
    assert not captured.complete


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"choices": 3}', b"<html>"])
def test_what_is_no_reply_is_an_error(body: bytes) -> None:
    assert read_reply(body).problem


@pytest.mark.parametrize("read", [read_reply, lambda body: read_stream([b"data: " + body + b"\n\n"])])
def test_a_reply_that_is_not_utf8_is_refused_like_any_other_that_cannot_be_read(
    read: Callable[[bytes], Captured],
) -> None:
    assert "cannot be read" in (read(b'{"id":"\xff","choices":[]}').problem or "")
