"""The compiled reader of replies against the decoders it stands before: same result, whatever the bytes."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentcore_rl_toolkit.errors import CaptureError
from agentcore_rl_toolkit.gateway.capture import scan
from agentcore_rl_toolkit.gateway.capture.reply import Captured, read_reply
from agentcore_rl_toolkit.gateway.capture.stream import read_stream

compiled = pytest.mark.skipif(not scan.COMPILED, reason="the compiled reader is not built here (no C compiler)")

ids = st.lists(st.integers(0, 2**31 - 1) | st.integers(-5, 200_000), max_size=6)
floats = st.floats(-200, 0) | st.floats(width=32, allow_nan=False, allow_infinity=False) | st.integers(-30, 0)
texts = st.text(max_size=8) | st.sampled_from(
    ["\u2028", '"', "\\", "</tool_call>", "\U0001f600", "\ud83d", "\ude00", "data: x\n\n", "<tool_call>{"]
)


def entries(values: list[float], words: list[str]) -> list[dict[str, Any]]:
    return [
        {"token": word, "logprob": value, "bytes": list(word.encode(errors="surrogatepass")), "top_logprobs": []}
        for value, word in zip(values, words, strict=True)
    ]


@st.composite
def logprobs(draw: st.DrawFn, count: int) -> Any:
    values = draw(st.lists(floats, min_size=count, max_size=count))
    kind = draw(st.sampled_from(["content", "content", "content", "tokens", "null", "gap", "empty", "top", "short"]))
    words = draw(st.lists(texts, min_size=count, max_size=count))
    if kind == "content":
        return {"content": entries(values, words)}
    if kind == "top":
        reply = entries(values, words)
        for entry in reply:
            entry["top_logprobs"] = [{"token": "x", "logprob": -1.5, "bytes": None}]
        return {"content": reply, "refusal": None}
    if kind == "tokens":
        return {"tokens": words, "token_logprobs": values, "text_offset": list(range(count)), "top_logprobs": None}
    if kind == "gap":
        return {"token_logprobs": [None, *values[1:]] if values else []}
    if kind == "short":
        return {"content": entries(values[1:], words[1:])}
    return None if kind == "null" else draw(st.sampled_from([{}, {"content": None}, {"content": []}]))


@st.composite
def replies(draw: st.DrawFn) -> dict[str, Any]:
    choices = []
    for index in range(draw(st.integers(0, 3))):
        sampled = draw(ids)
        choice: dict[str, Any] = {"index": index, "message": {"role": "assistant", "content": draw(texts)}}
        choice["logprobs"] = draw(logprobs(len(sampled)))
        choice["finish_reason"] = draw(st.sampled_from(["stop", "length", None]))
        choice["token_ids"] = draw(st.sampled_from([sampled, sampled, sampled, None, [*sampled, 2**40], [1.0]]))
        if draw(st.booleans()):
            choice["routed_experts"] = "AAEC"
        keys = draw(st.permutations(list(choice)))
        choices.append({key: choice[key] for key in keys})
    reply: dict[str, Any] = {"id": "r", "model": "m", "choices": choices}
    where = draw(st.sampled_from(["top", "top", "choice", "null"]))
    prompt = draw(ids | st.just([1000 + i for i in range(3000)]))
    if where == "choice" and choices:
        choices[0]["prompt_token_ids"] = prompt
    else:
        reply["prompt_token_ids"] = None if where == "null" else prompt
    if draw(st.booleans()):
        reply["usage"] = {"completion_tokens": draw(st.integers(0, 6))}
    return {key: reply[key] for key in draw(st.permutations(list(reply)))}


@st.composite
def deltas(draw: st.DrawFn) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    kind = draw(st.sampled_from(["text", "text", "text", "thought", "both names", "call", "nothing", "mixed"]))
    if kind in ("text", "mixed"):
        delta["content"] = draw(texts)
    if kind in ("thought", "mixed", "both names"):
        delta["reasoning_content"] = draw(texts)
    if kind == "both names":
        delta["reasoning"] = delta["reasoning_content"]
    if kind == "call":
        delta["tool_calls"] = [{"index": 0, "id": "c", "function": {"name": "f", "arguments": draw(texts)}}]
    if draw(st.booleans()):
        delta["role"] = "assistant"
    return delta


@st.composite
def events(draw: st.DrawFn) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    completions = draw(st.booleans())
    for number in range(draw(st.integers(0, 12))):
        sampled = draw(ids)
        choice: dict[str, Any] = {"index": draw(st.sampled_from([0, 0, 0, 0, 1]))}
        if completions:
            choice["text"] = draw(texts)
        else:
            choice["delta"] = draw(deltas())
        if draw(st.integers(0, 5)):
            choice["logprobs"] = draw(logprobs(len(sampled)))
            choice["token_ids"] = sampled
        choice["finish_reason"] = draw(st.sampled_from([None, None, None, None, "stop"]))
        event: dict[str, Any] = {"id": "r", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}
        if number == 0:
            event["prompt_token_ids"] = draw(ids)
        extra = draw(st.sampled_from([None] * 6 + ["usage", "version", "null usage", "no choice"]))
        if extra == "usage":
            event["usage"] = {"completion_tokens": 3}
        elif extra == "version":
            event["weight_version"] = draw(st.sampled_from([1, "2"]))
        elif extra == "null usage":
            event["usage"] = None
        elif extra == "no choice":
            event["choices"] = []
        items.append(event)
    return items


def both(monkeypatch: pytest.MonkeyPatch, read: Callable[[], Captured]) -> tuple[Any, Any]:
    """What is read with the compiled reader and without."""

    def outcome() -> Any:
        try:
            captured = read()
        except CaptureError:
            return "refused"  # the message tells the byte, of the reply with its numbers or without
        return {name: getattr(captured, name) for name in captured.__struct_fields__ if name != "plain"}

    fast = outcome()
    with monkeypatch.context() as m:
        m.setattr(scan, "lift", lambda reply: None)
        m.setattr(scan, "lift_events", lambda stream: None)
        return fast, outcome()


@pytest.fixture(scope="module")
def patching() -> Any:
    with pytest.MonkeyPatch.context() as m:
        yield m


compact = st.sampled_from([(",", ":"), (", ", ": ")])


@compiled
@settings(max_examples=120, deadline=None)
@given(reply=replies(), separators=compact, ascii_only=st.booleans())
def test_whole_replies_read_the_same(
    patching: pytest.MonkeyPatch, reply: dict[str, Any], separators: tuple[str, str], ascii_only: bool
) -> None:
    body = json.dumps(reply, separators=separators, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    fast, slow = both(patching, lambda: read_reply(body))
    assert fast == slow


def framed(event: bytes) -> bytes:
    return b"data: " + event + b"\n\n"


@compiled
@settings(max_examples=120, deadline=None)
@given(frames=events(), separators=compact, ascii_only=st.booleans(), cuts=st.lists(st.floats(0, 1), max_size=4))
def test_streams_read_the_same_however_they_are_cut(
    patching: pytest.MonkeyPatch,
    frames: list[dict[str, Any]],
    separators: tuple[str, str],
    ascii_only: bool,
    cuts: list[float],
) -> None:
    pieces = [
        framed(json.dumps(event, separators=separators, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))
        for event in frames
    ] + [framed(b"[DONE]")]
    fast, slow = both(patching, lambda: read_stream(list(pieces)))
    assert fast == slow
    text = b"".join(pieces)
    edges = sorted({0, len(text), *(int(cut * len(text)) for cut in cuts)})
    cut = [text[a:b] for a, b in itertools.pairwise(edges)]
    fast, slow = both(patching, lambda: read_stream(list(cut)))
    assert fast == slow


def sample_reply() -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "a b"},
        "logprobs": {"content": entries([-0.5, -1e-7], [" a", " b"])},
        "token_ids": [11, 12],
        "finish_reason": "stop",
    }
    return json.dumps({"id": "r", "choices": [choice], "prompt_token_ids": [1, 2]}, separators=(",", ":")).encode()


def sample_stream() -> bytes:
    items = []
    for number in range(3):
        choice = {
            "index": 0,
            "delta": {"content": f" w{number}"},
            "logprobs": {"content": entries([-0.25], [" w"])},
            "finish_reason": None,
            "token_ids": [number],
        }
        items.append(framed(json.dumps({"id": "r", "choices": [choice]}, separators=(",", ":")).encode()))
    return b"".join([*items, framed(b"[DONE]")])


DAMAGE = b'"\\,:[]{}0-.eEx\x00\n \xff\x7fnull1'


@compiled
@settings(max_examples=160, deadline=None)
@given(
    at=st.floats(0, 1), byte=st.sampled_from(list(DAMAGE)), how=st.sampled_from(["replace", "insert", "cut", "drop"])
)
@example(at=0.0, byte=0, how="cut")
def test_damaged_replies_read_the_same(patching: pytest.MonkeyPatch, at: float, byte: int, how: str) -> None:
    """No byte out of place makes the compiled reader see what the decoder does not, or read past the end."""
    for text, read in ((sample_reply(), read_reply), (sample_stream(), lambda data: read_stream([data]))):
        place = min(int(at * len(text)), len(text) - 1)
        end = {"replace": place + 1, "insert": place, "cut": len(text), "drop": place + 1}[how]
        damaged = text[:place] + (bytes([byte]) if how in ("replace", "insert") else b"") + text[end:]
        fast, slow = both(patching, lambda damaged=damaged, read=read: read(damaged))  # type: ignore[misc]
        assert fast == slow, damaged


@compiled
@settings(max_examples=130, deadline=None)
@given(value=st.floats(allow_nan=False, allow_infinity=False, min_value=-3e38, max_value=3e38))
@example(value=-1.1920928244535389e-07)
@example(value=-0.0)
@example(value=5e-324)
@example(value=-9007199254740993.0)
@example(value=1e22)
@example(value=123456789012345678.0)
def test_logprobs_are_rounded_as_python_rounds_them(value: float) -> None:
    lifted = scan.lift(b'{"choices":[{"logprobs":{"token_logprobs":[%b]}}]}' % repr(value).encode())
    assert lifted is not None
    assert lifted[1] == [(None, struct.pack("<f", value))]


@compiled
@settings(max_examples=200, deadline=None)
@given(value=st.floats(2**-100, 2**100, width=32), digits=st.integers(15, 25), step=st.integers(-2, 2))
def test_numbers_between_two_floats_go_to_the_one_that_python_takes(value: float, digits: int, step: int) -> None:
    """Halfway, and a hair off it, where one rounding more or less would tell."""
    above = struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", value))[0] + 1))[0]
    middle = (value + above) / 2
    for _ in range(abs(step)):
        middle = math.nextafter(middle, math.copysign(math.inf, step))
    for number in (f"{Decimal(middle):.{digits}g}", f"-{Decimal(middle):.{digits}f}"):
        body = b'{"choices":[{"logprobs":{"content":[{"token":"","logprob":%b,"bytes":[],"top_logprobs":[]}]}}]}'
        lifted = scan.lift(body % number.encode())
        assert lifted is not None
        assert lifted[1] == [(None, struct.pack("<f", float(number)))], number


@compiled
@settings(max_examples=130, deadline=None)
@given(text=st.text("0123456789,- ", max_size=40))
@example(text="")
@example(text="0,10,7")
@example(text="10,07")
@example(text="1,")
@example(text=",1")
@example(text="1,,2")
def test_only_lists_of_whole_numbers_are_taken_for_prompts(text: str) -> None:
    lifted = scan.lift(b'{"choices":[],"prompt_token_ids":[%b]}' % text.encode())
    try:
        good = isinstance(json.loads(f"[{text}]"), list)
    except ValueError:
        good = False
    assert (lifted is not None) is good
    if lifted is not None:
        assert lifted[2] == text.encode()


@compiled
@pytest.mark.parametrize(
    "entry",
    [
        b'{"token":"a","bytes":[97],"logprob":-0.5,"top_logprobs":[]}',
        b'{"token":"\\u00e9\\n","logprob":-0.5,"bytes":[195,169,10],"top_logprobs":[]}',
        b'{"token":"a","logprob":-0.5,"bytes":null,"top_logprobs":[]}',
        b'{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[{"token":"b","logprob":-1.0,"bytes":[98]}]}',
        b'{"logprob":-0.5}',
        b'{ "token" : "a" , "logprob" : -0.5 }',
    ],
)
def test_entries_of_every_engine_are_read(entry: bytes) -> None:
    lifted = scan.lift(b'{"choices":[{"logprobs":{"content":[%b,%b]}}]}' % (entry, entry))
    assert lifted is not None
    assert lifted[1] == [(None, struct.pack("<2f", -0.5, -0.5))]


@compiled
@pytest.mark.parametrize(
    "entry",
    [
        b'{"token":"a","logprob":-0.5,"logprob":-0.5,"bytes":[97],"top_logprobs":[]}',
        b'{"token":"a","bytes":[97],"top_logprobs":[]}',
        b'{"token":"\\ud800","logprob":-0.5,"bytes":[97],"top_logprobs":[]}',
        b'{"token":"a","logprob":-0.5,"bytes":[07],"top_logprobs":[]}',
        b'{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[]',
        b'{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[}',
    ],
)
def test_entries_that_are_none_are_declined(entry: bytes) -> None:
    assert scan.lift(b'{"choices":[{"logprobs":{"content":[%b]}}]}' % entry) is None


@compiled
@pytest.mark.parametrize(
    "number",
    [
        "-0.1e1",
        "1E+2",
        "0e0",
        "-12.50",
        "3.0000000000000000000000000000000001",
        "1e-400",
        "0." + "0" * 40 + "1",
        "9" * 30,
    ],
)
def test_unusual_numbers_are_read_as_they_are_written(number: str) -> None:
    lifted = scan.lift(b'{"choices":[{"logprobs":{"token_logprobs":[%b]}}]}' % number.encode())
    assert lifted is not None
    assert lifted[1][0][1] == struct.pack("<f", float(number))


@compiled
@pytest.mark.parametrize(
    "number", ["01", "1.", ".5", "+1", "1e", "--1", "1e400", "NaN", "Infinity", "1e39", "null", '"1"', ""]
)
def test_what_is_no_number_is_declined(number: str) -> None:
    body = b'{"choices":[{"logprobs":{"token_logprobs":[%b]}}]}' % number.encode()
    lifted = scan.lift(body)
    assert lifted is None or (number == "" and lifted[1] == [(None, b"")])


@compiled
@pytest.mark.parametrize("number", ["2147483648", "-2147483649", "1.0", "1e3", "01", "true", "null", '"7"'])
def test_what_is_no_token_id_is_declined(number: str) -> None:
    assert scan.lift(b'{"choices":[{"token_ids":[7,%b]}]}' % number.encode()) is None


@compiled
def test_the_rest_of_a_reply_is_what_it_was_without_its_numbers() -> None:
    lifted = scan.lift(sample_reply())
    assert lifted is not None
    rest, numbers, prompt = lifted
    reply = json.loads(sample_reply())
    reply["choices"][0]["logprobs"] = reply["choices"][0]["token_ids"] = None
    reply["prompt_token_ids"] = None
    assert prompt == b"1,2"
    assert json.loads(rest) == reply == json.loads(scan.without_numbers(sample_reply()))
    assert numbers == [(struct.pack("<2i", 11, 12), struct.pack("<2f", -0.5, -1e-7))]


def meant(stream: bytes) -> list[Any]:
    """What the lines of a stream say; short lists that stay and null are the same to whoever has not asked."""
    items: list[Any] = []
    for line in stream.split(b"\n"):
        try:
            event = json.loads(line.removeprefix(b"data:"))
        except ValueError:
            items.append(line)
            continue
        for part in [event, *event.get("choices", [])] if isinstance(event, dict) else []:
            for name in part:
                part[name] = part[name] or None
        items.append(event)
    return items


@compiled
@settings(max_examples=100, deadline=None)
@given(frames=events(), separators=compact, ascii_only=st.booleans(), newline=st.sampled_from([b"\n", b"\r\n"]))
def test_streams_without_their_numbers_say_the_same_otherwise(
    frames: list[dict[str, Any]], separators: tuple[str, str], ascii_only: bool, newline: bytes
) -> None:
    text = b": hi" + newline * 2
    for event in frames:
        body = json.dumps(event, separators=separators, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        text += b"data: " + body + newline * 2
    text += b"data: [DONE]" + newline * 2
    plain = scan.plain_events(text)
    assert scan.plain_events(plain) == plain
    if all(scan.without_numbers(line[6:]) != line[6:] for line in text.split(b"\n") if b"ids" in line):
        assert meant(plain) == meant(
            scan._plain_events(text)
        )  # where the decoder takes it; half surrogates it does not
    for event in meant(plain):
        for choice in (event.get("choices") if isinstance(event, dict) else None) or []:
            assert not choice.get("token_ids")
            assert not choice.get("logprobs")


@compiled
@settings(max_examples=160, deadline=None)
@given(
    at=st.floats(0, 1), byte=st.sampled_from(list(DAMAGE)), how=st.sampled_from(["replace", "insert", "drop", "cut"])
)
def test_damaged_events_are_left_as_they_are(at: float, byte: int, how: str) -> None:
    text = sample_stream()
    place = min(int(at * len(text)), len(text) - 1)
    end = {"replace": place + 1, "insert": place, "cut": len(text), "drop": place + 1}[how]
    damaged = text[:place] + (bytes([byte]) if how in ("replace", "insert") else b"") + text[end:]
    plain = scan.plain_events(damaged)
    for event in text.split(b"\n\n")[:-1]:
        if event in damaged.split(b"\n\n"):
            assert scan.plain_events(event) in plain
    intact = [line for line in damaged.split(b"\n") if scan.plain_events(line) == line]
    assert all(line in plain for line in intact)


def test_an_event_of_several_lines_or_another_kind_stays_as_it_is() -> None:
    for plain in (scan.plain_events, scan._plain_events):
        for text in (
            b"",
            b"\n\n",
            b'data: {"choices":[{"token_ids":[1,2,3],\ndata: "x":1}]}\n\n',
            b'data: {"choices":[{"token_ids":[1,2,3]\n}]}\n\n',
            b'event: x\ndata: {"token_ids":[1,2,3]}\n\n',
            b'data: {"choices":[{"delta":{"content":"\\"token_ids\\":[1,2,3]"}}]}\n\n',
            b'data: {"choices":[{"token_ids":[1,2,3]',
            b"data: [DONE]\n\n",
        ):
            assert plain(text) == text
        assert plain(b'data:{"prompt_token_ids":[1,2],"choices":[{"token_ids":[1,2,3]}]}\n\n').split() == [
            *plain(b'data:{"prompt_token_ids":null,"choices":[{"token_ids":null}]}\n\n').split()
        ]


@compiled
@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.sampled_from([b"\n", b"\r\n", b"x", b"\r"]), max_size=12).map(b"".join), data=st.data())
def test_whole_events_end_with_an_empty_line(text: bytes, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(text)))
    found = scan.whole_events(text, end)
    assert found == scan._whole_events(text, end)
    assert found == 0 or text[:found].endswith((b"\n\n", b"\n\r\n"))
    rest = text[found:end]
    assert b"\n\n" not in rest
    assert b"\n\r\n" not in rest


@compiled
def test_whole_events_needs_a_place_that_is_there() -> None:
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="not that many bytes"):
            scan.whole_events(b"abc", wrong)
    with pytest.raises(TypeError):
        scan.whole_events("abc", 1)  # type: ignore[arg-type]


@compiled
def test_a_thousand_events_are_one_run() -> None:
    event = sample_stream().split(b"\n\n")[1] + b"\n\n"
    items = scan.lift_events(event * 1000)
    assert items is not None
    assert len(items) == 2  # the first is given whole, for its id and model
    assert isinstance(items[0], bytes)
    assert items[1][0] == 0
    assert items[1][1] == struct.pack("<i", 1) * 999
    assert items[1][4] == b" w1" * 999


@compiled
def test_deep_nesting_is_declined_and_not_a_crash() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    assert scan.lift(b'{"choices":[],"x":%b}' % deep) is None


@compiled
@pytest.mark.parametrize("wrong", ["text", bytearray(b"{}"), None])
def test_other_types_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="needs bytes"):
        scan.lift(wrong)
    with pytest.raises(TypeError, match="needs bytes"):
        scan.lift_events(wrong)


ENDS = [
    b'"finish_reason"',
    b":",
    b" ",
    b'"stop"',
    b"null",
    b"data:",
    b"[DONE]",
    b"x",
    b"\n\n",
    b'"finish_reason": "length"',
]


@settings(max_examples=100, deadline=None)
@given(data=st.lists(st.sampled_from(ENDS), max_size=8), finish=st.booleans())
def test_the_end_of_a_stream_is_found_the_same(data: list[bytes], finish: bool) -> None:
    assert scan.find_end(b"".join(data), finish) == scan._find_end(b"".join(data), finish)


@pytest.mark.parametrize("find", [scan.find_end, scan._find_end])
def test_the_end_of_a_stream_is_found_however_it_is_spaced(find: Callable[[bytes, bool], int]) -> None:
    assert find(b'{"finish_reason":null}{"finish_reason":"stop"}', True) == 23
    assert find(b'{"finish_reason": "stop"}', True) == 1
    assert find(b'{"finish_reason" :\n"stop"}', True) == 1
    assert find(b'{"finish_reason":"stop"}data: [DONE]', False) == 24
    assert find(b"xdata:[DONE]", True) == 1
    assert find(b"[DONE]", True) == -1
    assert find(b"", True) == -1


def test_it_is_built_where_there_is_a_compiler() -> None:
    include = Path(sysconfig.get_paths()["include"], "Python.h")
    if not (shutil.which("cc") and include.exists()):
        pytest.skip("no C compiler, or no headers of Python")
    assert scan.COMPILED, "install the package again: the C reader was not built"


def test_it_can_be_left_out() -> None:
    code = "from agentcore_rl_toolkit.gateway.capture import scan; print(scan.COMPILED, scan.lift(b'{}'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "AGENTCORE_RL_PURE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.split() == ["False", "None"]


def test_float32_of_the_decoders_path_is_the_same() -> None:
    """Without the compiled reader the same bytes come out, down to the sign of zero."""
    values = [-0.0, -1e-45, -math.pi, -700.25]
    reply = {"choices": [{"index": 0, "token_ids": [1, 2, 3, 4], "logprobs": {"token_logprobs": values}, "text": "x"}]}
    with pytest.MonkeyPatch.context() as m:
        m.setattr(scan, "lift", lambda body: None)
        captured = read_reply(json.dumps(reply).encode())
    assert captured.choices[0].logprobs == struct.pack("<4f", *values)
