"""Reads the reply of a chat server: its deltas for the agent, and its content for the record.

Replies are JSON in the shape of OpenAI's chat completions with the token fields of vLLM: ``prompt_token_ids`` at the top,
``choices[].token_ids``, ``choices[].logprobs``. A typed decoder reads a whole reply, or each event of a stream, once. It skips
all other fields. The numbers of a choice are decoded apart, so the agent gets a text whose numbers cannot be read. An agent that
uses the chat API gets the bytes of the events, without token fields if it did not ask for them.

Structs without a place in the garbage collector's lists (``gc=False``) make this three times as fast.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import UpstreamError
from ...messages.errors import NOT_JSON
from ...messages.render import HINTS
from ...messages.wire import Delta
from ...messages.wire.canonical import ToolDelta
from ...messages.wire.history import text_of
from ...messages.wire.stream import CollectedCalls
from .choice import ChoiceTokens
from .events import DONE, EventReader
from .record import Captured, ChoiceRecord, Uint31
from .replay import Message, usage_of

ABSENT = msgspec.Raw(b"null")
_TOGETHER = 64  # pieces of a stream whose numbers are decoded together
# The marks of tool calls, by their first character: texts without it are not searched.
_CALL_MARKS = {
    first.encode(): re.compile("|".join(re.escape(mark) for mark in HINTS if mark[0] == first).encode())
    for first in sorted({mark[0] for mark in HINTS})
}


class _Choice(msgspec.Struct, gc=False):
    index: Uint31 = 0
    finish_reason: str | None = None
    message: Any = None  # only in a whole reply
    delta: Message | None = None  # only in an event
    stop_reason: Any = None
    token_ids: msgspec.Raw = ABSENT
    logprobs: msgspec.Raw = ABSENT
    routed_experts: Any = None
    weight_version_first: int | str | None = None  # the built-in policy's
    weight_version_last: int | str | None = None


class _Entry(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None


class _OwnLogprobs(msgspec.Struct, gc=False):
    content: list[dict[str, Any]] | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    id: str | None = None
    model: str | None = None
    prompt_token_ids: msgspec.Raw = ABSENT
    weight_version: int | str | None = None
    usage: Any = None
    error: Any = None


_event = msgspec.json.Decoder(_Event)
_ids = msgspec.json.Decoder(list[list[int] | None]).decode
_logprobs = msgspec.json.Decoder(list[_Logprobs | None]).decode
_own_logprobs = msgspec.json.Decoder(list[_OwnLogprobs | None]).decode
_encode = msgspec.json.Encoder().encode


@dataclass(kw_only=True, eq=False, repr=False)
class ReplyReader:
    """A request to a chat server, and the reader of its reply.

    ``entries``: the agent asked for logprobs. ``n`` is the number of choices. ``relayed``: the agent gets the events as they are.
    ``plain``: they have no token ids and logprobs then. ``answer`` is a whole reply for such an agent. ``reply_id`` replaces the
    id in the reply. ``untrainable`` is why the reply must not be trained on.
    """

    path: bytes = b""
    body: bytes = b""
    reported: int | str | None = None
    entries: bool = False
    n: int = 1
    relayed: bool = False
    plain: bool = False
    reply_id: str | None = None
    untrainable: str | None = None
    answer: bytes = b""
    _events: EventReader = field(default_factory=EventReader)
    _captured: Captured = field(default_factory=lambda: Captured(choices=[]))
    _choices: dict[int, _ChoiceParts] = field(default_factory=dict)
    _finished: set[int] = field(default_factory=set)
    _ended: bool = False  # all choices have ended, or the engine reported an error
    _begun: bool = False

    @property
    def rest(self) -> bytes:
        """Return the end of a stream that is not a complete event."""
        return bytes(self._events.rest)

    def feed(self, data: bytes) -> list[Delta]:
        """Read a piece of a stream. Raises: UpstreamError on an event that the agent could not read either."""
        if self.relayed:
            return self._relay(data)
        deltas: list[Delta] = []
        for found in self._events.feed(data):
            event = self._read(found)
            if event is None:
                raise UpstreamError(self._captured.problem or "")
            deltas += self._deltas(event)
        return deltas

    def _relay(self, data: bytes) -> list[Delta]:
        """Return the events for the agent: those before the end of the reply, and the others. Raises: UpstreamError."""
        before: list[bytes] = []
        rest: list[bytes] = []
        for lines, found in self._events.events(data):
            if found is not None and found != DONE:
                event = self._read(found)
                if event is not None:
                    lines = _cut(lines, event) if self.plain else lines
                elif found.lstrip()[:1] != b"{":
                    raise UpstreamError("the engine sent data in its reply that is not an event")
            (rest if self._ended or found == DONE else before).append(lines)
        return [Delta(event=b"\n\n".join([*part, b""]), final=part is rest) for part in (before, rest) if part]

    def read(self, body: bytes) -> None:
        """Read a reply that is not streamed."""
        event = self._read(body)
        if event is None:
            return
        for choice in event.choices:
            if choice.message is None:
                self._choices.clear()
                self._captured.problem = f"choice {choice.index} of the engine's reply has no message"
                return
            self._choices[choice.index].message = choice.message
        self.answer = _cut(body, event) if self.plain else body

    def _read(self, data: bytes) -> _Event | None:
        """Read an event and add it to the choices. None: it cannot be read, so the turn is invalid."""
        captured = self._captured
        try:
            event = _event.decode(data)
        except NOT_JSON as e:
            captured.problem = captured.problem or f"the engine's reply cannot be read: {e}"
            return None
        if not self._begun:
            self._begun, captured.reply_id, captured.model = True, event.id, event.model
        if event.prompt_token_ids is not ABSENT and captured.prompt is None and event.prompt_token_ids != ABSENT:
            captured.prompt = event.prompt_token_ids
        if event.usage is not None:
            captured.usage = _encode(event.usage)
        if event.error is not None:
            captured.error, self._ended = _encode(event.error), True
        for choice in event.choices:
            if choice.finish_reason is not None:
                self._finished.add(choice.index)
                self._ended = self._ended or len(self._finished) >= self.n
            parts = self._choices.get(choice.index)
            if parts is None:
                parts = self._choices[choice.index] = _ChoiceParts(entries=self.entries)
            parts.add(choice, event.weight_version, captured)
        return event

    def _deltas(self, event: _Event) -> Iterator[Delta]:
        """Return the content of an event. Raises: UpstreamError."""
        if event.error is not None:
            return
        for choice in event.choices:
            piece = choice.delta or _NO_DELTA
            delta = Delta(
                choice=choice.index,
                text=piece.text or piece.refusal or "",
                reasoning=piece.reasoning_content or piece.reasoning or "",
                finish_reason=choice.finish_reason,
                final=self._ended and choice.finish_reason is not None,
            )
            if piece.tool_calls:
                delta.tool_calls = _tool_deltas(piece)
            parts = self._choices[choice.index]
            delta.logprob_entries = parts.take_entries()
            if choice.finish_reason is not None:
                delta.stop_sequence = parts.stop_sequence
            yield delta
        if event.usage is not None:
            yield Delta(usage=usage_of(_encode(event.usage)))

    def entries_of(self, choice: int) -> list[dict[str, Any]] | None:
        """Return the logprobs of a choice for an agent that asked for them."""
        return self._choices[choice].entries or None

    def captured(self) -> Captured:
        """Return the content of the reply."""
        captured = self._captured
        captured.choices = [each.record(captured, index) for index, each in sorted(self._choices.items())]
        captured.untrainable, captured.reply_id = self.untrainable, self.reply_id or captured.reply_id
        _check(captured)
        return captured


class _ChoiceParts:
    """A choice: the pieces of a stream, or the ``message`` of a whole reply."""

    def __init__(self, *, entries: bool) -> None:
        self.message: Any = None
        self._with_entries = entries
        self._tokens = ChoiceTokens()
        self._content: list[str | list[Any]] = []
        self._more: list[Message] = []  # deltas that bring more than text
        self._finish_reason: str | None = None
        self.stop_sequence: str | None = None
        self.entries: list[dict[str, Any]] = []  # logprobs in the engine's words
        self._taken = 0  # entries that the agent has
        self._ids: list[msgspec.Raw] = []  # the numbers of pieces that are not decoded yet
        self._logprobs: list[msgspec.Raw] = []

    def add(self, choice: _Choice, version: int | str | None, captured: Captured) -> None:
        """Add a piece. The numbers of several pieces are decoded together; their problem goes to ``captured``."""
        delta, tokens = choice.delta, self._tokens
        if delta is not None:
            if delta.content:
                self._content.append(delta.content)
            if delta.tool_calls is not None or delta.reasoning_content or delta.reasoning or delta.refusal:
                self._more.append(delta)
        if choice.finish_reason is not None:
            self._finish_reason = choice.finish_reason
            if isinstance(choice.stop_reason, str):  # not the id of a stop token
                self.stop_sequence = choice.stop_reason
        if choice.routed_experts is not None:
            tokens.experts = choice.routed_experts
        last = choice.weight_version_last
        if version is not None or last is not None:
            sampled = bytes(choice.token_ids) not in (b"null", b"[]")
            tokens.add_version(version if last is None else last, first=choice.weight_version_first, tokens=sampled)
        if choice.token_ids is not ABSENT:
            self._ids.append(choice.token_ids)
        if choice.logprobs is not ABSENT:
            self._logprobs.append(choice.logprobs)
        if self._with_entries or len(self._ids) >= _TOGETHER:
            self._decode(captured)

    def _decode(self, captured: Captured) -> None:
        ids, logprobs = (b"[%b]" % b",".join(numbers) for numbers in (self._ids, self._logprobs))
        self._ids, self._logprobs = [], []
        try:
            if given := [each for each in _ids(ids) if each is not None]:
                self._tokens.add([number for each in given for number in each], None)
            if self._with_entries and (own := [each for each in _own_logprobs(logprobs) if each is not None]):
                entries = [entry for each in own for entry in each.content or ()]
                self.entries += entries
                self._tokens.add(None, [entry.get("logprob") for entry in entries])
            elif not self._with_entries and (named := [each for each in _logprobs(logprobs) if each is not None]):
                self._tokens.add(None, [entry.logprob for each in named for entry in each.content or ()])
        except NOT_JSON as e:
            captured.problem = captured.problem or f"the engine's token ids or logprobs cannot be read: {e}"

    def take_entries(self) -> list[dict[str, Any]] | None:
        """Return the logprobs that the agent does not have yet."""
        new, self._taken = self.entries[self._taken :], len(self.entries)
        return new or None

    def record(self, captured: Captured, index: int) -> ChoiceRecord:
        self._decode(captured)
        message = self.message if self.message is not None else self._joined()
        text = _encode(message)
        calls = isinstance(message, dict) and message.get("tool_calls")
        status = "parsed" if calls else _call_status(text)
        record = self._tokens.record(
            captured, index, finish_reason=self._finish_reason, message=text, parse_status=status
        )
        record.stop_sequence = self.stop_sequence
        return record

    def _joined(self) -> dict[str, Any]:
        """Return the assistant message of a stream."""
        collected = CollectedCalls()
        for delta in self._more:
            collected.add(_tool_deltas(delta))
        calls, content = collected.all(), "".join(map(text_of, self._content))
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if reasoning := "".join([d.reasoning_content or d.reasoning or "" for d in self._more]):
            message["reasoning_content"] = reasoning
        if refusal := "".join([d.refusal or "" for d in self._more]):
            message["refusal"] = refusal
        if calls:
            message["tool_calls"] = [call.to_dict() for call in calls]
        return message


_NO_DELTA = Message()


def _tool_deltas(delta: Message) -> list[ToolDelta]:
    return [
        ToolDelta(
            index=place if call.index is None else call.index,
            id=call.id,
            name=call.function.name if call.function else None,
            arguments=call.arguments(),
        )
        for place, call in enumerate(delta.tool_calls or ())
    ]


def _cut(data: bytes, event: _Event) -> bytes:
    """Cut the token ids and logprobs of an event, as they were read, out of its JSON, if that has no blanks.

    A quote in a string has a backslash, so a name with its quotes, a comma and a colon is that of a member.
    """
    for choice in event.choices:
        if choice.logprobs is not ABSENT:  # the longest first, and the next ones are found sooner
            data = _without_member(data, b',"logprobs":', choice.logprobs)
        if choice.token_ids is not ABSENT:
            data = _without_member(data, b',"token_ids":', choice.token_ids)
    if event.prompt_token_ids is not ABSENT:
        data = _without_member(data, b',"prompt_token_ids":', event.prompt_token_ids)
    return data


def _without_member(data: bytes, name: bytes, value: msgspec.Raw) -> bytes:
    start = data.find(name)
    end = start + len(name)
    if start < 0 or not data.startswith(value, end):
        return data
    return data[:start] + data[end + len(value) :]


def _check(captured: Captured) -> None:
    if not captured.choices:
        captured.complete = False
    if not captured.has_tokens or captured.problem is not None:
        return
    if captured.prompt is None:
        captured.problem = "the engine returned completion token ids but no prompt token ids"
    elif captured.usage is not None:
        try:
            counted = usage_of(captured.usage).completion_tokens
        except UpstreamError:
            counted = None
        have = sum(len(c.ids) // 4 for c in captured.choices)
        # vLLM before 0.11 left the ids of tool-call tokens out of streams; training on the rest would be silently
        # wrong.
        if counted is not None and counted != have:
            captured.problem = f"the engine counted {counted} completion tokens and returned {have} token ids"


def _call_status(message: bytes) -> str:
    """Return the parse status of a message without calls: it may have text that looks like one."""
    found = any(first in message and marks.search(message) for first, marks in _CALL_MARKS.items())
    return "unparsed" if found else "none"
