"""Tinker's sampling service: token ids in, token ids and logprobs out, each answer whole and in two steps.

``POST asample`` (JSON) gives the id of a request, ``POST retrieve_future`` waits for its answer (a protocol-buffer
message) and says "not yet" after half a minute. Who asks again, and with which session, is in `tinker.exchange`; here are
only the bytes.

Source: the `tinker` package 0.38.0 (resources/sampling.py, lib/api_future_impl.py, types/, proto/). The service has no
other description of its wire format; `tests/gateway/tinker/test_sampling.py` holds ours against what that package sends.
"""

from __future__ import annotations

import math
import os
from typing import Any

import msgspec

from ..._protobuf import read_fields, unpack
from ...errors import CaptureError
from ...messages.dialects.canonical import LENGTH, STOP, ModelRequest
from ...messages.errors import NOT_JSON
from .base import GenerationStream, Piece

SDK_VERSION = "0.38.0"  # sent to the service, which resolves feature flags by it
PRODUCTION_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
KEY_ENV, URL_ENV = "TINKER_API_KEY", "TINKER_BASE_URL"  # the SDK's own names
PROTOBUF = b"application/x-protobuf"

CONFIG = b"/api/v1/client/config"
DYNAMIC_CONFIG = b"/api/v1/client/dynamic_config"
AUTH_TOKEN = b"/api/v1/auth/token"
CREATE_SESSION = b"/api/v1/create_session"
CREATE_SAMPLER = b"/api/v1/create_sampling_session"
HEARTBEAT = b"/api/v1/session_heartbeat"
SAMPLE = b"/api/v1/asample"
RETRIEVE = b"/api/v1/retrieve_future"
CANCEL = b"/api/v1/cancel_future"

_STOP_REASONS = {0: STOP, 1: LENGTH}
_encode = msgspec.json.Encoder().encode


class Answer(msgspec.Struct):
    """What `retrieve_future` says in JSON: try again, failed, or (of `asample`) the request's id."""

    request_id: str | None = None
    type: str | None = None
    error: str | None = None
    category: str | None = None


_answer = msgspec.json.Decoder(Answer)


def read_answer(body: bytes) -> Answer:
    """Raises: CaptureError when it is not JSON of that shape."""
    try:
        return _answer.decode(body)
    except NOT_JSON as e:
        raise CaptureError(f"the service's answer cannot be read: {e}") from e


class TinkerEngine:
    """See the module. ``stop`` strings are cut here and not sent: a request takes either strings or token ids, and the
    ids that end a turn must stop it in any case."""

    name = "tinker"
    features = frozenset({"n", "seed", "top_k", "stop"})

    def request(
        self, prompt_json: bytes, asked: ModelRequest, *, max_tokens: int, stop_token_ids: list[int], stream: bool
    ) -> tuple[bytes, bytes]:
        """Path and body, all but the sampling session: `addressed` adds that when it is known."""
        given = asked.sampling
        sampling: dict[str, Any] = {
            "max_tokens": max_tokens,
            "stop": stop_token_ids or None,  # an empty list would disable the model's own end of text too
            "temperature": 1.0 if given.temperature is None else given.temperature,
            "top_k": -1 if given.top_k is None else given.top_k,
            "top_p": 1.0 if given.top_p is None else given.top_p,
        }
        if given.seed is not None:
            sampling["seed"] = given.seed
        body = {
            "num_samples": asked.n,
            "prompt": {"chunks": [{"tokens": msgspec.Raw(prompt_json), "type": "encoded_text"}]},
            "sampling_params": {k: v for k, v in sampling.items() if v is not None},
            "prompt_logprobs": False,
            "topk_prompt_logprobs": 0,
            "topk_sample_logprobs": 0,
            "prompt_alt_tokens_k": 0,
            "record_stability_info": False,
            "type": "sample",
        }
        return SAMPLE, _encode(body)

    def reply(self, body: bytes) -> list[Piece]:
        """Read a `SampleResponse`. Raises: CaptureError when it is not one."""
        pieces: list[Piece] = []
        for number, value in read_fields(body):
            if number == 1 and isinstance(value, bytes):
                pieces.append(_sequence(len(pieces), value))
        return pieces

    def stream(self) -> GenerationStream:
        raise CaptureError("Tinker answers whole")


def service_url() -> str:
    """The service that the SDK would use: TINKER_BASE_URL, or production."""
    return (os.environ.get(URL_ENV) or PRODUCTION_URL).rstrip("/")


def addressed(body: bytes, sampler: str, place: int) -> bytes:
    """A request's body with the sampling session and the request's number in it."""
    return _encode({"sampling_session_id": sampler, "seq_id": place})[:-1] + b"," + body[1:]


def retrieve(request_id: str) -> bytes:
    """The body that asks for an answer, whole, however large."""
    return _encode({"request_id": request_id, "allow_metadata_only": False})


def _sequence(choice: int, data: bytes) -> Piece:
    ids: list[int] = []
    logprobs: list[float | None] | None = None
    reason = 0
    for number, value in read_fields(data):
        if number == 1 and isinstance(value, int):
            reason = value
        elif number == 2 and isinstance(value, bytes):
            ids = unpack("i", value)
        elif number == 3 and isinstance(value, bytes) and value:
            # NaN stands for "not computed"
            logprobs = [None if math.isnan(lp) else lp for lp in unpack("f", value)]
    if reason not in _STOP_REASONS:
        raise CaptureError(f"choice {choice} has the unknown stop reason {reason}")
    return Piece(choice=choice, ids=ids, logprobs=logprobs, finish_reason=_STOP_REASONS[reason])
