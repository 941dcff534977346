"""The compiled reader of replies, where it could be built, and what stands in for it elsewhere.

`_scan.c` turns the numbers of a reply into packed arrays several times as fast as building a Python object for each. It is
built when the package is installed and there is a C compiler. Without it `lift` and `lift_events` decline every reply,
which decoders then read whole: slower, with the same result. ``AGENTCORE_RL_PURE=1`` leaves it out.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import msgspec

from ...messages.errors import NOT_JSON
from ..http.body import Bytes

__all__ = ["COMPILED", "Lifted", "Run", "find_end", "lift", "lift_events", "plain_events", "whole_events"]

Lifted = tuple[bytes, list[tuple[bytes | None, bytes | None]], Bytes | None]  # see `lift` in `_scan.c`
Run = tuple[int, bytes | None, bytes | None, bool, bytes]  # see `lift_events` in `_scan.c`


def _decline(reply: bytes, /) -> None:
    return None


_FINISH = re.compile(rb'"finish_reason"[ \n\r\t]*:[ \n\r\t]*"')
_DONE = re.compile(rb"data: ?\[DONE\]")


def _find_end(data: bytes, finish: bool, /) -> int:
    end = (_FINISH.search(data) if finish else None) or _DONE.search(data)
    return -1 if end is None else end.start()


class _Choices(msgspec.Struct):
    """What of an event is looked at."""

    choices: list[dict[str, msgspec.Raw]] = []


_NULL = msgspec.Raw(b"null")
_CUT = frozenset({"prompt_token_ids", "token_ids", "logprobs"})
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_choices = msgspec.json.Decoder(_Choices)


def without_numbers(reply: bytes) -> bytes:
    """A whole reply, or an event of one, with null for its token ids and logprobs; as it came, where it is no such reply."""
    try:
        response, choices = _fields.decode(reply), _choices.decode(reply).choices
    except NOT_JSON:
        return reply
    for choice in choices:
        choice |= dict.fromkeys(_CUT & choice.keys(), _NULL)
    response |= dict.fromkeys({"prompt_token_ids"} & response.keys(), _NULL)
    return msgspec.json.encode({**response, "choices": choices} if choices else response)


def _plain_line(line: bytes) -> bytes:
    data = line.removeprefix(b"data:").strip()
    if data[:1] != b"{" or not (b"token_ids" in data or b'"logprobs"' in data):
        return line
    plain = without_numbers(data)
    return line if plain == data else line.replace(data, plain)


def _plain_events(stream: bytes, /) -> bytes:
    return b"\n".join(_plain_line(line) if line.startswith(b"data:") else line for line in stream.split(b"\n"))


def _whole_events(data: bytes, end: int, /) -> int:
    places = data.rfind(b"\n\n", 0, end), data.rfind(b"\n\r\n", 0, end)
    return max(place + size if place >= 0 else 0 for place, size in zip(places, (2, 3), strict=True))


_PURE = _find_end, _decline, _decline, _plain_events, _whole_events

if TYPE_CHECKING:
    from ._scan import find_end, lift, lift_events, plain_events, whole_events

    COMPILED = True
else:
    try:
        if os.environ.get("AGENTCORE_RL_PURE"):
            raise ImportError("left out by AGENTCORE_RL_PURE")
        from ._scan import find_end, lift, lift_events, plain_events, whole_events

        COMPILED = True
    except ImportError:
        find_end, lift, lift_events, plain_events, whole_events = _PURE
        COMPILED = False
