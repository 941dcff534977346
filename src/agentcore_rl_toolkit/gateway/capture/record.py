"""The record of a model call, and its binary form.

Token ids are little-endian uint32, logprobs little-endian float32 (as engines compute them), so a token costs 8 bytes where
JSON takes 60 to 500. A prompt that starts with an earlier call's tokens stores only what comes after them
(`Base`), and so do the messages: a session of T tokens costs O(T) on disk and not O(T * turns). `capture.turns` makes
`trajectory.Turn`s of records.

The store has a row for each (`store.schema`); the bulk fetch sends them encoded.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from ...errors import CaptureError

VERSION = 4

OK = "ok"  # a whole reply with consistent tokens: becomes one turn per choice
UNTRAINABLE = "untrainable"  # a whole reply of an engine that gives no tokens: a turn for display only
INVALID = "invalid"  # a whole reply whose tokens do not fit together: never a turn
ERROR = "error"  # the engine or the gateway answered with an error
PARTIAL = "partial"  # the engine stopped before the end of its reply
ABORTED = "aborted"  # the agent disconnected before the end of the reply
REFUSED = "refused"  # the gateway did not take the request; `error` is the field at fault, a colon, and why
TURNS = frozenset({OK, UNTRAINABLE})
LOST_WEIGHTS = "engine_lost_its_weights"  # it was started again, and has not the published ones
CONSTRAINED = "held_to_a_form"  # a grammar held it: its logprobs are those of the masked distribution
IMAGES = "images"  # the engine saw pixels that a trainer would not have

# Members that the gateway adds to a recorded request; no engine gets them.
TAG = "agentcore_rl_tag"  # the header or path segment
LEFT_OUT = "agentcore_rl_left_out"  # the parts of the history that the model did not get as sent, counted by kind


Uint31 = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]  # token ids, and indexes of choices


class Captured(msgspec.Struct):
    """The content of a reply. ``prompt`` is the JSON list of the prompt ids, None if the engine gave none.

    ``complete`` is False when a choice has no finish reason, ``problem`` is the reason why the tokens cannot be trained on.
    """

    choices: list[ChoiceRecord]
    prompt: bytes | msgspec.Raw | None = None
    prompt_ids: bytes | None = None  # the packed ids of the prompt; None: they are read from ``prompt``
    reply_id: str | None = None
    model: str | None = None
    usage: bytes | None = None
    complete: bool = True
    problem: str | None = None
    error: bytes | None = None
    has_tokens: bool = False
    parent_turn: str | None = None
    branch_reason: str | None = None
    untrainable: str | None = None  # why it must not be trained on, though its tokens are whole
    first_named: bool = False  # True if the engine named the versions of both ends


class Base(msgspec.Struct, array_like=True, frozen=True):
    """The beginning of a prompt or message list, which an earlier call of the session has.

    ``choice`` is the place of that call's choice whose completion follows its prompt (-1: the prompt alone), ``length`` the
    number of ids or messages that are taken from there.
    """

    call_id: str | None = None
    choice: int = -1
    length: int = 0


NO_BASE = Base()


class ChoiceRecord(msgspec.Struct, array_like=True):
    """A choice of a call. ``message`` is the assistant message as JSON, merged when it was streamed.

    ``stop_sequence`` is the agent's stop string that ended the answer.
    """

    index: int
    ids: bytes
    logprobs: bytes | None
    finish_reason: str | None
    parse_status: str
    message: bytes
    routed_experts: bytes | None = None
    stop_sequence: str | None = None
    weight_version_first: int | None = None  # as the engine named it; None: it did not
    weight_version_last: int | None = None
    untrainable: str | None = None  # why it must not be trained on, though its tokens are whole
    weight_spans: bytes | None = None  # pairs of first token and version as uint32, where weights changed on the way
    free_tokens: int | None = None  # tokens before the part that a grammar held to a form; None: all


class CallRecord(msgspec.Struct, array_like=True, kw_only=True):
    """A model call as stored: its fields are the columns of the store's table `calls`. Units: unix seconds."""

    version: int = VERSION
    call_id: str
    index: int
    status: str
    dialect: str
    model: str | None = None
    started_s: float
    first_token_s: float | None = None
    finished_s: float
    weight_version_first: int | None = None
    weight_version_last: int | None = None
    http_status: int = 200
    error_type: str | None = None
    error: str | None = None
    digest: int = 0
    reply_id: str | None = None
    upstream: str | None = None
    parent_turn: str | None = None
    branch_reason: str | None = None
    usage: bytes | None = None
    request_of: str | None = None  # the call whose `request` holds for this one too; None: its own
    request: bytes = b""  # the request's fields other than its messages, as JSON
    messages: bytes = b""
    prompt_ids: bytes = b""
    messages_base: Base = NO_BASE
    prompt_base: Base = NO_BASE
    choices: list[ChoiceRecord] = []
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


encode: Callable[[CallRecord], bytes] = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(CallRecord)


def decode(payload: bytes | memoryview) -> CallRecord:
    """Decode a stored call. Raises: CaptureError if the bytes are not a record of this version."""
    try:
        record = _decoder.decode(payload)
    except msgspec.DecodeError as e:
        raise CaptureError(f"a stored call cannot be decoded: {e}") from e
    if record.version != VERSION:
        raise CaptureError(f"a stored call has format {record.version}, this version reads {VERSION}")
    return record


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as uint32. Raises: CaptureError on a value that is not a token id."""
    try:
        packed = struct.pack(f"<{len(ids)}i", *ids)  # twice as fast as filling an array
    except struct.error as e:
        raise CaptureError(f"token ids must be 32-bit integers: {e}") from e
    if ids and min(ids) < 0:
        raise CaptureError(f"token ids must be 32-bit integers of at least 0, not {min(ids)}")
    return packed


def unpack_ids(data: bytes) -> list[int]:
    return array.array("I", data).tolist()


def pack_logprobs(logprobs: Sequence[float | None]) -> bytes:
    """Return logprobs as float32. Raises: CaptureError on a missing or non-numeric value: absent is not zero."""
    try:
        return struct.pack(f"<{len(logprobs)}f", *logprobs)
    except struct.error as e:
        raise CaptureError(f"the engine left out the logprob of a sampled token: {e}") from e
    except OverflowError as e:
        raise CaptureError(f"a logprob is not a float32: {e}") from e


def unpack_logprobs(data: bytes) -> list[float]:
    return array.array("f", data).tolist()
