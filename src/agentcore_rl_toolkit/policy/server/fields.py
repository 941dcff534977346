"""Fields of a request's body, read one by one; a wrong one becomes OpenAI's error object, which names it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ...errors import PolicyError
from ..tokens import ChatTokenizer

_LARGEST = sys.float_info.max  # JSON's whole numbers have no end, and Python's reader takes Infinity
_KIND_OF_STATUS = {404: "not_found_error", 429: "rate_limit_error"}


class RequestError(PolicyError):
    """A request that is answered with an error object: HTTP ``status``, the field in ``param``, OpenAI's ``code``."""

    def __init__(
        self,
        message: str = "",
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after_s: float | None = None,
        **ids: Any,
    ) -> None:
        super().__init__(message, **ids)
        self.param = param
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s

    def to_openai(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else _KIND_OF_STATUS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """True or false; ``default`` when absent. Raises: RequestError."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}", param=name, code="invalid_type")
    return value


def text(body: Mapping[str, Any], name: str) -> str | None:
    """A short string, or None when absent. Raises: RequestError."""
    value = body.get(name)
    if value is not None and (not isinstance(value, str) or len(value) > 256):
        raise RequestError(f"{name} must be a string of at most 256 characters", param=name, code="invalid_type")
    return value


def integer(body: Mapping[str, Any], name: str, *, low: int | None = None, high: int | None = None) -> int | None:
    """A whole number from ``low`` to ``high``, or None when absent. Raises: RequestError."""
    value = body.get(name)
    if value is None:
        return None
    # 64 bits are what a tensor holds
    if (
        type(value) is not int
        or abs(value) >= 2**63
        or (low is not None and value < low)
        or (high is not None and value > high)
    ):
        bounds = "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
        raise RequestError(
            f"{name} must be an integer{bounds}, got {str(value)[:80]}", param=name, code="invalid_value"
        )
    return value


def number(body: Mapping[str, Any], name: str, *, low: float, high: float = float("inf")) -> float | None:
    """A finite number from ``low`` to ``high``, or None when absent. Raises: RequestError."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= min(high, _LARGEST):
        bounds = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} must be a number, {bounds}; got {value!r}", param=name, code="invalid_value")
    return float(value)


def token_ids(value: Any, name: str, tokenizer: ChatTokenizer) -> list[int]:
    """A non-empty list of ids that the tokenizer has. Raises: RequestError."""
    size = tokenizer.vocabulary_size
    if not isinstance(value, list) or not value or any(type(i) is not int or not 0 <= i < size for i in value):
        raise RequestError(f"{name} must be a non-empty list of token ids, each from 0 to {size - 1}", param=name)
    return value


def logit_bias(body: Mapping[str, Any], tokenizer: ChatTokenizer) -> dict[int, float]:
    """Token ids (in JSON: strings) and what is added to their logits, cut to -100..100 as vLLM does. Raises: RequestError."""
    value = body.get("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError("logit_bias must be an object of token ids and numbers", param="logit_bias")
    size = tokenizer.vocabulary_size
    biases: dict[int, float] = {}
    for key, bias in value.items():
        try:
            token_id = int(key)
        except ValueError:
            token_id = -1
        if not 0 <= token_id < size:
            raise RequestError(
                f"logit_bias: {key!r} is no token id; this model's are from 0 to {size - 1}", param="logit_bias"
            )
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or bias != bias:
            raise RequestError(
                f"logit_bias: the bias of token {key} must be a number, got {bias!r}", param="logit_bias"
            )
        biases[token_id] = float(min(100, max(-100, bias)))
    return biases


def check_length(longest: int, limit: int, *, context: int, param: str) -> None:
    """Refuse a prompt of more than ``limit`` tokens in OpenAI's words. Raises: RequestError."""
    if longest > limit:
        raise RequestError(
            f"This model's maximum context length is {context} tokens, your prompt has {longest}; shorten it.",
            param=param,
            code="context_length_exceeded",
        )
