"""Accepts invocations: checks them, recognizes repeated ones, starts their rollouts, and ends them all at shutdown."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import signal
import sys
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from ..contract import (
    PROBE_FIELD,
    REFUSED,
    ROLLOUT_FIELD,
    RUNS_ONCE_FIELD,
    TRAIN_FIELD,
    RolloutConfig,
    redact_payload,
    result_key,
)
from ..errors import AgentCoreRLError, ContractError, StorePermissionError
from ..isolation.hints import is_private
from ..proof import PROOF_KEY_FIELD, REPLY_FIELD, SCHEME
from ..store import ObjectStore, open_store, parse_url, url_matches
from .record import RolloutInfo
from .rollout import Rollout, RolloutFunction
from .runner import AgentRunner
from .sagemaker.job import JobRollout, job_rollout
from .settings import AgentSettings

logger = logging.getLogger(__name__)

REMEMBERED = 10_000  # rollouts whose repeated delivery is recognized
MIN_HEARTBEAT_S = 0.2  # a caller must not make an agent write without pause

Identity = tuple[str | int, ...]  # store, key and attempt; or job and key


class Engine:
    """Accepts the invocations of one app, on the server's loop. It starts and opens nothing before the first one.

    Args:
        settings: reads the settings, at the first invocation: a snapshot of the process holds none of them.
        on_start, on_end: report to the SDK that a rollout runs.
        own_store: the store of a URL that the agent's author set, or None.
    """

    def __init__(
        self,
        *,
        settings: Callable[[], AgentSettings],
        on_start: Callable[[str], Any] = lambda name: None,
        on_end: Callable[[Any], Any] = lambda task: None,
        own_store: Callable[[str], ObjectStore | None] = lambda url: None,
    ) -> None:
        self._read_settings, self._on_start, self._on_end, self._own_store = settings, on_start, on_end, own_store
        self._settings: AgentSettings | None = None
        self._lock = threading.RLock()  # a signal handler may interrupt its own holder
        self.runner = AgentRunner()
        self._stores: dict[str, ObjectStore] = {}
        self._accepted: OrderedDict[Identity, concurrent.futures.Future[None]] = OrderedDict()
        self._live: set[Rollout] = set()
        self._closing = ""

    @property
    def settings(self) -> AgentSettings:
        """The settings, read on first use."""
        with self._lock:
            if self._settings is None:
                self._settings = self._read_settings()
                _reseed()
            return self._settings

    @property
    def busy(self) -> bool:
        """True while a rollout runs."""
        return bool(self._live)

    async def accept(self, function: RolloutFunction, payload: Any, context: Any) -> dict[str, Any]:
        """Check one invocation, start its rollout unless it runs or ran already, and return the reply.

        The reply of a rollout whose record cannot be stored has ``status: refused`` and HTTP 200: AgentCore passes on no text of
        an error reply.

        Raises: ContractError when the `_rollout` block is unusable or names a store outside the allow-list; AgentCoreRLError
            during shutdown.
        """
        settings = self.settings
        if self._closing:
            raise AgentCoreRLError(f"no new rollout: {self._closing}")
        session_id = getattr(context, "session_id", None) or str(uuid.uuid4())
        if not isinstance(payload, Mapping):
            raise ContractError(f"the payload must be a JSON object, got {type(payload).__name__}")
        if PROBE_FIELD in payload:
            from . import probe  # a rollout does not need its imports

            return await probe.answer(payload, session_id, settings, self.store_for)
        job = job_rollout(payload)
        if job is not None:
            return await self._accept_job(job, function, context, session_id)
        config = RolloutConfig.from_payload(payload) or RolloutConfig()
        settings.check_base_url(config.base_url)
        args, bucket = function.arguments(_without_proof_key(payload), context), config.s3_bucket
        if config.exp_id is None or config.input_id is None or bucket is None:
            info = RolloutInfo(config=config, session_id=session_id, result_key=session_id)
            self._begin(Rollout(function=function, args=args, settings=settings, info=info))
            return {"status": "processing"}

        if config.input_id == "":  # a fresh one, and the same one when this session is delivered again
            config = dataclasses.replace(config, input_id=session_id)
        key = result_key(config.exp_id or "", config.input_id or "", session_id)
        if settings.allowed_buckets and not url_matches(bucket, settings.allowed_buckets):
            text = f"this agent may not write to {bucket!r}; AGENTCORE_RL_ALLOWED_BUCKETS lists where it may"
            raise ContractError(text, key=key)
        store, own = self.store_for(bucket, config.s3_region)
        asked_s = settings.heartbeat_s if config.heartbeat_s is None else float(config.heartbeat_s)
        beats = asked_s > 0 and settings.heartbeat_s > 0 and not own  # 0 is the operator's setting for no heartbeats
        heartbeat_s = max(asked_s, MIN_HEARTBEAT_S) if beats else None
        reply: dict[str, Any] = {"status": "processing", "s3_bucket": bucket, "result_key": key, RUNS_ONCE_FIELD: True}
        if heartbeat_s is not None:
            reply["heartbeat_s"] = heartbeat_s  # a promise
        if config.proof_key is not None:
            reply[REPLY_FIELD] = SCHEME  # a promise, too: a record without a proof is not ours
        url = parse_url(bucket)
        if url.scheme == "file" and is_private(url.prefix):
            return _refusal(config, key, StorePermissionError("the sandbox of the session has a private folder there"))
        identity, rollout = (bucket, key, config.attempt), None
        if identity in self._accepted:
            logger.info("delivered again: %s", key)
            rollout = next((r for r in self._live if r.info.result_key == key), None)  # None if it has ended
        else:
            info = RolloutInfo(
                config=config,
                session_id=session_id,
                result_key=key,
                payload=redact_payload(payload),
                train=config.extra.get(TRAIN_FIELD) or function.train,
            )
            about: dict[str, Any] = {"function": function, "args": args, "settings": settings, "info": info}
            rollout = Rollout(**about, store=store, heartbeat_s=heartbeat_s)
            self._begin_once(identity, rollout)
        if rollout is not None and heartbeat_s is not None and settings.store_check_s > 0:
            # The first heartbeat shows if the store accepts objects. Faults that may pass are tried again for longer than this.
            await asyncio.wait({rollout.first_beat}, timeout=settings.store_check_s)
            refusal = rollout.first_beat.result() if rollout.first_beat.done() else None
            if refusal is not None:
                rollout.interrupt("its record cannot be stored")
                if rollout.agent is not None:
                    self.runner.cancel(rollout.agent)
                # Its interrupted record may have been stored, but the next delivery runs it again: access may be granted then.
                rollout.done.add_done_callback(lambda _: self._accepted.pop(identity, None))
                return _refusal(config, key, refusal)
        return reply

    async def _accept_job(
        self, job: JobRollout, function: RolloutFunction, context: Any, session_id: str
    ) -> dict[str, Any]:
        from .sagemaker.jobs import make_rollout  # only rollouts of jobs need its imports

        self.settings.check_base_url(job.endpoint)
        identity = (job.arn, job.key)
        if identity not in self._accepted:
            self._begin_once(identity, make_rollout(job, function, context, session_id, self.settings))
        if self.settings.sagemaker_background:
            return {"status": "in_progress"}
        await asyncio.wrap_future(self._accepted[identity])
        if identity not in self._accepted:
            raise AgentCoreRLError(f"the reward of {job.key} could not be reported; the agent's log has the reason")
        return {"status": "completed"}

    def _begin_once(self, identity: Identity, rollout: Rollout) -> None:
        """Begin a rollout, and recognize it if it is delivered again. If nothing is stored, the next delivery runs it again."""
        self._accepted[identity] = rollout.done
        rollout.done.add_done_callback(lambda _: rollout.stored or self._accepted.pop(identity, None))
        while len(self._accepted) > REMEMBERED:
            self._accepted.popitem(last=False)
        try:
            self._begin(rollout)
        except BaseException:
            self._accepted.pop(identity, None)
            raise

    def open(self) -> None:
        """Accept rollouts again after `close`: a test may start the same app twice."""
        self._closing = ""

    def interrupt(self, reason: str) -> None:
        """End every running rollout with an `interrupted` record and accept no new ones.

        Callable from any thread and from a signal handler.
        """
        self._closing = self._closing or reason
        for rollout in list(self._live):
            rollout.interrupt(reason)

    def interrupt_on_sigterm(self) -> Callable[[], None]:
        """Write `interrupted` records as soon as SIGTERM arrives, not only when the server has closed its connections.

        The handler before this one is called, too. Returns a function that restores it.
        """
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        before = signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: Any) -> None:
            self.interrupt("the session received SIGTERM before the agent had finished")
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, handle)

        def restore() -> None:
            if signal.getsignal(signal.SIGTERM) is handle:
                signal.signal(signal.SIGTERM, before)

        return restore

    async def close(self, reason: str) -> None:
        """Interrupt what runs and wait for its records, for at most ``grace_s``."""
        self.interrupt(reason)
        pending = {rollout: asyncio.wrap_future(rollout.done) for rollout in list(self._live)}
        if not pending:
            return
        grace_s = self.settings.grace_s
        await asyncio.wait(pending.values(), timeout=grace_s)
        self.runner.cancel()
        for rollout, done in pending.items():
            if not done.done():
                logger.critical("record not stored within %.0f s of the shutdown: %s", grace_s, rollout.info.result_key)

    def store_for(self, url: str, region: str | None = None) -> tuple[ObjectStore, bool]:
        """Return the store of a bucket or URL, and True if the agent's author brought it (then it gets records only)."""
        own = self._own_store(url)
        if own is not None:
            return own, True
        with self._lock:
            if url not in self._stores:
                self._stores[url] = open_store(url, region=region)
            return self._stores[url], False

    def proof_key_of(self, key: str) -> str | None:
        """Return the secret of the running rollout whose record will be at a key."""
        return next((r.info.config.proof_key for r in list(self._live) if r.info.result_key == key), None)

    def _begin(self, rollout: Rollout) -> None:
        self._live.add(rollout)
        busy = self._on_start(rollout.function.name)

        def finished(_: asyncio.Task[None] | None = None) -> None:
            self._on_end(busy)
            self._live.discard(rollout)
            rollout.done.set_result(None)

        try:
            supervisor = rollout.start(self.runner)
        except BaseException:  # no thread can be started
            finished()
            raise
        supervisor.add_done_callback(finished)


def is_rollout(payload: Any) -> bool:
    """Return True for rollouts, rollouts of SageMaker's jobs, and the doctor's probes. All other payloads are production's."""
    return isinstance(payload, Mapping) and (
        PROBE_FIELD in payload or payload.get(ROLLOUT_FIELD) is not None or job_rollout(payload) is not None
    )


def _refusal(config: RolloutConfig, key: str, error: AgentCoreRLError) -> dict[str, Any]:
    bucket = str(config.s3_bucket)
    text = f"the agent cannot store its record in {bucket}: {error}"
    if isinstance(error, StorePermissionError) and bucket.startswith("file:"):
        text += f". The session cannot write to {bucket} (local runtime: --store {bucket})"
    elif isinstance(error, StorePermissionError):
        rights = "s3:PutObject, s3:GetObject and s3:DeleteObject"
        text += f". The agent's role needs {rights} on {config.exp_id}/* there"
    logger.critical("rollout refused: %s", text)
    # Without `s3_bucket` and `result_key` a client of the published package fails on the reply itself.
    where = {"s3_bucket": bucket, "result_key": key}
    return {"status": REFUSED, **where, "error": text, "error_type": type(error).__name__}


def _without_proof_key(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the payload for the agent's code, which could print or pass on the key."""
    block = payload.get(ROLLOUT_FIELD)
    if not isinstance(block, Mapping):
        return payload
    return {**payload, ROLLOUT_FIELD: {k: v for k, v in block.items() if k != PROOF_KEY_FIELD}}


def _reseed() -> None:
    """Give the global random generators a fresh state: sessions forked from one template would draw the same numbers."""
    import random

    random.seed()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
