"""Engines' errors, of all shapes, as errors for the agent."""

from __future__ import annotations

import msgspec

from ...messages.errors import NOT_JSON, RequestError

_OVERFLOW = (
    b"maximum context length",
    b"context_length_exceeded",
    b"max_model_len",
    b"longer than the maximum model length",
    b"longer than the model's context length",
    b"prompt is too long",
)
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
    try:
        reply = msgspec.json.decode(body)
    except NOT_JSON:
        reply = {"message": body[:500].decode("utf-8", "replace")}
    found = reply if isinstance(reply, dict) else {}
    outer = found.get("detail")
    if isinstance(found.get("error"), dict):
        found = found["error"]
    texts = [found.get(name) for name in ("message", "error", "param", "code")]
    message, error, param, code = (text if isinstance(text, str) else None for text in texts)
    message = error or message
    if message is None:
        detail = found.get("detail", outer)
        message = body[:500].decode("utf-8", "replace") if detail is None else msgspec.json.encode(detail).decode()
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
        code=code,
        status=shown,
    )


def event_error(error: bytes) -> RequestError:
    """Return the error for an event that an engine put into a stream after it had sent its status.

    SGLang checks the length of a streamed prompt only then. The event may have the status.
    """
    body = b'{"error":%b}' % error
    try:
        code = msgspec.json.decode(error)["code"]
    except (*NOT_JSON, KeyError, TypeError):
        code = None
    if not isinstance(code, int) or not 400 <= code < 600:
        code = 400 if any(words in body for words in _OVERFLOW) else 500
    found = upstream_error(code, body)
    return RequestError(found.message, kind="upstream") if found.kind == "internal" else found
