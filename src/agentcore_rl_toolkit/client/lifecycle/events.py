"""What happens to rollouts, told once: to the log, the ledger, and whoever subscribed (metrics, traces)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ...contract import Outcome
from ...errors import AgentCoreRLError
from ...proof import Proof
from ..future import Progress, Verdict
from ..ledger import Ledger, fingerprint
from ..settings import RolloutRequest

logger = logging.getLogger("agentcore_rl_toolkit.client")

# (event, fields); events: intent, accepted, refused, server_error, retried, finished, stopped, watch_failure, skipped
Subscriber = Callable[[str, Mapping[str, Any]], None]


class Events:
    """Fan-out of the engine's events. Methods are called on the engine's loop and must not block.

    Attributes:
        counts: outcomes and refusals since the start, by name.
    """

    def __init__(self, exp_id: str) -> None:
        self.exp_id = exp_id
        self.counts: Counter[str] = Counter()
        self.subscribers: list[Subscriber] = []
        self._ledgers: dict[str, Ledger] = {}  # session id -> where its story is noted
        self._holds: Counter[int] = Counter()
        self._closing: set[asyncio.Future[None]] = set()

    def _tell(self, event: str, fields: Mapping[str, Any]) -> None:
        for subscriber in self.subscribers:
            try:
                subscriber(event, fields)
            except Exception:
                logger.exception("a subscriber to rollout events failed")

    def _ids(self, progress: Progress) -> dict[str, Any]:
        return {
            "session_id": progress.session_id,
            "input_id": progress.input_id,
            "exp_id": self.exp_id,
            "attempt": progress.attempt,
        }

    async def intent(self, request: RolloutRequest, progress: Progress) -> None:
        """An invoke is about to be sent. Returns once that is on record, where a record is kept."""
        self.counts["submitted"] += 1
        if request.ledger is not None:
            self.adopt(progress.session_id, request.ledger)
            line = {
                "event": "intent",
                "t": time.time(),
                "index": request.index,
                "input_id": progress.input_id,
                "session_id": progress.session_id,
                "attempt": progress.attempt,
                "key": progress.key,
                "bucket": progress.bucket,
                "payload": fingerprint(request.payload),
                "proof_key": progress.proof_key,
            }
            await request.ledger.append_async(line)
        if self.subscribers:
            self._tell(
                "intent",
                {**self._ids(progress), "index": request.index, "key": progress.key, "bucket": progress.bucket},
            )

    def accepted(self, progress: Progress) -> None:
        """The runtime accepted the invoke."""
        line = {"event": "accepted", "key": progress.key, "bucket": progress.bucket, "promised": progress.promised}
        self._note(progress.session_id, line)
        if self.subscribers:
            self._tell("accepted", {**self._ids(progress), "key": progress.key, "bucket": progress.bucket})

    def watching_failed(self) -> None:
        """Watching for results failed in a way nobody foresaw, and goes on."""
        self.counts["watch_failures"] += 1
        if self.subscribers:
            self._tell("watch_failure", {"session_id": "", "exp_id": self.exp_id})

    def refused(self, progress: Progress) -> None:
        """The runtime answered 429 or 402."""
        self.counts["refused"] += 1
        if self.subscribers:
            self._tell("refused", self._ids(progress))

    def names_skipped(self, number: int) -> None:
        """Listings of the store left out so many more names because they are no objects."""
        if self.subscribers:
            self._tell("skipped", {"session_id": "", "exp_id": self.exp_id, "count": number})

    def server_error(self, progress: Progress) -> None:
        """The runtime answered 500 or 503."""
        self.counts["server_errors"] += 1
        if self.subscribers:
            self._tell("server_error", self._ids(progress))

    def retried(self, progress: Progress, verdict: Verdict) -> None:
        """An attempt failed and another one follows."""
        self.counts["retried"] += 1
        self.proof(progress, verdict)
        self._note_done(progress.session_id, verdict)
        logger.info(
            "attempt %d ended as %s, trying again: %s",
            progress.attempt,
            verdict.outcome,
            verdict.error,
            extra=self._ids(progress),
        )
        if self.subscribers:
            fields = {"outcome": verdict.outcome.value, "error": str(verdict.error), "proof": verdict.proof}
            self._tell("retried", {**self._ids(progress), **fields})

    def finished(self, request: RolloutRequest, progress: Progress, verdict: Verdict) -> None:
        """A rollout has its verdict."""
        self.counts[verdict.outcome.value] += 1
        cause = verdict.cause
        if cause is not None:
            self.counts[f"cause_{cause.value}"] += 1
        self.proof(progress, verdict)
        self._note_done(progress.session_id, verdict)
        if verdict.outcome is not Outcome.OK:
            logger.info(
                "rollout ended as %s: %s",
                verdict.outcome,
                verdict.error,
                extra={**self._ids(progress), "stage": progress.stage.value},
            )
        if self.subscribers:
            self._tell(
                "finished",
                {
                    **self._ids(progress),
                    "index": request.index,
                    "outcome": verdict.outcome.value,
                    "cause": cause,
                    "failure": verdict.failure,
                    "error": None if verdict.error is None else str(verdict.error),
                    "stages": progress.stages(),
                    "proof": verdict.proof,
                },
            )

    def proof(self, progress: Progress, verdict: Verdict) -> None:
        """A record was read: count what it proves, and say so where somebody forged one."""
        if verdict.proof is None:
            return
        self.counts[verdict.proof.value] += 1
        if verdict.proof is Proof.FORGED:
            logger.critical("security: %s", verdict.error, extra=self._ids(progress))

    def stopped(self, session_id: str, gone: bool) -> None:
        """A session's stop is over: `gone`, or given up."""
        self.counts["stopped" if gone else "stop_failed"] += 1
        self._forget(session_id, gone=gone)
        if self.subscribers:
            self._tell("stopped", {"session_id": session_id, "exp_id": self.exp_id, "gone": gone})

    def adopt(self, session_id: str, ledger: Ledger | None) -> None:
        """A session of an earlier process goes on here, in the same ledger."""
        if ledger is not None and session_id not in self._ledgers:
            self._ledgers[session_id] = ledger
            self.hold(ledger)

    def never_started(self, session_id: str) -> None:
        """An attempt ended before a session could come of it."""
        self._forget(session_id, gone=True)

    def hold(self, ledger: Ledger) -> None:
        """Keep a ledger open until it is released as often as it was held."""
        self._holds[id(ledger)] += 1

    def release(self, ledger: Ledger) -> None:
        """Undo one `hold`; the last one closes the ledger, so that another client may resume from it."""
        self._holds[id(ledger)] -= 1
        if self._holds[id(ledger)] <= 0:
            del self._holds[id(ledger)]
            task = asyncio.ensure_future(ledger.close_async())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _forget(self, session_id: str, *, gone: bool) -> None:
        if gone:
            self._note(session_id, {"event": "stopped"})
        ledger = self._ledgers.pop(session_id, None)
        if ledger is not None:
            self.release(ledger)

    def _note(self, session_id: str, line: Mapping[str, Any]) -> None:
        ledger = self._ledgers.get(session_id)
        if ledger is None:
            return
        try:
            ledger.append_soon({"t": time.time(), "session_id": session_id, **line})
        except (OSError, AgentCoreRLError) as e:
            # The rollout itself is fine, and a resumed run finds out from the store what this line would have told.
            logger.error("the ledger could not be written: %s", e, extra={"session_id": session_id})

    def _note_done(self, session_id: str, verdict: Verdict) -> None:
        error = None if verdict.error is None else str(verdict.error)
        line = {"event": "done", "outcome": verdict.outcome.value, "error": error}
        if verdict.cause is not None:
            line["cause"] = verdict.cause.value
        self._note(session_id, line)
