"""AWS Signature Version 4 of requests to a local runtime: signs ours, and verifies all by computing the signature again."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from botocore.auth import SIGV4_TIMESTAMP, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

UNSIGNED = "UNSIGNED-PAYLOAD"
MAX_SKEW_S = 300.0
_REGION, _SERVICE = "us-west-2", "bedrock-agentcore"  # the scope of our requests. A runtime takes any.
_HASH = "x-amz-content-sha256"
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256\s+Credential=([^,\s]+)/(\d{8})/([^/,\s]+)/([^/,\s]+)/aws4_request,"
    r" ?SignedHeaders=([^,\s]+), ?Signature=([0-9a-f]{64})"
)


def sign(credential: tuple[str, str], *, method: str, url: str, body: bytes) -> dict[str, str]:
    """Return the headers that sign a request. ``credential``: access key and secret."""
    request = AWSRequest(method, url, data=body, headers={_HASH: hashlib.sha256(body).hexdigest()})
    SigV4Auth(Credentials(*credential), _SERVICE, _REGION).add_auth(request)
    return dict(request.headers)


def send(credential: tuple[str, str] | None, *, method: str, url: str, body: bytes | None, timeout_s: float) -> Any:
    """Send a request to a local runtime, signed if there is a credential, and return the open reply. Proxies are not used.

    Raises: OSError; its subclass `urllib.error.HTTPError` for a status from 400 on. ``timeout_s`` bounds each read.
    """
    headers = {} if credential is None else sign(credential, method=method, url=url, body=body or b"")
    request = urllib.request.Request(url, body, {"content-type": "application/json", **headers}, method=method)
    return _DIRECTLY.open(request, timeout=timeout_s)


def refusal(credentials: Mapping[str, str], scope: Mapping[str, Any], body: bytes) -> str | None:
    """Return AWS's text for a request that is not signed with one of ``credentials`` (access key -> secret), or None if it is.

    ``scope``: the request by ASGI, with path and query as they were sent.
    """
    values: dict[str, str] = {}
    for key, value in scope["headers"]:
        name, text = key.decode("latin-1"), value.decode("latin-1")
        values[name] = f"{values[name]},{text}" if name in values else text
    match = _AUTHORIZATION.fullmatch(values.get("authorization", ""))
    stamp = values.get("x-amz-date", "")
    if match is None or not stamp.startswith(match[2]):
        return "Missing Authentication Token"
    access_key, _, region, service, names, signature = match.groups()
    if access_key not in credentials:
        return "The security token included in the request is invalid."
    try:
        signed_at_s = datetime.strptime(stamp, SIGV4_TIMESTAMP).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return "X-Amz-Date is missing or malformed."
    if abs(time.time() - signed_at_s) > MAX_SKEW_S:
        return f"Signature expired: {stamp} is not within {MAX_SKEW_S:g} seconds of now."
    if "host" not in names.split(";"):
        return "Host must be a signed header."
    digest = hashlib.sha256(body).hexdigest()
    payload = values.get(_HASH, digest)
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    signed = {_HASH: payload, **{name: values.get(name, "") for name in names.split(";")}}
    request = AWSRequest(scope["method"], f"http://runtime{target.decode('latin-1')}", headers=signed)
    request.context["timestamp"] = stamp
    auth = _Verifier(Credentials(access_key, credentials[access_key]), service, region)
    auth.names = names.split(";")
    expected = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
    if not hmac.compare_digest(expected, signature):
        return (
            "The request signature we calculated does not match the signature you provided. "
            "Check your AWS Secret Access Key and signing method."
        )
    if payload not in (digest, UNSIGNED):
        return "The provided x-amz-content-sha256 does not match the payload."
    return None


class _Verifier(SigV4Auth):  # type: ignore[misc]  # botocore is untyped
    """Signs the headers that a request says are signed, and no others."""

    names: list[str]

    def headers_to_sign(self, request: AWSRequest) -> Mapping[str, str]:
        chosen = super().headers_to_sign(request)
        for name in set(chosen) - set(self.names):
            del chosen[name]
        return chosen  # type: ignore[no-any-return]


def has_password(credentials: Mapping[str, str], authorization: bytes | None) -> bool:
    """Return True if a request names a key and its secret itself, by HTTP basic authentication. Prometheus cannot sign."""
    scheme, _, value = (authorization or b"").partition(b" ")
    if scheme.lower() != b"basic":
        return False
    try:
        access_key, _, secret = base64.b64decode(value, validate=True).decode().partition(":")
    except ValueError:
        return False
    known = credentials.get(access_key)
    return known is not None and hmac.compare_digest(known.encode(), secret.encode())
