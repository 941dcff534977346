"""The secrets of sessions, and the proof that a record must have."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..proof import REPLY_FIELD, SCHEME, Proof, ProofKey, check


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The expected proof of one session's record.

    Attributes:
        secret: of the session; None when it is unknown here.
        promised: its agent said that it proves its records, so a record without a proof is a forgery too.
        required: a record without a proof is refused. That alone does not make it a forgery.
    """

    secret: str | None = field(default=None, repr=False)
    promised: bool = False
    required: bool = False

    def judge(self, body: bytes, key: str) -> Proof:
        """Judge the proof of a record at `key`."""
        found = Proof.UNPROVEN if self.secret is None else check(body, key, self.secret)
        if found is Proof.UNPROVEN and self.secret is not None and self.promised:
            return Proof.FORGED
        return found


ANYTHING = Expected()


class Proofs:
    """The keys of a client: those of its ledgers, so that a later process can check what an earlier one started, else its own."""

    def __init__(self, *, required: bool = False) -> None:
        self._own = ProofKey.new()
        self.required = required

    def key(self, ledger: Any = None) -> ProofKey:
        """The key of new sessions that are written to this ledger."""
        kept: ProofKey | None = getattr(ledger, "proof_key", None)
        return kept or self._own

    def expected(self, session_id: str, ledger: Any, *, key_id: str | None, promised: bool) -> Expected:
        """The proof expected of a session that was started with the key `key_id`."""
        for key in (self.key(ledger), self._own):
            if key.id == key_id:
                return Expected(secret=key.session_secret(session_id), promised=promised, required=self.required)
        return Expected(required=self.required)


def promises_proof(reply: Any) -> bool:
    """Whether an agent's answer says that its record will be proven, in a way known here."""
    return isinstance(reply, dict) and reply.get(REPLY_FIELD) == SCHEME


def keep_key(path: Path) -> ProofKey:
    """The key in a file that only its owner can read; made, and put on disk, when there is none.

    Raises: ConfigError when the file holds something else.
    """
    if path.exists():
        try:
            return ProofKey(bytes.fromhex(path.read_text()))
        except OSError as e:
            raise ConfigError(f"the proof key {path} cannot be read: {e}") from e
        except ValueError as e:
            text = f"{path} holds no proof key; remove it, and sessions that still run will count as unproven"
            raise ConfigError(text) from e
    made = ProofKey.new()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(made.key.hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    return made
