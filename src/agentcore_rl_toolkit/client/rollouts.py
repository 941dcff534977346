"""`RolloutClient`: starts rollouts of one agent and collects their results."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal

from .._portal import Portal, result_of
from ..contract import IdValue, check_id
from ..errors import ConfigError
from ..store import ObjectStore, open_store, parse_url
from .arguments import check_choice, check_instance, check_number, check_url, check_whole, for_the_agent
from .batches import BatchMethods
from .data_plane.delivery import shared_word
from .data_plane.pacing import PaceLimits, shared_pacer
from .data_plane.transport import AgentTransport, Boto3Transport
from .future import RolloutFuture
from .ledger import Ledger
from .lifecycle.engine import Engine
from .lifecycle.events import Events, Subscriber
from .lifecycle.flight import Adoption
from .lifecycle.lifetime import Stores, dropped, is_loopback, open_engines
from .proofs import Proofs
from .records.replay import Replayed, Reward, expected_of_records, replay_async
from .settings import (
    ON_FAILURE,
    PUBLISHED_POOL_CONNECTIONS,
    Deadlines,
    OnFailure,
    Prepare,
    WatchSettings,
)

ENDPOINT_ENV = ("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", "AWS_ENDPOINT_URL")
COLD_START_S = 15.0  # a slow cold start; invokes of that length, at the full pace, are what the pool must hold
POOL_LIMIT = 512


class RolloutClient(BatchMethods):
    """Starts rollouts of one agent and collects their results. Thread-safe; sync and async calls may be mixed.

    Args:
        agent_runtime_arn: ARN of the agent at AgentCore Runtime (or at a local one).
        s3_bucket: where agents store results: a bucket name or a store URL (``s3://bucket/prefix``, ``file:///dir``).
            It is sent to the agent as it is.
        exp_id: experiment; first part of every key.
        max_retry_attempts: how often an invoke that did not reach the runtime is sent. Refusals (429, 402) are waited
            out instead.
        tps_limit: requests per second (invokes; stops have the same limit of their own).
        max_pool_connections: connections and threads for invokes. Left at 10, it follows `tps_limit`.
        base_url, model_id: passed to the agent.
        rollout_config: more entries of the `_rollout` block, which the agent gets.
        extra_config: the same by name, for what is usual there: api_key, sampling_params, temperature, top_p, max_tokens and
            the like. Any other keyword is an error.
        sessions_per_minute: new sessions per minute. AgentCore allows container agents 400.
        endpoint_url: another AgentCore data plane, such as a local runtime. Default: the environment, then AWS.
        store: the opened store to read results from, if not the one `s3_bucket` names.
        qualifier: endpoint name of the agent.
        on_failure: "return" hands out the record of a failed agent, "raise" raises, "retry" runs another session first
            (see `retries`).
        retries: additional sessions after lost, timed out or throttled ones; default 1 with "retry", else 0.
        deadlines: of the stages.
        watch: how results are noticed.
        push: True runs a listener on loopback that agents on the same machine notify; "auto" does so when the endpoint
            is on loopback; False never.
        notify_url: where agents report instead, such as a gateway; whoever receives it calls `notify`.
        resend: whether an invoke that the runtime answered with 500 or 503 is sent again, with the same session id, up to
            `max_retry_attempts` times in all. "auto": for agents whose answers said that a session's payload runs once
            however often it is delivered (agents of this toolkit do), and where the runtime says that it has no such
            session. True: always; an agent of the published toolkit may then run twice in one session. False: never.
        transport: another way to the agent than boto3.
        boto3_session: for credentials other than the default ones.
        proof_key: 32 random bytes or more, from which the secrets of sessions are derived, for processes that follow each
            other's sessions. Default: the key beside a ledger in a file, else one made for this client.
        require_proof: refuse records that do not prove that they come from their session, those of agents that cannot
            prove it included.

    Raises: ConfigError (a ValueError) on unusable arguments.
    """

    def __init__(
        self,
        agent_runtime_arn: str,
        s3_bucket: str,
        exp_id: IdValue,
        max_retry_attempts: int = 5,
        tps_limit: float = 25,
        max_pool_connections: int = PUBLISHED_POOL_CONNECTIONS,
        base_url: str | None = None,
        model_id: str | None = None,
        *,
        sessions_per_minute: float | None = None,
        stop_tps_limit: float | None = None,
        endpoint_url: str | None = None,
        store: ObjectStore | None = None,
        qualifier: str | None = None,
        on_failure: OnFailure = "return",
        retries: int | None = None,
        deadlines: Deadlines | None = None,
        watch: WatchSettings | None = None,
        push: bool | Literal["auto"] = "auto",
        notify_url: str | None = None,
        resend: bool | Literal["auto"] = "auto",
        transport: AgentTransport | None = None,
        boto3_session: Any = None,
        proof_key: bytes | None = None,
        require_proof: bool = False,
        rollout_config: Mapping[str, Any] | None = None,
        **extra_config: Any,
    ) -> None:
        given = for_the_agent(rollout_config, extra_config, RolloutClient.__init__)
        check_choice("on_failure", on_failure, ON_FAILURE)
        check_choice("resend", resend, (True, False, "auto"))
        check_choice("push", push, (True, False, "auto"))
        check_choice("require_proof", require_proof, (True, False))
        check_number("tps_limit", tps_limit, above=0)
        check_number("sessions_per_minute", sessions_per_minute, above=0, optional=True)
        check_number("stop_tps_limit", stop_tps_limit, above=0, optional=True)
        check_whole("max_retry_attempts", max_retry_attempts, at_least=1)
        check_whole("max_pool_connections", max_pool_connections, at_least=1)
        check_whole("retries", retries, at_least=0, optional=True)
        check_instance("deadlines", deadlines, Deadlines)
        check_instance("watch", watch, WatchSettings)
        check_url("endpoint_url", endpoint_url)
        check_url("notify_url", notify_url)
        parse_url(s3_bucket)
        self.agent_runtime_arn = agent_runtime_arn
        self.s3_bucket = s3_bucket
        self.exp_id = check_id(exp_id, "exp_id")
        self.base_url = base_url
        self.model_id = model_id
        self.extra_config = given
        self.tps_limit = tps_limit
        self.deadlines = deadlines or Deadlines()
        self.watch = watch or WatchSettings()
        self.on_failure: OnFailure = on_failure
        self.retries = retries if retries is not None else int(on_failure == "retry")
        self.endpoint_url = endpoint_url or next(
            (os.environ[name] for name in ENDPOINT_ENV if os.environ.get(name)), None
        )
        self.store = store if store is not None else open_store(s3_bucket)

        pool = max_pool_connections
        if pool == PUBLISHED_POOL_CONNECTIONS:
            pool = int(min(POOL_LIMIT, max(64, tps_limit * COLD_START_S)))
        self._boto3 = Boto3Transport(
            agent_runtime_arn,
            region=self.region,
            endpoint_url=endpoint_url,
            qualifier=qualifier,
            pool_connections=pool,
            read_timeout_s=self.deadlines.start_s,
            session=boto3_session,
        )
        pacer = shared_pacer(agent_runtime_arn, self.endpoint_url)
        limits = PaceLimits(tps_limit, stop_tps_limit or tps_limit, sessions_per_minute)
        pacer.join(limits)
        self._leave_pacer = functools.partial(pacer.leave, limits)
        self._ledgers: dict[str, Ledger] = {}
        self._portal = Portal("agentcore-rl-client", owner="client")
        self._may_close = threading.Semaphore(1)  # taken by the first `close`
        self._engine = Engine(
            portal=self._portal,
            transport=transport or self._boto3,
            pacer=pacer,
            store_for=Stores(s3_bucket, self.store),
            watch=self.watch,
            events=Events(self.exp_id),
            proofs=Proofs(proof_key, required=require_proof),
            word=shared_word(agent_runtime_arn, self.endpoint_url, qualifier),
            resend=resend,
            max_attempts=max_retry_attempts,
            pool_size=pool,
            stop_s=self.deadlines.stop_s,
            listen=push is True or (push == "auto" and is_loopback(self.endpoint_url)),
            notify_url=notify_url,
        )
        open_engines.add((self._portal, self._engine))
        self._finalizer = weakref.finalize(self, dropped, self._portal, self._engine)
        self._finalizer.atexit = False

    # ---- single rollouts

    def submit(
        self,
        payload: Mapping[str, Any],
        session_id: str | None = None,
        input_id: IdValue | None = None,
        *,
        timeout: float | None = None,
        on_failure: OnFailure | None = None,
        retries: int | None = None,
        prepare: Prepare | None = None,
        rollout_config: Mapping[str, Any] | None = None,
        **rollout_overrides: Any,
    ) -> RolloutFuture:
        """Start a rollout without waiting for the runtime to accept it. Failures, also those of the start, are in the future.

        Args:
            timeout: seconds from the moment the invoke is sent to the record.
            prepare: ``prepare(session_id, attempt)`` gives the `_rollout` overrides of each attempt (a dict, or an
                awaitable of one, run on the client's loop): where every session needs an address and a key of its own.
            rollout_config, rollout_overrides: `_rollout` entries of this rollout, as in the client's constructor.
        Raises: ConfigError on unusable arguments.
        """
        return self._engine.submit(
            self._request(
                payload,
                session_id=session_id,
                input_id=input_id,
                overrides=for_the_agent(rollout_config, rollout_overrides, RolloutClient.submit),
                timeout=timeout,
                on_failure=on_failure,
                retries=retries,
                prepare=prepare,
            )
        )

    def invoke(
        self,
        payload: Mapping[str, Any],
        session_id: str | None = None,
        input_id: IdValue | None = None,
        *,
        rollout_config: Mapping[str, Any] | None = None,
        **rollout_overrides: Any,
    ) -> RolloutFuture:
        """Start a rollout and wait until the runtime accepted it.

        Raises: what prevented the start (RolloutThrottledError, AgentError, ConfigError, ...).
        """
        overrides = for_the_agent(rollout_config, rollout_overrides, RolloutClient.invoke, RolloutClient.submit)
        future = self._start(payload, session_id, input_id, overrides)
        self._engine.refuse_own_thread()
        try:
            result_of(future._accepted)
        except BaseException:
            future.cancel()
            raise
        self._raise_start_error(future)
        return future

    async def invoke_async(
        self,
        payload: Mapping[str, Any],
        session_id: str | None = None,
        input_id: IdValue | None = None,
        *,
        rollout_config: Mapping[str, Any] | None = None,
        **rollout_overrides: Any,
    ) -> RolloutFuture:
        """Async `invoke`. Cancelling it ends the rollout."""
        overrides = for_the_agent(rollout_config, rollout_overrides, RolloutClient.invoke_async, RolloutClient.submit)
        future = self._start(payload, session_id, input_id, overrides)
        try:
            await asyncio.wrap_future(future._accepted)
        except BaseException:
            future.cancel()
            raise
        self._raise_start_error(future)
        return future

    def attach(
        self,
        result_key: str,
        *,
        session_id: str,
        input_id: IdValue,
        s3_bucket: str | None = None,
        timeout: float | None = None,
    ) -> RolloutFuture:
        """A future for a session that something else started (an earlier process, another client): it is waited for, read and
        stopped like one of ours, and never started again.
        """
        request = self._request(
            {},
            session_id=session_id,
            input_id=input_id,
            overrides={},
            timeout=timeout,
            on_failure=None,
            retries=0,
            prepare=None,
        )
        return self._engine.submit(
            request, adopt=Adoption(accepted=True, bucket=s3_bucket or self.s3_bucket, key=result_key)
        )

    def _start(
        self, payload: Mapping[str, Any], session_id: str | None, input_id: IdValue | None, overrides: Mapping[str, Any]
    ) -> RolloutFuture:
        request = self._request(
            payload,
            session_id=session_id,
            input_id=input_id,
            overrides=overrides,
            timeout=None,
            on_failure=None,
            retries=None,
            prepare=None,
        )
        return self._engine.submit(request)

    @staticmethod
    def _raise_start_error(future: RolloutFuture) -> None:
        if future.done() and future._progress.agent_reply is None and future.record is None:
            error = future.exception(0)
            if error is not None:
                raise error

    # ---- stored records

    def replay_async(
        self,
        reward: Reward | None = None,
        *,
        input_id: IdValue | None = None,
        ledger: str | os.PathLike[str] | None = None,
    ) -> AsyncIterator[Replayed]:
        """The stored records of this experiment, each with `reward` computed anew; no agent runs. See `replay.replay_async`.

        Args:
            ledger: the file of a run, with which the records of its sessions are checked.
        """
        expected = expected_of_records(self._engine.proofs, None if ledger is None else Path(ledger))
        return replay_async(self.store, self.exp_id, reward, input_id=input_id, expected=expected)

    def replay(
        self,
        reward: Reward | None = None,
        *,
        input_id: IdValue | None = None,
        ledger: str | os.PathLike[str] | None = None,
    ) -> list[Replayed]:
        """Sync `replay_async`, as a list."""

        async def collect() -> list[Replayed]:
            return [item async for item in self.replay_async(reward, input_id=input_id, ledger=ledger)]

        return self._portal.call(collect())

    # ---- state and end

    def notify(self, session_id: str) -> None:
        """Tell the client that a session has finished, so that it reads the record now instead of at its next look."""
        self._engine.notify(session_id)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber(event, fields)`` for each event of a rollout, on the client's thread; it must not block.

        Events: intent, accepted, refused, server_error, retried, finished, stopped, watch_failure, skipped (with ``count`` names
        in the store that are no objects). Fields always hold ``session_id`` (empty for the last two) and ``exp_id``.
        """
        self._engine.events.subscribers.append(subscriber)

    @property
    def in_flight(self) -> int:
        """Rollouts without an outcome."""
        return self._engine.in_flight

    def flights(self) -> list[dict[str, Any]]:
        """Where each rollout without an outcome is: ``session_id``, ``input_id``, ``attempt``, ``stage``, seconds in it
        (``stage_s``) and in all (``total_s``), until its deadline (``left_s``, None: no limit), ``trouble`` with the store.
        """
        return self._engine.flights()

    @property
    def stats(self) -> dict[str, int]:
        """Counts since the start: submitted, refused, server_errors, retried, each outcome, failures by cause (cause_agent,
        cause_policy, cause_infrastructure), stopped, stop_failed, watch_failures, store_requests, skipped_names (what lies in
        the store beside the records and is no object); of the records read: proven, unproven, forged.
        """
        return {
            **self._engine.events.counts,
            "store_requests": self._engine.store_requests,
            "skipped_names": self._engine.skipped_names,
        }

    @property
    def region(self) -> str:
        """Of the agent, as its ARN says."""
        return self._parse_region_from_arn(self.agent_runtime_arn)

    @property
    def agentcore_client(self) -> Any:
        """The boto3 ``bedrock-agentcore`` client."""
        return self._boto3.client

    @property
    def s3_client(self) -> Any:
        """A boto3 S3 client, for your own code."""
        return self._boto3.make_s3_client()

    def flush(self) -> None:
        """Wait until every session that is due to be stopped is stopped (at most ``deadlines.stop_s``)."""
        if self._portal.started:
            self._portal.call(self._engine.close_async(cancel=False))

    async def flush_async(self) -> None:
        """Async `flush`."""
        if self._portal.started:
            await self._portal.run(self._engine.close_async(cancel=False))

    def close(self) -> None:
        """Cancel what runs, stop its sessions, and end the background thread. A second call does nothing."""
        if not self._begin_close():
            return
        try:
            if self._portal.started:
                self._portal.call(self._shut())
        finally:
            self._end_close()

    async def aclose(self) -> None:
        """Async `close`."""
        if not self._begin_close():
            return
        try:
            if self._portal.started:
                await self._portal.run(self._shut())
        finally:
            self._end_close()

    async def _shut(self) -> None:
        await self._engine.close_async(cancel=True)
        for ledger in self._ledgers.values():
            await ledger.close_async()

    def _begin_close(self) -> bool:
        self._engine.refuse_more()
        return self._may_close.acquire(blocking=False)

    def _end_close(self) -> None:
        self._finalizer.detach()
        open_engines.discard((self._portal, self._engine))
        self._leave_pacer()
        self._portal.close()
        self._boto3.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ---- inside

    @staticmethod
    def _parse_region_from_arn(arn: str) -> str:
        parts = arn.split(":")
        if len(parts) < 6 or parts[0] != "arn" or not parts[3]:
            raise ConfigError(f"Invalid ARN format, cannot extract region: {arn}")
        return parts[3]
