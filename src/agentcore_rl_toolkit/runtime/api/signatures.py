"""Signatures of requests to a runtime: checked as AgentCore does, and made for our own.

Source: AWS, "Create a signed AWS API request".
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, urlsplit

from ..._servers.sigv4 import ALGORITHM, UNSIGNED, Claim, canonical_query, claim_of
from ..wire import Headers, WireError

MAX_SKEW_S = 300.0
_REGION, _SERVICE = "us-west-2", "bedrock-agentcore"  # of our own requests; a runtime takes any


def _refused(message: str) -> WireError:
    return WireError("AccessDeniedException", message)


@dataclass(frozen=True)
class Pending:
    """A request whose head was checked as far as a head can tell. ``proven``: its signature holds, whatever the body is.

    The signature covers the body's hash. A request that says the hash, as S3's clients and ours do, is proven by its head; of
    others (boto3 says it to S3 only) the head shows a known key and the time, and the signature is checked with the body.
    """

    proven: bool
    claimed: str | None
    compare: Callable[[str], None]

    def finish(self, body: Sequence[bytes]) -> None:
        """Check the body. Raises: WireError 403."""
        if self.claimed == UNSIGNED:
            return
        digest = hashlib.sha256()
        for piece in body:
            digest.update(piece)
        if not self.proven:
            self.compare(digest.hexdigest())
        elif self.claimed != digest.hexdigest():
            raise _refused("The provided x-amz-content-sha256 does not match the payload.")


def begin(
    credentials: Mapping[str, str],
    *,
    method: str,
    raw_path: bytes,
    query_string: bytes,
    headers: Headers,
    now: float,
) -> Pending:
    """Check a request's head against ``credentials`` (access key -> secret). Units: ``now`` in unix seconds.

    Raises: WireError 403 when the signature is missing, of an unknown key, older than five minutes, or wrong.
    """
    by_name: dict[str, str] = {}
    for key, value in headers:
        name, text = key.decode("latin-1"), value.decode("latin-1")
        by_name[name] = f"{by_name[name]},{text}" if name in by_name else text
    query = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)
    claim = claim_of(by_name, query)
    if claim is None:
        raise _refused("Missing Authentication Token")
    secret = credentials.get(claim.access_key)
    if secret is None:
        raise _refused("The security token included in the request is invalid.")
    _check_time(claim, now)
    if "host" not in claim.signed.split(";"):
        raise _refused("Host must be a signed header.")
    # Every service but S3 encodes the path once more on top of how it is sent.
    path = quote(raw_path.split(b"?", 1)[0].decode("latin-1") or "/", safe="/~")

    def compare(payload_hash: str) -> None:
        expected = claim.expected(secret, method, path, by_name, payload_hash)
        if not hmac.compare_digest(expected.signature, claim.signature):
            raise _refused(
                "The request signature we calculated does not match the signature you provided. "
                "Check your AWS Secret Access Key and signing method."
            )

    claimed = by_name.get("x-amz-content-sha256")
    if claimed is not None:
        compare(claimed)
    return Pending(claimed is not None, claimed, compare)


def _check_time(claim: Claim, now: float) -> None:
    if claim.signed_at_s is None:
        raise _refused("X-Amz-Date is missing or malformed.")
    if abs(now - claim.signed_at_s) > MAX_SKEW_S:
        raise _refused(f"Signature expired: {claim.stamp} is not within {MAX_SKEW_S:g} seconds of now.")


def sign(credential: tuple[str, str], *, method: str, url: str, body: bytes, now: float) -> dict[str, str]:
    """The headers that sign a request to a local runtime. ``credential``: access key and secret.

    Units: ``now`` in unix seconds.
    """
    access_key, secret = credential
    parts = urlsplit(url)
    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%SZ")
    payload_hash = hashlib.sha256(body).hexdigest()
    claim = Claim(
        access_key=access_key,
        scope=(stamp[:8], _REGION, _SERVICE),
        signed="host;x-amz-content-sha256;x-amz-date",
        signature="",
        stamp=stamp,
        query=canonical_query(parse_qsl(parts.query, keep_blank_values=True)),
    )
    headers = {"x-amz-content-sha256": payload_hash, "x-amz-date": stamp}
    path = quote(parts.path or "/", safe="/~")
    signature = claim.expected(secret, method, path, {"host": parts.netloc, **headers}, payload_hash).signature
    credential_scope = "/".join((access_key, *claim.scope, "aws4_request"))
    authorization = f"{ALGORITHM} Credential={credential_scope}, SignedHeaders={claim.signed}, Signature={signature}"
    return {**headers, "authorization": authorization}
