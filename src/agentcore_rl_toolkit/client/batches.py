"""Making requests, one or many: the part of `RolloutClient` that turns payloads into rollouts."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .._portal import Portal
from ..contract import IdValue, check_id, new_session_id
from ..errors import ConfigError
from ..store import ObjectStore
from ..store.names import path_of
from .arguments import check_choice, check_instance, check_number, check_whole
from .batch import AsyncBatchResult, BatchItem, BatchPlan, BatchResult, BatchRun, ProgressHook, print_progress
from .ledger import FileLedger, Ledger, StoreLedger
from .lifecycle.engine import Engine
from .resume import plan_resume
from .settings import ON_FAILURE, Deadlines, OnFailure, Prepare, RolloutRequest


class BatchMethods:
    """`run_batch` and its kin; `RolloutClient` inherits them and sets the attributes."""

    exp_id: str
    s3_bucket: str
    store: ObjectStore
    base_url: str | None
    model_id: str | None
    extra_config: dict[str, Any]
    deadlines: Deadlines
    on_failure: OnFailure
    retries: int
    _portal: Portal
    _engine: Engine
    _ledgers: dict[str, Ledger]

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
        session_ids: Sequence[str] | None = None,
        overrides: Sequence[Mapping[str, Any] | None] | None = None,
        progress: bool | ProgressHook = False,
        retries: int | None = None,
        on_failure: OnFailure | None = None,
        prepare: Prepare | None = None,
        resume: bool | Literal["retry_failed"] = False,
        ledger: str | os.PathLike[str] | Ledger | None = None,
    ) -> BatchResult:
        """Run many rollouts; iterate the result for `BatchItem`s in the order they finish.

        Args:
            max_concurrent_sessions: rollouts in flight at a time; None: all.
            timeout: seconds each rollout may take from its invoke to its record.
            initial_interval, max_interval, backoff_factor: of the published client, which polls each rollout; here one
                watcher sees all results, and these have no effect.
            log_interval: seconds between two log lines; 0: none.
            input_ids, session_ids: one per payload; default, and where one is empty: made up.
            overrides: `_rollout` entries per payload.
            progress: True prints a line to stderr; a function is called with a `BatchProgress` (on the client's
                thread).
            retries: further attempts of rollouts that were lost, timed out or throttled.
            resume: go on with a run that a crash or Ctrl-C ended: outcomes on record are collected, sessions still
                running are waited for, only the rest is sent. "retry_failed" also runs again what did not end `ok`.
                Without a ledger on disk yet it starts the run, so a script may always say ``resume=True``.
            ledger: a file, "store" for segments in the store, or a `Ledger`; default with `resume`:
                ``runs/{exp_id}/ledger.jsonl``.
        """
        start, size = self._batch(
            payloads,
            max_concurrent_sessions,
            timeout,
            log_interval,
            input_ids,
            session_ids,
            overrides,
            progress,
            retries,
            on_failure,
            prepare,
            resume,
            ledger,
        )
        return BatchResult(start, size)

    def run_batch_async(
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
        session_ids: Sequence[str] | None = None,
        overrides: Sequence[Mapping[str, Any] | None] | None = None,
        progress: bool | ProgressHook = False,
        retries: int | None = None,
        on_failure: OnFailure | None = None,
        prepare: Prepare | None = None,
        resume: bool | Literal["retry_failed"] = False,
        ledger: str | os.PathLike[str] | Ledger | None = None,
    ) -> AsyncBatchResult:
        """`run_batch` for `async for`."""
        start, size = self._batch(
            payloads,
            max_concurrent_sessions,
            timeout,
            log_interval,
            input_ids,
            session_ids,
            overrides,
            progress,
            retries,
            on_failure,
            prepare,
            resume,
            ledger,
        )
        return AsyncBatchResult(start, size)

    def map(
        self, payloads: Iterable[Mapping[str, Any]], max_concurrent_sessions: int | None = None, **options: Any
    ) -> list[BatchItem]:
        """`run_batch` to the end; items in the order of the payloads."""
        return sorted(self.run_batch(payloads, max_concurrent_sessions, **options), key=lambda item: item.index or 0)

    async def map_async(
        self, payloads: Iterable[Mapping[str, Any]], max_concurrent_sessions: int | None = None, **options: Any
    ) -> list[BatchItem]:
        """Async `map`."""
        items = [item async for item in self.run_batch_async(payloads, max_concurrent_sessions, **options)]
        return sorted(items, key=lambda item: item.index or 0)

    def _batch(
        self,
        payloads: Iterable[Mapping[str, Any]],
        max_concurrent: int | None,
        timeout: float | None,
        log_interval: float,
        input_ids: Sequence[IdValue] | None,
        session_ids: Sequence[str] | None,
        overrides: Sequence[Mapping[str, Any] | None] | None,
        progress: bool | ProgressHook,
        retries: int | None,
        on_failure: OnFailure | None,
        prepare: Prepare | None,
        resume: bool | Literal["retry_failed"],
        ledger: str | os.PathLike[str] | Ledger | None,
    ) -> tuple[Callable[[], BatchRun], int]:
        rows = list(payloads)
        for name, values in (("input_ids", input_ids), ("session_ids", session_ids), ("overrides", overrides)):
            if values is not None and len(values) != len(rows):
                raise ConfigError(f"{name} has {len(values)} entries for {len(rows)} payloads")
        check_whole("max_concurrent_sessions", max_concurrent, at_least=1, optional=True)
        check_number("log_interval", log_interval, at_least=0)
        self._check_policy(timeout, on_failure, retries)
        check_choice("resume", resume, (True, False, "retry_failed"))
        if progress not in (True, False) and not callable(progress):
            raise ConfigError(f"progress must be True, False or a function, got {progress!r}")
        for i, entries in enumerate(overrides or ()):
            check_instance(f"overrides[{i}]", entries, Mapping)
        if resume and ledger is None:
            ledger = Path("runs") / path_of(self.exp_id) / "ledger.jsonl"
        hook: ProgressHook | None = print_progress if progress is True else (progress or None)

        def start() -> BatchRun:
            requests = [
                self._request(
                    row,
                    session_id=session_ids[i] if session_ids is not None else None,
                    input_id=input_ids[i] if input_ids is not None else None,
                    overrides=(overrides[i] if overrides is not None else None) or {},
                    timeout=timeout,
                    on_failure=on_failure,
                    retries=retries,
                    prepare=prepare,
                    index=i,
                )
                for i, row in enumerate(rows)
            ]

            async def plan() -> BatchPlan:
                if ledger is None:
                    return BatchPlan(run=[(request, None) for request in requests])
                return await plan_resume(
                    requests,
                    self._open_ledger(ledger),
                    engine=self._engine,
                    mode=resume,
                    fixed_inputs=input_ids is not None,
                )

            return BatchRun(
                self._portal,
                self._engine,
                len(requests),
                plan,
                max_concurrent=max_concurrent or max(1, len(rows)),
                progress=hook,
                log_interval=log_interval,
            )

        return start, len(rows)

    def _open_ledger(self, ledger: str | os.PathLike[str] | Ledger) -> Ledger:
        if not isinstance(ledger, (str, os.PathLike)):
            return ledger
        name = os.fspath(ledger)
        if name not in self._ledgers:
            self._ledgers[name] = StoreLedger(self.store, self.exp_id) if name == "store" else FileLedger(name)
        return self._ledgers[name]

    def _config(self, input_id: IdValue, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The `_rollout` block; later entries win: ids, `extra_config`, base_url and model_id, overrides."""
        config = {"exp_id": self.exp_id, "input_id": input_id, "s3_bucket": self.s3_bucket, **self.extra_config}
        if self.base_url:
            config["base_url"] = self.base_url
        if self.model_id:
            config["model_id"] = self.model_id
        config.update(overrides)
        return config

    @staticmethod
    def _check_policy(timeout: float | None, on_failure: OnFailure | None, retries: int | None) -> None:
        check_number("timeout", timeout, at_least=0, optional=True)
        if on_failure is not None:
            check_choice("on_failure", on_failure, ON_FAILURE)
        check_whole("retries", retries, at_least=0, optional=True)

    def _request(
        self,
        payload: Mapping[str, Any],
        *,
        session_id: str | None,
        input_id: IdValue | None,
        overrides: Mapping[str, Any],
        timeout: float | None,
        on_failure: OnFailure | None,
        retries: int | None,
        prepare: Prepare | None,
        index: int | None = None,
    ) -> RolloutRequest:
        self._check_policy(timeout, on_failure, retries)
        if not isinstance(payload, Mapping):
            raise ConfigError(f"a payload must be a mapping, got {type(payload).__name__}")
        policy = on_failure or self.on_failure
        if retries is None:
            retries = self.retries if on_failure is None else int(policy == "retry")
        if input_id is None or input_id == "":
            input_id = str(uuid.uuid4())
        check_id(input_id, "input_id")
        return RolloutRequest(
            payload=payload,
            input_id=input_id,
            session_id=session_id or new_session_id(),
            config=self._config(input_id, overrides),
            index=index,
            on_failure=policy,
            retries=retries,
            prepare=prepare,
            deadlines=self.deadlines,
            timeout_s=timeout,
        )
