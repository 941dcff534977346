"""The table of AWS clients' errors: was a request refused or carried out, and may a retry help.

Every exception of botocore, urllib3, `ssl` or `socket` has one of four fates:

    refused     the service answered "not now" (throttling, a quota, a conflict): nothing runs, and the caller slows down
    transient   nothing runs, and the cause passes: no connection, expired credentials, a clock that is off
    uncertain   the request may have been executed: it was sent, and no usable reply came back
    final       another request would fail in the same way

Classes and codes decide, never the words of a message. Classes are recognized by name, because agents must not load botocore.

Sources: botocore.exceptions, botocore/data/_retry.json and botocore.retries.standard (codes of throttling), the error pages of
AgentCore, S3, DynamoDB and Systems Manager, urllib3.exceptions.
"""

from __future__ import annotations

import datetime
import email.utils
import ssl
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

_LONGEST_CHAIN = 100
MOST_SKEW_S = 240.0  # AWS accepts signatures of five minutes before and after its own time


class Fate(StrEnum):
    """The fate of a failed request."""

    REFUSED = "refused"
    TRANSIENT = "transient"
    UNCERTAIN = "uncertain"
    FINAL = "final"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The entry of an exception in the table.

    Attributes:
        code: the service's name of the error, or the class of the client library.
        status: the HTTP status of the reply, if one came.
        credentials: fresh credentials (or a clock that is right) may help.
    """

    fate: Fate
    code: str
    status: int | None = None
    credentials: bool = False


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


CREDENTIAL_CODES = _names(
    "ExpiredToken ExpiredTokenException RequestExpired TokenRefreshRequired RequestTimeTooSkewed RequestInTheFuture"
)
# Codes of a wrong signature. If the clock is off, they are about the clock.
SIGNATURE_CODES = frozenset({"InvalidSignatureException", "SignatureDoesNotMatch", "AuthFailure"})


def _by_name(names: dict[Fate, str]) -> dict[str, Fate]:
    return {name: fate for fate, listed in names.items() for name in listed.split()}


CODES = _by_name(
    {
        Fate.REFUSED: """Throttling ThrottlingException ThrottledException RequestThrottled RequestThrottledException
            TooManyRequests TooManyRequestsException RequestLimitExceeded BandwidthLimitExceeded
            ProvisionedThroughputExceededException TransactionInProgressException EC2ThrottledException
            PriorRequestNotComplete SlowDown LimitExceededException ServiceQuotaExceededException
            RetryableConflictException ModelNotReadyException""",
        # the last two: the service did not get the whole request
        Fate.TRANSIENT: " ".join(CREDENTIAL_CODES) + " RequestTimeout RequestTimeoutException",
        # Model...: errors of Amazon Bedrock
        Fate.UNCERTAIN: """InternalServerException InternalServerError InternalFailure InternalError ServiceException
            ServiceUnavailable ServiceUnavailableException ModelErrorException ModelStreamErrorException
            ModelTimeoutException""",
    }
)
STATUSES = {
    402: Fate.REFUSED,
    408: Fate.TRANSIENT,
    409: Fate.REFUSED,
    425: Fate.REFUSED,
    429: Fate.REFUSED,
}
# Classes, each after its top-level module. The nearest class of an exception that is in the table decides.
CLASSES = _by_name(
    {
        # SSOError: `aws sso login` renews an expired session
        Fate.TRANSIENT: """botocore.ConnectTimeoutError botocore.EndpointConnectionError botocore.ProxyConnectionError
            botocore.CredentialRetrievalError botocore.MetadataRetrievalError botocore.SSOError
            botocore.TokenRetrievalError urllib3.NewConnectionError urllib3.ConnectTimeoutError urllib3.ProxyError
            socket.gaierror builtins.ConnectionRefusedError""",
        # HTTPClientError: timeouts of reading, connections that were closed
        Fate.UNCERTAIN: """botocore.HTTPClientError botocore.ResponseStreamingError botocore.IncompleteReadError
            urllib3.HTTPError builtins.ConnectionError builtins.TimeoutError""",
        Fate.FINAL: "botocore.NoCredentialsError botocore.PartialCredentialsError urllib3.LocationValueError",
    }
)
_CREDENTIAL_CLASSES = _names(
    "botocore.CredentialRetrievalError botocore.MetadataRetrievalError botocore.SSOError botocore.TokenRetrievalError"
)


def look_up(error: BaseException) -> Fault | None:
    """Find the entry of an exception. Return None if no AWS client raises it."""
    response = getattr(error, "response", None)
    names = [f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(error).__mro__]
    code = type(error).__name__
    if "botocore.ClientError" in names and isinstance(response, Mapping):
        about, details = response.get("ResponseMetadata", {}), response.get("Error", {})
        return fault_of(str(details.get("Code", "")), about.get("HTTPStatusCode"), about.get("HTTPHeaders", {}))
    if isinstance(error, ssl.SSLError) or "botocore.SSLError" in names or "urllib3.SSLError" in names:
        return Fault(fate=Fate.TRANSIENT if _in_handshake(error) else Fate.UNCERTAIN, code=code)
    for name in names:
        if name in CLASSES:
            return Fault(fate=CLASSES[name], code=code, credentials=name in _CREDENTIAL_CLASSES)
    known = any(name.startswith(("botocore.", "urllib3.", "boto3.")) for name in names)
    return Fault(fate=Fate.FINAL, code=code) if known else None


def fault_of(code: str, status: int | None, headers: Mapping[str, str] = MappingProxyType({})) -> Fault:
    """Find the entry of a reply with this code and status."""
    fate = CODES.get(code[:1].upper() + code[1:])  # names in event streams begin with a small letter
    if fate is None and code in SIGNATURE_CODES and _skew_s(headers) > MOST_SKEW_S:
        fate = Fate.TRANSIENT
    if fate is None and isinstance(status, int):
        fate = Fate.UNCERTAIN if status >= 500 else STATUSES.get(status)
    renew = fate is Fate.TRANSIENT and code in CREDENTIAL_CODES | SIGNATURE_CODES
    return Fault(fate=fate or Fate.FINAL, code=code or str(status), status=status, credentials=renew)


def _skew_s(headers: Mapping[str, str]) -> float:
    """Return seconds between this machine's clock and that of the service."""
    try:
        theirs = email.utils.parsedate_to_datetime(headers["date"])
        return abs((datetime.datetime.now(datetime.UTC) - theirs).total_seconds())
    except (KeyError, TypeError, ValueError):  # TypeError: a date without a time zone
        return 0.0


def _in_handshake(error: BaseException) -> bool:
    """Return True if TLS failed before a request was sent. Libraries raise the same classes afterwards."""
    return any(
        isinstance(one, ssl.SSLCertVerificationError)
        or any(frame.f_code.co_name == "do_handshake" for frame, _ in traceback.walk_tb(one.__traceback__))
        for one in chained(error)
    )


def chained(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from, or that it holds, each once, nearest first."""
    seen: set[int] = set()
    waiting: list[Any] = [error]
    while waiting and len(seen) < _LONGEST_CHAIN:
        one = waiting.pop(0)
        if isinstance(one, BaseException) and id(one) not in seen:
            seen.add(id(one))
            yield one
            # Strands keeps its client's exception in an attribute, botocore keeps urllib3's in a keyword, and urllib3 keeps
            # that of `ssl` in `reason` or its arguments.
            kept = getattr(one, "kwargs", None)
            inner = kept.get("error") if isinstance(kept, Mapping) else None
            waiting += [getattr(one, "original_exception", None), one.__cause__, getattr(one, "reason", None), inner]
            waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else one.args
            if not one.__suppress_context__:
                waiting.append(one.__context__)
