"""Recorded episodes, replayed through the same seams as real ones: for tests, benchmarks and trying a trainer's set-up.

`Replay` hands out a client and a gateway that answer `collect` from a list of episodes with the timing, failures and
tokens written in them. Nothing runs and nothing is sampled, so a trainer's plumbing can be checked without a runtime
or a model.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..contract import Stage
from ..errors import (
    GatewayError,
    RolloutCancelledError,
    RolloutTimeoutError,
)
from ..trajectory import Turn


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What one rollout did: its turns, and the record it left or the error it ended in.

    `kind` names the case for test ids and tables. Units: `delay_s` seconds from submission to the record; inf never
    answers.
    """

    input_id: str
    turns: Sequence[Turn] = ()
    record: Mapping[str, Any] | None = None
    failure: BaseException | None = None
    delay_s: float = 0.0
    kind: str = "plain"


@dataclass(frozen=True, kw_only=True)
class ReplayAddress:
    """Where a session would be reached; same fields as the gateway's session handle."""

    session_id: str
    base_url: str
    api_key: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class ReplayCapture:
    """The captured turns of a session; same fields as the gateway's capture."""

    session_id: str
    turns: list[Turn]
    dialogue: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)


class Replay:
    """Episodes to replay. Each submission of an input takes its next episode, or with ``by_input=False`` simply the
    next one.

    After a collection `invoked` holds the full payloads, `stopped` the session ids that were cancelled,
    `open_sessions` the gateway sessions nobody deleted, `peak_running` the most rollouts alive at once.
    """

    def __init__(self, episodes: Sequence[Episode], *, by_input: bool = True) -> None:
        self.by_input = by_input
        self.waiting: dict[str, deque[Episode]] = {}
        for episode in episodes:
            self.waiting.setdefault(episode.input_id if by_input else "", deque()).append(episode)
        self.weight_version: int | None = None
        self.by_session: dict[str, Episode] = {}
        self.invoked: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.open_sessions: dict[str, Mapping[str, Any]] = {}
        self.closed_sessions: set[str] = set()
        self.running = 0
        self.peak_running = 0
        self.client = ReplayClient(self)
        self.gateway = ReplayGateway(self)


class ReplayClient:
    """Answers like `RolloutClient`."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    def submit(
        self,
        payload: Mapping[str, Any],
        session_id: str | None = None,
        input_id: str | None = None,
        *,
        rollout_config: Mapping[str, Any] | None = None,
    ) -> ReplayFuture:
        if session_id is None or input_id is None:
            raise ValueError("a replayed rollout needs session_id and input_id")
        replay = self.replay
        episode = replay.waiting[input_id if replay.by_input else ""].popleft()
        replay.by_session[session_id] = episode
        replay.invoked.append({**payload, "_rollout": {"input_id": input_id, **(rollout_config or {})}})
        replay.running += 1
        replay.peak_running = max(replay.peak_running, replay.running)
        return ReplayFuture(replay, episode, session_id)


class ReplayFuture:
    """Answers like `RolloutFuture`."""

    def __init__(self, replay: Replay, episode: Episode, session_id: str) -> None:
        self.replay, self.episode, self.session_id = replay, episode, session_id
        self.began_s = time.monotonic()
        self.ready_s = self.began_s + episode.delay_s
        self.ended = False
        self.stopped = asyncio.Event()

    @property
    def stage(self) -> Stage:
        return Stage.RUN

    @property
    def stages(self) -> Mapping[str, float]:
        return {Stage.RUN.value: time.monotonic() - self.began_s}

    async def result_async(self, timeout: float | None = None) -> dict[str, Any]:
        """Raises: the episode's failure; RolloutTimeoutError at the timeout; RolloutCancelledError after a cancel."""
        left_s = self.ready_s - time.monotonic()
        late = timeout is not None and left_s > timeout
        stopped = asyncio.create_task(self.stopped.wait())
        try:
            await asyncio.wait({stopped}, timeout=timeout if late else max(0.0, left_s))
        finally:
            stopped.cancel()
        if self.stopped.is_set():
            raise RolloutCancelledError("cancelled", session_id=self.session_id)
        if late:
            raise RolloutTimeoutError(f"no record after {timeout:g} s", stage="run", session_id=self.session_id)
        self._end()
        if self.episode.failure is not None:
            raise self.episode.failure
        return dict(self.episode.record or {})

    async def cancel_async(self) -> bool:
        first = self.session_id not in self.replay.stopped
        if first:
            self.replay.stopped.append(self.session_id)
            self._end()
        self.stopped.set()
        return first

    def _end(self) -> None:
        self.replay.running -= not self.ended
        self.ended = True


class ReplayGateway:
    """Answers like `GatewayClient`."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    async def create_sessions_async(
        self,
        session_ids: Sequence[str],
        *,
        sampling_params: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        max_turns: int | None = None,
    ) -> list[ReplayAddress]:
        options = {"sampling_params": sampling_params, "model_id": model_id, "max_turns": max_turns}
        self.replay.open_sessions.update(dict.fromkeys(session_ids, options))
        return [
            ReplayAddress(session_id=s, base_url=f"http://replay/sessions/{s}/v1", api_key=f"key-{s}")
            for s in session_ids
        ]

    async def fetch_async(self, session_ids: Sequence[str], *, close: bool = True) -> dict[str, ReplayCapture]:
        found = {}
        for session_id in session_ids:
            if session_id not in self.replay.open_sessions:
                raise GatewayError("unknown session", session_id=session_id, status=404)
            if close:
                self.replay.closed_sessions.add(session_id)
            episode = self.replay.by_session.get(session_id)
            turns = list(episode.turns) if episode is not None else []
            found[session_id] = ReplayCapture(session_id=session_id, turns=turns)
        return found

    async def delete_async(self, session_ids: Sequence[str]) -> int:
        return sum(self.replay.open_sessions.pop(s, None) is not None for s in session_ids)

    def set_weight_version(self, version: int) -> None:
        self.replay.weight_version = version

    async def set_weight_version_async(self, version: int) -> None:
        self.replay.weight_version = version
