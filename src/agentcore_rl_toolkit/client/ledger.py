"""The ledger of a run: what was sent, what became of it. Append-only; one JSON object per line.

A line is written *before* an invoke is sent (`intent`), when it is accepted, when the rollout has its outcome (`done`),
and when its session is known to be gone (`stopped`). So whatever moment a process dies in, the next one knows every
session that can exist. Nothing is ever rewritten; a torn last line is what a crash leaves, and it is ignored.

A file ledger is locked while it is open: two processes resuming the same run would run everything twice.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..contract import IdValue, Outcome
from ..errors import ConfigError, ObjectNotFoundError, ObjectTooLargeError
from ..proof import ProofKey
from ..store import ObjectStore
from .proofs import keep_key

logger = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 64 * 2**20  # some hundred thousand lines; agents may be able to write there, too
SEGMENT_S = 0.05  # appends within this time share one object of a ledger in the store


def key_file(ledger: Path) -> Path:
    """Where the key of a ledger in a file is."""
    return ledger.with_name(ledger.name + ".key")


def fingerprint(payload: Mapping[str, Any]) -> str:
    """A short digest of a payload, the same in every process."""
    return hashlib.sha256(json.dumps(payload, sort_keys=True, default=repr).encode()).hexdigest()[:16]


@dataclass(kw_only=True)
class Attempt:
    """One session of the ledger. Times are unix seconds."""

    index: int | None
    input_id: IdValue
    session_id: str
    attempt: int
    key: str
    bucket: str
    payload: str = ""
    intent_s: float = 0.0
    accepted_s: float | None = None
    outcome: Outcome | None = None
    cause: str | None = None  # of a failure, as `contract.Cause` writes it
    error: str | None = None
    stopped: bool = False
    proof_key: str | None = None  # name of the key that the session's secret comes from
    promised: bool = False  # its agent said that it proves its record


class Ledger(Protocol):
    """Where the lines go."""

    async def open_async(self) -> list[dict[str, Any]]:
        """Open for appending; returns what is there already."""
        ...

    async def append_async(self, line: Mapping[str, Any]) -> None:
        """Append a line; returns when it would survive the death of this process."""
        ...

    def append_soon(self, line: Mapping[str, Any]) -> None:
        """Append a line without waiting for it."""
        ...

    async def close_async(self) -> None: ...


class FileLedger:
    """A ledger in a file. With ``fsync`` an intent also survives a power cut, at some milliseconds each.

    ``proof_key`` is the key of its sessions, kept beside it in a file that only its owner can read (``NAME.key``, mode 0600).
    """

    proof_key: ProofKey | None = None

    def __init__(self, path: str | os.PathLike[str], *, fsync: bool = False) -> None:
        self.path = Path(path)
        self._fsync = fsync
        self._fd: int | None = None

    async def open_async(self) -> list[dict[str, Any]]:
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                os.close(fd)
                raise ConfigError(f"the ledger {self.path} is in use by another process") from e
            try:
                self.proof_key = keep_key(key_file(self.path))
            except BaseException:
                os.close(fd)
                raise
            self._fd = fd
            content = self.path.read_bytes()
            if content and not content.endswith(b"\n"):
                os.write(fd, b"\n")  # closes the torn line of a crash, so that the next one stands alone
        return list(parse_lines(self.path.read_bytes()))

    async def append_async(self, line: Mapping[str, Any]) -> None:
        self.append_soon(line)
        if self._fsync and self._fd is not None:
            await asyncio.to_thread(os.fsync, self._fd)

    def append_soon(self, line: Mapping[str, Any]) -> None:
        # One write of a few hundred bytes to the page cache: microseconds, so it may happen on the loop.
        if self._fd is not None:
            os.write(self._fd, json.dumps(line).encode() + b"\n")

    async def close_async(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class StoreLedger:
    """A ledger in the object store, as numbered segments under ``_ledger/{exp_id}/``: for runs without a lasting disk.

    It keeps no proof key, because agents may be able to read the store.
    """

    def __init__(self, store: ObjectStore, exp_id: str) -> None:
        self._store = store
        self._prefix = f"_ledger/{exp_id}/"
        self._run = f"{time.time():017.6f}-{secrets.token_hex(4)}"
        self._segment = 0
        self._lines: list[bytes] = []
        self._flushed: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def open_async(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for item in await self._store.list_async(self._prefix):
            try:
                lines.extend(parse_lines(await self._store.get_async(item.key, max_bytes=MAX_SEGMENT_BYTES)))
            except ObjectNotFoundError:
                continue
            except ObjectTooLargeError as e:  # nothing that was written here
                logger.warning("a part of the ledger is left out: %s", e)
        return lines

    async def append_async(self, line: Mapping[str, Any]) -> None:
        self.append_soon(line)
        if self._flushed is not None:
            await asyncio.shield(self._flushed)

    def append_soon(self, line: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(line).encode() + b"\n")
        if self._flushed is None:
            self._flushed = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._flush(self._task))

    async def _flush(self, before: asyncio.Task[None] | None) -> None:
        await asyncio.sleep(SEGMENT_S)
        if before is not None:
            await asyncio.wait([before])
        lines, self._lines = self._lines, []
        flushed, self._flushed = self._flushed, None
        assert flushed is not None
        self._segment += 1
        try:
            await self._store.put_async(f"{self._prefix}{self._run}-{self._segment:08d}.jsonl", b"".join(lines))
        except Exception as e:
            flushed.set_exception(e)
            flushed.exception()  # `append_soon` has nobody who would look
        else:
            flushed.set_result(None)

    async def close_async(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])


def parse_lines(content: bytes) -> Iterable[dict[str, Any]]:
    """The readable lines of a ledger. A torn line is left out: what it told did not happen yet."""
    for raw in content.splitlines():
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and "event" in line:
            yield line


def attempts_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, Attempt]:
    """Replay the lines: session id -> what is known of it, in order of their intents.

    A line that makes no sense is left out and counted in the log: whoever can write to the store can write there.
    """
    attempts: dict[str, Attempt] = {}
    senseless = 0
    for line in lines:
        try:
            _replay(line, attempts)
        except (KeyError, TypeError, ValueError):
            senseless += 1
    if senseless:
        logger.warning("%d lines of the ledger make no sense and are left out", senseless)
    return attempts


def _replay(line: Mapping[str, Any], attempts: dict[str, Attempt]) -> None:
    """Raises: KeyError, TypeError, ValueError when the line is not as it is written here."""
    session_id = str(line.get("session_id"))
    if line["event"] == "intent":
        index = line.get("index")
        attempts[session_id] = Attempt(
            index=None if index is None else int(index),
            input_id=line["input_id"],
            session_id=session_id,
            attempt=int(line.get("attempt", 1)),
            key=str(line["key"]),
            bucket=str(line["bucket"]),
            payload=str(line.get("payload", "")),
            intent_s=float(line.get("t", 0.0)),
            proof_key=line.get("proof_key"),
        )
        return
    known = attempts.get(session_id)
    if known is None:
        return
    if line["event"] == "accepted":
        known.accepted_s = float(line.get("t", 0.0))
        known.promised = known.promised or line.get("promised") is True
        known.key, known.bucket = str(line.get("key", known.key)), str(line.get("bucket", known.bucket))
    elif line["event"] == "done":
        known.outcome = Outcome(line["outcome"])
        known.error = line.get("error")
        known.cause = line.get("cause")
    elif line["event"] == "stopped":
        known.stopped = True


def last_attempts(attempts: Mapping[str, Attempt]) -> dict[int, Attempt]:
    """Index in the batch -> its latest attempt."""
    last: dict[int, Attempt] = {}
    for attempt in attempts.values():
        if attempt.index is not None:
            last[attempt.index] = attempt
    return last
