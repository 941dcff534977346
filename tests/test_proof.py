"""Records that prove where they come from: every changed byte, key or secret shows."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.proof import KEY_BYTES, Proof, ProofKey, check, seal

BODY = b'{"rewards": 1.0, "_agent": {"outcome": "ok"}, "outcome": "ok"}'
KEY = "e/i/s.json"
SECRET = ProofKey(b"k" * KEY_BYTES).session_secret("s")


def test_a_sealed_record_is_the_record_with_one_member_more() -> None:
    sealed = seal(BODY, KEY, SECRET)
    record = json.loads(sealed)
    assert list(record)[-1] == "_proof"
    assert {k: v for k, v in record.items() if k != "_proof"} == json.loads(BODY)
    assert check(sealed, KEY, SECRET) is Proof.PROVEN
    assert check(BODY, KEY, SECRET) is Proof.UNPROVEN


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_no_byte_can_be_changed(place: int, change: int) -> None:
    sealed = bytearray(seal(BODY, KEY, SECRET))
    sealed[place % len(sealed)] ^= change
    assert check(bytes(sealed), KEY, SECRET) is not Proof.PROVEN


def test_a_record_proves_nothing_under_another_key_secret_or_after_another_record() -> None:
    sealed = seal(BODY, KEY, SECRET)
    other = ProofKey(b"k" * KEY_BYTES).session_secret("t")
    assert check(sealed, "e/j/s.json", SECRET) is Proof.FORGED
    assert check(sealed, KEY, other) is Proof.FORGED
    assert check(seal(BODY, KEY, other), KEY, SECRET) is Proof.FORGED
    assert check(sealed + b"\n", KEY, SECRET) is Proof.UNPROVEN
    assert check(b'{"rewards": 9, "was": ' + sealed + b"}", KEY, SECRET) is Proof.UNPROVEN
    assert check(BODY[:-1] + b', "x": 1' + sealed[len(BODY) - 1 :], KEY, SECRET) is Proof.FORGED
