"""vLLM, and the built-in policy, which speaks the same.

Whole answers come from ``/inference/v1/generate``. Streams come from ``/v1/completions`` with the ids as prompt and
``return_token_ids``, because generate streams in the latest versions only. A call ends when its connection closes
(`with_cancellation`); the server's ``/abort_requests`` exists only under ``--tokens-only``. Source: docs.vllm.ai,
"OpenAI-compatible server" and "disaggregated serving"; shapes as of vLLM 0.11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ...errors import CaptureError
from ..capture.record import Uint31
from .base import COMMON, FORMS, VLLM_FORMS, Piece, TokenEngine, TokenRequest, WeightSpan, changes, error_piece

_encode = msgspec.json.Encoder().encode


class _Entry(msgspec.Struct, gc=False):
    logprob: float | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: Uint31 = 0
    token_ids: list[Uint31] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: Any = None
    weight_version_first: int | str | None = None  # the built-in policy's
    weight_version_last: int | str | None = None
    weight_versions: list[WeightSpan] | None = None  # vLLM's


class _Response(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    weight_version: int | str | None = None
    error: Any = None


_response = msgspec.json.Decoder(_Response)


_SAMPLER = frozenset(
    {"allowed_token_ids", "bad_words", "ignore_eos", "min_tokens", "stop_token_ids", "thinking_token_budget"}
)


def request(wanted: TokenRequest) -> tuple[bytes, bytes]:
    """Return path and body of a request."""
    asked = wanted.asked
    sampling = {
        **_held_to_form(asked.response_format),
        **wanted.sampling,
        "max_tokens": wanted.max_tokens,
        "logprobs": 1,
        "stop_token_ids": wanted.stop_token_ids,
        "skip_special_tokens": False,  # stop strings are looked for in this text
    }
    if asked.n != 1:
        sampling["n"] = asked.n
    prompt = msgspec.Raw(wanted.prompt)
    if not wanted.stream:
        body: dict[str, Any] = {"model": asked.model, "token_ids": prompt, "sampling_params": sampling}
        return b"/inference/v1/generate", _encode(body)
    body = {"model": asked.model, "prompt": prompt, "stream": True, "return_token_ids": True, **sampling}
    return b"/v1/completions", _encode(body)


def _held_to_form(response_format: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the sampling parameter for a constraint. Source: vLLM's `sampling_params.StructuredOutputsParams`."""
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    if kind == "json_schema":
        return {"structured_outputs": {"json": response_format["json_schema"]["schema"]}}
    return {"structured_outputs": {"structural_tag": _encode(response_format).decode()}}


def _pieces(event: bytes) -> list[Piece]:
    """Read a generated answer, or a chunk of a text completion that has token ids."""
    answer = _response.decode(event)
    pieces = [] if answer.error is None else [error_piece(answer.error)]
    for choice in answer.choices:
        if choice.token_ids is None:
            raise CaptureError("the engine returned no token ids; it must support return_token_ids")
        logprobs, spans = choice.logprobs, choice.weight_versions
        values: list[float | None] | None = None
        if logprobs is not None and logprobs.content is not None:
            values = [entry.logprob for entry in logprobs.content]
        elif logprobs is not None:
            values = logprobs.token_logprobs
        first, last = choice.weight_version_first, choice.weight_version_last
        if spans:
            first, last = spans[0].version, spans[-1].version
        pieces.append(
            Piece(
                choice=choice.index,
                ids=choice.token_ids,
                logprobs=values,
                finish_reason=choice.finish_reason,
                stop_sequence=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
                weight_version=answer.weight_version if last is None else last,
                weight_version_first=first,
                spans=changes(spans) if spans else None,
                routed_experts=choice.routed_experts,
            )
        )
    return pieces


VLLM = TokenEngine(features=COMMON | _SAMPLER | FORMS | VLLM_FORMS, request=request, reader=lambda: _pieces)
POLICY = replace(VLLM, features=COMMON)  # it holds no answer to a form
