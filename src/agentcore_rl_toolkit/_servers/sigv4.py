"""AWS Signature Version 4: what a request says of its signature, and what that must be.

Source: AWS, "Create a signed AWS API request".
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

ALGORITHM = "AWS4-HMAC-SHA256"
UNSIGNED = "UNSIGNED-PAYLOAD"
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256\s+Credential=([^,\s]+), ?SignedHeaders=([^,\s]+), ?Signature=([0-9a-f]{64})"
)
Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a request says about its own signature."""

    access_key: str
    scope: tuple[str, str, str]  # day, region, service
    signed: str
    signature: str
    stamp: str
    query: str

    @property
    def signed_at_s(self) -> float | None:
        """Unix seconds; None when the request does not say it, or says it in another way."""
        try:
            return datetime.strptime(self.stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
        except ValueError:
            return None

    def expected(self, secret: str, method: str, path: str, headers: Mapping[str, str], payload: str) -> Expected:
        """The signature that a request with this claim must have. ``path``: as it is signed; ``payload``: its hash."""
        names = self.signed.split(";")
        lines = [f"{name}:{' '.join(headers.get(name, '').split())}" for name in names]
        canonical = "\n".join((method, path, self.query, *lines, "", self.signed, payload))
        scope = "/".join((*self.scope, "aws4_request"))
        to_sign = f"{ALGORITHM}\n{self.stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        signature = hmac.digest(_signing_key(secret, *self.scope), to_sign.encode(), "sha256").hex()
        return Expected(signature, to_sign, canonical)


@dataclass(frozen=True)
class Expected:
    """A signature, and what it was made from."""

    signature: str
    to_sign: str
    canonical: str


@functools.lru_cache(maxsize=64)
def _signing_key(secret: str, *scope: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (*scope, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def claim_of(headers: Mapping[str, str], query: Pairs) -> Claim | None:
    """What a request's ``authorization`` says; None when that is no signature of version 4."""
    match = _AUTHORIZATION.fullmatch(headers.get("authorization", ""))
    if match is None:
        return None
    credential, signed, signature = match.groups()
    stamp = headers.get("x-amz-date", "")
    access_key, *scope = credential.rsplit("/", 4)
    if len(scope) != 4 or scope[0] != stamp[:8] or scope[3] != "aws4_request":
        return None
    return Claim(
        access_key=access_key,
        scope=(scope[0], scope[1], scope[2]),
        signed=signed,
        signature=signature,
        stamp=stamp,
        query=canonical_query(query),
    )


def canonical_query(query: Pairs) -> str:
    """A query as it is signed."""
    return "&".join(f"{k}={v}" for k, v in sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in query))
