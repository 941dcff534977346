"""Checks AWS request signatures: version 4 in the header, in the query and per chunk; version 2, which boto3 still presigns with.

Source: Amazon S3 API Reference, "Authenticating Requests (AWS Signature Version 4)"; S3 Developer Guide (2015), "Signing and
Authenticating REST Requests" for version 2.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, unquote

from .errors import S3Error

_ALGORITHM = "AWS4-HMAC-SHA256"
_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_SKEW_S = 900
_LONGEST_EXPIRY_S = 604800
_HEADER = re.compile(r"AWS4-HMAC-SHA256\s+(.*)", re.S)
_SPACES = re.compile(r"\s+")
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
    authorization = request.headers.get("authorization", "")
    if authorization.startswith("AWS "):
        return authorization[4:].partition(":")[0]
    found = re.search(r"Credential=([^,\s]+)", authorization)
    credential = found[1] if found is not None else request.parameter("X-Amz-Credential")
    if credential is None:
        return request.parameter("AWSAccessKeyId") or ""
    return credential.rsplit("/", 4)[0]


class ChunkSigner:
    """The chain of signatures over the chunks of one body. Source: "Transferring payload in multiple chunks"."""

    def __init__(self, key: bytes, date: str, scope: str, seed: str) -> None:
        self._key, self._date, self._scope, self._previous = key, date, scope, seed

    def check_chunk(self, payload: bytes, signature: str) -> None:
        hashed = hashlib.sha256(payload).hexdigest()
        self._check(f"{_ALGORITHM}-PAYLOAD", f"{_EMPTY_SHA256}\n{hashed}", signature)

    def check_trailers(self, text: bytes, signature: str) -> None:
        self._check(f"{_ALGORITHM}-TRAILER", hashlib.sha256(text).hexdigest(), signature)

    def _check(self, kind: str, tail: str, signature: str) -> None:
        text = f"{kind}\n{self._date}\n{self._scope}\n{self._previous}\n{tail}"
        expected = hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()
        if not hmac.compare_digest(expected, signature):
            raise S3Error("SignatureDoesNotMatch")
        self._previous = expected


@functools.lru_cache(maxsize=64)
def _signing_key(secret: str, date: str, region: str, service: str) -> bytes:
    key = b"AWS4" + secret.encode()
    for part in (date, region, service, "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key


def verify(request: Signed, credentials: Mapping[str, str], now_s: float) -> ChunkSigner | None:
    """Check a request against ``credentials`` (access key -> secret key).

    Without credentials nothing is verified, but a presigned URL still expires.
    Returns: the checker for signed chunks, where the body is signed by chunks.
    Raises: S3Error with the code that S3 answers.
    """
    authorization = request.headers.get("authorization", "")
    if request.parameter("X-Amz-Algorithm") is not None:
        _query_v4(request, credentials, now_s)
        return None
    if request.parameter("AWSAccessKeyId") is not None and request.parameter("Signature") is not None:
        _query_v2(request, credentials, now_s)
        return None
    if not credentials:
        return None
    if authorization.startswith("AWS "):
        access, _, signature = authorization[4:].partition(":")
        date = "" if "x-amz-date" in request.headers else request.headers.get("date", "")
        _check_v2(request, _secret(credentials, access), date, signature)
        return None
    match = _HEADER.match(authorization)
    if match is None:
        raise S3Error("AccessDenied")
    fields = dict(part.strip().partition("=")[::2] for part in match[1].split(","))
    if not {"Credential", "SignedHeaders", "Signature"} <= fields.keys():
        raise S3Error("AuthorizationHeaderMalformed")
    date = request.headers.get("x-amz-date", "")
    if abs(_time_of(date, "AuthorizationHeaderMalformed") - now_s) > _SKEW_S:
        raise S3Error("RequestTimeTooSkewed")
    payload = request.headers.get("x-amz-content-sha256")
    if payload is None:
        raise S3Error("InvalidRequest", "Missing required header for this request: x-amz-content-sha256")
    return _check_v4(request, credentials, fields, date, payload, request.query, "AuthorizationHeaderMalformed")


def _query_v4(request: Signed, credentials: Mapping[str, str], now_s: float) -> None:
    wrong = "AuthorizationQueryParametersError"
    fields = {name: request.parameter(f"X-Amz-{name}") or "" for name in ("Credential", "SignedHeaders", "Signature")}
    date = request.parameter("X-Amz-Date") or ""
    expires = request.parameter("X-Amz-Expires") or ""
    if request.parameter("X-Amz-Algorithm") != _ALGORITHM or not all(fields.values()) or not expires.isdecimal():
        raise S3Error(wrong)
    if int(expires) > _LONGEST_EXPIRY_S:
        raise S3Error(wrong, "X-Amz-Expires must be less than a week (in seconds) that is 604800")
    signed_at = _time_of(date, wrong)
    if now_s > signed_at + int(expires):
        raise S3Error("AccessDenied", "Request has expired")
    if signed_at - now_s > _SKEW_S:
        raise S3Error("AccessDenied", "Request is not valid yet")
    if credentials:
        query = [(k, v) for k, v in request.query if k != "X-Amz-Signature"]
        payload = request.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
        if "x-amz-content-sha256" not in fields["SignedHeaders"].split(";"):
            payload = request.parameter("X-Amz-Content-Sha256") or "UNSIGNED-PAYLOAD"
        _check_v4(request, credentials, fields, date, payload, query, wrong)


def _check_v4(
    request: Signed,
    credentials: Mapping[str, str],
    fields: Mapping[str, str],
    date: str,
    payload: str,
    query: list[tuple[str, str]],
    wrong: str,
) -> ChunkSigner | None:
    access, *scope = fields["Credential"].rsplit("/", 4)
    if len(scope) != 4 or scope[0] != date[:8] or scope[3] != "aws4_request":
        raise S3Error(wrong, "The credential's scope is not DATE/REGION/s3/aws4_request.")
    names = fields["SignedHeaders"].split(";")
    in_header = wrong == "AuthorizationHeaderMalformed"
    unsigned = [n for n in request.headers if n.startswith("x-amz-") and n not in names] if in_header else []
    if "host" not in names or unsigned:
        raise S3Error("AccessDenied", "There were headers present in the request which were not signed")
    headers = "".join(f"{n}:{_SPACES.sub(' ', request.headers.get(n, '')).strip()}\n" for n in names)
    pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in query)
    parameters = "&".join(f"{k}={v}" for k, v in pairs)
    key = _signing_key(_secret(credentials, access), scope[0], scope[1], scope[2])
    scope_text = "/".join(scope)
    # The path is signed as sent. Clients that send it less encoded than they sign it are met on the second form.
    for path in dict.fromkeys((request.raw_path, quote(unquote(request.raw_path), safe="/-_.~"))):
        text = f"{request.method}\n{path}\n{parameters}\n{headers}\n{fields['SignedHeaders']}\n{payload}"
        hashed = hashlib.sha256(text.encode()).hexdigest()
        to_sign = f"{_ALGORITHM}\n{date}\n{scope_text}\n{hashed}"
        expected = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
        if hmac.compare_digest(expected, fields["Signature"]):
            signed_chunks = payload.startswith(f"STREAMING-{_ALGORITHM}")
            return ChunkSigner(key, date, scope_text, expected) if signed_chunks else None
    raise S3Error("SignatureDoesNotMatch", AWSAccessKeyId=access, StringToSign=to_sign, CanonicalRequest=text)


def _query_v2(request: Signed, credentials: Mapping[str, str], now_s: float) -> None:
    expires = request.parameter("Expires") or ""
    if not expires.isdecimal():
        raise S3Error("AccessDenied", "Invalid date (should be seconds since epoch): " + expires)
    if now_s > int(expires):
        raise S3Error("AccessDenied", "Request has expired")
    if credentials:
        secret = _secret(credentials, request.parameter("AWSAccessKeyId") or "")
        _check_v2(request, secret, expires, request.parameter("Signature") or "")


def _check_v2(request: Signed, secret: str, date: str, signature: str) -> None:
    amz = sorted((n, _SPACES.sub(" ", v).strip()) for n, v in request.headers.items() if n.startswith("x-amz-"))
    parts = sorted((k, v) for k, v in request.query if k in _SUBRESOURCES)
    suffix = "?" + "&".join(f"{k}={v}" if v else k for k, v in parts) if parts else ""
    lines = [request.method, request.headers.get("content-md5", ""), request.headers.get("content-type", ""), date]
    # Version 2 signs /bucket/key, which is not all of the path where the endpoint's address has a path of its own.
    for path in dict.fromkeys((request.raw_path, request.raw_path.removeprefix(request.mount))):
        text = "\n".join([*lines, *(f"{n}:{v}" for n, v in amz), path + suffix])
        expected = base64.b64encode(hmac.new(secret.encode(), text.encode(), hashlib.sha1).digest()).decode()
        if hmac.compare_digest(expected, signature):
            return
    raise S3Error("SignatureDoesNotMatch", StringToSign=text)


def _secret(credentials: Mapping[str, str], access: str) -> str:
    try:
        return credentials[access]
    except KeyError:
        raise S3Error("InvalidAccessKeyId", AWSAccessKeyId=access) from None


def _time_of(date: str, wrong: str) -> float:
    try:
        return datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise S3Error(wrong, "The request's date must be in the ISO8601 Long Format \"yyyyMMdd'T'HHmmss'Z'\"") from None
