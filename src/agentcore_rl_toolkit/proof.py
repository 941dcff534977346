"""Proof that a record comes from its session: an HMAC that only the client and the agent of that session can make.

Theory of operation. A client has one random key. For each session it derives a secret from it and sends that to the agent in the
`_rollout` block (``proof_key``). The agent, which answers that it will (``"proof": "hmac-sha256"``), ends its record with a
``_proof`` over every byte before it and over the key that the record lies at::

    {"rewards": 1.0, ..., "_agent": {...}, "_proof": "hmac-sha256:5f0c..."}

The client derives the secret again and checks the bytes it read, before it decodes them. So a session that may write to the whole
store can spoil another's record, but not replace it, move it, or keep a changed one unnoticed. A session may of course write what
it likes into its own. Agents of the published package take no notice of the secret; their records are accepted as unproven.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from enum import StrEnum

PROOF_KEY_FIELD = "proof_key"  # the session's secret in the `_rollout` block
PROOF_FIELD = "_proof"  # the last member of the record
REPLY_FIELD = "proof"  # the scheme of the proof, in the agent's response to the invoke
SCHEME = "hmac-sha256"
KEY_BYTES = 32

_TAIL = re.compile(rb', "_proof": "hmac-sha256:([0-9a-f]{64})"\}\Z')
_TAIL_BYTES = len(f', "{PROOF_FIELD}": "{SCHEME}:"}}') + 64


class Proof(StrEnum):
    """The known origin of a record."""

    PROVEN = "proven"
    UNPROVEN = "unproven"
    FORGED = "forged"


@dataclass(frozen=True)
class ProofKey:
    """A client's key. ``id`` names it in a ledger and tells nothing about it."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < KEY_BYTES:
            raise ValueError(f"a proof key needs at least {KEY_BYTES} random bytes, got {len(self.key)}")

    @classmethod
    def new(cls) -> ProofKey:
        """Return a random key."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @functools.cached_property
    def id(self) -> str:
        """The id of the key, which records carry."""
        return self._derive(b"id", "")[:16]

    def session_secret(self, session_id: str) -> str:
        """Return the secret of one session, the same whenever it is derived."""
        return self._derive(b"session", session_id)

    def _derive(self, purpose: bytes, text: str) -> str:
        return hmac.new(self.key, purpose + b"\0" + text.encode(), hashlib.sha256).hexdigest()


def seal(body: bytes, key: str, secret: str) -> bytes:
    """Return a record (a JSON object that is not empty) with its proof as last member; `key` is where it will lie."""
    return b'%b, "_proof": "hmac-sha256:%b"}' % (body[:-1], _mac(body[:-1], key, secret).encode())


def check(body: bytes, key: str, secret: str) -> Proof:
    """Check the proof at the end of a record, for this key and secret. UNPROVEN: the record has no proof."""
    found = _TAIL.search(body, max(0, len(body) - _TAIL_BYTES))
    if found is None:
        return Proof.UNPROVEN
    expected = _mac(memoryview(body)[: found.start()], key, secret)
    return Proof.PROVEN if hmac.compare_digest(found[1], expected.encode()) else Proof.FORGED


def _mac(body: bytes | memoryview, key: str, secret: str) -> str:
    mac = hmac.new(
        secret.encode(), b"agentcore-rl record 1\0" + key.encode() + b"\0", hashlib.sha256
    )  # keys hold no NUL
    mac.update(body)
    return mac.hexdigest()
