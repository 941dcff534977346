"""Reads a stream of chat completion events: makes deltas of them, and joins them into whole choices.

Each event is decoded once, with its numbers as they came. A delta for an agent that speaks the servers' dialect carries the
event's own bytes, a delta for others carries its content. Events are joined a block at a time: each kind of content in a pass of
its own, with few objects alive meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ...errors import CaptureError, UpstreamError
from ...messages.errors import NOT_JSON
from ...messages.wire import Delta
from ...messages.wire.canonical import ToolDelta
from ...messages.wire.stream import CollectedCalls
from .events import DONE, gather, split
from .record import Captured, ChoiceRecord
from .replay import usage_of
from .reply import (
    Choice,
    Event,
    Message,
    ToolPiece,
    check,
    check_text,
    choice_record,
    experts,
    read_numbers,
    stop_sequence,
    text_status,
)
from .token_numbers import (
    ABSENT,
    SHORT,
    brackets,
    own_words,
    packed_ids,
    packed_logprobs,
    raw,
    take_prompt,
    without_numbers,
)
from .versions import Versions, put, version_of


class _EndedChoice(msgspec.Struct, gc=False):
    index: int = 0
    finish_reason: str | None = None


class _Ended(msgspec.Struct, gc=False):
    choices: list[_EndedChoice] = []


class _Origin(msgspec.Struct, gc=False):
    id: str | None = None
    model: str | None = None


_event = msgspec.json.Decoder(Event)
_ended = msgspec.json.Decoder(_Ended)
_origin = msgspec.json.Decoder(_Origin)
_encode = msgspec.json.Encoder().encode
_BLOCK = 64  # events


class StreamReader:
    """Reads a stream's events. ``begun``: one has been read; ``unread`` says why one could not be.

    ``entries``: the agent asked for logprobs. ``n`` is the number of choices. ``relayed``: the agent gets the events as they are;
    with ``plain`` they have null for token ids and logprobs.
    """

    def __init__(self, *, entries: bool = False, n: int = 1, relayed: bool = False, plain: bool = False) -> None:
        self.unread: str | None = None
        self.begun = False
        self.ended = False  # whether some choice has ended
        self.carry: list[bytes] = []  # of an event that is not whole yet
        self._captured = Captured(choices=[])
        self._entries = entries
        self._n = n
        self._relayed = relayed
        self._plain = plain
        self._parts: dict[int, _Parts] = {}
        self._finished: set[int] = set()
        self._block: list[Event] = []  # of which the parts do not know yet

    def feed(self, data: bytes) -> list[Delta]:
        """Read a piece of the stream. Raises: UpstreamError on an event that the agent could not read either."""
        block = gather(self.carry, data)
        if not block:
            return []
        events = self._read(block)
        if self._relayed:
            return [delta for lines, said, event in events for delta in self._passed(lines, said, event)]
        if self.unread is not None:
            raise UpstreamError(self.unread)
        return [delta for *_, event in events if event is not None for delta in self._deltas(event)]

    def _read(self, block: bytes) -> list[tuple[bytes, bytes | None, Event | None]]:
        """Read whole events: of each its lines, its data, and its content, if it is an event of this kind."""
        found: list[tuple[bytes, bytes | None, Event | None]] = []
        captured, decoded = self._captured, self._block
        for lines, data in split(block):
            if data is None or data == DONE:
                found.append((b"data: [DONE]" if lines is None else lines, data, None))
                continue
            event, prompt, text = None, None, data
            try:
                if len(data) > SHORT:
                    prompt, text = take_prompt(data)
                event = _event.decode(text)
                if event.usage is not ABSENT:
                    check_text(bytes(event.usage))
                if not self.begun or (captured.prompt is None and (prompt or event.prompt_token_ids is not ABSENT)):
                    self._begin(text, event, prompt)
                decoded.append(event)
                text = without_numbers(text, event.choices, event.prompt_token_ids) if self._plain else data
            except NOT_JSON as e:
                event, text = _endings(data), data
                self.unread = self.unread or f"the engine's stream cannot be read: {e}"
            found.append((b"data: %b" % text if lines is None else lines.replace(data, text), data, event))
        if len(decoded) >= _BLOCK:
            self._fold()
        return found

    def _begin(self, text: bytes, event: Event, prompt: bytes | None) -> None:
        """Keep what a stream states once."""
        captured = self._captured
        if not self.begun:
            origin = _origin.decode(text)
            captured.reply_id, captured.model, self.begun = origin.id, origin.model, True
        captured.prompt = brackets(event.prompt_token_ids) if prompt is None else prompt

    def _final(self, choice: Choice) -> bool:
        """Return True if this piece ends its choice, and all other choices have ended."""
        if choice.finish_reason is None:
            return False
        self.ended = True
        self._finished.add(choice.index)
        return len(self._finished) >= self._n

    def _passed(self, lines: bytes, said: bytes | None, event: Event | None) -> Iterator[Delta]:
        """An event as it is. Raises: UpstreamError when it is no event of any kind."""
        if event is None and said not in (None, DONE) and said.lstrip()[:1] != b"{":
            raise UpstreamError("the inference server sent something else in the middle of its reply")
        final = said == DONE
        for choice in event.choices if event is not None else ():
            final = self._final(choice) or final
        if event is not None and event.error is not ABSENT and raw(event.error) is not None:
            final = True
        yield Delta(event=lines + b"\n\n", final=final)

    def _deltas(self, event: Event) -> Iterator[Delta]:
        """The content of an event. Raises: UpstreamError."""
        if event.error is not ABSENT and raw(event.error) is not None:
            return
        for choice in event.choices:
            piece = choice.delta or _NO_DELTA
            delta = Delta(
                choice=choice.index,
                text=piece.content or "",
                reasoning=piece.reasoning_content or piece.reasoning or "",
                refusal=piece.refusal or "",
                finish_reason=choice.finish_reason,
                final=self._final(choice),
            )
            if piece.tool_calls:
                delta.tool_calls = [_tool_piece(place, call) for place, call in enumerate(piece.tool_calls)]
            if self._entries:
                delta.logprob_entries = own_words(choice.logprobs)
            if choice.finish_reason is not None:
                delta.stop_sequence = stop_sequence(choice.stop_reason)
            yield delta
        if event.usage is not ABSENT and (counted := raw(event.usage)) is not None:
            yield Delta(choice=event.choices[-1].index if event.choices else 0, usage=usage_of(counted))

    def _fold(self) -> None:
        """Put together what the last events say."""
        events, self._block = self._block, []
        captured, parts = self._captured, self._parts
        for event in events:
            if event.usage is not ABSENT or event.error is not ABSENT:
                captured.usage = raw(event.usage) or captured.usage
                captured.error = raw(event.error) or captured.error
        choices = [choice for event in events for choice in event.choices]
        indices = {choice.index for choice in choices}
        for index in indices:
            own = choices if len(indices) == 1 else [choice for choice in choices if choice.index == index]
            parts.setdefault(index, _Parts()).take(captured, own, entries=self._entries)
        for event in events:
            if event.weight_version is not None:
                self._name(event, version_of(event.weight_version))

    def _name(self, event: Event, version: int | None) -> None:
        """An event names the weights of its tokens."""
        if version is None:
            return
        for choice in event.choices:
            versions = self._parts[choice.index].versions
            versions.named(version, tokens=bool(brackets(choice.token_ids)))
            if choice.weight_version_first is not None:
                first, last = choice.weight_version_first, choice.weight_version_last
                versions.spans(version_of(first), version_of(last))

    def captured(self) -> Captured:
        """The events so far, as a whole reply. Raises: CaptureError when some event could not be read."""
        if self.unread is not None:
            raise CaptureError(self.unread)
        if not self.begun and (sent := b"".join(self.carry).strip()).startswith((b"{", b"[", b"<")):
            raise CaptureError(f"the engine was asked for a stream and sent something else: {sent[:100]!r}")
        self._fold()
        captured, parts = self._captured, self._parts
        for index in sorted(parts):
            captured.choices.append(parts[index].whole(captured, index))
        put(captured, [parts[index].versions for index in sorted(parts)])
        check(captured)
        return captured


def _endings(data: bytes) -> Event | None:
    """The finish reasons in an event that cannot be read otherwise. An agent may understand the event all the same."""
    try:
        return Event([Choice(index=c.index, finish_reason=c.finish_reason) for c in _ended.decode(data).choices])
    except NOT_JSON:
        return None


def _tool_piece(place: int, call: ToolPiece) -> ToolDelta:
    name = call.function.name if call.function else None
    index = place if call.index is None else call.index
    return ToolDelta(index=index, id=call.id, name=name, arguments=call.arguments())


class _Parts:
    """The events of one choice, joined."""

    def __init__(self) -> None:
        self.ids: list[bytes] = []  # packed
        self.logprobs: list[bytes] = []
        self.content: list[str] = []
        self.rare: list[Message] = []  # deltas that bring more than text
        self.finish_reason: str | None = None
        self.experts: msgspec.Raw = ABSENT
        self.stop_sequence: str | None = None
        self.entries: list[Any] = []  # logprobs in the engine's words
        self.versions = Versions()

    def take(self, captured: Captured, choices: Sequence[Choice], *, entries: bool) -> None:
        ids = [c.token_ids for c in choices if c.token_ids is not ABSENT]
        logprobs = [c.logprobs for c in choices if c.logprobs is not ABSENT]
        if (packed := read_numbers(captured, packed_ids, ids)) is not None:
            self.ids.append(packed)
        if (packed := read_numbers(captured, packed_logprobs, logprobs)) is not None:
            self.logprobs.append(packed)
        for words in map(own_words, logprobs if entries else ()):
            self.entries += words or ()
        deltas = [c.delta for c in choices if c.delta is not None]
        self.content += [d.content for d in deltas if d.content]
        self.rare += [d for d in deltas if d.tool_calls is not None or d.reasoning_content or d.reasoning or d.refusal]
        for choice in choices:
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
                self.stop_sequence = stop_sequence(choice.stop_reason)
            if choice.routed_experts is not ABSENT:
                self.experts = choice.routed_experts

    def whole(self, captured: Captured, index: int) -> ChoiceRecord:
        message, calls = _message("".join(self.content), self.rare)
        record = choice_record(
            captured,
            index,
            b"".join(self.ids) if self.ids else None,
            b"".join(self.logprobs) if self.logprobs else None,
            self.finish_reason,
            _encode(message),
            "parsed" if calls else text_status(self.content),
        )
        record.routed_experts = experts(captured, self.experts)
        record.stop_sequence = self.stop_sequence
        record.agent_logprobs = _encode({"content": self.entries}) if self.entries else None
        return record


def _message(content: str, rare: list[Message]) -> tuple[dict[str, object], bool]:
    """The assistant message, and whether it calls tools. ``rare`` are the deltas that bring more than text."""
    collected = CollectedCalls()
    for delta in rare:
        collected.add(_tool_piece(place, call) for place, call in enumerate(delta.tool_calls or ()))
    calls = collected.all()
    message: dict[str, object] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning := "".join([d.reasoning_content or d.reasoning or "" for d in rare]):
        message["reasoning_content"] = reasoning
    if refusal := "".join([d.refusal or "" for d in rare]):
        message["refusal"] = refusal
    if calls:
        message["tool_calls"] = [call.to_dict() for call in calls]
    return message, bool(calls)


_NO_DELTA = Message()
