"""Make turns of a session's records.

A record has only what is new since the calls that it refers to. Prompts and message lists become whole again here, and share
the objects that they have in common: a session of T tokens then costs O(T), however many turns repeat them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import CaptureError
from ...trajectory import Turn
from .flows import Flows
from .record import (
    LEFT_OUT,
    LOST_WEIGHTS,
    OK,
    REFUSED,
    TAG,
    TURNS,
    CallRecord,
    ChoiceRecord,
    unpack_ids,
    unpack_logprobs,
)

Message = dict[str, Any]


class _Function(msgspec.Struct):
    name: str = ""


class _Tool(msgspec.Struct):
    function: _Function | None = None


class _Sampling(msgspec.Struct):
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class _Request(_Sampling, rename={"tag": TAG, "left_out": LEFT_OUT}):
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    tag: str | None = None
    left_out: dict[str, int] = {}


_request = msgspec.json.Decoder(_Request)
_items = msgspec.json.Decoder(list[msgspec.Raw])


class Expanded(msgspec.Struct):
    """Turns, display dialogue and errors of a session, and its records in the order in which the calls started."""

    turns: list[Turn]
    dialogue: list[Message]
    errors: list[dict[str, Any]]
    records: list[CallRecord]


def expand(records: Sequence[CallRecord]) -> Expanded:
    """Make the turns of a session. ``records`` are all of its calls in stored order, in which each refers only to earlier ones.

    Raises: CaptureError if a record refers to a missing record.
    """
    places = places_of(records)
    prompts, completions = _whole_ids(records)
    messages = message_lists(records)
    requests = [_facts(record.request) if record.request_of is None else {} for record in records]
    order = sorted(range(len(records)), key=lambda i: records[i].index)  # a call that started first may be stored last
    found = Expanded(turns=[], dialogue=[], errors=[], records=[records[i] for i in order])
    flows = Flows()
    feeds: dict[str, dict[str, str]] = {}
    for i in order:
        record = records[i]
        if record.status not in TURNS:
            found.errors.append(_error(record))
            continue
        asked = [message for message in messages[i] if isinstance(message, dict)]
        replies = [_decoded(choice.message) for choice in record.choices]
        found.dialogue = _grown(found.dialogue, asked, replies)
        facts = requests[i if record.request_of is None else _place(places, record.request_of)]
        system = _system(asked) if facts else None
        sources = flows.into(asked)
        for choice, ids, reply in zip(record.choices, completions[i], replies, strict=True):
            name = turn_id(record, choice.index)
            for source, how in sources.items():
                feeds[source][name] = how
            flows.add(name, reply, asked, hash(tuple(map(id, asked))))
            turn = _turn(
                record,
                choice,
                turn_id=name,
                index=len(found.turns),
                prompt_ids=prompts[i],
                completion_ids=ids,
                system=system,
                answered=_answered(reply),
                feeds=feeds.setdefault(name, {}),  # grows with the later turns
                unsampled=sum(m.get("role") == "assistant" for m in asked) if i == order[0] else 0,
                **facts,
            )
            found.turns.append(turn)
    return found


def _turn(record: CallRecord, choice: ChoiceRecord, *, completion_ids: list[int], **about: Any) -> Turn:
    logprobs: Sequence[float | None] = [] if choice.logprobs is None else unpack_logprobs(choice.logprobs)
    untrainable = choice.untrainable if record.status == OK else "engine_gives_no_tokens"
    if len(logprobs) != len(completion_ids):  # absent is not zero, and one such choice must not hide all other turns
        logprobs, untrainable = [None] * len(completion_ids), "missing_logprobs"
    first, last, each = _versions(record, choice, len(completion_ids))
    return Turn(
        completion_ids=completion_ids,
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
        delivered=record.delivered,
        parent_turn=record.parent_turn,
        branch_reason=record.branch_reason,
        choice_index=choice.index,
        reply_id=record.reply_id,
        free_tokens=choice.free_tokens,
        **about,
    )


def turn_id(record: CallRecord, choice: int) -> str:
    return record.call_id if len(record.choices) == 1 else f"{record.call_id}.{choice}"


def _versions(record: CallRecord, choice: ChoiceRecord, count: int) -> tuple[int | None, int | None, list[int] | None]:
    """Return the versions at a choice's first and last token, and of each token where only bounds are known: the older one."""
    if choice.weight_version_last is not None:
        return choice.weight_version_first, choice.weight_version_last, _each(choice.weight_spans, count)
    if choice.untrainable == LOST_WEIGHTS:
        return None, None, None
    first, last = record.weight_version_first, record.weight_version_last
    return first, last, None if first is None or last is None or first == last else [min(first, last)] * count


def _each(spans: bytes | None, count: int) -> list[int] | None:
    """Return the version of each token, if the engine named spans that cover all tokens."""
    if spans is None:
        return None
    flat = unpack_ids(spans)
    starts, versions = flat[::2], flat[1::2]
    each: list[int] = []
    for start, end, version in zip(starts, [*starts[1:], count], versions, strict=True):
        each += [version] * (end - start)
    return each if len(each) == count else None


# -- whole prompts and message lists


def places_of(records: Sequence[CallRecord]) -> dict[str | None, int]:
    """Return the place of each call of a session among its records; -1 for the base of a call that continues none."""
    places: dict[str | None, int] = {record.call_id: place for place, record in enumerate(records)}
    places[None] = -1
    return places


def _place(places: dict[str | None, int], call_id: str | None) -> int:
    try:
        return places[call_id]
    except KeyError:
        raise CaptureError(f"a stored call refers to the call {call_id}, which is missing") from None


def _whole_ids(records: Sequence[CallRecord]) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Return the whole prompt ids of each record, and the completion ids of each of its choices."""
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
        prompts.append(whole + unpack_ids(record.prompt_ids))
    return prompts, completions


def message_lists(records: Sequence[CallRecord]) -> list[list[Any]]:
    """Return the messages of each record. Messages with the same JSON are the same object."""
    lists: list[list[Any]] = []
    known: dict[bytes, Any] = {}
    places = places_of(records)
    for record in records:
        base = record.messages_base
        whole = [] if base.call_id is None else lists[_place(places, base.call_id)][: base.length]
        try:
            texts = list(map(bytes, _items.decode(record.messages or b"[]")))
        except msgspec.DecodeError:  # an engine took what is no list
            texts = []
        for text in texts:
            if text not in known:
                known[text] = _decoded(text)
        lists.append(whole + [known[text] for text in texts])
    return lists


# -- facts of a request and its reply


def _facts(request: bytes) -> dict[str, Any]:
    """Return the fields of a `Turn` from a recorded request, or none if it cannot be read again.

    A tool that the model must call is the form of an answer, and not offered.
    """
    try:
        asked = _request.decode(request)
    except msgspec.DecodeError:
        return {}
    tools = tuple(tool.function.name for tool in asked.tools or () if tool.function is not None)
    choice = asked.tool_choice
    named = isinstance(choice, dict) and choice.get("type") == "function"
    form = named or (choice == "required" and len(tools) == 1)
    sampling = {name: getattr(asked, name) for name in _Sampling.__struct_fields__}
    return {
        "tools": () if form else tools,
        "tag": asked.tag,
        "left_out": asked.left_out,
        "sampling": {name: value for name, value in sampling.items() if value is not None},
    }


def _system(messages: Sequence[Message]) -> str:
    """Return a digest of the leading system messages."""
    leading = []
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        leading.append(message.get("content"))
    return hashlib.blake2b(msgspec.json.encode(leading), digest_size=8).hexdigest()


def _answered(reply: Any) -> bool:
    """Return False if a reply has only reasoning."""
    if not isinstance(reply, dict) or reply.get("content") or reply.get("tool_calls"):
        return True
    return not (reply.get("reasoning_content") or reply.get("reasoning"))


def _decoded(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text) if text else None
    except msgspec.DecodeError:
        return None


def _grown(dialogue: list[Message], asked: list[Message], replies: Sequence[Any]) -> list[Message]:
    """Return the dialogue after a call: its own messages if they continue what was shown, otherwise they are appended."""
    answers = [m if isinstance(m, dict) else {"role": "assistant", "content": m} for m in replies if m is not None]
    shown = [m for m in dialogue if m.get("role") != "assistant"]
    mine = [m for m in asked if m.get("role") != "assistant"]
    if mine[: len(shown)] == shown:
        return [*asked, *answers]
    return [*dialogue, *asked, *answers]


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
