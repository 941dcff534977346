"""What a stream says: chat or text completion events put together into whole choices, by one reader.

For an agent that gets the engine's own events the stream is read once it is whole (`read_stream`). A stream of a thousand
tokens is a thousand events of the same few shapes. Those that only add text and tokens are read by `scan`, a run of them at
once. What is left, or all where there is no compiler, is decoded a block at a time, as one JSON list, and each kind of
content is gathered in a pass of its own: less to do in Python for each event, and few enough objects at a time to stay in
the processor's cache. For an agent of another dialect it is read as it comes (`StreamReader.feed`), into deltas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ...errors import CaptureError, UpstreamError
from ...messages.dialects import Delta
from ...messages.dialects.canonical import ToolDelta
from ...messages.dialects.completions import chat_entries
from ...messages.errors import NOT_JSON
from ..http.body import Bytes
from . import scan
from .events import events_of
from .record import ChoiceRecord, pack_ids
from .replay import usage_of
from .reply import (
    ABSENT,
    Captured,
    Logprobs,
    Sglext,
    add_experts,
    check,
    check_text,
    choice_record,
    extend_logprobs,
    in_own_words,
    logprob_values,
    long_prompt,
    loose_prompt,
    packed_logprobs,
    raw,
    stop_sequence,
    take_prompt,
    text_status,
    version_number,
)
from .versions import Versions, put


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _ToolDelta(msgspec.Struct, gc=False):
    index: int | None = None
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
    weight_version_first: int | str | None = None
    weight_version_last: int | str | None = None
    stop_reason: msgspec.Raw = ABSENT  # vLLM's
    matched_stop: msgspec.Raw = ABSENT  # SGLang's


class _EntriesChoice(_Choice, gc=False):
    logprobs: dict[str, Any] | None = None  # type: ignore[assignment]  # in the engine's words, for the agent


class _Event(msgspec.Struct, gc=False):
    """One event: only what changes from one to the next."""

    choices: list[_Choice] = []
    weight_version: int | str | None = None
    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT
    sglext: Sglext | None = None


class _EntriesEvent(_Event, gc=False):
    choices: list[_EntriesChoice] = []  # type: ignore[assignment]


class _EndedChoice(msgspec.Struct, gc=False):
    index: int = 0
    finish_reason: str | None = None


class _Ended(msgspec.Struct, gc=False):
    choices: list[_EndedChoice] = []


class _Origin(msgspec.Struct, gc=False):
    id: str | None = None
    model: str | None = None


_events = msgspec.json.Decoder(list[_Event])
_entries = msgspec.json.Decoder(list[_EntriesEvent])
_origin = msgspec.json.Decoder(_Origin)
_ended = msgspec.json.Decoder(_Ended)
_text = msgspec.json.Decoder(str)
_encode = msgspec.json.Encoder().encode
_PROMPT = b'"prompt_token_ids"'
_BLOCK = 32  # events; measured, with all at once the objects leave the cache and it takes twice as long


def read_stream(pieces: list[bytes], *, entries: bool = False) -> Captured:
    """Decode a streamed reply from the body pieces it came in, however they are cut. ``entries``: the agent asked for
    logprobs, which are kept in the engine's words.

    A stream that broke off gives what had arrived, with ``complete`` False. Raises: CaptureError when an event is not
    JSON of this kind.
    """
    prompt, stream = long_prompt(pieces[0] if len(pieces) == 1 else b"".join(pieces))
    items = None if entries else scan.lift_events(stream)
    if items is not None:
        try:
            return _read(items, prompt, entries=False)
        except (CaptureError, *NOT_JSON):
            pass
    events = events_of(stream)
    if not events and stream.strip().startswith((b"{", b"[", b"<")):
        raise CaptureError(f"the engine was asked for a stream and sent something else: {stream[:100]!r}")
    try:
        return _read([*events], prompt, entries=entries)
    except NOT_JSON as e:
        raise CaptureError(f"the engine's stream cannot be read: {e}") from e


def _read(items: list[bytes | scan.Run], prompt: Bytes | None, *, entries: bool) -> Captured:
    """A stream from its events' JSON, runs of plain events being read already, and the prompt if that was cut out."""
    reader = StreamReader(_cut_prompt(items) if prompt is None else prompt, entries=entries)
    block: list[bytes] = []
    for item in [*items, None]:
        if isinstance(item, bytes):
            block.append(item)
            if len(block) < _BLOCK:
                continue
        if block:
            reader.take(block)
            block.clear()
        if isinstance(item, tuple):
            reader.take_run(item)
    return reader.captured()


class StreamReader:
    """See the module. ``entries``: the agent asked for logprobs."""

    def __init__(self, prompt: Bytes | None = None, *, entries: bool = False) -> None:
        self._captured = Captured(choices=[], prompt=prompt)
        self._decoder: msgspec.json.Decoder[Any] = _entries if entries else _events
        self._parts: dict[int, _Parts] = {}
        self._sglext: Sglext | None = None
        self._begun = False

    def feed(self, data: bytes) -> list[Delta]:
        """Read whole events of a stream; what is new in them. Where only tokens cannot be read the agent gets its text, and
        the capture says why. Raises: UpstreamError on an event that is not JSON of this kind.
        """
        texts: list[bytes | scan.Run] = [*events_of(data)]
        if not texts:
            return []
        try:
            if self._captured.prompt is None:
                self._captured.prompt = _cut_prompt(texts)
            events = self.take([text for text in texts if isinstance(text, bytes)])
        except (CaptureError, *NOT_JSON) as e:
            self._captured.problem = self._captured.problem or f"the engine's stream cannot be read: {e}"
            try:
                events = self.take(events_of(scan.plain_events(data)))
            except (CaptureError, *NOT_JSON) as again:
                raise UpstreamError(f"the engine sent an event that cannot be read: {again}") from again
        return [delta for event in events for delta in _deltas(event)]

    def take(self, texts: list[bytes]) -> Sequence[_Event]:
        """Read events' JSON. Raises: CaptureError, msgspec.DecodeError."""
        captured, parts = self._captured, self._parts
        events: list[_Event] = self._decoder.decode(b"[%b]" % b",".join(texts))
        if not self._begun and texts:
            self._begun = True
            origin = _origin.decode(texts[0])
            captured.reply_id, captured.model = origin.id, origin.model
        _take(captured, parts, events)
        for event in events[-3:]:  # it comes last, before the usage
            self._sglext = event.sglext or self._sglext
        return events

    def take_run(self, run: scan.Run) -> None:
        """Take events that were read already."""
        self._begun = True
        self._parts.setdefault(run[0], _Parts()).take_run(run)

    def captured(self) -> Captured:
        """What has come, as a whole reply."""
        captured, parts = self._captured, self._parts
        for index in sorted(parts):
            captured.choices.append(parts[index].whole(captured, index))
        put(captured, [parts[index].versions for index in sorted(parts)])
        add_experts(captured, self._sglext)
        check(captured)
        return captured


def _deltas(event: _Event) -> Iterator[Delta]:
    """What an event brings, for the agent. Raises: UpstreamError."""
    if event.error is not ABSENT and raw(event.error) is not None:
        return
    for choice in event.choices:
        piece = choice.delta or _NO_DELTA
        delta = Delta(
            choice=choice.index,
            text=choice.text or piece.content or "",
            reasoning=piece.reasoning_content or piece.reasoning or "",
            refusal=piece.refusal or "",
            finish_reason=choice.finish_reason,
        )
        if piece.tool_calls:
            delta.tool_calls = [_tool_piece(place, call) for place, call in enumerate(piece.tool_calls)]
        if (entries := in_own_words(choice.logprobs)) is not None:
            delta.logprob_entries = chat_entries(entries)
        if choice.finish_reason is not None:
            delta.stop_sequence = stop_sequence(choice.stop_reason, choice.matched_stop)
        yield delta
    if event.usage is not ABSENT and (counted := raw(event.usage)) is not None:
        yield Delta(choice=event.choices[-1].index if event.choices else 0, usage=usage_of(counted))


def _tool_piece(place: int, call: _ToolDelta) -> ToolDelta:
    name = call.function.name if call.function else None
    index = place if call.index is None else call.index
    return ToolDelta(index=index, id=call.id, name=name, arguments=_arguments(call))


def _arguments(call: _ToolDelta) -> str:
    arguments = call.function.arguments if call.function else None
    return _encode(arguments).decode() if isinstance(arguments, dict) else arguments or ""


def _take(captured: Captured, parts: dict[int, _Parts], events: list[_Event]) -> None:
    for event in events:
        if event.usage is not ABSENT or event.error is not ABSENT:
            check_text(bytes(event.usage))
            captured.usage = raw(event.usage) or captured.usage
            captured.error = raw(event.error) or captured.error
    choices = [choice for event in events for choice in event.choices]
    for index in {choice.index for choice in choices}:
        if index not in parts:
            parts[index] = _Parts()
    if len(parts) == 1:
        for only in parts.values():
            only.take(captured, choices)
    else:
        for index, part in parts.items():
            part.take(captured, [choice for choice in choices if choice.index == index])
    for event in events:
        version = version_number(event.weight_version)
        if version is not None:
            for choice in event.choices:
                part = parts[choice.index]
                part.versions.named(version, tokens=bool(choice.token_ids))
                if choice.weight_version_first is not None:
                    first, last = choice.weight_version_first, choice.weight_version_last
                    part.versions.spans(version_number(first), version_number(last))


def endings(stream: bytes) -> Iterator[int]:
    """The choices of which some event of a stream says why they finished, whatever else cannot be read in it."""
    for event in events_of(stream):
        try:
            choices = _ended.decode(event).choices
        except NOT_JSON:
            continue
        yield from (choice.index for choice in choices if choice.finish_reason is not None)


def _cut_prompt(data: list[bytes | scan.Run]) -> bytes | None:
    """The first prompt ids of the stream, taken out of their event: they would be most of the decoding."""
    for i, event in enumerate(data):
        if isinstance(event, bytes) and _PROMPT in event:
            prompt, data[i] = take_prompt(event)
            if prompt is None:
                prompt = loose_prompt(event)
            if prompt is not None:
                return prompt
    return None


class _Parts:
    """What the events of one choice add up to."""

    def __init__(self) -> None:
        self.ids: list[bytes] | None = None  # packed
        self.logprobs: list[bytes] | None = None
        self.content: list[str] = []
        self.rare: list[_Delta] = []  # deltas that bring more than text
        self.finish_reason: str | None = None
        self.experts: msgspec.Raw = ABSENT
        self.stop_sequence: str | None = None
        self.entries: dict[str, Any] = {}  # logprobs in the engine's words
        self.versions = Versions()

    def add(self, ids: bytes | None, logprobs: bytes | None) -> None:
        if ids is not None:
            if self.ids is None:
                self.ids = []
            self.ids.append(ids)
        if logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.append(logprobs)

    def take_run(self, run: scan.Run) -> None:
        _, ids, logprobs, reasoning, json_text = run
        self.add(ids, logprobs)
        if json_text:
            text = _text.decode(b'"%b"' % json_text)
            if reasoning:
                self.rare.append(_Delta(reasoning_content=text))
            else:
                self.content.append(text)

    def take(self, captured: Captured, choices: list[_Choice]) -> None:
        lists = [c.token_ids for c in choices if c.token_ids is not None]
        ids = pack_ids([i for ids in lists for i in ids]) if lists else None
        parts = [c.logprobs for c in choices if c.logprobs is not None]
        own = [entries for part in parts if (entries := in_own_words(part)) is not None]
        for entries in own:
            extend_logprobs(self.entries, entries)
        contents = [] if own else [part.content for part in parts if part.content is not None]
        if len(contents) == len(parts):
            values: list[float | None] = [entry.logprob for content in contents for entry in content]
        else:
            values = [value for part in parts for value in logprob_values(part) or ()]
        self.add(ids, packed_logprobs(captured, values) if parts else None)
        deltas = [c.delta for c in choices if c.delta is not None]
        self.content += [d.content for d in deltas if d.content] if deltas else [c.text for c in choices if c.text]
        self.rare += [d for d in deltas if d.tool_calls is not None or d.reasoning_content or d.reasoning or d.refusal]
        for choice in choices:
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
                self.stop_sequence = stop_sequence(choice.stop_reason, choice.matched_stop)
            if choice.routed_experts is not ABSENT:
                self.experts = choice.routed_experts

    def whole(self, captured: Captured, index: int) -> ChoiceRecord:
        message, calls = _message("".join(self.content), self.rare)
        record = choice_record(
            captured,
            index,
            None if self.ids is None else b"".join(self.ids),
            None if self.logprobs is None else b"".join(self.logprobs),
            self.finish_reason,
            _encode(message),
            "parsed" if calls else text_status(self.content),
            self.experts,
        )
        record.stop_sequence = self.stop_sequence
        record.agent_logprobs = _encode(self.entries) if self.entries else None
        return record


def _message(content: str, rare: list[_Delta]) -> tuple[dict[str, object], bool]:
    """The assistant message, and whether it calls tools. ``rare`` are the deltas that bring more than text."""
    message: dict[str, object] = {"role": "assistant", "content": content or None}
    reasoning = [d.reasoning_content or d.reasoning or "" for d in rare if d.reasoning_content or d.reasoning]
    refusal = [d.refusal for d in rare if d.refusal]
    calls: dict[int, _ToolDelta] = {}
    for delta in rare:
        for place, call in enumerate(delta.tool_calls or ()):
            _add_call(calls, place if call.index is None else call.index, call)
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
                    "arguments": _arguments(call),
                },
            }
            for _, call in sorted(calls.items())
        ]
    elif not content:
        message["content"] = ""
    return message, bool(calls)


def _add_call(calls: dict[int, _ToolDelta], index: int, call: _ToolDelta) -> None:
    known = calls.get(index)
    if known is None:
        calls[index] = call
        return
    known.id = known.id or call.id
    if call.function is not None:
        if known.function is None:
            known.function = call.function
        else:
            known.function.arguments = _arguments(known) + _arguments(call)
            known.function.name = known.function.name or call.function.name


_NO_DELTA = _Delta()
