"""The secrets of sessions, and the proof that a record must have."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..proof import REPLY_FIELD, SCHEME, Proof, ProofKey, check

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The expected proof of one session's record.

    Attributes:
        secret: of the session; None when it is unknown here.
        ours: the session was started with this secret, so another proof is a forgery, not another client's record.
        promised: its agent said that it proves its records, so a record without a proof is a forgery too.
        required: a record without a proof is refused. That alone does not make it a forgery.
    """

    secret: str | None = field(default=None, repr=False)
    ours: bool = True
    promised: bool = False
    required: bool = False

    def judge(self, body: bytes, key: str) -> Proof:
        """Judge the proof of a record at `key`."""
        found = Proof.UNPROVEN if self.secret is None else check(body, key, self.secret)
        if found is Proof.PROVEN:
            return found
        known = self.secret is not None and self.ours
        if known and (found is Proof.FORGED or self.promised):
            return Proof.FORGED
        return Proof.UNPROVEN


ANYTHING = Expected(ours=False)


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
        return Expected(ours=False, required=self.required)


def promises_proof(reply: Any) -> bool:
    """Whether an agent's answer says that its record will be proven, in a way known here."""
    return isinstance(reply, dict) and reply.get(REPLY_FIELD) == SCHEME


def keep_key(path: Path) -> ProofKey:
    """The key in a file that only its owner can read; made, and put on disk, when there is none.

    Raises: ConfigError when the file holds something else.
    """
    known = read_key(path)
    if known is not None:
        return known
    made = ProofKey.new()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(made.key.hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    return made


def read_key(path: Path) -> ProofKey | None:
    """The key in a file; None when there is no such file. Raises: ConfigError when it holds something else."""
    try:
        return ProofKey(bytes.fromhex(path.read_text()))
    except FileNotFoundError:
        return None
    except OSError as e:
        raise ConfigError(f"the proof key {path} cannot be read: {e}") from e
    except ValueError as e:
        text = f"{path} holds no proof key; remove it, and sessions that still run will count as unproven"
        raise ConfigError(text) from e
