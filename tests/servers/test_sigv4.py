"""Credentials in the requests to a local runtime: the age of a signature, and a key as a password."""

from __future__ import annotations

import base64
import time
from datetime import UTC, datetime

import pytest

from agentcore_rl_toolkit._servers import sigv4

KEYS = {"AKLOCAL": "very/secret+key"}


@pytest.mark.parametrize("late_s", [300, -300, 301, -301])
def test_a_signature_is_taken_for_five_minutes(late_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://127.0.0.1:1/x?a=%20b&c"
    headers = sigv4.sign(next(iter(KEYS.items())), method="POST", url=url, body=b"{}")
    scope = {"method": "POST", "raw_path": b"/x", "query_string": b"a=%20b&c"}
    scope["headers"] = [(b"host", b"127.0.0.1:1"), *((k.lower().encode(), v.encode()) for k, v in headers.items())]
    signed_at_s = datetime.strptime(headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    monkeypatch.setattr(time, "time", lambda: signed_at_s + late_s)
    expired = f"Signature expired: {headers['X-Amz-Date']} is not within 300 seconds of now."
    assert sigv4.refusal(KEYS, scope, b"{}") == (expired if abs(late_s) > 300 else None)


def basic(text: bytes, scheme: bytes = b"Basic") -> bytes:
    return scheme + b" " + base64.b64encode(text)


@pytest.mark.parametrize(
    ("authorization", "known"),
    [
        (None, False),
        (basic(b"AKLOCAL:very/secret+key"), True),
        (basic(b"AKLOCAL:very/secret+key", b"bASIC"), True),
        (basic(b"AKLOCAL:very/secret+key", b"Bearer"), False),
        (basic(b"AKLOCAL:wrong"), False),
        (basic(b"AKOTHER:very/secret+key"), False),
        (basic(b"AKLOCAL:very/secret+key\xff"), False),
        (b"Basic not-base64", False),
    ],
)
def test_a_key_and_its_secret_are_a_user_and_a_password(authorization: bytes | None, known: bool) -> None:
    assert sigv4.has_password(KEYS, authorization) is known
