"""Verify AWS Signature Version 4 on requests. Source: AWS, "Create a signed AWS API request"."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote

from .wire import Headers, WireError

MAX_SKEW_S = 300.0
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request, ?SignedHeaders=([^,]+), ?Signature=([0-9a-f]{64})"
)


def _refused(message: str) -> WireError:
    return WireError("AccessDeniedException", message)


def verify(
    credentials: Mapping[str, str],
    *,
    method: str,
    raw_path: bytes,
    query_string: bytes,
    headers: Headers,
    body: Sequence[bytes],
    now: float,
) -> None:
    """Check a request's signature against ``credentials`` (access key -> secret). Units: ``now`` in unix seconds.

    Raises: WireError 403 when it is missing, of an unknown key, older than five minutes, or wrong.
    """
    by_name: dict[str, list[str]] = {}
    for key, value in headers:
        by_name.setdefault(key.decode("latin-1"), []).append(" ".join(value.decode("latin-1").split()))
    match = _AUTHORIZATION.fullmatch(", ".join(by_name.get("authorization", [])))
    if match is None:
        raise _refused("Missing Authentication Token")
    access_key, day, region, service, signed, signature = match.groups()
    secret = credentials.get(access_key)
    if secret is None:
        raise _refused("The security token included in the request is invalid.")
    stamp = (by_name.get("x-amz-date") or [""])[0]
    _check_time(stamp, day, now)
    names = signed.split(";")
    if "host" not in names:
        raise _refused("Host must be a signed header.")
    payload_hash = hashlib.sha256(b"".join(body)).hexdigest()
    claimed = (by_name.get("x-amz-content-sha256") or [payload_hash])[0]
    if claimed not in (payload_hash, "UNSIGNED-PAYLOAD"):
        raise _refused("The provided x-amz-content-sha256 does not match the payload.")
    canonical = "\n".join(
        (
            method,
            # every service but S3 encodes the path once more on top of how it is sent
            quote(raw_path.split(b"?", 1)[0].decode("latin-1") or "/", safe="/~"),
            _canonical_query(query_string.decode("latin-1")),
            *(f"{name}:{','.join(by_name.get(name, []))}" for name in names),
            "",
            signed,
            claimed,
        )
    )
    scope = f"{day}/{region}/{service}/aws4_request"
    to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{secret}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    if not hmac.compare_digest(hmac.new(key, to_sign.encode(), "sha256").hexdigest(), signature):
        raise _refused(
            "The request signature we calculated does not match the signature you provided. "
            "Check your AWS Secret Access Key and signing method."
        )


def _check_time(stamp: str, day: str, now: float) -> None:
    try:
        signed_at = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise _refused("X-Amz-Date is missing or malformed.") from None
    if not stamp.startswith(day) or abs(now - signed_at) > MAX_SKEW_S:
        raise _refused(f"Signature expired: {stamp} is not within five minutes of now.")


def _canonical_query(query: str) -> str:
    pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in parse_qsl(query, keep_blank_values=True))
    return "&".join(f"{k}={v}" for k, v in pairs)
