"""Events of rollouts, each reported once to the log, the ledger and the subscribers (metrics, traces)."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ...contract import Outcome
from ...proof import Proof
from ..future import Progress, Verdict
from ..ledger import FileLedger, fingerprint
from ..settings import RolloutRequest

logger = logging.getLogger("agentcore_rl_toolkit.client")

# (event, fields); events: intent, accepted, refused, server_error, retried, finished, stopped
Subscriber = Callable[[str, Mapping[str, Any]], None]

COUNTED = {
    "intent": "submitted",
    "refused": "refused",  # the runtime answered 429 or 402
    "server_error": "server_errors",  # it answered 500 or 503
    "retried": "retried",
}


class Events:
    """Fan-out of a client's events. Methods are called on the engine's loop and must not block.

    Attributes:
        counts: outcomes and refusals since the start, by name.
    """

    def __init__(self, exp_id: str) -> None:
        self.exp_id = exp_id
        self.counts: Counter[str] = Counter()
        self.subscribers: list[Subscriber] = []

    def tell(self, event: str, progress: Progress | None = None, **fields: Any) -> None:
        """Count an event and hand it to the subscribers."""
        if event in COUNTED:
            self.counts[COUNTED[event]] += 1
        if not self.subscribers:
            return
        ids = {"exp_id": self.exp_id} if progress is None else self._ids(progress)
        for subscriber in self.subscribers:
            try:
                subscriber(event, {**ids, **fields})
            except Exception:
                logger.exception("a subscriber to rollout events failed")

    def intent(self, request: RolloutRequest, progress: Progress) -> None:
        """An invoke is about to be sent."""
        if request.ledger is not None:
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
            request.ledger.append(line)
        self.tell("intent", progress, index=request.index, key=progress.key, bucket=progress.bucket)

    def accepted(self, request: RolloutRequest, progress: Progress) -> None:
        """The runtime accepted the invoke."""
        place = {"key": progress.key, "bucket": progress.bucket}
        if request.ledger is not None:
            request.ledger.note(progress.session_id, event="accepted", **place, promised=progress.promised)
        self.tell("accepted", progress, **place)

    def retried(self, request: RolloutRequest, progress: Progress, verdict: Verdict) -> None:
        """An attempt failed and another one follows."""
        self._ended(request, progress, verdict)
        text = "attempt %d ended as %s, trying again: %s"
        logger.info(text, progress.attempt, verdict.outcome, verdict.error, extra=self._ids(progress))
        error = str(verdict.error)
        self.tell("retried", progress, outcome=verdict.outcome.value, error=error, proof=verdict.proof)

    def finished(self, request: RolloutRequest, progress: Progress, verdict: Verdict) -> None:
        """A rollout has its verdict."""
        self.counts[verdict.outcome.value] += 1
        cause = verdict.cause
        if cause is not None:
            self.counts[f"cause_{cause.value}"] += 1
        self._ended(request, progress, verdict)
        if verdict.outcome is not Outcome.OK:
            extra = {**self._ids(progress), "stage": progress.stage.value}
            logger.info("rollout ended as %s: %s", verdict.outcome, verdict.error, extra=extra)
        self.tell(
            "finished",
            progress,
            index=request.index,
            outcome=verdict.outcome.value,
            cause=cause,
            failure=verdict.failure,
            error=None if verdict.error is None else str(verdict.error),
            stages=progress.stages(),
            proof=verdict.proof,
        )

    def stopped(self, session_id: str, ledger: FileLedger | None, gone: bool) -> None:
        """A session's stop is over: `gone`, or given up."""
        self.counts["stopped" if gone else "stop_failed"] += 1
        if gone and ledger is not None:
            ledger.note(session_id, event="stopped")
        self.tell("stopped", session_id=session_id, gone=gone)

    def _ended(self, request: RolloutRequest, progress: Progress, verdict: Verdict) -> None:
        """Count what a record proves, report a forged one, and write the outcome to the ledger."""
        if verdict.proof is not None:
            self.counts[verdict.proof.value] += 1
        if verdict.proof is Proof.FORGED:
            logger.critical("security: %s", verdict.error, extra=self._ids(progress))
        if request.ledger is not None:
            error = None if verdict.error is None else str(verdict.error)
            cause = {} if verdict.cause is None else {"cause": verdict.cause.value}
            request.ledger.note(progress.session_id, event="done", outcome=verdict.outcome.value, error=error, **cause)

    def _ids(self, progress: Progress) -> dict[str, Any]:
        return {
            "session_id": progress.session_id,
            "input_id": progress.input_id,
            "exp_id": self.exp_id,
            "attempt": progress.attempt,
        }
