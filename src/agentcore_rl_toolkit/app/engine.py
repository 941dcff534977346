"""Accepts invocations: checks them, recognises repeated ones, starts their rollouts, and ends them all at shutdown."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import sys
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

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
from ..proof import PROOF_KEY_FIELD, REPLY_FIELD, SCHEME
from ..store import ObjectStore, open_store, url_matches
from .record import RolloutInfo, find_secrets
from .rollout import Rollout, RolloutFunction
from .runner import AgentRunner, keep_running
from .sagemaker.job import job_rollout
from .settings import AgentSettings

if TYPE_CHECKING:
    from .sagemaker.jobs import Jobs

logger = logging.getLogger(__name__)

REMEMBERED = 10_000  # rollouts whose repeated delivery is still recognised
MIN_HEARTBEAT_S = 0.2  # a caller must not make an agent write without pause

Identity = tuple[str, str, int]  # store, key, attempt


class Engine:
    """Accepts the invocations of one app. Thread-safe; starts and opens nothing before the first one."""

    def __init__(
        self,
        *,
        settings: Callable[[], AgentSettings],
        on_start: Callable[[str], int],
        on_end: Callable[[int], Any],
        own_store: Callable[[str], ObjectStore | None],
    ) -> None:
        self._read_settings = settings
        self._on_start, self._on_end = on_start, on_end
        self._own_store = own_store
        self._settings: AgentSettings | None = None
        self._lock = threading.RLock()  # a signal handler may interrupt its own holder
        self.runner = AgentRunner()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stores: dict[str, ObjectStore] = {}
        self._accepted: OrderedDict[Identity, None] = OrderedDict()
        self._live: set[Rollout] = set()
        self._sagemaker: Jobs | None = None
        self._closing = ""

    @property
    def settings(self) -> AgentSettings:
        """Read on first use, which is the first invocation: a snapshot of the process holds none of them."""
        with self._lock:
            if self._settings is None:
                self._settings = self._read_settings()
                if self._settings.reseed:
                    reseed()
            return self._settings

    @property
    def busy(self) -> bool:
        """True while a rollout runs."""
        return bool(self._live)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop of supervisors, in a thread of its own."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=keep_running, args=(self._loop,), name="rollout-supervisors", daemon=True
                ).start()
            return self._loop

    async def accept(
        self,
        function: RolloutFunction,
        payload: Any,
        context: Any,
    ) -> dict[str, Any]:
        """Check one invocation, start its rollout unless it runs or ran already, and return the reply.

        The reply of a rollout whose record cannot be stored says so (``status: refused``) with HTTP 200: AgentCore hands on no
        text of an error answer.

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
            from . import probe  # a rollout does not pay for what it loads

            return await probe.answer(payload, session_id, settings, self.store_for)
        job = job_rollout(payload)
        if job is not None:
            return await self._jobs().accept(job, function, context, session_id, settings)
        config = RolloutConfig.from_payload(payload)
        settings.check_base_url(config and config.base_url)
        seen = payload if config is None or config.proof_key is None else _without_proof_key(payload)
        args = function.arguments(seen, context)
        make = functools.partial(Rollout, function=function, args=args, settings=settings, session_id=session_id)
        if config is None or config.exp_id is None or config.input_id is None or config.s3_bucket is None:
            self._begin(make(config=config or RolloutConfig()))
            return {"status": "processing"}

        bucket, exp_id, input_id = config.s3_bucket, config.exp_id, config.input_id
        if input_id == "":  # a fresh one, and the same one when this session is delivered again
            input_id = session_id
            config = dataclasses.replace(config, input_id=input_id)
        key = result_key(exp_id, input_id, session_id)
        if settings.allowed_buckets and not url_matches(bucket, settings.allowed_buckets):
            raise ContractError(
                f"this agent may not write to {bucket!r}; AGENTCORE_RL_ALLOWED_BUCKETS lists where it may",
                key=key,
            )
        store, own = self.store_for(bucket)
        asked_s = settings.heartbeat_s if config.heartbeat_s is None else float(config.heartbeat_s)
        if settings.heartbeat_s == 0:
            asked_s = 0.0  # the operator's word
        heartbeat_s = max(asked_s, MIN_HEARTBEAT_S) if asked_s > 0 and not own else None
        reply: dict[str, Any] = {"status": "processing", "s3_bucket": bucket, "result_key": key, RUNS_ONCE_FIELD: True}
        if heartbeat_s is not None:
            reply["heartbeat_s"] = heartbeat_s  # a promise that the client may hold us to
        if config.proof_key is not None:
            reply[REPLY_FIELD] = SCHEME  # a promise, too: from now on a record without a proof is not ours
        info = RolloutInfo(
            config=config,
            session_id=session_id,
            result_key=key,
            payload=redact_payload(payload),
            secrets=find_secrets(config, key, session_id),
            started_s=time.time(),
            train=config.extra.get(TRAIN_FIELD) or function.train,
        )
        identity = (bucket, key, config.attempt)
        if not self._is_new(identity):
            return reply
        rollout = make(config=config, info=info, store=store, heartbeat_s=heartbeat_s)
        self._begin(rollout)
        if heartbeat_s is not None and settings.store_check_s > 0:
            refusal = await rollout.refusal(settings.store_check_s)
            if refusal is not None:
                return self._refuse(rollout, config, identity, refusal)
        return reply

    def _jobs(self) -> Jobs:
        from .sagemaker.jobs import Jobs  # only rollouts of jobs pay for what it loads

        with self._lock:
            self._sagemaker = self._sagemaker or Jobs(self._begin)
            return self._sagemaker

    def _is_new(self, identity: Identity) -> bool:
        """Whether an invocation is delivered for the first time; from now on it is not."""
        with self._lock:
            if identity in self._accepted:
                logger.info("delivered again: %s", identity[1])
                return False
            self._accepted[identity] = None
            while len(self._accepted) > REMEMBERED:
                self._accepted.popitem(last=False)
            return True

    def _refuse(
        self, rollout: Rollout, config: RolloutConfig, identity: Identity, refusal: AgentCoreRLError
    ) -> dict[str, Any]:
        text = f"the agent cannot store its record in {config.s3_bucket}: {refusal}"
        if isinstance(refusal, StorePermissionError):
            if str(config.s3_bucket).startswith("file:"):
                text += f". The session cannot write to {config.s3_bucket} (local runtime: --store {config.s3_bucket})"
            else:
                text += f". The agent's role needs s3:PutObject, s3:GetObject and s3:DeleteObject on {config.exp_id}/* there"
        logger.critical("rollout refused: %s", text)
        rollout.give_up(self.runner, text)
        # Once it has ended, the same delivery is tried again: access may have been granted.
        rollout.done.add_done_callback(lambda _: self._accepted.pop(identity, None))
        # Without `s3_bucket` and `result_key` a client of the published package fails on the reply itself.
        where = {"s3_bucket": config.s3_bucket, "result_key": identity[1]}
        return {"status": REFUSED, **where, "error": text, "error_type": type(refusal).__name__}

    def open(self) -> None:
        """Take rollouts again after `close`: a test may start the same app twice."""
        self._closing = ""

    def interrupt(self, reason: str) -> None:
        """End every running rollout with an `interrupted` record and take no new ones.

        Callable from any thread and from a signal handler.
        """
        self._closing = self._closing or reason
        for rollout in list(self._live):
            rollout.interrupt(reason)

    async def close(self, reason: str) -> bool:
        """Interrupt what runs and wait for its records, for at most ``grace_s``; True when nothing is left."""
        self.interrupt(reason)
        if not self._live:
            return True
        grace_s = self.settings.grace_s
        pending = {rollout: asyncio.wrap_future(rollout.done) for rollout in list(self._live)}
        await asyncio.wait(pending.values(), timeout=grace_s)
        self.runner.cancel()
        late = [rollout for rollout, done in pending.items() if not done.done()]
        for rollout in late:
            logger.critical("record not stored within %.0f s of the shutdown: %s", grace_s, rollout.label)
        return not late

    def store_for(self, url: str) -> tuple[ObjectStore, bool]:
        """The store of a bucket or URL, and whether the agent's author brought it (then it gets records only)."""
        own = self._own_store(url)
        if own is not None:
            return own, True
        with self._lock:
            if url not in self._stores:
                self._stores[url] = open_store(url)
            return self._stores[url], False

    def proof_key_of(self, key: str) -> str | None:
        """The secret of the rollout whose record lies at a key, while it runs."""
        return next((r.info.config.proof_key for r in list(self._live) if r.info and r.info.result_key == key), None)

    def _begin(self, rollout: Rollout) -> None:
        self._live.add(rollout)
        busy = self._on_start(rollout.name)

        def finished(_: asyncio.Task[None]) -> None:
            self._on_end(busy)
            self._live.discard(rollout)
            rollout.done.set_result(None)

        rollout.start(self.runner).add_done_callback(finished)


def is_rollout(payload: Any) -> bool:
    """Return True for rollouts, rollouts of SageMaker's jobs, and the doctor's probes; all other payloads are production's."""
    return isinstance(payload, Mapping) and (
        PROBE_FIELD in payload or payload.get(ROLLOUT_FIELD) is not None or job_rollout(payload) is not None
    )


def _without_proof_key(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The payload as the agent's code sees it: what it does not know, it cannot print or pass on."""
    block = {k: v for k, v in payload[ROLLOUT_FIELD].items() if k != PROOF_KEY_FIELD}
    return {**payload, ROLLOUT_FIELD: block}


def reseed() -> None:
    """Give the global random generators a fresh state.

    Sessions restored from one snapshot, or forked from one template, would otherwise all draw the same "random" numbers.
    """
    import random

    random.seed()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(int.from_bytes(os.urandom(4)))
