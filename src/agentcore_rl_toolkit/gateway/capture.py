"""What a finished reply says, read once with typed decoders after the agent has its bytes.

Replies are JSON in the shapes of OpenAI's chat and text completions with the token fields of vLLM:
``prompt_token_ids`` at the top (chat) or in the choice (completions), ``choices[].token_ids``,
``choices[].logprobs``. Fields nobody needs are skipped by the decoder, never built.

A stream is kept as the pieces it came in. Servers write one event per HTTP chunk, so each piece is one event and is
decoded as it is; a stream that is cut differently is put together and split at its blank lines first. Structs without
a place in the garbage collector's lists (``gc=False``) make this three times as fast.
"""

from __future__ import annotations

import msgspec

from ..errors import CaptureError
from .records import ChoiceRecord, pack_ids, pack_logprobs

_NULL = b"null"
_ABSENT = msgspec.Raw(_NULL)  # a union with None would make the decoder build the value


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None = None
    token_logprobs: list[float | None] | None = None


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
    message: msgspec.Raw = _ABSENT
    text: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = _ABSENT
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    routed_experts: msgspec.Raw = _ABSENT


class _Reply(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    id: str | None = None
    model: str | None = None
    prompt_token_ids: msgspec.Raw = _ABSENT
    weight_version: int | str | None = None
    usage: msgspec.Raw = _ABSENT
    error: msgspec.Raw = _ABSENT


class _EventChoice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    routed_experts: msgspec.Raw = _ABSENT


class _Event(msgspec.Struct, gc=False):
    """One event of a stream: only what changes from one to the next."""

    choices: list[_EventChoice] = []
    weight_version: int | str | None = None
    usage: msgspec.Raw = _ABSENT
    error: msgspec.Raw = _ABSENT


class _Origin(msgspec.Struct, gc=False):
    id: str | None = None
    model: str | None = None


class _PromptedChoice(msgspec.Struct, gc=False):
    prompt_token_ids: msgspec.Raw = _ABSENT


class _Prompted(msgspec.Struct, gc=False):
    prompt_token_ids: msgspec.Raw = _ABSENT
    choices: list[_PromptedChoice] = []


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int | None = None


_reply = msgspec.json.Decoder(_Reply)
_event = msgspec.json.Decoder(_Event)
_origin = msgspec.json.Decoder(_Origin)
_ids = msgspec.json.Decoder(list[int])
_usage = msgspec.json.Decoder(_Usage)
_prompted = msgspec.json.Decoder(_Prompted)
_encode = msgspec.json.Encoder().encode
_PROMPT = b'"prompt_token_ids":['


class Captured(msgspec.Struct):
    """One reply, understood. ``prompt`` is the JSON text of the prompt ids without its brackets, None when the engine
    gave none.

    ``complete`` is False when a choice has no finish reason, ``problem`` says why the tokens cannot be trained on.
    """

    choices: list[ChoiceRecord]
    prompt: bytes | None = None
    reply_id: str | None = None
    model: str | None = None
    weight_version_first: int | None = None
    weight_version_last: int | None = None
    usage: bytes | None = None
    complete: bool = True
    problem: str | None = None
    error: bytes | None = None
    has_tokens: bool = False
    parent_turn: str | None = None
    branch_reason: str | None = None


def parse_ids(text: bytes) -> bytes:
    """JSON list content (no brackets) to packed ids. Raises: CaptureError."""
    try:
        return pack_ids(_ids.decode(b"[" + text + b"]"))
    except msgspec.DecodeError as e:
        raise CaptureError(f"the engine's token ids are not a list of integers: {e}") from e


def read_reply(body: bytes) -> Captured:
    """Decode a whole (not streamed) reply. Raises: CaptureError when it is no such reply."""
    prompt, rest = _take_prompt(body)
    try:
        reply = _reply.decode(rest)
    except msgspec.DecodeError as e:
        raise CaptureError(f"the engine's reply cannot be read: {e}") from e
    version = _version(reply.weight_version)
    captured = Captured(
        choices=[],
        prompt=prompt if prompt is not None else _brackets(reply.prompt_token_ids),
        reply_id=reply.id,
        model=reply.model,
        weight_version_first=version,
        weight_version_last=version,
        usage=_raw(reply.usage),
        error=_raw(reply.error),
    )
    for choice in reply.choices:
        if captured.prompt is None:
            captured.prompt = _brackets(choice.prompt_token_ids)
        message = _raw(choice.message)
        if message is None:
            message = _encode({"role": "assistant", "content": choice.text or ""})
        captured.choices.append(
            _choice(
                captured,
                choice.index,
                choice.token_ids,
                _values(choice.logprobs),
                choice.finish_reason,
                message,
                _parse_status(message),
                choice.routed_experts,
            )
        )
    _check(captured)
    return captured


def read_stream(pieces: list[bytes]) -> Captured:
    """Decode a streamed reply from the body pieces it came in.

    A stream that broke off gives what had arrived, with ``complete`` False. Raises: CaptureError when an event is not
    JSON of this kind.
    """
    try:
        return _read_events(pieces, framed=False)
    except (msgspec.DecodeError, _NotOneEventEachError):
        pass
    try:
        return _read_events(_split_events(b"".join(pieces)), framed=True)
    except msgspec.DecodeError as e:
        raise CaptureError(f"the engine's stream cannot be read: {e}") from e


class _NotOneEventEachError(Exception):
    """The pieces of a stream are not one event each."""


def _read_events(events: list[bytes], *, framed: bool) -> Captured:
    captured = Captured(choices=[])
    parts: dict[int, _Parts] = {}
    decode = _event.decode
    prompt: bytes | None = None
    first = True
    carry = b""
    for data in events:
        if not framed:
            if carry:
                data, carry = carry + data, b""
            if data[-2:] != b"\n\n":
                carry = data  # cut by the end of a read, not by the server
                continue
            if data[:6] != b"data: ":
                raise _NotOneEventEachError
            data = data[6:]
            if data[:6] == b"[DONE]":
                if len(data) > 8:
                    raise _NotOneEventEachError
                continue
        if prompt is None and b'"prompt_token_ids"' in data:
            prompt, data = _take_prompt(data)
            if prompt is None:
                prompt = _loose_prompt(data)
        event = decode(data)
        if first:
            first = False
            origin = _origin.decode(data)
            captured.reply_id, captured.model = origin.id, origin.model
        if event.weight_version is not None:
            version = _version(event.weight_version)
            if captured.weight_version_first is None:
                captured.weight_version_first = version
            captured.weight_version_last = version
        if event.usage is not _ABSENT:
            captured.usage = _raw(event.usage) or captured.usage
        if event.error is not _ABSENT:
            captured.error = _raw(event.error) or captured.error
        for choice in event.choices:
            into = parts.get(choice.index)
            if into is None:
                into = parts[choice.index] = _Parts()
            if choice.token_ids is not None:
                into.saw_ids = True
                into.ids += choice.token_ids
            if choice.logprobs is not None:
                into.add_logprobs(choice.logprobs)
            if choice.finish_reason is not None:
                into.finish_reason = choice.finish_reason
            delta = choice.delta
            if delta is not None:
                if delta.content:
                    into.content.append(delta.content)
                if delta.tool_calls is not None or delta.reasoning_content or delta.reasoning or delta.refusal:
                    into.add_delta(delta)
            elif choice.text:
                into.content.append(choice.text)
            if choice.routed_experts is not _ABSENT:
                into.routed_experts = choice.routed_experts
    if carry.strip():
        raise _NotOneEventEachError
    captured.prompt = prompt
    for index in sorted(parts):
        part = parts[index]
        message, calls = part.message()
        captured.choices.append(
            _choice(
                captured,
                index,
                part.ids if part.saw_ids else None,
                part.logprobs,
                part.finish_reason,
                _encode(message),
                "parsed" if calls else _text_status(part.content),
                part.routed_experts,
            )
        )
    _check(captured)
    return captured


def _split_events(text: bytes) -> list[bytes]:
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


class _Parts:
    """What the chunks of one choice add up to."""

    __slots__ = (
        "calls",
        "content",
        "finish_reason",
        "ids",
        "logprobs",
        "reasoning",
        "refusal",
        "routed_experts",
        "saw_ids",
    )

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.saw_ids = False
        self.logprobs: list[float | None] | None = None
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.refusal: list[str] = []
        self.calls: dict[int, _ToolDelta] = {}
        self.finish_reason: str | None = None
        self.routed_experts: msgspec.Raw = _ABSENT

    def add_logprobs(self, logprobs: _Logprobs) -> None:
        into = self.logprobs
        if into is None:
            into = self.logprobs = []
        if logprobs.content is not None:
            for entry in logprobs.content:
                into.append(entry.logprob)
        elif logprobs.token_logprobs is not None:
            into += logprobs.token_logprobs

    def add_delta(self, delta: _Delta) -> None:
        if delta.reasoning_content or delta.reasoning:
            self.reasoning.append(delta.reasoning_content or delta.reasoning or "")
        if delta.refusal:
            self.refusal.append(delta.refusal)
        for call in delta.tool_calls or ():
            self._add_call(call)

    def _add_call(self, call: _ToolDelta) -> None:
        known = self.calls.get(call.index)
        if known is None:
            self.calls[call.index] = call
            return
        known.id = known.id or call.id
        if call.function is not None:
            if known.function is None:
                known.function = call.function
            else:
                known.function.name = known.function.name or call.function.name
                known.function.arguments = (known.function.arguments or "") + (call.function.arguments or "")

    def message(self) -> tuple[dict[str, object], bool]:
        message: dict[str, object] = {"role": "assistant", "content": "".join(self.content) or None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.refusal:
            message["refusal"] = "".join(self.refusal)
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type or "function",
                    "function": {
                        "name": call.function.name if call.function else None,
                        "arguments": (call.function.arguments if call.function else None) or "",
                    },
                }
                for _, call in sorted(self.calls.items())
            ]
        elif message["content"] is None:
            message["content"] = ""
        return message, bool(self.calls)


def _take_prompt(body: bytes) -> tuple[bytes | None, bytes]:
    """Cut the prompt ids out of a reply before it is decoded: they grow with the session, and mostly repeat.

    Inside a JSON string a quote is always escaped, so these bytes can only be a key with a list.
    """
    start = body.find(_PROMPT)
    if start < 0:
        return None, body
    end = body.find(b"]", start)
    if end < 0:
        return None, body
    first = start + len(_PROMPT)
    return body[first:end], body[: first - 1] + _NULL + body[end + 1 :]


def _loose_prompt(data: bytes) -> bytes | None:
    """The prompt ids of an event that is not written compactly."""
    told = _prompted.decode(data)
    found = _brackets(told.prompt_token_ids)
    for choice in told.choices:
        found = found if found is not None else _brackets(choice.prompt_token_ids)
    return found


def _choice(
    captured: Captured,
    index: int,
    ids: list[int] | None,
    logprobs: list[float | None] | None,
    finish_reason: str | None,
    message: bytes,
    parse_status: str,
    routed_experts: msgspec.Raw,
) -> ChoiceRecord:
    packed, packed_logprobs = b"", None
    if ids is not None:
        captured.has_tokens = True
        packed = pack_ids(ids)
        if logprobs is None:
            captured.problem = captured.problem or f"choice {index} has {len(ids)} token ids and no logprobs"
        elif len(logprobs) != len(ids):
            captured.problem = (
                captured.problem or f"choice {index} has {len(ids)} token ids and {len(logprobs)} logprobs"
            )
        else:
            try:
                packed_logprobs = pack_logprobs(logprobs)  # type: ignore[arg-type]  # a None in it is what the check is for
            except CaptureError as e:
                captured.problem = captured.problem or str(e)
    if finish_reason is None:
        captured.complete = False
    return ChoiceRecord(
        index=index,
        ids=packed,
        logprobs=packed_logprobs,
        finish_reason=finish_reason,
        parse_status=parse_status,
        message=message,
        routed_experts=_raw(routed_experts),
    )


def _check(captured: Captured) -> None:
    if not captured.choices:
        captured.complete = False
    if captured.has_tokens and captured.prompt is None and captured.problem is None:
        captured.problem = "the engine returned completion token ids but no prompt token ids"
    if captured.usage is not None and captured.has_tokens and captured.problem is None:
        try:
            said = _usage.decode(captured.usage).completion_tokens
        except msgspec.DecodeError:
            said = None
        have = sum(len(c.ids) // 4 for c in captured.choices)
        # vLLM before 0.11 left the ids of tool-call tokens out of streams; training on the rest would be silently
        # wrong.
        if said is not None and said != have:
            captured.problem = f"the engine counted {said} completion tokens and returned {have} token ids"


def _values(logprobs: _Logprobs | None) -> list[float | None] | None:
    if logprobs is None:
        return None
    if logprobs.content is not None:
        return [entry.logprob for entry in logprobs.content]
    return logprobs.token_logprobs


def _raw(value: msgspec.Raw) -> bytes | None:
    data = bytes(value)
    return None if data == _NULL else data


def _brackets(value: msgspec.Raw) -> bytes | None:
    data = _raw(value)
    return None if data is None else data.strip()[1:-1]


def _version(value: int | str | None) -> int | None:
    if isinstance(value, str):
        return int(value) if value.isdigit() else None
    return value


_MARKS = (
    b"<tool_call>",
    b"<function=",
    b"[TOOL_CALLS]",
    b"<|python_tag|>",
    b"<|tool_call",
    b"<\xef\xbd\x9ctool\xe2\x96\x81call",
)


def _parse_status(message: bytes) -> str:
    """Whether the engine parsed tool calls, or left text that looks like one."""
    at = message.find(b'"tool_calls":[')
    if at >= 0 and message[at + 14 : at + 15] != b"]":
        return "parsed"
    return "unparsed" if any(mark in message for mark in _MARKS) else "none"


def _text_status(parts: list[str]) -> str:
    text = "".join(parts).encode()
    return "unparsed" if any(mark in text for mark in _MARKS) else "none"
