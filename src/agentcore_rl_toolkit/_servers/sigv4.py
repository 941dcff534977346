"""AWS Signature Version 4 of requests to a local runtime: signs our own, and checks all as AgentCore does.

Source: AWS, "Create a signed AWS API request".
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

ALGORITHM = "AWS4-HMAC-SHA256"
UNSIGNED = "UNSIGNED-PAYLOAD"
MAX_SKEW_S = 300.0
_REGION, _SERVICE = "us-west-2", "bedrock-agentcore"  # of our own requests; a runtime takes any
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256\s+Credential=([^,\s]+)/(\d{8})/([^/,\s]+)/([^/,\s]+)/aws4_request,"
    r" ?SignedHeaders=([^,\s]+), ?Signature=([0-9a-f]{64})"
)


@dataclass(frozen=True, kw_only=True)
class _Signed:
    """The signed parts of a request. ``scope``: day, region, service. ``headers``: the signed names. ``payload``: its hash."""

    scope: tuple[str, ...]
    stamp: str
    method: str
    path: str
    query: str
    headers: str
    payload: str

    def signature(self, secret: str, values: Mapping[str, str]) -> str:
        """``values``: those of the headers."""
        lines = [f"{name}:{' '.join(values.get(name, '').split())}" for name in self.headers.split(";")]
        pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in parse_qsl(self.query, True))
        query = "&".join(f"{key}={value}" for key, value in pairs)
        path = quote(self.path or "/", safe="/~")  # every service but S3 encodes it once more on top of how it is sent
        canonical = "\n".join((self.method, path, query, *lines, "", self.headers, self.payload))
        scope = "/".join((*self.scope, "aws4_request"))
        text = f"{ALGORITHM}\n{self.stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        return hmac.digest(_signing_key(secret, *self.scope), text.encode(), "sha256").hex()


@functools.lru_cache(maxsize=64)
def _signing_key(secret: str, *scope: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (*scope, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def refusal(
    credentials: Mapping[str, str],
    *,
    method: str,
    path: str,
    query: str,
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes,
    now: float,
) -> str | None:
    """Why a request is not one of ``credentials`` (access key -> secret), in AWS's words; None when it is.

    ``path`` and ``query`` are as they were sent. Units: ``now`` in unix seconds.
    """
    values: dict[str, str] = {}
    for key, value in headers:
        name, text = key.decode("latin-1"), value.decode("latin-1")
        values[name] = f"{values[name]},{text}" if name in values else text
    match = _AUTHORIZATION.fullmatch(values.get("authorization", ""))
    stamp = values.get("x-amz-date", "")
    if match is None or not stamp.startswith(match[2]):
        return "Missing Authentication Token"
    access_key, *scope, names, signature = match.groups()
    secret = credentials.get(access_key)
    if secret is None:
        return "The security token included in the request is invalid."
    try:
        signed_at_s = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return "X-Amz-Date is missing or malformed."
    if abs(now - signed_at_s) > MAX_SKEW_S:
        return f"Signature expired: {stamp} is not within {MAX_SKEW_S:g} seconds of now."
    if "host" not in names.split(";"):
        return "Host must be a signed header."
    digest = hashlib.sha256(body).hexdigest()
    payload = values.get("x-amz-content-sha256", digest)
    signed = _Signed(
        scope=tuple(scope), stamp=stamp, method=method, path=path, query=query, headers=names, payload=payload
    )
    if not hmac.compare_digest(signed.signature(secret, values), signature):
        return (
            "The request signature we calculated does not match the signature you provided. "
            "Check your AWS Secret Access Key and signing method."
        )
    if payload not in (digest, UNSIGNED):
        return "The provided x-amz-content-sha256 does not match the payload."
    return None


def bearer_refusal(credentials: Mapping[str, str], token: str, *, now: float) -> str | None:
    """Why a bearer token of SageMaker is not one of ``credentials``; None when it is. It is a presigned request, in base64.

    Source: the SDK `sagemaker-core`, its token generator. Units: ``now`` in unix seconds.
    """
    try:
        url = base64.b64decode(token.removeprefix("sagemaker-api-key-"), validate=True).decode()
        host, _, query = url.partition("/?")
        given = dict(parse_qsl(query))
        access_key, *scope, _ = given["X-Amz-Credential"].split("/")
        signed_at_s = datetime.strptime(given["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
        expired = not -MAX_SKEW_S < now - signed_at_s < float(given["X-Amz-Expires"])
        signed = _Signed(
            scope=tuple(scope),
            stamp=given["X-Amz-Date"],
            method="POST",
            path="/",
            query=urlencode([(k, v) for k, v in given.items() if k not in ("X-Amz-Signature", "Version")]),
            headers="host",
            payload=hashlib.sha256(b"").hexdigest(),
        )
        signature = signed.signature(credentials[access_key], {"host": host})
    except (binascii.Error, UnicodeDecodeError, KeyError, ValueError):
        return "The bearer token included in the request is invalid."
    if expired or not hmac.compare_digest(signature, given.get("X-Amz-Signature", "")):
        return "The bearer token included in the request is expired or has another signature."
    return None


def sign(credential: tuple[str, str], *, method: str, url: str, body: bytes, now: float) -> dict[str, str]:
    """The headers that sign a request. ``credential``: access key and secret. Units: ``now`` in unix seconds."""
    access_key, secret = credential
    parts = urlsplit(url)
    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = {"x-amz-content-sha256": hashlib.sha256(body).hexdigest(), "x-amz-date": stamp}
    signed = _Signed(
        scope=(stamp[:8], _REGION, _SERVICE),
        stamp=stamp,
        method=method,
        path=parts.path,
        query=parts.query,
        headers="host;x-amz-content-sha256;x-amz-date",
        payload=headers["x-amz-content-sha256"],
    )
    signature = signed.signature(secret, {"host": parts.netloc, **headers})
    credential_scope = "/".join((access_key, *signed.scope, "aws4_request"))
    words = f"Credential={credential_scope}, SignedHeaders={signed.headers}, Signature={signature}"
    return {**headers, "authorization": f"{ALGORITHM} {words}"}
