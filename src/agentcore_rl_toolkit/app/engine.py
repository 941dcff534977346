"""One rollout from its invocation to its stored record.

Theory of operation. `Engine.accept` runs inside the invocation request, on the SDK's worker loop: it checks the request,
starts the agent through `AgentRunner`, leaves a supervising task on that loop, and answers. The supervisor waits for whichever
comes first: the agent's end, the next heartbeat, or an interruption (SIGTERM, server shutdown). It then writes exactly one
record, create-only, and keeps the session `HealthyBusy` until the store has it. Agent code never runs on this loop, so an agent
that blocks delays nothing.

    accepted -> running --agent returned or raised--> storing -> done
                   |                                     |
                   +--interrupted--> storing `interrupted`+
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import json
import logging
import os
import sys
import threading
import time
import traceback
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from ..contract import INFO_FIELD, Outcome, RolloutConfig, alive_key, parse_record, redact, result_key
from ..errors import AgentCoreRLError, ContractError, InvalidResultError, ObjectExistsError, StoreError
from ..logs import log_context
from ..store import ObjectStore, open_store, url_matches
from .notify import notify
from .record import RolloutInfo, describe, error_body, find_secrets, success_body
from .runner import AgentRunner
from .settings import AgentSettings

logger = logging.getLogger(__name__)

REMEMBERED = 10_000  # finished rollouts whose repeated delivery is still recognised
INTERRUPTED = "Interrupted"


class Engine:
    """Accepts invocations of one app and supervises their rollouts. Thread-safe; holds nothing before the first invocation."""

    def __init__(
        self,
        *,
        settings: Callable[[], AgentSettings],
        on_start: Callable[[str], int],
        on_end: Callable[[int], Any],
        open_store_for: Callable[[str], ObjectStore | None] = lambda _url: None,
    ) -> None:
        self._read_settings = settings
        self._on_start, self._on_end = on_start, on_end
        self._open_store_for = open_store_for
        self._settings: AgentSettings | None = None
        self._lock = threading.Lock()
        self._runner = AgentRunner()
        self._stores: dict[str, ObjectStore] = {}
        self._running: dict[tuple[str, str, int], Rollout] = {}
        self._finished: OrderedDict[tuple[str, str, int], None] = OrderedDict()
        self._live: set[Rollout] = set()
        self._interrupted = False

    @property
    def settings(self) -> AgentSettings:
        with self._lock:
            if self._settings is None:
                self._settings = self._read_settings()
                if self._settings.reseed:
                    reseed()
            return self._settings

    async def accept(
        self, func: Callable[..., Any], name: str, takes_context: bool, payload: Any, context: Any
    ) -> dict[str, Any]:
        """Check one invocation, start its rollout unless it already runs or ran, and return the reply.

        Raises: ContractError when the `_rollout` block is unusable or names a store outside the allow-list.
        """
        settings = self.settings
        config = RolloutConfig.from_payload(payload) if isinstance(payload, Mapping) else None
        session_id = getattr(context, "session_id", None) or str(uuid.uuid4())
        args = (payload, context) if takes_context else (payload,)
        if config is None or not config.stores_result:
            self._begin(Rollout(self, func, name, args, None, None, session_id))
            return {"status": "processing"}

        assert config.exp_id is not None
        assert config.input_id is not None
        assert config.s3_bucket is not None
        key = result_key(config.exp_id, config.input_id, session_id)
        if settings.allowed_buckets and not url_matches(config.s3_bucket, settings.allowed_buckets):
            raise ContractError(
                f"this agent must not write to {config.s3_bucket!r}; AGENTCORE_RL_ALLOWED_BUCKETS names where it may",
                key=key,
            )
        reply = {"status": "processing", "s3_bucket": config.s3_bucket, "result_key": key}
        identity = (config.s3_bucket, key, config.attempt)
        info = RolloutInfo(
            config=config,
            session_id=session_id,
            result_key=key,
            payload=redact(payload),
            secrets=find_secrets(config, key, session_id),
            started_s=time.time(),
        )
        rollout = Rollout(self, func, name, args, info, self._store(config.s3_bucket), session_id)
        with self._lock:
            if identity in self._running or identity in self._finished:
                logger.info("delivered again, already %s: %s", "running" if identity in self._running else "done", key)
                return reply
            self._running[identity] = rollout
        self._begin(rollout, identity)
        return reply

    def interrupt(self, reason: str) -> None:
        """End every running rollout with an `interrupted` record. Callable from any thread and from a signal handler."""
        self._interrupted = True
        for rollout in list(self._live):
            rollout.interrupt(reason)

    async def drain(self, grace_s: float) -> bool:
        """Wait until every record is stored, for at most `grace_s`; True when nothing is left."""
        self._runner.cancel_async()
        pending = [asyncio.wrap_future(rollout.done) for rollout in list(self._live)]
        if pending:
            await asyncio.wait(pending, timeout=grace_s)
        for rollout in list(self._live):
            logger.error("record not stored within %.0f s of the shutdown: %s", grace_s, rollout.label)
        return not self._live

    def _begin(self, rollout: Rollout, identity: tuple[str, str, int] | None = None) -> None:
        self._live.add(rollout)
        busy = self._on_start(rollout.name)

        def finished(_: asyncio.Task[None]) -> None:
            self._on_end(busy)
            with self._lock:
                self._live.discard(rollout)
                if identity is not None:
                    self._running.pop(identity, None)
                    self._finished[identity] = None
                    while len(self._finished) > REMEMBERED:
                        self._finished.popitem(last=False)
            rollout.done.set_result(None)

        rollout.start(self._runner).add_done_callback(finished)

    def _store(self, url: str) -> ObjectStore:
        with self._lock:
            store = self._open_store_for(url) or self._stores.get(url)
            if store is None:
                store = self._stores[url] = open_store(url)
            return store


class Rollout:
    """The supervisor of one run of the agent; `info` is None when its result is not stored."""

    def __init__(
        self,
        engine: Engine,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        info: RolloutInfo | None,
        store: ObjectStore | None,
        session_id: str,
    ) -> None:
        self._engine, self._func, self.name, self._args = engine, func, name, args
        self._info, self._store, self._session_id = info, store, session_id
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._stop_reason = ""
        self.done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.done.set_running_or_notify_cancel()  # waiting for it with a deadline must not cancel it

    @property
    def label(self) -> str:
        return self._info.result_key if self._info else self._session_id

    def start(self, runner: AgentRunner) -> asyncio.Task[None]:
        config = self._info.config if self._info else RolloutConfig()
        self._loop = asyncio.get_running_loop()
        with log_context(session_id=self._session_id, input_id=config.input_id, exp_id=config.exp_id):
            agent = runner.start(self._func, self._args, contextvars.copy_context(), f"rollout-{self.name}")
            self._task = self._loop.create_task(self._supervise(agent), name=f"supervise-{self.name}")
        return self._task

    def interrupt(self, reason: str) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._stop_reason = self._stop_reason or reason
            self._loop.call_soon_threadsafe(self._stop.set)

    async def _supervise(self, agent: concurrent.futures.Future[Any]) -> None:
        try:
            ended = asyncio.ensure_future(asyncio.wrap_future(agent))
            stopped = asyncio.ensure_future(self._stop.wait())
            try:
                await self._wait(ended, stopped)
                if self._info is not None and self._store is not None:
                    await self._finish(self._info, self._store, ended)
                elif ended.done() and ended.exception() is not None:
                    logger.error("rollout failed", exc_info=ended.exception())
            finally:
                stopped.cancel()
                if not ended.done():
                    ended.cancel()
        except Exception:  # the last line of defence: a supervisor that dies is a record that is never written
            logger.exception("rollout %s could not be finished", self.label)

    async def _wait(self, ended: asyncio.Future[Any], stopped: asyncio.Future[Any]) -> None:
        """Until the agent ends or the rollout is interrupted; writes heartbeats meanwhile."""
        period_s = 0.0
        if self._info is not None:
            asked = self._info.config.heartbeat_s
            period_s = self._engine.settings.heartbeat_s if asked is None else float(asked)
        waiting = {ended, stopped}
        if period_s <= 0:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return
        while not ended.done() and not stopped.done():
            beat = asyncio.ensure_future(self._beat(period_s))
            await asyncio.wait({*waiting, beat}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(waiting, timeout=period_s, return_when=asyncio.FIRST_COMPLETED)
            if not beat.done():
                beat.cancel()
            await asyncio.wait({beat})

    async def _beat(self, period_s: float) -> None:
        assert self._info is not None
        assert self._store is not None
        body = json.dumps(
            {
                "session_id": self._session_id,
                "attempt": self._info.config.attempt,
                "started_s": round(self._info.started_s, 3),
                "beat_s": round(time.time(), 3),
                "period_s": period_s,
            }
        ).encode()
        try:
            await self._store.put_async(
                alive_key(self._info.result_key), body, durable=False, timeout_s=max(period_s, 5.0)
            )
        except AgentCoreRLError as e:
            logger.warning("heartbeat not written: %s", e)

    async def _finish(self, info: RolloutInfo, store: ObjectStore, ended: asyncio.Future[Any]) -> None:
        settings = self._engine.settings
        interrupted = not ended.done()
        body, outcome = await self._encode(info, ended, settings)
        stored = await self._store_record(info, store, body, settings, interrupted=interrupted)
        if not stored:
            return
        try:
            await store.delete_async(alive_key(info.result_key), timeout_s=10.0)
        except AgentCoreRLError as e:
            logger.warning("heartbeat object left behind: %s", e)
        await self._push(info, outcome, settings)

    async def _encode(
        self, info: RolloutInfo, ended: asyncio.Future[Any], settings: AgentSettings
    ) -> tuple[bytes, Outcome]:
        now = time.time()
        if not ended.done():
            logger.error("interrupted: %s", self._stop_reason)
            return (
                error_body(
                    info,
                    stop_reason=f"interrupted: {self._stop_reason}",
                    error_type=INTERRUPTED,
                    traceback="",
                    outcome=Outcome.LOST,
                    finished_s=now,
                ),
                Outcome.LOST,
            )
        error = ended.exception()
        outcome = Outcome.AGENT_ERROR
        if error is None:
            try:
                return await asyncio.to_thread(
                    success_body, info, ended.result(), finished_s=now, max_bytes=settings.max_record_bytes
                )
            except Exception as e:
                error = e
                if isinstance(e, InvalidResultError):
                    outcome = Outcome.INVALID
        stop_reason, error_type = describe(error)
        text = "".join(traceback.format_exception(error))
        logger.error("rollout failed: %s: %s", error_type, stop_reason, exc_info=error)
        body = await asyncio.to_thread(
            error_body,
            info,
            stop_reason=stop_reason,
            error_type=error_type,
            traceback=text,
            outcome=outcome,
            finished_s=now,
        )
        return body, outcome

    async def _store_record(
        self, info: RolloutInfo, store: ObjectStore, body: bytes, settings: AgentSettings, *, interrupted: bool
    ) -> bool:
        timeout_s = settings.grace_s if interrupted else settings.put_timeout_s
        try:
            await store.put_async(info.result_key, body, create_only=True, timeout_s=timeout_s)
        except ObjectExistsError:
            return await self._settle_existing(info, store, body, timeout_s)
        except StoreError as e:
            logger.critical("the record of %s is lost: %s", info.result_key, e)
            return False
        logger.info("record stored: %s (%d bytes)", info.result_key, len(body))
        return True

    async def _settle_existing(self, info: RolloutInfo, store: ObjectStore, body: bytes, timeout_s: float) -> bool:
        """Somebody wrote this key before us: the first record of an attempt stays, one of an earlier attempt is replaced."""
        try:
            there = parse_record(await store.get_async(info.result_key, timeout_s=timeout_s))
            block = there.get(INFO_FIELD)
            earlier = block.get("attempt") if isinstance(block, Mapping) else None
            if isinstance(earlier, int) and earlier < info.config.attempt:
                await store.put_async(info.result_key, body, timeout_s=timeout_s)
                return True
        except (StoreError, ContractError) as e:
            logger.error("%s is taken and could not be read: %s", info.result_key, e)
        logger.warning("%s holds a record already; it stays", info.result_key)
        return True

    async def _push(self, info: RolloutInfo, outcome: Outcome, settings: AgentSettings) -> None:
        url = info.config.notify_url
        if not url:
            return
        if settings.allowed_notify_urls and not any(_below(url, allowed) for allowed in settings.allowed_notify_urls):
            logger.warning("push to %s is not allowed by AGENTCORE_RL_ALLOWED_NOTIFY_URLS", url)
            return
        message = {
            "session_id": info.session_id,
            "exp_id": info.config.exp_id,
            "input_id": info.config.input_id,
            "s3_bucket": info.config.s3_bucket,
            "result_key": info.result_key,
            "outcome": str(outcome),
            "attempt": info.config.attempt,
        }
        base_url = info.config.base_url
        same_host = base_url is not None and _origin(base_url) == _origin(url)
        await notify(
            url, message, timeout_s=settings.notify_timeout_s, api_key=info.config.api_key if same_host else None
        )


def _origin(url: str) -> tuple[str, str]:
    scheme, _, rest = url.partition("://")
    return scheme.lower(), rest.partition("/")[0].lower()


def _below(url: str, allowed: str) -> bool:
    allowed = allowed.rstrip("/")
    return url == allowed or url.startswith((allowed + "/", allowed + "?"))


def reseed() -> None:
    """Give the global random generators a fresh state.

    Sessions restored from one snapshot, or forked from one template, would otherwise all draw the same "random" numbers.
    """
    import random

    random.seed()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(int.from_bytes(os.urandom(4)))
