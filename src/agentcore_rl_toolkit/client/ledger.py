"""The ledger of a run: one line of JSON per event of a session, appended and never rewritten.

A line is written before an invoke is sent (`intent`), when the runtime accepted it, when the rollout has its outcome (`done`),
and when its session has ended (`stopped`). So a later process knows every session that may exist. The file is locked while it is
open: two processes that resume one run would run everything twice.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .._servers.locks import close_in_children
from ..contract import IdValue
from ..errors import ConfigError
from ..proof import ProofKey

logger = logging.getLogger(__name__)


def fingerprint(payload: Mapping[str, Any]) -> str:
    """Return a short digest of a payload, the same in every process."""
    text = json.dumps(dict(payload), sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(kw_only=True)
class Attempt:
    """A session in the ledger. Times are unix seconds.

    Attributes:
        outcome, cause: as `contract.Outcome` and `contract.Cause` write them.
        proof_key: id of the key from which the session's secret is derived.
        promised: the agent promised to prove its record.
        retried: another attempt was to follow.
    """

    index: int | None
    input_id: IdValue
    session_id: str
    attempt: int
    key: str
    bucket: str
    payload: str = ""
    intent_s: float = 0.0
    accepted_s: float | None = None
    outcome: str | None = None
    cause: str | None = None
    error: str | None = None
    stopped: bool = False
    proof_key: str | None = None
    promised: bool = False
    retried: bool = False


class FileLedger:
    """A ledger in a file, open and locked until its client is closed. Before it is opened, it keeps nothing.

    ``proof_key`` is the key of its sessions. It is kept in ``NAME.key``, which only its owner can read.
    """

    proof_key: ProofKey | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd: int | None = None

    def open(self) -> list[dict[str, Any]]:
        """Open the file for appending. Returns its lines. Raises: ConfigError if another process or client has it open."""
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            close_in_children(self)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.proof_key = kept_key(self.path.with_name(self.path.name + ".key"))
            except BaseException as e:
                self.close()
                if not isinstance(e, BlockingIOError):
                    raise
                raise ConfigError(
                    f"the ledger {self.path} is in use by another process or client; close that one"
                ) from e
        return list(parse_lines(self.path.read_bytes()))

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line. It survives the death of this process. Raises: OSError."""
        # One write of a few hundred bytes to the page cache: microseconds, so it may happen on the loop.
        if self._fd is not None:
            data = b"\n" + json.dumps(line).encode()  # a line that a crash or a full disk tore ends here
            if os.write(self._fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def note(self, session_id: str, **line: Any) -> None:
        """Append an event of a session. If that fails, a resumed run finds the event in the store."""
        try:
            self.append({"t": time.time(), "session_id": session_id, **line})
        except OSError as e:
            text = "the ledger could not be written, so a restart cannot continue from it: %s"
            logger.error(text, e, extra={"session_id": session_id})

    def close(self) -> None:
        """Close and unlock the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    __del__ = close


NO_LEDGER = FileLedger(os.devnull)  # is never opened, and so keeps nothing


def kept_key(path: Path) -> ProofKey:
    """Read the proof key in a file, or make the file. Raises: ConfigError if the file holds no key."""
    if not path.exists():
        made = ProofKey.new()
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(made.key.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        return made
    try:
        return ProofKey(bytes.fromhex(path.read_text()))
    except (OSError, ValueError) as e:
        text = f"{path} holds no proof key ({e}); remove it, and sessions that still run will count as unproven"
        raise ConfigError(text) from e


def parse_lines(content: bytes) -> Iterable[dict[str, Any]]:
    """Parse the readable lines of a ledger. A torn line is left out: its event has not happened."""
    for raw in content.splitlines():
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and "event" in line:
            yield line


def attempts_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, Attempt]:
    """Replay the lines. Return the attempts by session id, in the order of their intents."""
    attempts: dict[str, dict[str, Any]] = {}
    for line in lines:
        facts = dict(line)
        event, at_s, session_id = facts.pop("event"), facts.pop("t", 0.0), facts["session_id"]
        if event == "intent":
            attempts[session_id] = {"intent_s": at_s}
        if session_id in attempts:
            now = {"accepted": {"accepted_s": at_s}, "stopped": {"stopped": True}}.get(event, {})
            attempts[session_id] |= {**facts, **now}
    known = {field.name for field in fields(Attempt)}
    return {
        session_id: Attempt(**{name: value for name, value in facts.items() if name in known})
        for session_id, facts in attempts.items()
    }
