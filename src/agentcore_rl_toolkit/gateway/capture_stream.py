"""What a finished stream says: chat or text completion events put together into whole choices.

A stream of a thousand tokens is a thousand events of the same few shapes. They are decoded a block at a time, as one
JSON list, and each kind of content is gathered in a pass of its own: less to do in Python for each event, and few
enough objects at a time to stay in the processor's cache.
"""

from __future__ import annotations

import msgspec

from ..errors import CaptureError
from .capture import (
    ABSENT,
    Captured,
    Logprobs,
    Sglext,
    add_experts,
    check,
    choice_record,
    loose_prompt,
    raw,
    take_prompt,
    text_status,
    version_number,
)
from .records import ChoiceRecord


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolDelta(msgspec.Struct, gc=False):
    index: int = 0
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolDelta] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    routed_experts: msgspec.Raw = ABSENT


class _Event(msgspec.Struct, gc=False):
    """One event: only what changes from one to the next."""

    choices: list[_Choice] = []
    weight_version: int | str | None = None
    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT
    sglext: Sglext | None = None


class _Origin(msgspec.Struct, gc=False):
    id: str | None = None
    model: str | None = None


_events = msgspec.json.Decoder(list[_Event])
_origin = msgspec.json.Decoder(_Origin)
_encode = msgspec.json.Encoder().encode
_PROMPT = b'"prompt_token_ids"'
_BLOCK = 32  # events; measured, with all at once the objects leave the cache and it takes twice as long


def read_stream(pieces: list[bytes]) -> Captured:
    """Decode a streamed reply from the body pieces it came in: quickly if each is an event, however else they are cut.

    A stream that broke off gives what had arrived, with ``complete`` False. Raises: CaptureError when an event is not
    JSON of this kind.
    """
    data = [piece[6:-2] for piece in pieces]  # right if every piece is an event: `data: ` and JSON and an empty line
    if data and data[-1] == b"[DONE]":
        data.pop()
    try:
        return _read(data)
    except (CaptureError, msgspec.DecodeError):
        pass
    try:
        return _read(_split(b"".join(pieces)))
    except msgspec.DecodeError as e:
        raise CaptureError(f"the engine's stream cannot be read: {e}") from e


def _read(data: list[bytes]) -> Captured:
    captured = Captured(choices=[], prompt=_cut_prompt(data))
    parts: dict[int, _Parts] = {}
    if data:
        origin = _origin.decode(data[0])
        captured.reply_id, captured.model = origin.id, origin.model
    told: Sglext | None = None
    for start in range(0, len(data), _BLOCK):
        events = _events.decode(b"[%b]" % b",".join(data[start : start + _BLOCK]))
        _take(captured, parts, events)
        for event in events[-3:]:  # it comes last, before the usage
            told = event.sglext or told
    for index in sorted(parts):
        captured.choices.append(parts[index].whole(captured, index))
    add_experts(captured, told)
    check(captured)
    return captured


def _take(captured: Captured, parts: dict[int, _Parts], events: list[_Event]) -> None:
    for event in events:
        if event.usage is not ABSENT or event.error is not ABSENT:
            captured.usage = raw(event.usage) or captured.usage
            captured.error = raw(event.error) or captured.error
    versions = [e.weight_version for e in events if e.weight_version is not None]
    if versions:
        if captured.weight_version_first is None:
            captured.weight_version_first = version_number(versions[0])
        captured.weight_version_last = version_number(versions[-1])
    choices = [choice for event in events for choice in event.choices]
    for index in {choice.index for choice in choices}:
        if index not in parts:
            parts[index] = _Parts()
    if len(parts) == 1:
        for only in parts.values():
            only.take(choices)
    else:
        for index, part in parts.items():
            part.take([choice for choice in choices if choice.index == index])


def _split(text: bytes) -> list[bytes]:
    """The data of each event: any line ending, comments, several data lines; an unfinished last event is left out."""
    events: list[bytes] = []
    data: list[bytes] = []
    for line in text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            event = b"\n".join(data)
            data = []
            if event.strip() != b"[DONE]":
                events.append(event)
    return events


def _cut_prompt(data: list[bytes]) -> bytes | None:
    """The first prompt ids of the stream, taken out of their event: they would be most of the decoding."""
    for i, event in enumerate(data):
        if _PROMPT in event:
            prompt, data[i] = take_prompt(event)
            if prompt is None:
                prompt = loose_prompt(event)
            if prompt is not None:
                return prompt
    return None


class _Parts:
    """What the events of one choice add up to."""

    __slots__ = ("content", "experts", "finish_reason", "ids", "logprobs", "rare")

    def __init__(self) -> None:
        self.ids: list[int] | None = None
        self.logprobs: list[float | None] | None = None
        self.content: list[str] = []
        self.rare: list[_Delta] = []  # deltas that bring more than text
        self.finish_reason: str | None = None
        self.experts: msgspec.Raw = ABSENT

    def take(self, choices: list[_Choice]) -> None:
        lists = [c.token_ids for c in choices if c.token_ids is not None]
        if lists:
            if self.ids is None:
                self.ids = []
            self.ids += [i for ids in lists for i in ids]
        logprobs = [c.logprobs for c in choices if c.logprobs is not None]
        if logprobs:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += [entry.logprob for part in logprobs if part.content is not None for entry in part.content]
            self.logprobs += [v for part in logprobs if part.token_logprobs is not None for v in part.token_logprobs]
        deltas = [c.delta for c in choices if c.delta is not None]
        self.content += [d.content for d in deltas if d.content] if deltas else [c.text for c in choices if c.text]
        self.rare += [d for d in deltas if d.tool_calls is not None or d.reasoning_content or d.reasoning or d.refusal]
        for choice in choices:
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
            if choice.routed_experts is not ABSENT:
                self.experts = choice.routed_experts

    def whole(self, captured: Captured, index: int) -> ChoiceRecord:
        message, calls = _message("".join(self.content), self.rare)
        return choice_record(
            captured,
            index,
            self.ids,
            self.logprobs,
            self.finish_reason,
            _encode(message),
            "parsed" if calls else text_status(self.content),
            self.experts,
        )


def _message(content: str, rare: list[_Delta]) -> tuple[dict[str, object], bool]:
    """The assistant message, and whether it calls tools. ``rare`` are the deltas that bring more than text."""
    message: dict[str, object] = {"role": "assistant", "content": content or None}
    reasoning = [d.reasoning_content or d.reasoning or "" for d in rare if d.reasoning_content or d.reasoning]
    refusal = [d.refusal for d in rare if d.refusal]
    calls: dict[int, _ToolDelta] = {}
    for delta in rare:
        for call in delta.tool_calls or ():
            _add_call(calls, call)
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if refusal:
        message["refusal"] = "".join(refusal)
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type or "function",
                "function": {
                    "name": call.function.name if call.function else None,
                    "arguments": (call.function.arguments if call.function else None) or "",
                },
            }
            for _, call in sorted(calls.items())
        ]
    elif not content:
        message["content"] = ""
    return message, bool(calls)


def _add_call(calls: dict[int, _ToolDelta], call: _ToolDelta) -> None:
    known = calls.get(call.index)
    if known is None:
        calls[call.index] = call
        return
    known.id = known.id or call.id
    if call.function is not None:
        if known.function is None:
            known.function = call.function
        else:
            known.function.name = known.function.name or call.function.name
            known.function.arguments = (known.function.arguments or "") + (call.function.arguments or "")
