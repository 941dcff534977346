"""Engines' errors, of all shapes, as errors for the agent."""

from __future__ import annotations

import msgspec

from ...messages.errors import NOT_JSON, RequestError

_NULL = b"null"
_OVERFLOW = (
    b"maximum context length",
    b"context_length_exceeded",
    b"max_model_len",
    b"longer than the maximum model length",
    b"longer than the model's context length",
    b"prompt is too long",
)


class _ErrorBody(msgspec.Struct):
    message: str | None = None
    type: str | None = None
    code: str | int | None = None
    param: str | None = None


class _ErrorReply(msgspec.Struct):
    error: _ErrorBody | str | None = None
    message: str | None = None
    code: str | int | None = None
    param: str | None = None
    detail: msgspec.Raw = msgspec.Raw(b"null")


_error_reply = msgspec.json.Decoder(_ErrorReply)
_KIND_OF = {
    401: "upstream",  # our key for the engine is wrong, not the agent's key for us
    403: "upstream",
    404: "not_found",
    413: "too_large",
    429: "rate_limit",
    502: "upstream",
    503: "overloaded",
    504: "timeout",
}


def upstream_error(status: int, body: bytes) -> RequestError:
    """Return the error for an engine's error body. A prompt that is too long gets the provider's code for it."""
    message, param, code = None, None, None
    try:
        response = _error_reply.decode(body)
        if isinstance(response.error, _ErrorBody):
            message, param, code = response.error.message, response.error.param, response.error.code
        else:
            message, param, code = response.error or response.message, response.param, response.code
        if message is None and bytes(response.detail) != _NULL:
            message = bytes(response.detail).decode("utf-8", "replace")
    except NOT_JSON:
        message = body[:500].decode("utf-8", "replace")
    if status == 400 and any(words in body for words in _OVERFLOW):
        return RequestError(message or "the prompt is too long", kind="context_overflow", param=param or "messages")
    kind = _KIND_OF.get(status, "invalid_request" if 400 <= status < 500 else "internal")
    if status < 400:  # such as a redirect, which the gateway does not follow
        return RequestError(f"the engine answered {status}", kind="upstream")
    shown = 502 if status in (401, 403) else status
    if status == 401:
        message = f"the engine refused the gateway's key ({status}); set it in AGENTCORE_RL_GATEWAY_UPSTREAM_KEY"
    elif status == 403:  # a key without the right, or a closed route: vLLM's token route without --enable-scale-out
        message = f"the engine refused the gateway (403): {message or 'it gives no reason'}"
    return RequestError(
        message or f"the engine answered {status}",
        kind=kind,
        param=param,
        code=code if isinstance(code, str) else None,
        status=shown,
    )


def event_error(error: bytes) -> RequestError:
    """Return the error for an event that an engine put into a stream after it had sent its status.

    SGLang checks the length of a streamed prompt only then. The event may have the status.
    """
    body = b'{"error":%b}' % error
    try:
        response = _error_reply.decode(body).error
    except NOT_JSON:
        response = None
    code = response.code if isinstance(response, _ErrorBody) else None
    if not isinstance(code, int) or not 400 <= code < 600:
        code = 400 if any(words in body for words in _OVERFLOW) else 500
    found = upstream_error(code, body)
    return RequestError(found.message, kind="upstream") if found.kind == "internal" else found
