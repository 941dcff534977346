"""AgentCore's data-plane wire shapes, without any I/O: names, headers, errors.

Source: botocore service model `bedrock-agentcore` 2024-02-28 (rest-json).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

Headers = list[tuple[bytes, bytes]]

SESSION_HEADER = b"x-amzn-bedrock-agentcore-runtime-session-id"
REQUEST_ID_HEADER = b"x-amzn-bedrock-agentcore-runtime-request-id"
USER_ID_HEADER = b"x-amzn-bedrock-agentcore-runtime-user-id"
CUSTOM_HEADER_PREFIX = b"x-amzn-bedrock-agentcore-runtime-custom-"
HANDED = "AGENTCORE_RL_SESSION_ENV"  # variable of `runtime serve`: session variables as JSON
MAX_PAYLOAD_BYTES = 100_000_000
SESSION_ID_MIN, SESSION_ID_MAX = 33, 256

RETURNED = frozenset({b"x-amzn-trace-id", b"traceparent", b"tracestate", b"baggage", b"content-type"})
# Passed to the agent unchanged. Other headers are passed only if the runtime's requestHeaderAllowlist has them.
FORWARDED = RETURNED | {b"accept", b"workloadaccesstoken", b"x-amz-bedrock-agentcore-identity-wat", USER_ID_HEADER}

STATUS = {
    "ValidationException": 400,
    "ServiceQuotaExceededException": 402,
    "AccessDeniedException": 403,
    "ResourceNotFoundException": 404,
    "ConflictException": 409,
    "RetryableConflictException": 409,
    "RuntimeClientError": 424,
    "ThrottlingException": 429,
    "InternalServerException": 500,
}


class WireError(Exception):
    """An error as AWS sends it: JSON body with ``message`` and the header ``x-amzn-ErrorType``."""

    def __init__(self, code: str, message: str, *, status: int | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status or STATUS[code]
        self.extra = extra

    def body(self) -> bytes:
        return json.dumps({"message": self.message, **self.extra}).encode()


def invalid(message: str, *, field: str | None = None, reason: str = "FieldValidationFailed") -> WireError:
    """Make a ValidationException. ``field`` fills its field list."""
    extra: dict[str, Any] = {"reason": reason}
    if field is not None:
        extra["fieldList"] = [{"name": field, "message": message}]
    return WireError("ValidationException", message, **extra)


def not_found(what: str) -> WireError:
    return WireError("ResourceNotFoundException", f"{what} not found")


_ARN = re.compile(
    r"arn:aws(?:-[a-z]+)*:bedrock-agentcore:(?P<region>[a-z0-9-]+):(?P<account>[0-9]{12})"
    r":runtime/(?P<id>[A-Za-z][A-Za-z0-9_]{0,99}-[A-Za-z0-9]{10})(?:/runtime-endpoint/(?P<endpoint>[A-Za-z][A-Za-z0-9_]{0,47}))?"
)


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint of a runtime that a request is for."""

    runtime_id: str
    account_id: str
    region: str
    endpoint: str = "DEFAULT"


def parse_target(name: str, query: Mapping[str, str]) -> Target:
    """Parse an ARN. The endpoint may be in the ``qualifier``. Raises: WireError 400."""
    asked, match = query.get("qualifier"), _ARN.fullmatch(name)
    if match is None:
        raise invalid(f"{name!r} is not the ARN of an agent runtime", field="agentRuntimeArn")
    own = match["endpoint"]
    if asked and own and asked != own:
        raise invalid(f"The ARN names endpoint {own}, qualifier {asked}", field="qualifier")
    return Target(match["id"], match["account"], match["region"], asked or own or "DEFAULT")


def session_id_of(headers: Headers) -> str | None:
    """Return the session id in a request, or None. Raises: WireError 400 when its length is not 33-256."""
    value = next((value for name, value in headers if name == SESSION_HEADER), None)
    if value is None:
        return None
    session_id = value.decode("latin-1")
    if not SESSION_ID_MIN <= len(session_id) <= SESSION_ID_MAX or not session_id.isprintable():
        raise invalid(
            f"runtimeSessionId must have {SESSION_ID_MIN} to {SESSION_ID_MAX} characters, got {len(session_id)}",
            field="runtimeSessionId",
        )
    return session_id


def forwarded_headers(headers: Headers, allowlist: frozenset[bytes]) -> Headers:
    """Return the request headers that an agent may see."""
    return [(k, v) for k, v in headers if k in FORWARDED or k.startswith(CUSTOM_HEADER_PREFIX) or k in allowlist]


def returned_headers(headers: Headers) -> Headers:
    """Return the agent's response headers that a caller may see."""
    return [(k, v) for k, v in headers if k in RETURNED]


def parse_environment(pairs: Sequence[str]) -> dict[str, str]:
    """Parse ``KEY=VALUE`` strings. ``KEY`` only takes this process's value, which no command line then shows.

    Raises: ConfigError, which never names a value.
    """
    env = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not key:
            raise ConfigError("a session variable has no name: write KEY=VALUE")
        if not sign and key not in os.environ:
            raise ConfigError(
                f"session variable {key!r} has no value: write {key}=VALUE, or set it in this environment. A run stores the "
                "names of its session variables, but not their values"
            )
        env[key] = value if sign else os.environ[key]
    return env


def handed_environment() -> dict[str, str]:
    """Return session variables that the starting process hands over in `HANDED`, where no command line shows them."""
    found: dict[str, str] = json.loads(os.environ.pop(HANDED, "{}"))
    return found
