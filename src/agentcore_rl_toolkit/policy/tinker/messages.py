"""Tinker's protocol-buffer messages, both directions, as plain Python: what a service reads and answers.

Field numbers are those of `tinker.proto.tinker_public_pb2`, SDK 0.38.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..._protobuf import bytes_field, double_field, double_of, number_field, pack, read_fields, unpack
from ...errors import CaptureError

FLOAT32, INT64 = 1, 2
_KIND_OF = {FLOAT32: "f", INT64: "q"}
STOP, LENGTH = 0, 1


@dataclass(frozen=True, kw_only=True)
class ReceivedDatum:
    """One training example as it came over the wire. Shapes: `tokens` (T,), each of `inputs` flat, row by row."""

    tokens: list[int]
    inputs: Mapping[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class ForwardBackward:
    """A forward (and backward) request."""

    model_id: str
    seq_id: int
    loss_fn: str
    data: Sequence[ReceivedDatum]
    config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One sampled sequence. Shapes: both (C,)."""

    ids: list[int]
    logprobs: list[float] | None
    stop_reason: int = STOP


def read_forward_backward(data: bytes) -> ForwardBackward:
    """Raises: CaptureError on images, audio or sparse tensors, which nothing here trains."""
    model_id, loss_fn, seq_id, forward_only = "", "", 0, False
    examples: list[ReceivedDatum] = []
    config: dict[str, float | str] = {}
    for number, value in read_fields(data):
        if isinstance(value, int):
            seq_id = value if number == 2 else seq_id
            forward_only = bool(value) if number == 6 else forward_only
        elif number == 1:
            model_id = value.decode()
        elif number == 3:
            examples.append(_datum(value))
        elif number == 4:
            loss_fn = value.decode()
        elif number == 5:
            key, raw = _entry(value)
            config.setdefault(key, double_of(raw))
        elif number == 7:  # the newer form of 5; holds texts too
            key, raw = _entry(value)
            for kind, part in read_fields(raw):
                if isinstance(part, bytes):
                    config[key] = double_of(part) if kind == 1 else part.decode()
    return ForwardBackward(
        model_id=model_id,
        seq_id=seq_id,
        loss_fn=loss_fn,
        data=examples,
        config=config,
        forward_only=forward_only,
    )


def _entry(data: bytes) -> tuple[str, bytes]:
    """Key and value of a map's entry."""
    fields = {number: value for number, value in read_fields(data) if isinstance(value, bytes)}
    return fields.get(1, b"").decode(), fields.get(2, b"")


def _datum(data: bytes) -> ReceivedDatum:
    tokens: list[int] = []
    inputs: dict[str, list[float]] = {}
    for number, value in read_fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            chunk = dict(read_fields(value))
            text = chunk.get(1)
            if not isinstance(text, bytes):
                raise CaptureError("only tokens can be trained on here, no images or audio")
            packed = dict(read_fields(text)).get(1, b"")
            tokens += unpack("i", packed if isinstance(packed, bytes) else b"")
        elif number == 2:
            name, tensor = _entry(value)
            inputs[name] = _tensor(name, tensor)
    return ReceivedDatum(tokens=tokens, inputs=inputs)


def _tensor(name: str, data: bytes) -> list[float]:
    dense, kind = b"", 0
    for number, value in read_fields(data):
        if number == 1 and isinstance(value, bytes):
            dense = value
        elif number == 2:
            raise CaptureError(f"{name}: sparse tensors are not read here")
        elif number == 3 and isinstance(value, int):
            kind = value
    if kind not in _KIND_OF:
        raise CaptureError(f"{name}: unknown type {kind} of tensor")
    return unpack(_KIND_OF[kind], dense)


def write_forward_backward(logprobs_B: Sequence[Sequence[float]], metrics: Mapping[str, float]) -> bytes:
    """The answer to `ForwardBackward`: the logprobs of every example's target tokens, and the metrics."""
    offsets, packed = [0], b""
    for logprobs in logprobs_B:
        packed += pack("f", list(logprobs))
        offsets.append(len(packed))
    tensor = bytes_field(1, packed) + bytes_field(2, pack("q", offsets)) + number_field(3, FLOAT32)
    record = bytes_field(1, "ArrayRecord") + bytes_field(2, bytes_field(1, "logprobs") + bytes_field(2, tensor))
    record += number_field(3, len(logprobs_B))
    out = bytes_field(1, "ArrayRecord") + bytes_field(2, record)
    for name, value in metrics.items():
        out += bytes_field(3, bytes_field(1, name) + double_field(2, value))
    return out


class Completion(Protocol):
    """One sample; `Sampled` is one. Shapes: both (C,)."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[float] | None: ...
    @property
    def stop_reason(self) -> int: ...


def write_sample(sequences: Sequence[Completion], prompt_logprobs: Sequence[float | None] | None = None) -> bytes:
    """The answer to a sampling request; a missing prompt logprob is NaN on the wire."""
    out = b""
    for sequence in sequences:
        one = number_field(1, sequence.stop_reason) + bytes_field(2, pack("i", sequence.ids))
        if sequence.logprobs is not None:
            one += bytes_field(3, pack("f", sequence.logprobs))
        out += bytes_field(1, one)
    if prompt_logprobs is not None:
        values = [float("nan") if value is None else value for value in prompt_logprobs]
        out += bytes_field(2, pack("f", values))
    return out
