"""The scripted data plane's answers: what AWS says when it refuses, HTTP as bytes, and one POST."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

REFUSALS: dict[str | None, tuple[int, str, str]] = {
    "429": (429, "ThrottlingException", "Rate exceeded"),
    "402": (402, "ServiceQuotaExceededException", "maxVms limit exceeded"),
    "409": (409, "RetryableConflictException", "Session operation in progress, please retry"),
    "500": (500, "InternalServerException", "internal error"),
    "503": (503, "ServiceUnavailableException", "service unavailable"),
    "424": (424, "RuntimeClientError", "Received error (500) from runtime. Please check your CloudWatch logs."),
    "424-init": (
        424,
        "RuntimeClientError",
        "Runtime initialization time exceeded. Please make sure it completes in 30s.",
    ),
    "403": (403, "AccessDeniedException", "User is not authorized"),
}


def error_answer(status: int, name: str, message: str, session_id: str) -> tuple[int, str, bytes, str]:
    """An error of the service: status, error name, body, session id."""
    return status, name, json.dumps({"message": message}).encode(), session_id


def response_bytes(status: int, error: str, content: bytes, session_id: str) -> bytes:
    """A whole HTTP/1.1 answer."""
    head = [f"HTTP/1.1 {status} {error or 'OK'}", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    if error:
        head.append(f"x-amzn-ErrorType: {error}")
    if session_id:
        head.append(f"X-Amzn-Bedrock-AgentCore-Runtime-Session-Id: {session_id}")
    return ("\r\n".join(head) + "\r\n\r\n").encode("latin-1") + content


def post(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """One request; status 599 when nobody answers."""
    import http.client

    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        connection.request("POST", parts.path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except OSError as e:
        return 599, str(e).encode()
    finally:
        connection.close()
