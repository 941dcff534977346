from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.gateway.capture.events import EventReader
from agentcore_rl_toolkit.messages.wire.stream import encode_event

STREAM = (
    b': a comment\n\ndata: {"a": 1}\n\nevent: named\r\ndata: two\r\ndata: lines\r\n\r\n'
    b"data:no space\ndata:  two spaces\n\nid: 7\nretry: 10\n\ndata: [DONE]\n\ndata: not whole\n"
)
EVENTS = [b'{"a": 1}', b"two\nlines", b"no space\n two spaces"]


def read(pieces: list[bytes]) -> list[bytes]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)]


def test_every_cut_in_two_gives_the_same_events() -> None:
    for at in range(len(STREAM) + 1):
        assert read([STREAM[:at], STREAM[at:]]) == EVENTS, f"cut at {at}"
    assert read([STREAM[i : i + 1] for i in range(len(STREAM))]) == EVENTS


LINE = st.sampled_from([b"data: x", b"data: ", b"data:{}", b"event: e", b": c", b"", b"", b"id: 1", b"junk"])
END = st.sampled_from([b"\n", b"\r\n"])


@given(st.lists(st.tuples(LINE, END), max_size=12), st.data())
def test_slices_never_change_the_events(lines: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    stream = b"".join(line + end for line, end in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(pieces) == read([stream])
    # A plain reading of the whole, line by line, as the specification words it.
    wanted: list[bytes] = []
    for block in stream.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
        values = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        if values:
            wanted.append(b"\n".join(values))
    assert read([stream]) == wanted


def test_what_is_written_as_an_event_is_read_as_one() -> None:
    assert read([encode_event({}), encode_event([1], "named")]) == [b"{}", b"[1]"]


def test_the_shortest_event_is_read_when_its_last_byte_comes() -> None:
    reader = EventReader()
    assert [reader.events(piece) for piece in (b":", b"\n", b"\n")] == [[], [], [(b":", None)]]
    assert reader.rest == b""
