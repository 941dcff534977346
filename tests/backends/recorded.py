"""Episodes of every kind that trainers have to get right, made from a fixed seed: the shared table of cases of all
backends.

The kinds: one turn, many turns with tool results, a history that was rewritten (fork), a sub-agent in between (fork),
an answer cut at the length limit, weights that moved during the rollout, expert routing, a tool call that did not
parse, a policy that ran out of tokens (trained with the reward that its agent declares, unless the run masks such rollouts);
and those that must not be trained on: an agent that raised, one that the infrastructure failed, a policy's failure without
a reward, a lost session, a record without reward, a rollout without captured tokens.

`Replay` hands out a client and a gateway that answer `collect` from a list of episodes with the timing, failures and tokens
written in them: nothing runs and nothing is sampled.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentcore_rl_toolkit.backends.collection.groups import GroupRequest
from agentcore_rl_toolkit.client import Deadlines
from agentcore_rl_toolkit.contract import Stage
from agentcore_rl_toolkit.errors import GatewayError, RolloutCancelledError, RolloutLostError, RolloutTimeoutError
from agentcore_rl_toolkit.trajectory import Turn

GOOD_KINDS = (
    *("single", "multi_turn", "rewritten", "sub_agent", "truncated", "mixed_versions", "moe", "unparsed"),
    *("policy_failed", "side_calls", "compacted", "images"),
)
BAD_KINDS = ("agent_error", "lost", "no_reward", "no_tokens", "infrastructure", "policy_unscored")
# Mixed, so that every group has some that are trained, also in runs that mask what the policy failed at.
KINDS = (*GOOD_KINDS[:5], *BAD_KINDS[:3], *GOOD_KINDS[5:], *BAD_KINDS[3:])

EXPERT_LAYERS, EXPERT_TOP_K = 2, 2


def recorded_episodes(
    n: int = 64, *, per_group: int = 8, seed: int = 0, vocabulary: int = 500, versions: tuple[int, int] = (3, 4)
) -> list[Episode]:
    """`n` episodes in groups of `per_group`, every kind in turn; equal arguments give equal episodes.

    Token ids lie in [10, vocabulary). Rewards are 0, 1 or a fraction, so that groups have a spread.
    """
    rng = random.Random(seed)
    made = []
    for i in range(n):
        kind = KINDS[i % len(KINDS)]
        made.append(_Recorder(rng, f"case-{i // per_group:02d}", kind, vocabulary, versions).episode())
    return made


def requests_for(episodes: Sequence[Episode]) -> list[GroupRequest]:
    """One group request per input id of the episodes, asking for all of them."""
    counts: dict[str, int] = {}
    for episode in episodes:
        counts[episode.input_id] = counts.get(episode.input_id, 0) + 1
    return [GroupRequest(input_id=i, payload={"prompt": f"task {i}"}, n=n) for i, n in counts.items()]


class _Recorder:
    """Writes one episode down turn by turn, the way a gateway would have captured it."""

    def __init__(
        self, rng: random.Random, input_id: str, kind: str, vocabulary: int, versions: tuple[int, int]
    ) -> None:
        self.rng, self.input_id, self.kind, self.vocabulary = rng, input_id, kind, vocabulary
        self.first, self.last = versions
        self.turns: list[Turn] = []
        self.role = "main"  # of the next turns, and what their ids begin with: main, sub, side, thrown, image
        self.facts: dict[str, Any] = {}

    def episode(self) -> Episode:
        good: dict[str, Callable[[], Any]] = {
            "single": lambda: self.talk(1),
            "multi_turn": lambda: self.talk(self.rng.randint(2, 5)),
            "rewritten": self.rewritten,
            "sub_agent": self.sub_agent,
            "truncated": lambda: self.talk(2, last_reason="length"),
            "mixed_versions": lambda: self.talk(3, moving=True),
            "moe": lambda: self.talk(2, experts=True, moving=True),
            "unparsed": lambda: self.talk(2, parse_status="unparsed"),
            "side_calls": self.side_calls,
            "compacted": self.compacted,
            "images": self.images,
        }
        reward: Any = self.rng.choice([0.0, 1.0, 0.25, [0.1, 0.5], {"reward": 1.0, "format": 0.5}])
        if self.kind in good:
            good[self.kind]()
            return self.done({"rewards": reward, "status_code": 200})
        if self.kind in ("policy_failed", "policy_unscored"):
            self.talk(3, last_reason="length")
            scored = {"rewards": self.rng.choice([0.0, -1.0])} if self.kind == "policy_failed" else {}
            return self.done({**self.raised("policy", failure="tokens"), **scored})
        if self.kind != "no_tokens":
            self.talk(2)
        if self.kind == "lost":
            return self.done(None, RolloutLostError("the session died without a record"))
        if self.kind == "infrastructure":
            return self.done({**self.raised("infrastructure"), "rewards": 1.0})
        if self.kind == "agent_error":  # as an agent of the published toolkit leaves it: without a word on the cause
            return self.done(
                {"status_code": 500, "stop_reason": "boom", "traceback": "Traceback: boom", "rewards": 1.0}
            )
        return self.done({"status_code": 200} if self.kind == "no_reward" else {"rewards": 1.0, "status_code": 200})

    def raised(self, cause: str, **facts: str) -> dict[str, Any]:
        """The record of an agent that raised."""
        block = {"outcome": "agent_error", "cause": cause, **facts}
        return {"status_code": 500, "stop_reason": "boom", "traceback": "Traceback: boom", "_agent": block}

    def done(self, record: dict[str, Any] | None, failure: BaseException | None = None) -> Episode:
        return Episode(input_id=self.input_id, turns=tuple(self.turns), record=record, failure=failure, kind=self.kind)

    def ids(self, low: int, high: int) -> list[int]:
        return [self.rng.randrange(10, self.vocabulary) for _ in range(self.rng.randint(low, high))]

    def talk(
        self,
        turns: int,
        *,
        prompt: list[int] | None = None,
        last_reason: str = "stop",
        moving: bool = False,
        experts: bool = False,
        parse_status: Any = "parsed",
    ) -> list[int]:
        """Append turns that each extend the one before by its answer and new context; returns everything said."""
        history = prompt if prompt is not None else self.ids(8, 16)
        for k in range(turns):
            completion = self.ids(2, 9)
            self.add(
                history,
                completion,
                finish_reason=last_reason if k == turns - 1 else "tool_calls",
                weight_version_last=self.last if moving and k else self.first,
                parse_status="none" if k == turns - 1 and parse_status == "parsed" else parse_status,
                routed_experts=self.experts(len(history) + len(completion)) if experts else None,
            )
            history = history + completion + self.ids(2, 6)
        return history

    def rewritten(self) -> None:
        """The agent compacts its history: the same system prompt, then other tokens. Then it goes back to its first answer."""
        head = self.ids(8, 12)
        self.talk(2, prompt=head)
        first = self.turns[0]
        self.role = "sub"  # the older branch goes on after it: a conversation in between, not what became of the first
        self.talk(2, prompt=head[:6] + self.ids(5, 9))
        self.role = "main"
        # Sampled tokens of the first branch are context of this one: they must be trained there and only there.
        self.talk(1, prompt=[*first.prompt_ids, *first.completion_ids, *self.ids(2, 6)])

    def sub_agent(self) -> None:
        """A sub-agent with a prompt of its own runs between two turns of the main one."""
        history = self.talk(1)
        self.role = "sub"
        self.talk(2)
        self.role = "main"
        self.talk(1, prompt=history)

    def side_calls(self) -> None:
        """A title before the task, a sub-agent that the task calls, a call for the memory behind it."""
        for role, tools, turns in (
            ("side", (), 0),
            ("main", ("edit", "run"), 2),
            ("sub", ("run",), 1),
            ("side", (), 0),
        ):
            self.role, self.facts = role, {"tools": tools, "system": f"{role} {len(self.turns)}"}
            if role == "main":
                self.facts["feeds"] = {"sub-3": "called"}
            if turns:
                self.talk(turns)
            else:
                self.add(self.ids(12, 16), self.ids(2, 2), finish_reason="stop")

    def compacted(self) -> None:
        """Three summaries are asked for; the conversation goes on from the third, in the words of its user."""
        self.facts = {"tools": ("edit",), "system": "main"}
        asked = [*self.talk(2), *self.ids(26, 30)]
        for role in ("thrown", "thrown", "main"):
            self.role = role
            self.add(
                asked, self.ids(20, 24), finish_reason="stop", feeds={"main-5": "quoted"} if role == "main" else {}
            )
        self.talk(2, prompt=[*self.ids(3, 5), *self.turns[-1].completion_ids[2:-1], *self.ids(3, 5)])

    def images(self) -> None:
        """The last turn saw a picture that the trainer does not get."""
        history = self.talk(2)
        self.role, self.facts = "image", {"trainable": False, "untrainable_reason": "images"}
        self.talk(1, prompt=history)

    def add(self, prompt: list[int], completion: list[int], **facts: Any) -> None:
        index = len(self.turns)
        self.turns.append(
            Turn(
                turn_id=f"{self.role}-{index}",
                index=index,
                prompt_ids=list(prompt),
                completion_ids=completion,
                logprobs=[-self.rng.random() * 3 for _ in completion],
                weight_version_first=self.first,
                **self.facts,
                **facts,
            )
        )

    def experts(self, tokens: int) -> bytes:
        """int32 expert numbers, (tokens - 1, layers, top k) row by row, as SGLang returns them."""
        count = (tokens - 1) * EXPERT_LAYERS * EXPERT_TOP_K
        return b"".join(self.rng.randrange(8).to_bytes(4, "little") for _ in range(count))


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
    errors: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class ReplayAddress:
    """Where a session would be reached."""

    session_id: str
    base_url: str
    api_key: str


@dataclass(frozen=True, kw_only=True)
class ReplayCapture:
    """The captured turns of a session."""

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
        deadlines: Deadlines | None = None,
    ) -> ReplayFuture:
        if session_id is None or input_id is None:
            raise ValueError("a replayed rollout needs session_id and input_id")
        replay = self.replay
        episode = replay.waiting[input_id if replay.by_input else ""].popleft()
        replay.by_session[session_id] = episode
        replay.invoked.append({**payload, "_rollout": {"input_id": input_id, **(rollout_config or {})}})
        replay.running += 1
        replay.peak_running = max(replay.peak_running, replay.running)
        return ReplayFuture(replay, episode, session_id, None if deadlines is None else deadlines.run_s)


class ReplayFuture:
    """Answers like `RolloutFuture`."""

    attempt = 1

    def __init__(self, replay: Replay, episode: Episode, session_id: str, run_s: float | None = None) -> None:
        self.replay, self.episode, self.session_id, self.run_s = replay, episode, session_id, run_s
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
        left_s, timeout = self.ready_s - time.monotonic(), self.run_s if timeout is None else timeout
        late = timeout is not None and left_s > timeout
        stopped = asyncio.create_task(self.stopped.wait())
        try:
            await asyncio.wait({stopped}, timeout=timeout if late else max(0.0, left_s))
        finally:
            stopped.cancel()
        if self.stopped.is_set():
            raise RolloutCancelledError("cancelled", session_id=self.session_id)
        if late:
            await self.cancel_async()
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
        max_turns: int | None = None,
        train: str | None = None,
    ) -> list[ReplayAddress]:
        options = {"sampling_params": sampling_params, "max_turns": max_turns}
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
            asked = self.replay.open_sessions[session_id]["sampling_params"] or {}
            if "temperature" in asked:  # a session's temperature wins over the agent's, and is recorded
                given = {"temperature": asked["temperature"]}
                turns = [turn if turn.sampling else replace(turn, sampling=given) for turn in turns]
            errors = list(episode.errors) if episode is not None else []
            found[session_id] = ReplayCapture(session_id=session_id, turns=turns, errors=errors)
        return found

    async def delete_async(self, session_ids: Sequence[str]) -> int:
        return sum(self.replay.open_sessions.pop(s, None) is not None for s in session_ids)

    def set_weight_version(self, version: int) -> None:
        self.replay.weight_version = version

    async def set_weight_version_async(self, version: int) -> None:
        self.replay.weight_version = version
