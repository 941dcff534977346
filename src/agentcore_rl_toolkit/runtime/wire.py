"""AgentCore's data-plane wire shapes, without any I/O: names, headers, errors.

Source: botocore service model `bedrock-agentcore` 2024-02-28 (rest-json).
"""

from __future__ import annotations

import functools
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

RETURNED = frozenset({b"x-amzn-trace-id", b"traceparent", b"tracestate", b"baggage"})
RETURNED |= {b"content-type", b"mcp-session-id", b"mcp-protocol-version"}
# Handed to the agent as they came; anything else only when the runtime's requestHeaderAllowlist names it.
FORWARDED = RETURNED | {b"accept", b"mcp-method", b"mcp-name", b"workloadaccesstoken", b"oauth2callbackurl"}
FORWARDED |= {b"x-amz-bedrock-agentcore-identity-wat", USER_ID_HEADER}

STATUS = {
    "ValidationException": 400,
    "UnauthorizedException": 401,
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
    """A ValidationException; ``field`` fills its field list."""
    extra: dict[str, Any] = {"reason": reason}
    if field is not None:
        extra["fieldList"] = [{"name": field, "message": message}]
    return WireError("ValidationException", message, **extra)


def not_found(what: str) -> WireError:
    return WireError("ResourceNotFoundException", f"{what} not found")


@dataclass(frozen=True)
class Target:
    """The runtime and endpoint that a data-plane request names: the text of its path, and its query."""

    runtime: str
    query: Mapping[str, str]

    @property
    def named(self) -> Named:
        """Raises: WireError 400."""
        return named(self.runtime, self.query.get("accountId"))

    @property
    def qualifier(self) -> str:
        """The endpoint: of the parameter, else of the ARN. Raises: WireError 400 when they name two."""
        asked, own = self.query.get("qualifier"), self.named.endpoint
        if asked and own and asked != own:
            raise invalid(f"The ARN names endpoint {own}, qualifier {asked}", field="qualifier")
        return asked or own or "DEFAULT"


_ARN = re.compile(
    r"arn:aws(?:-[a-z]+)*:bedrock-agentcore:(?P<region>[a-z0-9-]+):(?P<account>[0-9]{12})"
    r":runtime/(?P<id>[A-Za-z][A-Za-z0-9_]{0,99}-[A-Za-z0-9]{10})(?:/runtime-endpoint/(?P<endpoint>[A-Za-z][A-Za-z0-9_]{0,47}))?"
)
_RUNTIME_ID = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}-[A-Za-z0-9]{10}")


@dataclass(frozen=True, slots=True)
class Named:
    """A runtime, or an endpoint of one, as a request names it. ``region`` None: of a bare id, which says none."""

    runtime_id: str
    account_id: str
    region: str | None = None
    endpoint: str | None = None


@functools.lru_cache(4096)
def named(name: str, account_id: str | None) -> Named:
    """Of an ARN, or of a bare id, which needs the ``accountId`` parameter. Raises: WireError 400."""
    match = _ARN.fullmatch(name)
    if match:
        return Named(match["id"], match["account"], match["region"], match["endpoint"])
    if not _RUNTIME_ID.fullmatch(name):
        raise invalid(f"Invalid agent runtime identifier: {name!r}", field="agentRuntimeArn")
    if account_id is None or not re.fullmatch(r"[0-9]{12}", account_id):
        raise invalid("accountId (12 digits) is required when agentRuntimeArn is an agent id", field="accountId")
    return Named(name, account_id)


def session_id_of(headers: Mapping[bytes, bytes]) -> str | None:
    """The session id a request names, or None. Raises: WireError 400 when its length is not 33-256."""
    value = headers.get(SESSION_HEADER)
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
    """The request headers an agent gets to see."""
    return [(k, v) for k, v in headers if k in FORWARDED or k.startswith(CUSTOM_HEADER_PREFIX) or k in allowlist]


def returned_headers(headers: Headers) -> Headers:
    """The agent's response headers a caller gets to see."""
    return [(k, v) for k, v in headers if k in RETURNED]


def parse_environment(pairs: Sequence[str]) -> dict[str, str]:
    """``KEY=VALUE`` strings to a dict; ``KEY`` alone has this process's own value, which no command line then shows.

    Raises: ConfigError, which never names a value.
    """
    env = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not key:
            raise ConfigError("a session variable has no name: write KEY=VALUE")
        if not sign and key not in os.environ:
            raise ConfigError(
                f"session variable {key!r} has no value: write {key}=VALUE, or set it in this environment. A run keeps the "
                "names of its session variables, never their values"
            )
        env[key] = value if sign else os.environ[key]
    return env


def handed_environment() -> dict[str, str]:
    """Session variables that the starting process hands over in `HANDED`, where no command line shows them."""
    found: dict[str, str] = json.loads(os.environ.pop(HANDED, "{}"))
    return found
