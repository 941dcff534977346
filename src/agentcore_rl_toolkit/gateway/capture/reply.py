"""Reads the reply of a chat server: its deltas for the agent, and its content for the record.

Replies are JSON in the shape of OpenAI's chat completions with the token fields of vLLM: ``prompt_token_ids`` at the top,
``choices[].token_ids``, ``choices[].logprobs``. A typed decoder reads a whole reply, or each event of a stream, once. It skips
all other fields. An agent that speaks chat gets the bytes of the events; without token fields if it did not ask for them.

Structs without a place in the garbage collector's lists (``gc=False``) make this three times as fast.
"""

from __future__ import annotations

import binascii
from array import array
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec

from ...errors import CaptureError, UpstreamError
from ...messages.errors import NOT_JSON
from ...messages.wire import Delta
from ...messages.wire.canonical import ToolDelta
from ...messages.wire.stream import CollectedCalls
from .events import DONE, EventReader
from .record import Captured, ChoiceRecord, pack_ids, pack_logprobs
from .replay import Message, usage_of
from .versions import Versions, put, version_of

ABSENT = msgspec.Raw(b"null")
_LONG = 8 * 2**10  # bytes from which the prompt's ids are taken out before the rest is read, perhaps twice


class _End(msgspec.Struct, gc=False):
    """What is known of a choice whose content cannot be read."""

    index: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 0
    finish_reason: str | None = None


class _TextChoice(_End, gc=False):
    message: Any = None  # of a whole reply
    delta: Message | None = None  # of an event
    stop_reason: Any = None


class _Entry(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None


class _Choice(_TextChoice, gc=False):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    routed_experts: Any = None
    weight_version_first: int | str | None = None  # the built-in policy's
    weight_version_last: int | str | None = None


class _Ends(msgspec.Struct, gc=False):
    choices: list[_End] = []
    error: Any = None


class _TextEvent(msgspec.Struct, gc=False):
    choices: list[_TextChoice] = []
    id: str | None = None
    model: str | None = None
    prompt_token_ids: msgspec.Raw = ABSENT
    weight_version: int | str | None = None
    usage: Any = None
    error: Any = None


class _Event(_TextEvent, gc=False):
    choices: list[_Choice] = []  # type: ignore[assignment]  # msgspec lets a subclass have another type


class _OwnLogprobs(msgspec.Struct, gc=False):
    content: list[dict[str, Any]] | None = None


class _OwnChoice(_Choice, gc=False):
    logprobs: _OwnLogprobs | None = None  # type: ignore[assignment]  # in the engine's words, for an agent that asked for them


class _OwnEvent(_Event, gc=False):
    choices: list[_OwnChoice] = []  # type: ignore[assignment]


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int | None = None


_event = msgspec.json.Decoder(_Event)
_own_event = msgspec.json.Decoder(_OwnEvent)
_text_event = msgspec.json.Decoder(_TextEvent)
_ends = msgspec.json.Decoder(_Ends)
_usage = msgspec.json.Decoder(_Usage)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_member_lists = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_encode = msgspec.json.Encoder().encode


class ReplyReader:
    """Reads one reply. ``ended``: some choice has ended.

    Args: ``entries``: the agent asked for logprobs. ``n`` is the number of choices. ``relayed``: the agent gets the events as
    they are. ``plain``: they have no token ids and logprobs then.
    """

    def __init__(self, *, entries: bool = False, n: int = 1, relayed: bool = False, plain: bool = False) -> None:
        self.ended = False
        self._decode: Callable[[bytes], _Event] = (_own_event if entries else _event).decode
        self._entries = entries
        self._n = n
        self._relayed = relayed
        self._plain = plain
        self._events = EventReader()
        self._captured = Captured(choices=[])
        self._choices: dict[int, _ChoiceParts] = {}
        self._finished: set[int] = set()
        self._begun = False
        self._unread: str | None = None  # why an event could not be read

    @property
    def rest(self) -> bytes:
        """The end of a stream that is no whole event."""
        return bytes(self._events.rest)

    def feed(self, data: bytes) -> list[Delta]:
        """Read a piece of a stream. Raises: UpstreamError on an event that the agent could not read either."""
        deltas: list[Delta] = []
        for lines, found in self._events.events(data):
            if found is None or found == DONE:
                if self._relayed:
                    deltas.append(Delta(event=lines + b"\n\n", final=found == DONE))
                continue
            event, rest = self._read(found)
            if self._relayed:
                if self._plain and event is not None:
                    lines = lines.replace(found, without_numbers(rest))
                deltas.append(Delta(event=lines + b"\n\n", final=self._ends(found, event)))
            elif self._unread is not None:
                raise UpstreamError(self._unread)
            elif isinstance(event, _Event):
                deltas += self._deltas(event)
        return deltas

    def read(self, body: bytes) -> bytes:
        """Read a reply that is not streamed. Returns it without the prompt's ids, if they are long. Raises: CaptureError."""
        event, rest = self._read(body)
        if not isinstance(event, _Event):
            raise CaptureError(self._unread or "the engine's reply cannot be read")
        for choice in event.choices:
            if choice.message is None:
                raise CaptureError(f"choice {choice.index} of the engine's reply has no message")
            self._choices[choice.index].message = choice.message
        if len(self._choices) < len(event.choices):
            self._captured.problem = "several choices of the engine's reply have one index"
        return rest

    def _read(self, data: bytes) -> tuple[_Event | _Ends | None, bytes]:
        """Read an event, or what of it can be read, and add it to the choices. Returns its JSON too, as `read` does."""
        if len(data) > _LONG:
            data = self._without_prompt(data)
        try:
            event = self._decode(data)
        except NOT_JSON as e:
            return self._partly_read(data, e), data
        self._add(event)
        return event, data

    def _without_prompt(self, data: bytes) -> bytes:
        try:
            members = _members.decode(data)
        except NOT_JSON:
            return data
        prompt = bytes(members.pop("prompt_token_ids", b""))
        if prompt[:1] != b"[":
            return data
        self._captured.prompt = self._captured.prompt or prompt
        return _encode(members)

    def _partly_read(self, data: bytes, error: Exception) -> _Event | _Ends | None:
        captured = self._captured
        try:
            text = _text_event.decode(data)
        except NOT_JSON:
            self._unread = self._unread or f"the engine's reply cannot be read: {error}"
            try:
                return _ends.decode(data)  # an agent may understand the event all the same
            except NOT_JSON:
                return None
        captured.problem = captured.problem or f"the engine's token ids or logprobs cannot be read: {error}"
        members = {name: getattr(text, name) for name in _TextEvent.__struct_fields__}
        event = _Event(**{**members, "choices": [_Choice(**msgspec.structs.asdict(each)) for each in text.choices]})
        self._add(event)
        return event

    def _add(self, event: _Event) -> None:
        captured = self._captured
        if not self._begun:
            self._begun, captured.reply_id, captured.model = True, event.id, event.model
        if captured.prompt is None and bytes(memoryview(event.prompt_token_ids)[:1]) == b"[":
            captured.prompt = bytes(event.prompt_token_ids)
        if event.usage is not None:
            captured.usage = _encode(event.usage)
        if event.error is not None:
            captured.error = _encode(event.error)
        version = version_of(event.weight_version)
        for choice in event.choices:
            parts = self._choices.get(choice.index)
            if parts is None:
                parts = self._choices[choice.index] = _ChoiceParts()
            parts.add(captured, choice, version, entries=self._entries)

    def _final(self, choice: _End) -> bool:
        """Return True if this piece ends its choice, and all other choices have ended."""
        if choice.finish_reason is None:
            return False
        self.ended = True
        self._finished.add(choice.index)
        return len(self._finished) >= self._n

    def _ends(self, data: bytes, event: _Event | _Ends | None) -> bool:
        """Return True if the reply ends with an event. Raises: UpstreamError when it is no event of any kind."""
        if event is None:
            if data.lstrip()[:1] != b"{":
                raise UpstreamError("the inference server sent something else in the middle of its reply")
            return False
        final = event.error is not None
        for choice in event.choices:
            if choice.finish_reason is not None:
                final = self._final(choice) or final
        return final

    def _deltas(self, event: _Event) -> Iterator[Delta]:
        """The content of an event. Raises: UpstreamError."""
        if event.error is not None:
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
                delta.tool_calls = _tool_deltas(piece)
            if self._entries and choice.logprobs is not None:
                delta.logprob_entries = choice.logprobs.content  # type: ignore[assignment]  # of an `_OwnChoice`
            if choice.finish_reason is not None:
                delta.stop_sequence = _stop_sequence(choice)
            yield delta
        if event.usage is not None:
            usage = usage_of(_encode(event.usage))
            yield Delta(choice=event.choices[-1].index if event.choices else 0, usage=usage)

    def captured(self) -> Captured:
        """The content of the reply so far. Raises: CaptureError when some event could not be read."""
        captured = self._captured
        if self._unread is not None:
            raise CaptureError(self._unread)
        if not self._begun and (sent := self.rest.strip()).startswith((b"{", b"[", b"<")):
            raise CaptureError(f"the engine was asked for a stream and sent something else: {sent[:100]!r}")
        parts = sorted(self._choices.items())
        captured.choices = [each.record(captured, index) for index, each in parts]
        put(captured, [each.versions for _, each in parts])
        _check(captured)
        return captured


class _ChoiceParts:
    """One choice: the pieces of a stream, or the ``message`` of a whole reply."""

    def __init__(self) -> None:
        self.message: Any = None
        self.versions = Versions()
        self._ids: array[int] | None = None
        self._logprobs: array[float] | None = None
        self._content: list[str] = []
        self._more: list[Message] = []  # deltas that bring more than text
        self._finish_reason: str | None = None
        self._stop_sequence: str | None = None
        self._experts: bytes | None = None
        self._entries: list[Any] = []  # logprobs in the engine's words

    def add(self, captured: Captured, choice: _Choice, version: int | None, *, entries: bool) -> None:
        ids, logprobs, delta = choice.token_ids, choice.logprobs, choice.delta
        try:
            if ids is not None:
                self._ids = array("q") if self._ids is None else self._ids
                self._ids.extend(ids)
            if logprobs is not None and logprobs.content is not None:
                self._logprobs = array("d") if self._logprobs is None else self._logprobs
                if entries:
                    self._entries += logprobs.content
                    self._logprobs.extend([entry.get("logprob") for entry in self._entries[len(self._logprobs) :]])
                else:
                    self._logprobs.extend([entry.logprob for entry in logprobs.content])
        except (OverflowError, TypeError) as e:
            captured.problem = captured.problem or f"the engine's token ids or logprobs cannot be read: {e}"
        if delta is not None:
            if delta.content:
                self._content.append(delta.content)
            if delta.tool_calls is not None or delta.reasoning_content or delta.reasoning or delta.refusal:
                self._more.append(delta)
        if choice.finish_reason is not None:
            self._finish_reason, self._stop_sequence = choice.finish_reason, _stop_sequence(choice)
        if choice.routed_experts is not None:
            self._experts = read_numbers(captured, read_experts, choice.routed_experts)
        if version is not None:
            self.versions.named(version, tokens=bool(ids))
        if choice.weight_version_first is not None:
            self.versions.spans(version_of(choice.weight_version_first), version_of(choice.weight_version_last))

    def record(self, captured: Captured, index: int) -> ChoiceRecord:
        message = self.message if self.message is not None else self._joined()
        text = _encode(message)
        calls = isinstance(message, dict) and message.get("tool_calls")
        record = choice_record(
            captured,
            index,
            None if self._ids is None else read_numbers(captured, pack_ids, self._ids),
            None if self._logprobs is None else read_numbers(captured, pack_logprobs, self._logprobs),
            self._finish_reason,
            text,
            "parsed" if calls else _call_status(text),
        )
        record.routed_experts = self._experts
        record.stop_sequence = self._stop_sequence
        record.agent_logprobs = _encode({"content": self._entries}) if self._entries else None
        return record

    def _joined(self) -> dict[str, Any]:
        """The assistant message of a stream."""
        collected = CollectedCalls()
        for delta in self._more:
            collected.add(_tool_deltas(delta))
        calls, content = collected.all(), "".join(self._content)
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


def _stop_sequence(choice: _TextChoice) -> str | None:
    """The stop string that an engine names as the reason of an answer's end; not the id of a stop token."""
    return choice.stop_reason if isinstance(choice.stop_reason, str) else None


def read_experts(value: Any) -> bytes | None:
    """The bytes of expert routing: base64, of a numpy file (vLLM) or bare int32 (SGLang). Raises: CaptureError."""
    if value is None:
        return None
    try:
        return binascii.a2b_base64(value, strict_mode=True)
    except (TypeError, ValueError) as e:
        raise CaptureError(f"the engine's routed_experts are no base64: {e}") from e


def read_numbers(captured: Captured, pack: Callable[[Any], Any], values: Any) -> Any:
    """Numbers as packed arrays; of those that cannot be read none, and the capture says why."""
    try:
        return pack(values)
    except CaptureError as e:
        captured.problem = captured.problem or str(e)
        return None


def without_numbers(data: bytes) -> bytes:
    """A reply's JSON, or an event's, without token ids and logprobs. Text that is no such JSON stays as it is."""
    if b'"logprobs"' not in data and b'token_ids"' not in data:
        return data
    try:
        reply = _members.decode(data)
        choices = _member_lists.decode(reply["choices"])
    except (*NOT_JSON, KeyError):
        return data
    reply.pop("prompt_token_ids", None)
    for choice in choices:
        choice.pop("token_ids", None)
        choice.pop("logprobs", None)
    reply["choices"] = choices  # type: ignore[assignment]  # it is encoded next
    return _encode(reply)


def choice_record(
    captured: Captured,
    index: int,
    ids: bytes | None,
    logprobs: bytes | None,
    finish_reason: str | None,
    message: bytes,
    parse_status: str,
) -> ChoiceRecord:
    """One choice of a reply. A problem of its tokens (int32 and float32, packed) goes to ``captured``."""
    if ids is None:
        logprobs = None
    else:
        captured.has_tokens = True
        problem = None
        if logprobs is None:
            problem = f"choice {index} has {len(ids) // 4} token ids and no logprobs"
        elif len(logprobs) != len(ids):
            problem = f"choice {index} has {len(ids) // 4} token ids and {len(logprobs) // 4} logprobs"
            logprobs = None
        captured.problem = captured.problem or problem
    if finish_reason is None:
        captured.complete = False
    return ChoiceRecord(
        index=index,
        ids=ids or b"",
        logprobs=logprobs,
        finish_reason=finish_reason,
        parse_status=parse_status,
        message=message,
    )


def _check(captured: Captured) -> None:
    if not captured.choices:
        captured.complete = False
    if not captured.has_tokens or captured.problem is not None:
        return
    if captured.prompt is None:
        captured.problem = "the engine returned completion token ids but no prompt token ids"
    elif captured.usage is not None:
        try:
            counted = _usage.decode(captured.usage).completion_tokens
        except NOT_JSON:
            counted = None
        have = sum(len(c.ids) // 4 for c in captured.choices)
        # vLLM before 0.11 left the ids of tool-call tokens out of streams; training on the rest would be silently
        # wrong.
        if counted is not None and counted != have:
            captured.problem = f"the engine counted {counted} completion tokens and returned {have} token ids"


_CALL_MARKS = (
    *("[TOOL_CALLS]", "<tool_call>", "<function=", "<|python_tag|>", "<|tool_call", "<｜tool▁call", "<｜DSML｜"),
)


def _call_status(message: bytes) -> str:
    """Whether a message without calls has text that looks like one."""
    return "unparsed" if any(mark.encode() in message for mark in _CALL_MARKS) else "none"
