"""Checks the signatures of requests to S3: version 4 in the header and in the query, version 2 as boto3 still presigns with.

Source: Amazon S3 API Reference, "Authenticating Requests (AWS Signature Version 4)"; S3 Developer Guide (2015), "Signing and
Authenticating REST Requests" for version 2.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

from ..._servers import sigv4
from .errors import S3Error

_SKEW_S = 900
# Query parameters that are part of the resource in version 2.
_SUBRESOURCES = frozenset(
    [
        "acl",
        "cors",
        "delete",
        "lifecycle",
        "location",
        "logging",
        "notification",
        "partNumber",
        "policy",
        "requestPayment",
        "tagging",
        "torrent",
        "uploadId",
        "uploads",
        "versionId",
        "versioning",
        "versions",
        "website",
        "response-cache-control",
        "response-content-disposition",
        "response-content-encoding",
        "response-content-language",
        "response-content-type",
        "response-expires",
    ]
)


@dataclass(frozen=True, kw_only=True)
class Signed:
    """What is checked of a request: everything a signature covers."""

    method: str
    raw_path: str
    query: list[tuple[str, str]]
    headers: Mapping[str, str]
    mount: str = ""

    def parameter(self, name: str) -> str | None:
        return next((v for k, v in self.query if k == name), None)


def claimed_key(request: Signed) -> str:
    """The access key that a request says it is signed with; empty for an unsigned one. Nothing is checked."""
    found = re.search(r"Credential=([^,\s]+)", request.headers.get("authorization", ""))
    credential = found[1] if found is not None else request.parameter("X-Amz-Credential")
    if credential is None:
        return request.parameter("AWSAccessKeyId") or ""
    return credential.rsplit("/", 4)[0]


def verify(request: Signed, credentials: Mapping[str, str], now_s: float) -> None:
    """Check a request against ``credentials`` (access key -> secret key).

    Without credentials nothing is verified, but a presigned URL still expires.
    Raises: S3Error with the code that S3 answers.
    """
    if request.parameter("X-Amz-Algorithm") is not None:
        _query_v4(request, credentials, now_s)
    elif request.parameter("AWSAccessKeyId") is not None and request.parameter("Signature") is not None:
        _query_v2(request, credentials, now_s)
    elif credentials:
        _header_v4(request, credentials, now_s)


def _header_v4(request: Signed, credentials: Mapping[str, str], now_s: float) -> None:
    claim = sigv4.claim_of(request.headers, request.query)
    if claim is None or claim.signed_at_s is None:
        signed = request.headers.get("authorization", "").startswith(sigv4.ALGORITHM)
        raise S3Error("AuthorizationHeaderMalformed" if signed else "AccessDenied")
    if abs(claim.signed_at_s - now_s) > _SKEW_S:
        raise S3Error("RequestTimeTooSkewed")
    payload = request.headers.get("x-amz-content-sha256")
    if payload is None:
        raise S3Error("InvalidRequest", "Missing required header for this request: x-amz-content-sha256")
    if any(n.startswith("x-amz-") and n not in claim.signed.split(";") for n in request.headers):
        raise S3Error("AccessDenied", "There were headers present in the request which were not signed")
    _check_v4(request, claim, credentials, payload)


def _query_v4(request: Signed, credentials: Mapping[str, str], now_s: float) -> None:
    wrong = "AuthorizationQueryParametersError"
    claim = sigv4.presigned_claim_of(request.query)
    if claim is None or claim.lifetime_s is None or claim.signed_at_s is None:
        raise S3Error(wrong)
    if claim.lifetime_s > sigv4.MAX_PRESIGNED_S:
        raise S3Error(wrong, "X-Amz-Expires must be less than a week (in seconds) that is 604800")
    if now_s > claim.signed_at_s + claim.lifetime_s:
        raise S3Error("AccessDenied", "Request has expired")
    if claim.signed_at_s - now_s > _SKEW_S:
        raise S3Error("AccessDenied", "Request is not valid yet")
    if credentials:
        payload = request.parameter("X-Amz-Content-Sha256") or sigv4.UNSIGNED
        if "x-amz-content-sha256" in claim.signed.split(";"):
            payload = request.headers.get("x-amz-content-sha256", sigv4.UNSIGNED)
        _check_v4(request, claim, credentials, payload)


def _check_v4(request: Signed, claim: sigv4.Claim, credentials: Mapping[str, str], payload: str) -> None:
    if "host" not in claim.signed.split(";"):
        raise S3Error("AccessDenied", "There were headers present in the request which were not signed")
    secret = _secret(credentials, claim.access_key)
    # The path is signed as sent. Clients that send it less encoded than they sign it are met on the second form.
    for path in dict.fromkeys((request.raw_path, quote(unquote(request.raw_path), safe="/-_.~"))):
        expected = claim.expected(secret, request.method, path, request.headers, payload)
        if hmac.compare_digest(expected.signature, claim.signature):
            return
    detail = {"StringToSign": expected.to_sign, "CanonicalRequest": expected.canonical}
    raise S3Error("SignatureDoesNotMatch", AWSAccessKeyId=claim.access_key, **detail)


def _query_v2(request: Signed, credentials: Mapping[str, str], now_s: float) -> None:
    expires = request.parameter("Expires") or ""
    if not expires.isdecimal():
        raise S3Error("AccessDenied", "Invalid date (should be seconds since epoch): " + expires)
    if now_s > int(expires):
        raise S3Error("AccessDenied", "Request has expired")
    if not credentials:
        return
    secret = _secret(credentials, request.parameter("AWSAccessKeyId") or "")
    amz = sorted((n, " ".join(v.split())) for n, v in request.headers.items() if n.startswith("x-amz-"))
    parts = sorted((k, v) for k, v in request.query if k in _SUBRESOURCES)
    suffix = "?" + "&".join(f"{k}={v}" if v else k for k, v in parts) if parts else ""
    lines = [request.method, request.headers.get("content-md5", ""), request.headers.get("content-type", ""), expires]
    # Version 2 signs /bucket/key, which is not all of the path where the endpoint's address has a path of its own.
    for path in dict.fromkeys((request.raw_path, request.raw_path.removeprefix(request.mount))):
        text = "\n".join([*lines, *(f"{n}:{v}" for n, v in amz), path + suffix])
        signature = base64.b64encode(hmac.digest(secret.encode(), text.encode(), "sha1")).decode()
        if hmac.compare_digest(signature, request.parameter("Signature") or ""):
            return
    raise S3Error("SignatureDoesNotMatch", StringToSign=text)


def _secret(credentials: Mapping[str, str], access: str) -> str:
    try:
        return credentials[access]
    except KeyError:
        raise S3Error("InvalidAccessKeyId", AWSAccessKeyId=access) from None
