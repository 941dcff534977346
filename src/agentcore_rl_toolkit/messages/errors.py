"""Errors of requests, and their form in OpenAI's dialects."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import GatewayError

# What reading bytes of others as JSON may raise: bad syntax, bytes that are not UTF-8, too deep.
NOT_JSON = (msgspec.DecodeError, UnicodeError, RecursionError)

# kind -> (HTTP status, OpenAI type, OpenAI code). Source: platform.openai.com/docs/guides/error-codes
KINDS: dict[str, tuple[int, str, str | None]] = {
    "invalid_request": (400, "invalid_request_error", None),
    "unsupported": (400, "invalid_request_error", "unsupported_parameter"),
    "context_overflow": (400, "invalid_request_error", "context_length_exceeded"),
    "authentication": (401, "invalid_request_error", "invalid_api_key"),
    "permission": (403, "invalid_request_error", "permission_denied"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "model_not_found": (404, "invalid_request_error", "model_not_found"),
    "method_not_allowed": (405, "invalid_request_error", "method_not_allowed"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "rate_limit": (429, "requests", "rate_limit_exceeded"),
    # no 429: Strands waits two minutes over one, whatever the headers say
    "turn_limit": (403, "invalid_request_error", "turn_limit_reached"),
    "internal": (500, "server_error", None),
    "upstream": (502, "server_error", "upstream_error"),
    "overloaded": (503, "server_error", "overloaded"),
    "timeout": (504, "server_error", "timeout"),
}


class RequestError(GatewayError):
    """The error of a refused or failed call, for the agent.

    ``kind`` is a key of `KINDS`. ``param`` names the field at fault, as a path: ``messages[2].content[0].image_url``.
    """

    status: int

    def __init__(
        self,
        message: str = "",
        *,
        kind: str = "invalid_request",
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        **ids: Any,
    ) -> None:
        known = KINDS[kind]
        super().__init__(message, status=known[0] if status is None else status, **ids)
        self.kind = kind
        self.param = param
        self.code = code if code is not None else known[2]


def unsupported(param: str, why: str) -> RequestError:
    return RequestError(f"{param!r} is not supported here: {why}", kind="unsupported", param=param)


NO_THREADS = "thread_unsupported_request"  # the provider's client then continues without a thread


def no_threads() -> RequestError:
    why = "'thread' is not supported here: the gateway does not keep the agent's conversation; send all messages"
    return RequestError(why, kind="unsupported", param="thread", code=NO_THREADS)


# Anthropic has no code for it: agents tell it by these words, the first where a prompt alone is at fault.
TOO_LONG = ("prompt is too long", "input and output tokens exceed your context limit")


def context_overflow(prompt_tokens: int, limit: int, *, max_tokens: int | None = None) -> RequestError:
    """Return the error for a prompt that does not fit, alone or with the requested answer. Units: tokens.

    Its words are those that agents look for in both dialects.
    """
    asked = f" ({prompt_tokens} in the messages, {max_tokens} in the completion)" if max_tokens else ""
    total = prompt_tokens + (max_tokens or 0)
    if prompt_tokens >= limit:
        what = f"{TOO_LONG[0]}: {prompt_tokens} tokens > {limit} maximum."
    else:
        what = f"{TOO_LONG[1]}: {total} tokens > {limit} maximum."
    return RequestError(
        f"{what} This model's maximum context length is {limit} tokens. "
        f"However, you requested {total} tokens{asked}. Please reduce the length of the messages or completion.",
        kind="context_overflow",
        param="messages",
    )


# The names that chat and the engines have for the prompt: an error names the field that the agent sent.
_PROMPT_NAMES = frozenset({"messages", "input", "token_ids", "input_ids", "prompt_token_ids"})


def field_at_fault(error: RequestError, prompt: str) -> str | None:
    """Return the agent's name of the field. ``prompt`` is its name of the prompt."""
    if error.param in _PROMPT_NAMES:
        return prompt
    # Token engines take an agent's sampling parameters under one member.
    return error.param.removeprefix("sampling_params.") if error.param is not None else None


def openai_error(error: RequestError, prompt: str = "messages") -> dict[str, Any]:
    """Return the body of an OpenAI error. ``prompt`` is the name of the prompt in the dialect."""
    return {
        "error": {
            "message": error.message,
            "type": KINDS[error.kind][1],
            "param": field_at_fault(error, prompt),
            "code": error.code,
        }
    }
