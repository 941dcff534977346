"""The budget of an answer's thinking: how it is sent to engines, and which servers cannot hold one.

vLLM takes ``thinking_token_budget`` and answers 400 where it was started without ``--reasoning-parser`` (or where its
runner cannot count yet). SGLang takes ``custom_params.thinking_budget``, holds it under ``--enable-strict-thinking`` and
passes over it otherwise, without a word. The others have no such thing. A budget is a ceiling within ``max_tokens``, so a
call whose budget nobody holds is served all the same, and its reply says so.

Source: vLLM's `v1/engine/input_processor.py` and `entrypoints/openai/*/protocol.py`; SGLang's
`srt/constrained/grammar_manager.py` and docs.sglang.io, "Thinking budget"; 2026-11.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from ...messages.dialects.canonical import Request
from ..upstreams.router import Worker

log = logging.getLogger(__name__)

ASK_AGAIN_S = 600.0  # a server may have been started anew, with a reasoning parser

_SGLANG = ("sglang", "sglang-experts")
_FIELD = "thinking_token_budget"
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_params = msgspec.json.Decoder(dict[str, Any])
_to_json = msgspec.json.Encoder().encode


class Budget:
    """The budget of one call. ``worker`` is the server that was sent it: None while none is."""

    __slots__ = ("_asked", "worker")

    def __init__(self, asked: Request) -> None:
        self._asked = asked
        self.worker: Worker | None = None

    def at(self, worker: Worker) -> int | None:
        """The budget that this server is to be sent: if its engine knows budgets, and it has not refused one lately."""
        budget = self._asked.thinking_budget
        takes = worker.config.engine in ("vllm", *_SGLANG) and worker.no_budget_until <= time.monotonic()
        self.worker = worker if takes and budget is not None else None
        return None if self.worker is None else budget

    def goes_without(self, status: int, body: bytes) -> bool:
        """Whether the server's error is about the budget: it is sent none for a while."""
        if self.worker is None or status not in (400, 422) or _FIELD.encode() not in body:
            return False
        leave_out(self.worker)
        return True

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the reply says of a budget that nobody holds."""
        unheld = self._asked.thinking_budget is not None and self.worker is None
        return [(b"agentcore-rl-not-held", b"thinking.budget_tokens")] if unheld else []


def leave_out(worker: Worker) -> None:
    """Send this server no budgets for a while."""
    worker.no_budget_until = time.monotonic() + ASK_AGAIN_S
    log.warning(
        "%s does not hold budgets of thinking, so calls go to it without; start vLLM with --reasoning-parser (and "
        "--reasoning-config for parsers without start and end strings)",
        worker.config.url,
    )


def in_chat(body: bytes, engine: str, budget: int) -> bytes:
    """A chat request with the budget in the engine's words. What the session's settings say of it stays."""
    fields: dict[str, Any] = dict(_fields.decode(body))
    if engine in _SGLANG:
        params = fields.get("custom_params")
        fields["custom_params"] = _custom(_params.decode(params) if params is not None else None, budget)
    else:
        fields.setdefault(_FIELD, budget)
    return _to_json(fields)


def in_sampling(asked: Request, engine: str, budget: int) -> Request:
    """The same for a request whose prompt is sent as token ids."""
    other = dict(asked.sampling.other)
    if engine in _SGLANG:
        other["custom_params"] = _custom(other.get("custom_params"), budget)
    else:
        other.setdefault(_FIELD, budget)
    return msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, other=other))


def reasoned(body: bytes, engine: str) -> bytes:
    """SGLang's chat endpoint sees from the template's variables that an answer begins with thinking; with token ids it
    has to be sent, and counts nothing otherwise.
    """
    return body[:-1] + b',"require_reasoning":true}' if engine in _SGLANG else body


def _custom(params: Mapping[str, Any] | None, budget: int) -> dict[str, Any]:
    return {"thinking_budget": budget, **(params or {})}
