"""SGLang's native ``/generate`` with token ids in and out.

Each event of a stream repeats everything sampled so far, or, with ``--incremental-streaming-output``, has only the new tokens.
``completion_tokens`` counts from the beginning in both. It leaves out tokens sampled after a stop in the same step (speculative
decoding). Only the list of logprobs has them. SGLang notices a closed connection by a poll every few seconds, so the gateway
also ends a cancelled call by name (``/abort_request``).
Source: docs.sglang.ai, "Sampling parameters" and "Native APIs"; sglang 0.5.23, `api/v1/api_types.py`,
`managers/io_struct.py`, `sampling/sampling_params.py`, `utils/weight_versions.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from ...errors import CaptureError
from ..capture.record import Uint31
from .base import COMMON, FORMS, SGLANG_FORMS, Piece, TokenEngine, TokenRequest, WeightSpan, changes, error_piece

_LONG_BYTES = 16 * 2**10  # some 400 tokens
_UNFINISHED = re.compile(rb'"finish_reason": ?null')
_encode = msgspec.json.Encoder().encode
_RENAMED = {"max_tokens": "max_new_tokens", "seed": "sampling_seed", "min_tokens": "min_new_tokens"}
_SAMPLER = frozenset({"ignore_eos", "min_tokens", "stop_token_ids"})


class _Finish(msgspec.Struct):
    type: str = "stop"
    matched: int | str | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, Uint31, Any]] | None = None
    completion_tokens: int | None = None
    weight_version: int | str | None = None
    weight_versions: list[WeightSpan] | None = None  # each event of a stream has all spans of the choice
    routed_experts: Any = None


class _Response(msgspec.Struct):
    output_ids: list[Uint31] | None = None
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    index: Uint31 = 0
    error: Any = None


_one = msgspec.json.Decoder(_Response)
_many = msgspec.json.Decoder(list[_Response])


def request(wanted: TokenRequest, *, experts: bool = False) -> tuple[bytes, bytes]:
    """Return path and body of a request. ``experts`` asks for expert routing."""
    asked = wanted.asked
    parameters = {**_held_to_form(asked.response_format), **wanted.sampling, "max_tokens": wanted.max_tokens}
    sampling = {_RENAMED.get(key, key): value for key, value in parameters.items()}
    sampling |= {"stop_token_ids": wanted.stop_token_ids, "skip_special_tokens": False}
    if asked.n != 1:
        sampling["n"] = asked.n
    body = {
        "input_ids": msgspec.Raw(wanted.prompt),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": wanted.stream,
        "rid": wanted.name,
        **({"return_routed_experts": True} if experts else {}),
    }
    return b"/generate", _encode(body)


def _held_to_form(response_format: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the sampling parameter for a constraint. SGLang takes schemas and tags as JSON text."""
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if kind == "json_schema":
        return {"json_schema": _encode(response_format["json_schema"]["schema"]).decode()}
    return {"structural_tag": _encode(response_format).decode()}


class _Reader:
    """Reads the new tokens of cumulative events.

    Of long events that repeat earlier tokens, it decodes the last, and each that is 5% longer than the last decoded one.
    """

    def __init__(self) -> None:
        self._seen: Counter[int] = Counter()
        self._least_bytes = 0  # the least size of the next event to decode

    def read(self, event: bytes) -> list[Piece]:
        if event.lstrip()[:1] == b"[":  # a whole reply with several choices
            return [_piece(answer, place, 0) for place, answer in enumerate(_many.decode(event))]
        if len(event) < self._least_bytes and _UNFINISHED.search(event):
            return []
        answer = _one.decode(event)
        if answer.error is not None:
            return [error_piece(answer.error)]
        piece = _piece(answer, answer.index, self._seen[answer.index])
        self._seen[answer.index] += len(piece.ids)
        repeats = len(event) > _LONG_BYTES and len(answer.output_ids or ()) > len(piece.ids)
        self._least_bytes = len(event) * 21 // 20 if repeats else 0
        return [piece]


T = TypeVar("T")


def _new(listed: list[T], total: int | None, seen: int) -> list[T]:
    """Return the part of a list that is new: the list is of all tokens so far, or only of those since the last event.

    Raises: CaptureError when it holds fewer than are new.
    """
    if total is None:
        return listed[seen:]
    fresh = total - seen
    if len(listed) < fresh or fresh < 0:
        raise CaptureError(
            f"the engine reported {total} tokens. {seen} came before this event, which has {len(listed)}"
        )
    # `_piece` compares the ids: a list of new tokens may be as long as all so far, because of tokens after a stop.
    return listed[seen:total] if len(listed) >= total and len(listed) != fresh else listed[:fresh]


def _piece(answer: _Response, choice: int, seen: int) -> Piece:
    """Return the tokens after the first ``seen`` ones. The list of logprobs also names the ids; both must agree."""
    meta = answer.meta_info
    ids: list[int] = answer.output_ids or []
    total = meta.completion_tokens
    values: list[float | None] | None = None
    if meta.output_token_logprobs is not None:
        values = _new([value for value, _, _ in meta.output_token_logprobs], total, seen)
        named = _new([token for _, token, _ in meta.output_token_logprobs], total, seen)
        if answer.output_ids is not None and _new(ids, total, seen) != named:
            raise CaptureError("the engine's output_ids and output_token_logprobs name different tokens")
        ids = named
    else:
        ids = _new(ids, total, seen)
    finish = meta.finish_reason
    matched = finish.matched if finish is not None else None
    spans = meta.weight_versions
    return Piece(
        choice=choice,
        ids=ids,
        logprobs=values,
        finish_reason=None if finish is None else finish.type,
        stop_sequence=matched if isinstance(matched, str) else None,
        weight_version=spans[-1].version if spans else meta.weight_version,
        weight_version_first=spans[0].version if spans else None,
        spans=changes(spans) if spans else None,
        routed_experts=meta.routed_experts,
    )


SGLANG = TokenEngine(
    features=COMMON | _SAMPLER | FORMS | SGLANG_FORMS,
    request=request,
    reader=lambda: _Reader().read,
    cancel=lambda name: (b"/abort_request", _encode({"rid": name})),
)
SGLANG_EXPERTS = replace(SGLANG, request=partial(request, experts=True))  # servers with --enable-return-routed-experts
