"""What a finished reply says, read once with typed decoders after the agent has its bytes.

Replies are JSON in the shapes of OpenAI's chat and text completions with the token fields of vLLM:
``prompt_token_ids`` at the top (chat) or in the choice (completions), ``choices[].token_ids``,
``choices[].logprobs``. Fields nobody needs are skipped by the decoder, never built.

A stream is decoded in one go: as JSON texts cannot hold a raw newline, ``\\n\\ndata: `` only ever separates events,
and replacing it by a comma makes one JSON array of the whole stream. A stream that is framed differently goes through
the event parser of `dialects.sse`.
"""

from __future__ import annotations

import msgspec

from ..errors import CaptureError
from .records import ChoiceRecord, pack_ids, pack_logprobs

_NULL = b"null"
_ABSENT = msgspec.Raw(_NULL)  # a union with None would make the decoder build the value


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None
    token_logprobs: list[float | None] | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolDelta] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: msgspec.Raw = _ABSENT
    text: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = _ABSENT
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    routed_experts: msgspec.Raw = _ABSENT


class _Reply(msgspec.Struct):
    choices: list[_Choice] = []
    id: str | None = None
    model: str | None = None
    prompt_token_ids: msgspec.Raw = _ABSENT
    weight_version: int | str | None = None
    usage: msgspec.Raw = _ABSENT
    error: msgspec.Raw = _ABSENT


class _ChunkChoice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = _ABSENT
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    routed_experts: msgspec.Raw = _ABSENT


class _Chunk(msgspec.Struct):
    choices: list[_ChunkChoice] = []
    id: str | None = None
    model: str | None = None
    prompt_token_ids: msgspec.Raw = _ABSENT
    weight_version: int | str | None = None
    usage: msgspec.Raw = _ABSENT
    error: msgspec.Raw = _ABSENT


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


_reply = msgspec.json.Decoder(_Reply)
_chunks = msgspec.json.Decoder(list[_Chunk])
_ids = msgspec.json.Decoder(list[int])
_usage = msgspec.json.Decoder(_Usage)
_encode = msgspec.json.Encoder().encode


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


def read_stream(text: bytes) -> Captured:
    """Decode all events of a streamed reply. A stream that broke off gives what had arrived, with ``complete`` False.

    Raises: CaptureError when an event is not JSON of this kind.
    """
    prompt, rest = _take_prompt(text)
    captured = Captured(choices=[], prompt=prompt)
    parts: dict[int, _Parts] = {}
    for chunk in _decode_chunks(rest):
        if chunk.error is not _ABSENT:
            captured.error = _raw(chunk.error) or captured.error
        if captured.reply_id is None:
            captured.reply_id, captured.model = chunk.id, chunk.model
        if chunk.weight_version is not None:
            version = _version(chunk.weight_version)
            if captured.weight_version_first is None:
                captured.weight_version_first = version
            captured.weight_version_last = version
        if chunk.usage is not _ABSENT:
            captured.usage = _raw(chunk.usage) or captured.usage
        if captured.prompt is None and chunk.prompt_token_ids is not _ABSENT:
            captured.prompt = _brackets(chunk.prompt_token_ids)
        for choice in chunk.choices:
            into = parts.get(choice.index)
            if into is None:
                into = parts[choice.index] = _Parts()
            into.add(choice)
            if captured.prompt is None and choice.prompt_token_ids is not _ABSENT:
                captured.prompt = _brackets(choice.prompt_token_ids)
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

    def add(self, choice: _ChunkChoice) -> None:
        if choice.token_ids is not None:
            self.saw_ids = True
            self.ids += choice.token_ids
        logprobs = choice.logprobs
        if logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            if logprobs.content:
                for entry in logprobs.content:
                    self.logprobs.append(entry.logprob)
            elif logprobs.token_logprobs:
                self.logprobs += logprobs.token_logprobs
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
        if choice.routed_experts is not _ABSENT:
            self.routed_experts = choice.routed_experts
        delta = choice.delta
        if delta is None:
            if choice.text:
                self.content.append(choice.text)
            return
        if delta.content:
            self.content.append(delta.content)
        if delta.reasoning_content:
            self.reasoning.append(delta.reasoning_content)
        elif delta.reasoning:
            self.reasoning.append(delta.reasoning)
        if delta.refusal:
            self.refusal.append(delta.refusal)
        if delta.tool_calls:
            for call in delta.tool_calls:
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


def _decode_chunks(text: bytes) -> list[_Chunk]:
    start = text.find(b"data: ")
    if start < 0 and not text.strip():
        return []
    body = text[start + 6 :].rstrip(b"\n") if start == 0 else b""
    if body.endswith(b"\n\ndata: [DONE]"):
        body = body[:-14]
    elif body.endswith(b"[DONE]"):
        body = body[:-6]
    try:
        return _chunks.decode(b"[" + body.replace(b"\n\ndata: ", b",") + b"]") if body else _decode_events(text)
    except msgspec.DecodeError:
        return _decode_events(text)


def _decode_events(text: bytes) -> list[_Chunk]:
    """The careful way: any line ending, comments, several data lines; an unfinished last event is left out."""
    events: list[bytes] = []
    data: list[bytes] = []
    lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    for line in lines:
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            events.append(b"\n".join(data))
            data = []
    try:
        return _chunks.decode(b"[" + b",".join(e for e in events if e.strip() != b"[DONE]") + b"]")
    except msgspec.DecodeError as e:
        raise CaptureError(f"the engine's stream cannot be read: {e}") from e


def _take_prompt(body: bytes) -> tuple[bytes | None, bytes]:
    """Cut the prompt ids out of a reply before it is decoded: they grow with the session, and mostly repeat.

    Inside a JSON string a quote is always escaped, so these bytes can only be a key with a list.
    """
    key = b'"prompt_token_ids":['
    start = body.find(key)
    if start < 0:
        return None, body
    end = body.find(b"]", start)
    if end < 0:
        return None, body
    first = start + len(key)
    return body[first:end], body[: first - 1] + _NULL + body[end + 1 :]


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
