"""The trainer as a process that may be killed at any moment and is started again: `python trainer.py SETTINGS.json`.

Steps of some hundred rollouts, in turn through the collection core (groups of four) and through `run_batch` with a ledger from
which a new process resumes. What happens goes into ``outcomes.jsonl``, a line at a time: the sessions that were opened, how
each rollout ended, what the gateway had recorded of each session, which steps are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))

from agentcore_rl_toolkit.backends import (
    CollectConfig,
    CollectedRollout,
    GroupRequest,
    collect_async,
)
from agentcore_rl_toolkit.client import Deadlines, RolloutClient, WatchSettings
from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import GatewayClient, SessionCapture, SessionHandle
from soak_load.words import turns_of

T = TypeVar("T")
GROUP = 4
PATIENCE_S = 60.0  # for a gateway that is away
BUCKET = "rollouts"


@dataclass(frozen=True)
class Settings:
    """What the soak tells its trainer. ``folder`` holds ledgers and outcomes."""

    folder: str
    runtime: str
    arn: str
    store: str
    gateway: str
    rollouts: int
    step: int
    at_once: int


def task_of(step: int, place: int) -> tuple[str, int]:
    """The input id of a rollout of a step, and its number within its group."""
    if step % 2 == 0:
        return f"g{step}-{place // GROUP}", place % GROUP
    return f"b{step}-{place}", 0


def payload_of(task: str) -> dict[str, Any]:
    return {"task": task, "turns": turns_of(task), "stream": turns_of(task) == 3}


class Notes:
    """The file of outcomes: one write per line, so that a kill tears at most the last one."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.opened: dict[int, list[str]] = {}
        self.ended: set[tuple[str, int]] = set()
        self.captured: set[str] = set()
        self.done: set[int] = set()
        if os.fstat(self.fd).st_size:
            os.write(self.fd, b"\n")
        for line in read_notes(path):
            self._learn(line)

    def _learn(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        if kind == "opened":
            self.opened.setdefault(line["step"], []).extend(line["sessions"])
        elif kind == "ended":
            self.ended.add((line["task"], line["index"]))
        elif kind == "captured":
            self.captured.add(line["session"])
        elif kind == "done":
            self.done.add(line["step"])

    def add(self, **line: Any) -> None:
        os.write(self.fd, json.dumps(line).encode() + b"\n")
        self._learn(line)

    def capture(self, found: SessionCapture) -> None:
        if found.session_id not in self.captured:
            turns = [[list(turn.completion_ids), turn.trainable] for turn in found.turns]
            self.add(kind="captured", session=found.session_id, turns=turns, errors=len(found.errors))


def read_notes(path: Path) -> Iterator[dict[str, Any]]:
    """Line by line: the file grows to megabytes, which a trainer that reads it at once would keep."""
    if path.exists():
        with path.open("rb") as file:
            for raw in file:
                with contextlib.suppress(ValueError):
                    yield json.loads(raw)


class NotingGateway(GatewayClient):
    """Notes sessions before they are opened, so that the next process finds them."""

    def __init__(self, url: str, notes: Notes, step: int) -> None:
        super().__init__(url)
        self.notes, self.step = notes, step

    async def create_sessions_async(self, session_ids: Sequence[str], **settings: Any) -> list[SessionHandle]:
        known = set(self.notes.opened.get(self.step, ()))
        fresh = [s for s in session_ids if s not in known]
        if fresh:
            self.notes.add(kind="opened", step=self.step, sessions=fresh)
        return await super().create_sessions_async(session_ids, **settings)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """What the gateway answers, through its restarts. Raises: GatewayError."""
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await call()
        except GatewayError as e:
            if e.status not in (None, 429, 500, 502, 503, 504, 507) or time.monotonic() > give_up_s:
                raise
            await asyncio.sleep(0.2)


class Trainer:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.notes = Notes(Path(settings.folder, "outcomes.jsonl"))

    async def run(self) -> None:
        count, size = self.settings.rollouts, self.settings.step
        for step in range((count + size - 1) // size):
            if step not in self.notes.done:
                await self._step(step, min(size, count - step * size))

    async def _step(self, step: int, count: int) -> None:
        gateway = NotingGateway(self.settings.gateway, self.notes, step)
        batch = step % 2 == 1
        client = self._client(step, batch)
        try:
            if batch:
                await self._batch(client, gateway, step, count)
            else:
                await self._collect(client, gateway, step, count)
        finally:
            await client.aclose()
        mine = self.notes.opened.get(step, [])
        missing = [s for s in mine if s not in self.notes.captured]
        for found in (await patiently(lambda: gateway.fetch_async(missing))).values():
            self.notes.capture(found)
        await patiently(lambda: gateway.delete_async(mine))
        self.notes.add(kind="done", step=step, seconds=time.monotonic())

    def _client(self, step: int, batch: bool) -> RolloutClient:
        settings = self.settings
        return RolloutClient(
            settings.arn,
            settings.store,
            f"soak-{step}",
            endpoint_url=settings.runtime,
            tps_limit=500,
            model_id="scripted",
            retries=5 if batch else 0,
            max_retry_attempts=30,
            watch=WatchSettings(heartbeat_s=1.0, lost_after_s=5.0),
            deadlines=Deadlines(start_s=30, confirm_s=5, run_s=60, stop_s=30, result_s=30),
        )

    async def _collect(self, client: RolloutClient, gateway: NotingGateway, step: int, count: int) -> None:
        places: dict[str, list[int]] = {}
        for place in range(count):
            task, index = task_of(step, place)
            if (task, index) not in self.notes.ended:
                places.setdefault(task, []).append(index)
        requests = [GroupRequest(input_id=t, payload=payload_of(t), n=len(left)) for t, left in places.items()]

        def ended(rollout: CollectedRollout) -> None:
            if rollout.capture is not None:
                self.notes.capture(rollout.capture)
            report = rollout.trajectory.report if rollout.trajectory is not None else None
            self.notes.add(
                kind="ended",
                task=rollout.input_id,
                index=places[rollout.input_id][rollout.index],
                session=rollout.session_id,
                outcome=str(rollout.outcome),
                reward=rollout.reward,
                usable=rollout.usable,
                mask=rollout.mask_reason,
                trained=None if report is None else report.trained_tokens,
                error=None if rollout.error is None else str(rollout.error)[:300],
            )

        await collect_async(
            requests,
            client=client,
            gateway=gateway,
            config=CollectConfig(max_concurrent=self.settings.at_once, rollout_timeout_s=60.0, submit_timeout_s=60.0),
            on_rollout=ended,
        )

    async def _batch(self, client: RolloutClient, gateway: NotingGateway, step: int, count: int) -> None:
        async def prepare(session_id: str, attempt: int) -> dict[str, Any]:
            [session] = await patiently(lambda: gateway.create_sessions_async([session_id]))
            return {"base_url": session.base_url, "api_key": session.api_key}

        tasks = [task_of(step, place)[0] for place in range(count)]
        batch = client.run_batch_async(
            [payload_of(task) for task in tasks],
            self.settings.at_once,
            timeout=60.0,
            log_interval=0,
            input_ids=tasks,
            prepare=prepare,
            resume=True,
            ledger=Path(self.settings.folder, f"ledger-{step}.jsonl"),
        )
        async for item in batch:
            reward = (item.result or {}).get("rewards")
            self.notes.add(
                kind="ended",
                task=str(item.input_id),
                index=0,
                session=item.session_id,
                outcome=str(item.outcome),
                reward=reward,
                usable=item.success,
                mask=None,
                trained=None,
                error=None if item.error is None else item.error[-300:],
            )


if __name__ == "__main__":
    asyncio.run(Trainer(Settings(**json.loads(Path(sys.argv[1]).read_text()))).run())
