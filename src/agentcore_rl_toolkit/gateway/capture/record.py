"""The record of a model call, and its binary form.

Token ids are little-endian int32, logprobs little-endian float32 (as engines compute them), so a token costs 8 bytes where
JSON takes 60 to 500. A prompt that starts with an earlier call's tokens stores only what comes after them
(`Base`), and so do the messages, which makes a session of T tokens cost O(T) on disk and not O(T * turns). `expand`
undoes that and is what turns records into `trajectory.Turn`s.

The store has a row for each (`store.schema`); the bulk fetch sends them encoded.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import CaptureError
from ...trajectory import Turn
from . import asked as of_request
from .flows import Flows

VERSION = 2

OK = "ok"  # a whole reply with consistent tokens: becomes one turn per choice
UNTRAINABLE = "untrainable"  # a whole reply of an engine that gives no tokens: a turn for display only
INVALID = "invalid"  # a whole reply whose tokens do not fit together: never a turn
ERROR = "error"  # the engine or the gateway answered with an error
PARTIAL = "partial"  # the engine stopped in the middle of a reply
ABORTED = "aborted"  # the agent went away in the middle of a reply
REFUSED = "refused"  # the gateway did not take the request; `error` is the field at fault, a colon, and why
TURNS = frozenset({OK, UNTRAINABLE})
LOST_WEIGHTS = "engine_lost_its_weights"  # it was started again, and has not the published ones
CONSTRAINED = "held_to_a_form"  # by a grammar: its logprobs are those of the masked distribution


class Captured(msgspec.Struct):
    """One reply, understood. ``prompt`` is the JSON text of the prompt ids without its brackets, None when there is none.

    ``complete`` is False when a choice has no finish reason, ``problem`` says why the tokens cannot be trained on.
    ``plain`` is the body of a whole reply with null for token ids and logprobs.
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
    plain: bytes | None = None
    untrainable: str | None = None  # why it must not be trained on, though its tokens are whole
    first_named: bool = False  # whether the engine named the first token's version too, not only the one that ended


class Base(msgspec.Struct, array_like=True, frozen=True):
    """Where a prompt (or message list) starts: all of an earlier call's of the session, or nothing.

    ``call_id`` names that call, ``choice`` the place of the choice whose completion follows its prompt (-1: the prompt
    alone), ``length`` how many ids (or bytes of message JSON) are taken from there.
    """

    call_id: str | None = None
    choice: int = -1
    length: int = 0


NO_BASE = Base()


class ChoiceRecord(msgspec.Struct, array_like=True):
    """One choice of a call. ``message`` is the assistant message as JSON, merged when it was streamed.

    ``agent_logprobs`` is the JSON that an agent got for them which asked for logprobs, ``stop_sequence`` the string it named
    at which the answer ended.
    """

    index: int
    ids: bytes
    logprobs: bytes | None
    finish_reason: str | None
    parse_status: str
    message: bytes
    routed_experts: bytes | None = None
    agent_logprobs: bytes | None = None
    stop_sequence: str | None = None
    weight_version_first: int | None = None  # as the engine named it; None: it did not
    weight_version_last: int | None = None
    untrainable: str | None = None  # why it must not be trained on, though its tokens are whole
    weight_spans: bytes | None = None  # pairs of first token and version as int32, where weights changed on the way


class CallRecord(msgspec.Struct, array_like=True, kw_only=True):
    """One model call, as stored: its fields are the columns of the store's table `calls`. Units: unix seconds."""

    version: int = VERSION
    call_id: str
    index: int
    status: str
    dialect: str
    model: str | None
    started_s: float
    first_token_s: float | None
    finished_s: float
    weight_version_first: int | None
    weight_version_last: int | None
    http_status: int = 200
    error_type: str | None = None
    error: str | None = None
    digest: int = 0
    retry_of: str | None = None
    reply_id: str | None = None
    upstream: str | None = None
    parent_turn: str | None = None
    branch_reason: str | None = None
    usage: bytes | None = None
    request_of: str | None = None  # the call whose `request` holds for this one too; None: its own
    request: bytes = b""  # the request's fields other than its messages, as JSON
    messages: bytes
    prompt_ids: bytes
    messages_base: Base
    prompt_base: Base
    choices: list[ChoiceRecord]
    delivered: bool = True  # whether an agent took the reply whole, as far as is known


class FetchedHead(msgspec.Struct):
    """Precedes a session's records in the answer to a bulk fetch."""

    session_id: str
    known: bool
    closed: bool = False
    records: int = 0
    created_s: float = 0.0
    train: str | None = None
    metadata: dict[str, Any] = {}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CallRecord)


def encode(record: CallRecord) -> bytes:
    return _encoder.encode(record)


def decode(payload: bytes | memoryview) -> CallRecord:
    """Raises: CaptureError on bytes that are not a record, or on a record of a newer version."""
    try:
        record = _decoder.decode(payload)
    except msgspec.DecodeError as e:
        raise CaptureError(f"a stored call cannot be decoded: {e}") from e
    if record.version > VERSION:
        raise CaptureError(f"a stored call has format {record.version}, this version reads up to {VERSION}")
    return record


def decode_small(payload: bytes) -> CallRecord:
    """A record with empty bytes in place of expert routing, which takes most of a record. Raises: CaptureError."""
    record = decode(payload)
    for choice in record.choices:
        choice.routed_experts = None if choice.routed_experts is None else b""
    return record


def places_of(records: Sequence[CallRecord]) -> dict[str | None, int]:
    """The place of each call of a session among its records; -1 for the base of a call that continues none."""
    places: dict[str | None, int] = {record.call_id: place for place, record in enumerate(records)}
    places[None] = -1
    return places


def _place(places: dict[str | None, int], call_id: str | None) -> int:
    try:
        return places[call_id]
    except KeyError:
        raise CaptureError(f"a stored call refers to call {call_id}, which is not there") from None


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as int32. Raises: CaptureError on a value that is no token id."""
    try:
        return struct.pack(f"<{len(ids)}i", *ids)  # twice as fast as filling an array
    except struct.error as e:
        raise CaptureError(f"token ids must be 32-bit integers: {e}") from e


def unpack_ids(data: bytes) -> list[int]:
    unpacked = array.array("i")
    unpacked.frombytes(data)
    return unpacked.tolist()


def ids_array(data: bytes) -> array.array[int]:
    """Packed ids as an array, four bytes each."""
    return array.array("I", data)


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Logprobs as float32. Raises: CaptureError on a missing or non-numeric value: absent is not zero."""
    try:
        return struct.pack(f"<{len(logprobs)}f", *logprobs)
    except struct.error as e:
        raise CaptureError(f"the engine left out the logprob of a sampled token: {e}") from e
    except OverflowError as e:
        raise CaptureError(f"a logprob is not a float32: {e}") from e


def unpack_logprobs(data: bytes) -> list[float]:
    unpacked = array.array("f")
    unpacked.frombytes(data)
    return unpacked.tolist()


class Expanded(msgspec.Struct):
    """A session's records with every prompt and message list whole, in the order the calls were started."""

    turns: list[Turn]
    dialogue: list[dict[str, Any]]
    errors: list[dict[str, Any]]
    records: list[CallRecord]


def _whole_ids(records: list[CallRecord]) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Whole prompt ids of each record, and completion ids of each of its choices.

    What prompts share are the same int objects: making one costs ten times as much as copying a reference, and 20 turns of one
    session repeat each of their tokens ten times on average.
    """
    completions = [[unpack_ids(choice.ids) for choice in record.choices] for record in records]
    prompts: list[list[int]] = []
    places = places_of(records)
    for record in records:
        base = record.prompt_base
        whole: list[int] = []
        if base.call_id is not None:
            at = _place(places, base.call_id)
            whole = prompts[at][: base.length]
            if base.choice >= 0:
                whole += completions[at][base.choice][: base.length - len(whole)]
        whole += unpack_ids(record.prompt_ids)
        prompts.append(whole)
    return prompts, completions


def whole_prompt(records: Sequence[CallRecord], place: int, places: dict[str | None, int]) -> bytes:
    """The packed prompt ids of one record, whole; the records before it are needed, no other prompt is built."""
    pieces: list[bytes] = []
    wanted = -1  # bytes to take from the front of what this record's prompt (and a completion behind it) is; -1: all
    choice = -1
    while place >= 0:
        record = records[place]
        base = record.prompt_base
        taken = base.length * 4 if base.call_id is not None else 0
        tail = record.prompt_ids + (record.choices[choice].ids if choice >= 0 else b"")
        pieces.append(tail if wanted < 0 else tail[: max(0, wanted - taken)])
        wanted = taken if wanted < 0 else min(wanted, taken)
        place, choice = _place(places, base.call_id), base.choice
    return b"".join(reversed(pieces))


def whole_messages(records: list[CallRecord]) -> list[bytes]:
    """The JSON of each record's message list, whole."""
    texts: list[bytes] = []
    places = places_of(records)
    for record in records:
        base = record.messages_base
        head = b"" if base.call_id is None else texts[_place(places, base.call_id)][: base.length]
        texts.append(head + record.messages)
    return texts


def turn_id(record: CallRecord, choice: int) -> str:
    return record.call_id if len(record.choices) == 1 else f"{record.call_id}.{choice}"


def expand(records: list[CallRecord]) -> Expanded:
    """Turns, display dialogue and errors of one session.

    The records must be all of the session's, in stored order: a record refers only to records stored before it. A call
    that started first may be stored last, so the order of the starts (`CallRecord.index`) is another one.

    Raises: CaptureError if a record refers to one that is not there.
    """
    prompts, completions = _whole_ids(records)
    messages = whole_messages(records)
    places = places_of(records)
    requests = [of_request.read(record.request) if record.request_of is None else {} for record in records]
    order = sorted(range(len(records)), key=lambda i: records[i].index)
    turns: list[Turn] = []
    errors: list[dict[str, Any]] = []
    dialogue: list[dict[str, Any]] = []
    flows = Flows()
    feeds: dict[str, dict[str, str]] = {}
    for i in order:
        record = records[i]
        if record.status not in TURNS:
            errors.append(_error(record))
            continue
        prompt = prompts[i]
        asked, answers = _said(messages[i], record)
        dialogue = _grow(dialogue, asked, answers)
        about = requests[i if record.request_of is None else _place(places, record.request_of)]
        system = of_request.system_of(asked) if about else None
        sources = flows.into(asked)
        for choice, ids in zip(record.choices, completions[i], strict=True):
            name, message = turn_id(record, choice.index), _message(choice.message)
            for source, how in sources.items():
                feeds[source][name] = how
            flows.add(name, message, asked, hash(messages[i]))
            logprobs = _logprobs(choice)
            untrainable = choice.untrainable if record.status == OK else "engine_gives_no_tokens"
            if len(logprobs) != len(ids):  # absent is not zero, and one such choice must not hide all other turns
                logprobs, untrainable = [None] * len(ids), "missing_logprobs"
            first, last, each = _versions(record, choice, len(ids))
            turns.append(
                Turn(
                    turn_id=name,
                    index=len(turns),
                    prompt_ids=prompt,
                    completion_ids=ids,
                    logprobs=logprobs,
                    finish_reason=choice.finish_reason,
                    weight_version_first=first,
                    weight_version_last=last,
                    token_weight_versions=each,
                    parse_status=choice.parse_status,  # type: ignore[arg-type]  # written by the capture with these three values
                    routed_experts=choice.routed_experts,
                    started_s=record.started_s,
                    first_token_s=record.first_token_s,
                    finished_s=record.finished_s,
                    trainable=untrainable is None,
                    untrainable_reason=untrainable,
                    retry_of=_retry_of(record, choice.index),
                    delivered=record.delivered,
                    parent_turn=record.parent_turn,
                    branch_reason=record.branch_reason,
                    choice_index=choice.index,
                    system=system,
                    answered=of_request.answered(message),
                    reply_id=record.reply_id,
                    feeds=feeds.setdefault(name, {}),  # grows with the later turns
                    **about,
                )
            )
    return Expanded(turns=turns, dialogue=dialogue, errors=errors, records=[records[i] for i in order])


def _versions(record: CallRecord, choice: ChoiceRecord, count: int) -> tuple[int | None, int | None, list[int] | None]:
    """The versions at a choice's first and last token, and of each token where only bounds are known: the older one."""
    if choice.weight_version_last is not None:
        return choice.weight_version_first, choice.weight_version_last, _each(choice.weight_spans, count)
    if choice.untrainable == LOST_WEIGHTS:
        return None, None, None
    first, last = record.weight_version_first, record.weight_version_last
    return first, last, None if first is None or last is None or first == last else [min(first, last)] * count


def _retry_of(record: CallRecord, choice: int) -> str | None:
    """The turn that stands where this one does in the call that was asked for again."""
    if record.retry_of is None or len(record.choices) == 1:
        return record.retry_of
    return f"{record.retry_of}.{choice}"


def _each(spans: bytes | None, count: int) -> list[int] | None:
    """The version of each token, where the engine named spans that cover them all."""
    if spans is None:
        return None
    flat = unpack_ids(spans)
    starts, versions = flat[::2], flat[1::2]
    each = [
        version
        for start, end, version in zip(starts, [*starts[1:], count], versions, strict=True)
        for _ in range(start, end)
    ]
    return each if len(each) == count else None


def _logprobs(choice: ChoiceRecord) -> Sequence[float | None]:
    return unpack_logprobs(choice.logprobs) if choice.logprobs is not None else []


def _error(record: CallRecord) -> dict[str, Any]:
    field, message = None, record.error
    if record.status == REFUSED and message is not None:
        field, _, message = message.partition(": ")
    return {
        "call_id": record.call_id,
        "status": record.status,
        "http_status": record.http_status,
        "type": record.error_type,
        "field": field or None,
        "message": message,
        "started_s": record.started_s,
        "finished_s": record.finished_s,
        "upstream": record.upstream,
    }


def _message(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text) if text else None
    except msgspec.DecodeError:
        return None


def _said(text: bytes, record: CallRecord) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages that a call was asked with, and its answers."""
    asked = _message(text)
    if not isinstance(asked, list):
        asked = []
    found = [_message(choice.message) for choice in record.choices if choice.message]
    answers = [m if isinstance(m, dict) else {"role": "assistant", "content": m} for m in found if m is not None]
    return [m for m in asked if isinstance(m, dict)], answers


def _grow(
    dialogue: list[dict[str, Any]], asked: list[dict[str, Any]], answers: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The dialogue after a call: its own messages where they go on from what was shown, appended where they do not."""
    shown = [m for m in dialogue if m.get("role") != "assistant"]
    mine = [m for m in asked if m.get("role") != "assistant"]
    if mine[: len(shown)] == shown:
        return [*asked, *answers]
    return [*dialogue, *asked, *answers]
