"""A key and its secret as the password of a request to a local runtime."""

from __future__ import annotations

import base64

import pytest

from agentcore_rl_toolkit._servers import sigv4

KEYS = {"AKLOCAL": "very/secret+key"}


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
