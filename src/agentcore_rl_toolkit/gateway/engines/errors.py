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
    if status < 400:  # such as a redirect, which the gateway does not follow
        return RequestError(f"the engine answered {status}", kind="upstream")
    try:
        reply = msgspec.json.decode(body)
    except NOT_JSON:
        reply = None
    found = reply if isinstance(reply, dict) else {}
    found = found["error"] if isinstance(found.get("error"), dict) else found
    texts = {name: text for name, text in found.items() if isinstance(text, str)}
    message = texts.get("message") or texts.get("error") or texts.get("detail") or body[:500].decode("utf-8", "replace")
    if status == 400 and any(words in body for words in _OVERFLOW):
        return RequestError(message, kind="context_overflow", param=texts.get("param", "messages"))
    if status == 401:
        message = "the engine refused the gateway's key (401); set it in AGENTCORE_RL_GATEWAY_UPSTREAM_KEY"
    elif status == 403:  # a key without the right, or a closed route: vLLM's token route without --enable-scale-out
        message = f"the engine refused the gateway (403): {message or 'it gives no reason'}"
    return RequestError(
        message or f"the engine answered {status}",
        kind=_KIND_OF.get(status, "invalid_request" if status < 500 else "internal"),
        param=texts.get("param"),
        code=texts.get("code"),
        status=502 if status in (401, 403) else status,
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
