"""`RolloutClient`: starts rollouts of one agent and collects their results."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import difflib
import inspect
import os
import resource
import uuid
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from .._portal import Portal
from ..contract import Cause, IdValue, Outcome, check_id, new_session_id
from ..errors import ConfigError, MissingExtraError
from ..proof import Proof
from ..store import open_store, parse_url
from ..store.remote import find_region, find_session
from .batch import BatchItem, BatchResult, ProgressHook, Resume, Run, continue_from, open_ledger, print_progress
from .future import RolloutFuture
from .ledger import NO_LEDGER, FileLedger
from .pacing import shared_pacer
from .records import Replayed, Reward, replayed
from .rollout import Dispatcher, Rollout, Subscriber
from .settings import Deadlines, OnFailure, Prepare, TurnsOf, WatchSettings, check_number
from .transport import Transport, in_thread

ENDPOINT_ENV = ("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", "AWS_ENDPOINT_URL")
COLD_START_S = 15.0  # a slow cold start. Invokes of that length, at the full pace, are what the pool must hold
POOL_LIMIT = 512
PUBLISHED_POOL_CONNECTIONS = 10  # the published default. With it, the pool follows the pace
# Keywords that code for the published client gives to agents by name. Everything else goes into `rollout_config`.
PASSED_BY_NAME = frozenset(
    (
        *("api_key", "base_url", "exp_id", "model_id", "s3_bucket", "sampling_params"),
        *("frequency_penalty", "logprobs", "max_completion_tokens", "max_new_tokens", "max_tokens", "min_p", "n"),
        *("presence_penalty", "repetition_penalty", "seed", "stop", "temperature", "top_k", "top_p"),
    )
)


class RolloutClient:
    """Starts rollouts of one agent and collects their results. Thread-safe. Sync and async calls may be mixed.

    Args:
        agent_runtime_arn: ARN of the agent on AgentCore Runtime, or on a local runtime.
        s3_bucket: where agents store results: a bucket name or a store URL (``s3://bucket/prefix``, ``file:///dir``).
        exp_id: the experiment, which is the first part of every key.
        max_retry_attempts: how often an invoke is sent before the runtime was first reached (the published name). Later outages
            are waited out for `deadlines.start_s`, and refusals (429, 402) for `throttle_s`.
        tps_limit: requests per second (invokes, and as many stops).
        max_pool_connections: connections and threads for invokes. Left at 10, it follows `tps_limit` and the limit
            of open files.
        base_url: address of the model, passed to the agent.
        model_id: name of the model, passed to the agent.
        rollout_config: more entries of the `_rollout` block, which the agent gets.
        extra_config: the same by name, for the usual ones: api_key, sampling_params, temperature, top_p, max_tokens and the
            like. Any other keyword is an error.
        sessions_per_minute: new sessions per minute. AgentCore allows container agents 400.
        endpoint_url: another AgentCore data plane, such as a local runtime. Default: the environment, then AWS.
        qualifier: endpoint name of the agent.
        on_failure: "return" hands out the record of a failed agent, "raise" raises.
        retries: further sessions of a rollout that was lost, timed out or throttled. A batch may have another number.
        deadlines: of the stages.
        watch: how results are found, and what they must prove.
        turns_of: ``turns_of(session_id)`` returns the model calls of a session so far (a number, or an awaitable of one). With
            it, a deadline that passes while the agent calls the model is the agent's failure, and not tried again.

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
        endpoint_url: str | None = None,
        qualifier: str | None = None,
        on_failure: OnFailure = "return",
        retries: int = 0,
        deadlines: Deadlines | None = None,
        watch: WatchSettings | None = None,
        turns_of: TurnsOf | None = None,
        rollout_config: Mapping[str, Any] | None = None,
        **extra_config: Any,
    ) -> None:
        given = _for_the_agent(rollout_config, extra_config, RolloutClient.__init__)
        if on_failure not in ("return", "raise"):
            raise ConfigError(
                f"on_failure must be 'return' or 'raise', got {on_failure!r}; `retries=` sets further attempts"
            )
        check_number("tps_limit", tps_limit, above=0)
        check_number("sessions_per_minute", sessions_per_minute, above=0, optional=True)
        check_number("max_retry_attempts", max_retry_attempts, at_least=1, whole=True)
        check_number("max_pool_connections", max_pool_connections, at_least=1, whole=True)
        check_number("retries", retries, at_least=0, whole=True)
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
        self.retries = retries
        self.endpoint_url = endpoint_url or next(filter(None, map(os.environ.get, ENDPOINT_ENV)), None)
        self.store = self.watch.store or open_store(s3_bucket, default_region=self.region)

        pool = max_pool_connections
        if pool == PUBLISHED_POOL_CONNECTIONS:
            files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # idle connections must leave some for the store
            most = POOL_LIMIT if files == resource.RLIM_INFINITY else min(POOL_LIMIT, max(1, files // 2))
            pool = int(min(most, max(64, tps_limit * COLD_START_S)))
        self._ledgers: dict[str, FileLedger] = {}
        self._closing: asyncio.Future[list[str]] | None = None
        self._dispatcher = Dispatcher(
            portal=Portal("agentcore-rl-client", owner="client"),
            transport=Transport(
                agent_runtime_arn,
                region=self.region,
                endpoint_url=self.endpoint_url,
                qualifier=qualifier,
                pool_connections=pool,
                read_timeout_s=self.deadlines.start_s,
            ),
            pacer=shared_pacer(agent_runtime_arn, self.endpoint_url),
            limits=(tps_limit, sessions_per_minute),
            watch=self.watch,
            deadlines=self.deadlines,
            exp_id=self.exp_id,
            max_attempts=max_retry_attempts,
            calls_at_once=pool,
            stores={s3_bucket: self.store},
            turns_of=turns_of,
        )
        self._portal = self._dispatcher.portal
        self._dropped = weakref.finalize(self, self._dispatcher.abandon)
        self._dropped.atexit = False

    # ---- single rollouts

    def submit(
        self,
        payload: Mapping[str, Any],
        session_id: str | None = None,
        input_id: IdValue | None = None,
        *,
        rollout_config: Mapping[str, Any] | None = None,
        deadlines: Deadlines | None = None,
        **rollout_overrides: Any,
    ) -> RolloutFuture:
        """Start a rollout without waiting for the runtime to accept it. Failures, also those of the start, are in the future.

        Args:
            rollout_config: `_rollout` entries of this rollout, as in the client's constructor.
            deadlines: of this rollout's stages. None: those of the client.
            **rollout_overrides: the same by name.

        Raises: ConfigError on unusable arguments.
        """
        overrides = _for_the_agent(rollout_config, rollout_overrides, RolloutClient.invoke)
        rollout = self._rollout(payload, session_id, input_id, overrides, deadlines=deadlines or self.deadlines)
        return self._dispatcher.submit(rollout)

    def invoke(
        self,
        payload: Mapping[str, Any],
        session_id: str | None = None,
        input_id: IdValue | None = None,
        **rollout_overrides: Any,
    ) -> RolloutFuture:
        """Start a rollout, as `submit`, and wait until the runtime accepted it.

        Raises: what prevented the start (RolloutThrottledError, AgentError, ConfigError, ...).
        """
        return self._portal.call(self.invoke_async(payload, session_id, input_id, **rollout_overrides))

    async def invoke_async(
        self,
        payload: Mapping[str, Any],
        session_id: str | None = None,
        input_id: IdValue | None = None,
        **rollout_overrides: Any,
    ) -> RolloutFuture:
        """Run `invoke` without blocking. Cancelling it ends the rollout."""
        future = self.submit(payload, session_id, input_id, **rollout_overrides)
        try:
            accepted = await asyncio.wrap_future(future._accepted)
        except BaseException:
            future.cancel()
            raise
        if not accepted and (error := future.exception()) is not None:
            raise error
        return future

    # ---- batches

    def run_batch(
        self,
        payloads: Iterable[Mapping[str, Any]],
        max_concurrent_sessions: int | None = None,
        timeout: float | None = 900.0,
        initial_interval: float = 0.5,
        max_interval: float = 30.0,
        backoff_factor: float = 1.5,
        log_interval: float = 30.0,
        *,
        input_ids: Sequence[IdValue] | None = None,
        overrides: Sequence[Mapping[str, Any] | None] | None = None,
        progress: bool | ProgressHook = False,
        retries: int | None = None,
        prepare: Prepare | None = None,
        resume: Resume = False,
        ledger: str | os.PathLike[str] | None = None,
    ) -> BatchResult:
        """Run many rollouts. Iterate the result for `BatchItem`s in the order they finish.

        Args:
            max_concurrent_sessions: rollouts in flight at a time. None: all.
            timeout: seconds each rollout may take from its invoke to its record.
            initial_interval: without effect, because one watcher finds all results.
            max_interval: without effect.
            backoff_factor: without effect.
            log_interval: seconds between two log lines; 0: none.
            input_ids: one per payload. The client invents an id for an empty one.
            overrides: `_rollout` entries per payload.
            progress: True prints a line to stderr. A function is called with a `BatchProgress` (on the client's thread).
            retries: further sessions of rollouts that were lost, timed out or throttled. None: as many as the client's.
            prepare: ``prepare(session_id, attempt)`` returns the `_rollout` overrides of each attempt (a dict, or an awaitable of
                one, run on the client's loop), for sessions that each need an address and a key.
            resume: continue a run that a crash or Ctrl-C ended: recorded outcomes are collected, running sessions are waited for,
                and only the rest is sent. "retry_failed" also runs again what did not end `ok`. Without a ledger on disk it
                starts the run, so a script may always set ``resume=True``.
            ledger: a file. Default with `resume`: ``runs/{exp_id}/ledger.jsonl``.
        """
        total = len(payloads) if isinstance(payloads, Sized) else None
        for name, values in (("input_ids", input_ids), ("overrides", overrides)):
            if values is not None and total is not None and len(values) != total:
                raise ConfigError(f"{name} has {len(values)} entries for {total} payloads")
        check_number("max_concurrent_sessions", max_concurrent_sessions, at_least=1, optional=True, whole=True)
        check_number("log_interval", log_interval, at_least=0)
        check_number("timeout", timeout, at_least=0, optional=True)
        check_number("retries", retries, at_least=0, optional=True, whole=True)
        if resume not in (True, False, "retry_failed"):
            raise ConfigError(f"resume must be True, False or 'retry_failed', got {resume!r}")
        if max_concurrent_sessions is None and total is None:
            raise ConfigError("max_concurrent_sessions is needed for payloads without a length")
        if resume and ledger is None:
            ledger = Path("runs") / self.exp_id / "ledger.jsonl"
        book = NO_LEDGER
        if ledger is not None:
            book = self._ledgers.setdefault(os.fspath(ledger), FileLedger(ledger))
        listed = payloads if isinstance(payloads, Sequence) else None
        for payload in listed or ():  # an error of the last row must not end the batch after hours
            check_payload(payload)
        for input_id in input_ids or ():
            check_id(input_id or "made up", "input_id")
        dispatcher, rows, end = self._dispatcher, enumerate(payloads), object()
        options: dict[str, Any] = {"timeout_s": timeout, "prepare": prepare, "ledger": book}
        options["retries"] = self.retries if retries is None else retries

        async def rollouts() -> AsyncIterator[Rollout]:
            attempts = {} if book is NO_LEDGER else open_ledger(dispatcher, book, resume, total)
            while True:
                # A generator of the caller's may block, so it is advanced in threads.
                row: Any = await in_thread(next, rows, end) if listed is None else next(rows, end)
                if row is end:
                    return
                index, payload = row
                input_id = None if input_ids is None else input_ids[index]
                override = (None if overrides is None else overrides[index]) or {}
                rollout = self._rollout(payload, None, input_id, override, index=index, **options)
                if index in attempts:
                    continue_from(attempts[index], rollout, resume, fixed_input=input_ids is not None)
                yield rollout

        run = Run(
            dispatcher,
            rollouts(),
            total=total,
            limit=max_concurrent_sessions or total or 1,
            hook=print_progress if progress is True else (progress or None),
            log_interval_s=log_interval,
        )
        return BatchResult(run, self)

    run_batch_async = run_batch

    def map(
        self, payloads: Iterable[Mapping[str, Any]], max_concurrent_sessions: int | None = None, **options: Any
    ) -> list[BatchItem]:
        """Run a batch to the end. Return its items in the order of the payloads."""
        return sorted(self.run_batch(payloads, max_concurrent_sessions, **options), key=lambda item: item.index or 0)

    # ---- stored records

    def replay_async(self, reward: Reward | None = None, *, input_id: IdValue | None = None) -> AsyncIterator[Replayed]:
        """Yield the stored records of this experiment, or of one input, sorted by key. Proofs of origin are not checked.

        ``reward(record=..., payload=...)``, sync or async, is computed for those that ended `ok`, from the record and the
        agent's payload. Raises: StoreError when the store cannot be listed.
        """
        return replayed(self.store, self.exp_id, input_id, self.watch.max_record_bytes, reward)

    def replay(self, reward: Reward | None = None, *, input_id: IdValue | None = None) -> list[Replayed]:
        """Sync `replay_async`, as a list."""

        async def collect() -> list[Replayed]:
            return [item async for item in self.replay_async(reward, input_id=input_id)]

        return self._portal.call(collect())

    # ---- state and end

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber(event, fields)`` for each event of a rollout, on the client's thread. It must not block.

        Events: intent, accepted, refused, server_error, retried, finished, stopped. Fields always hold
        ``session_id`` and ``exp_id``.
        """
        self._dispatcher.subscribers.append(subscriber)

    def flights(self) -> list[dict[str, Any]]:
        """Return the state of each rollout without an outcome.

        Each has ``session_id``, ``input_id``, ``attempt``, ``stage``, ``trouble`` with the store, and seconds: in the stage
        (``stage_s``), in total (``total_s``) and until the deadline (``left_s``).
        """
        return self._dispatcher.flights()

    @property
    def stats(self) -> dict[str, int]:
        """Return counts since the start.

        They are submitted, refused, server_errors, retried, each outcome, failures by cause (cause_agent, cause_policy,
        cause_infrastructure), stopped, stop_failed and store_requests. Of the records read: proven, unproven, forged.
        """
        dispatcher = self._dispatcher
        return {**dispatcher.counts, **dispatcher.stops.counts, "store_requests": dispatcher.store_requests}

    @property
    def region(self) -> str:
        """The agent's region, from its ARN."""
        parts = self.agent_runtime_arn.split(":")
        if len(parts) < 6 or parts[0] != "arn" or not parts[3]:
            raise ConfigError(f"Invalid ARN format, cannot extract region: {self.agent_runtime_arn}")
        return parts[3]

    @property
    def agentcore_client(self) -> Any:
        """The boto3 ``bedrock-agentcore`` client."""
        return self._dispatcher.transport.client

    @property
    def s3_client(self) -> Any:
        """A boto3 S3 client, for your own code."""
        return find_session().client("s3", region_name=find_region(self.region))

    def flush(self) -> list[str]:
        """Wait until all ended sessions are stopped. It has the result and the limits of `close`."""
        return self._portal.call(self._dispatcher.close_async()) if self._portal.started else []

    def close(self) -> list[str]:
        """Cancel the rollouts in flight, stop their sessions, and end the background thread.

        It waits while sessions are being stopped. It gives up when a stop failed and none succeeded for ``deadlines.stop_s``.
        A second call waits for the first one.

        Returns: ids of the sessions that are not known to have ended. They run until their idle timeout, and a warning lists
            them.
        """
        self._portal.refuse_own_thread()
        with self._closed():
            if self._portal.started:
                self._portal.call(self._shut())
        return list(self._dispatcher.stops.left)

    async def aclose(self) -> list[str]:
        """Run `close` without blocking."""
        with self._closed():
            if self._portal.started:
                await asyncio.wait([asyncio.wrap_future(self._portal.submit(self._shut()))])
        return list(self._dispatcher.stops.left)

    @contextlib.contextmanager
    def _closed(self) -> Iterator[None]:
        self._dispatcher.closing = True
        try:
            with contextlib.suppress(concurrent.futures.CancelledError, ConfigError):  # another call finished first
                yield
        finally:
            self._dropped.detach()
            self._dispatcher.leave()
            self._portal.close()

    async def _shut(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._dispatcher.close_async(cancel="all"))
        await asyncio.wait([self._closing])
        for ledger in self._ledgers.values():
            ledger.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ---- inside

    def _rollout(
        self,
        payload: Mapping[str, Any],
        session_id: str | None,
        input_id: IdValue | None,
        overrides: Mapping[str, Any],
        **options: Any,
    ) -> Rollout:
        """Make a rollout; ``options`` are other fields of it."""
        check_payload(payload)
        if input_id is None or input_id == "":
            input_id = str(uuid.uuid4())
        check_id(input_id, "input_id")
        # Later entries win.
        config = {"exp_id": self.exp_id, "input_id": input_id, "s3_bucket": self.s3_bucket, **self.extra_config}
        config |= {"base_url": self.base_url} if self.base_url else {}
        config |= {"model_id": self.model_id} if self.model_id else {}
        return Rollout(
            shared=self._dispatcher,
            _portal=self._portal,
            payload=dict(payload),  # the caller may change its own meanwhile
            input_id=input_id,
            session_id=session_id or new_session_id(),
            config={**config, **overrides},
            raise_failures=self.on_failure == "raise",
            **{"deadlines": self.deadlines, "retries": self.retries, **options},
        )


def check_payload(payload: Any) -> None:
    """Check that a payload is a mapping. Raises: ConfigError."""
    if not isinstance(payload, Mapping):
        raise ConfigError(f"a payload must be a mapping, got {type(payload).__name__}")


# The clients of each registry.
_exported: weakref.WeakKeyDictionary[Any, set[RolloutClient]] = weakref.WeakKeyDictionary()


def export_prometheus(client: RolloutClient, *, registry: Any = None) -> None:
    """Export the counts of a client, as in `RolloutClient.stats`, to a registry (default: the global one).

    If a registry gets several clients, it has the sums of their counts.

    Metrics: ``agentcore_rl_rollouts_total{outcome}``, ``agentcore_rl_failures_total{cause}``, ``agentcore_rl_in_flight``,
    ``agentcore_rl_events_total{event}``, ``agentcore_rl_records_total{proof}``.

    Raises: MissingExtraError without `prometheus-client`.
    """
    try:
        import prometheus_client as prometheus
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ModuleNotFoundError as e:
        raise MissingExtraError("this needs prometheus-client:\n    pip install prometheus-client") from e
    counts: dict[tuple[str, str], dict[str, str]] = {  # the name in `stats` of each value of a label
        ("rollouts", "outcome"): {outcome: outcome for outcome in Outcome},
        ("failures", "cause"): {cause: f"cause_{cause}" for cause in Cause},
        ("events", "event"): {name: name for name in ("submitted", "refused", "server_errors", "retried", "stopped")},
        ("records", "proof"): {proof: proof for proof in Proof},
    }

    registry = registry or prometheus.REGISTRY
    if registry in _exported:  # it refuses two metrics of one name
        _exported[registry].add(client)
        return
    clients = {client}

    class Collector:
        def collect(self) -> Iterator[Any]:
            stats: Counter[str] = Counter()
            for each in list(clients):
                stats.update(each.stats)
            for (name, label), values in counts.items():
                family = CounterMetricFamily(f"agentcore_rl_{name}", f"{name}, by {label}", labels=[label])
                for value, counted in values.items():
                    family.add_metric([str(value)], stats[counted])
                yield family
            in_flight = sum(len(each.flights()) for each in list(clients))
            yield GaugeMetricFamily("agentcore_rl_in_flight", "rollouts without an outcome", in_flight)

    registry.register(Collector())
    _exported[registry] = clients


def _for_the_agent(
    rollout_config: Mapping[str, Any] | None, by_name: Mapping[str, Any], call: Callable[..., Any]
) -> dict[str, Any]:
    """Collect the `_rollout` entries of a call: those of `rollout_config`, then published names as keywords.

    Raises: ConfigError on any other keyword. It suggests the nearest parameter of the call.
    """
    for name in by_name:
        if name not in PASSED_BY_NAME:
            near = difflib.get_close_matches(name, [*inspect.signature(call).parameters, *PASSED_BY_NAME], 1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(
                f"there is no parameter {name!r}{meant}; what the agent receives goes into rollout_config={{{name!r}: ...}}"
            )
    return {**(rollout_config or {}), **by_name}
