"""The collection core over replayed episodes: outcomes, masks, deadlines, early stop, clean-up."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.collect import collect, collect_async
from agentcore_rl_toolkit.backends.collection.groups import CollectedRollout, GroupRequest
from agentcore_rl_toolkit.backends.collection.samples import to_samples
from agentcore_rl_toolkit.backends.collection.settings import CollectConfig
from agentcore_rl_toolkit.contract import Cause, Outcome, Stage
from agentcore_rl_toolkit.errors import (
    AgentError,
    ConfigError,
    GatewayError,
    InvalidResultError,
    RolloutLostError,
    RolloutThrottledError,
)
from agentcore_rl_toolkit.trajectory import Turn

from ..recorded import Episode, Replay, ReplayAddress, ReplayCapture, ReplayGateway


def turn(version: int | None = 3, *, index: int = 0, completion: Sequence[int] = (5, 6), **more: Any) -> Turn:
    return Turn(
        turn_id=f"t{index}",
        index=index,
        prompt_ids=[1, 2],
        completion_ids=list(completion),
        logprobs=[-0.5] * len(completion),
        finish_reason="stop",
        weight_version_first=version,
        weight_version_last=version,
        **more,
    )


def good(reward: float = 1.0, *, input_id: str = "a", version: int | None = 3, delay_s: float = 0.0) -> Episode:
    return Episode(
        input_id=input_id, turns=[turn(version)], record={"rewards": reward, "status_code": 200}, delay_s=delay_s
    )


async def one(episode: Episode, *, config: CollectConfig | None = None) -> CollectedRollout:
    replay = Replay([episode])
    groups = await collect_async(
        [GroupRequest(input_id=episode.input_id, payload={"prompt": "1+1"})],
        client=replay.client,
        gateway=replay.gateway,
        config=config,
    )
    assert not replay.open_sessions
    return groups[0].rollouts[0]


async def test_the_agent_is_told_the_sessions_address_and_key() -> None:
    replay = Replay([good()])
    await collect_async(
        [GroupRequest(input_id="a", payload={"prompt": "p"}, sampling_params={"temperature": 0.7}, overrides={"x": 1})],
        client=replay.client,
        gateway=replay.gateway,
        config=CollectConfig(sampling_params={"max_tokens": 64, "temperature": 1.0}, max_turns=9),
    )
    (payload,) = replay.invoked
    session_id = next(iter(replay.by_session))
    assert payload == {
        "prompt": "p",
        "_rollout": {
            "input_id": "a",
            "x": 1,
            "sampling_params": {"max_tokens": 64, "temperature": 0.7, "top_p": 1.0},
            "base_url": f"http://replay/sessions/{session_id}/v1",
            "api_key": f"key-{session_id}",
        },
    }


async def test_each_rollout_of_a_run_gets_another_seed_and_a_second_run_the_same_ones_also_in_parts() -> None:
    config = CollectConfig(sampling_params={"seed": 5})

    async def seeds(*parts: tuple[int, ...], **params: Any) -> list[int]:
        replay = Replay([good(input_id=name) for name in "aabb"])
        for places in parts:
            more = {"n": len(places) or 2, "places": places, **params}
            requests = [GroupRequest(input_id=name, payload={}, **more) for name in "ab"]
            await collect_async(requests, client=replay.client, gateway=replay.gateway, config=config)
        return sorted(payload["_rollout"]["sampling_params"]["seed"] for payload in replay.invoked)

    found = await seeds(())
    assert found == await seeds((1,), (0,))
    assert len(set(found)) == 4
    given = await seeds((), sampling_params={"seed": 7})
    assert (given[:2], len(set(given))) == ([7, 7], 3), "the trainer's own seed is that of a group's first rollout"


RECORD_ERROR = {"status_code": 500, "stop_reason": "boom", "traceback": "Traceback ... boom", "rewards": 1.0}


def raised(cause: str, failure: str | None = None, **fields: Any) -> dict[str, Any]:
    """The record of an agent that raised, as ours write it."""
    block = {"outcome": "agent_error", "cause": cause, **({"failure": failure} if failure else {})}
    return {"status_code": 500, "stop_reason": "boom", "traceback": "Traceback ... boom", "_agent": block, **fields}


LOST_IN_AGENT = raised("infrastructure", rewards=1.0)


def ended(record: Any = None, failure: BaseException | None = None, turns: Sequence[Turn] = (turn(),)) -> Episode:
    return Episode(input_id="a", turns=list(turns), record=record, failure=failure)


AGENT, POLICY, OURS = Cause.AGENT, Cause.POLICY, Cause.INFRASTRUCTURE


@pytest.mark.parametrize(
    ("episode", "outcome", "reason", "error", "cause", "score"),
    [
        (ended(RECORD_ERROR), "agent_error", "outcome", AgentError, AGENT, 0.0),
        (ended(LOST_IN_AGENT), "lost", "outcome", RolloutLostError, OURS, None),
        (ended(raised("policy", "turns")), "agent_error", "policy_failure", AgentError, POLICY, 0.0),
        (ended(raised("policy", "turns", rewards="x")), "agent_error", "policy_failure", AgentError, POLICY, 0.0),
        (ended(raised("policy", "context", rewards=0.0), turns=()), "agent_error", "no_tokens", AgentError, POLICY, 0.0),
        (ended(failure=RolloutLostError("gone")), "lost", "outcome", RolloutLostError, OURS, None),
        (ended(failure=RolloutThrottledError("429")), "throttled", "outcome", RolloutThrottledError, OURS, None),
        (ended(failure=OSError("no route")), "lost", "outcome", RolloutLostError, OURS, None),
        (ended(failure=ConfigError("wrong bucket")), "lost", "outcome", RolloutLostError, OURS, None),
        (ended(failure=InvalidResultError("not JSON")), "invalid", "outcome", InvalidResultError, AGENT, 0.0),
        (ended(failure=InvalidResultError("?", cause="infrastructure")), "invalid", "outcome", InvalidResultError, OURS, None),
        (ended({}), "invalid", "no_reward", InvalidResultError, AGENT, None),
        (ended({"rewards": "x"}), "invalid", "no_reward", InvalidResultError, AGENT, None),
        (ended({"rewards": math.nan}), "invalid", "no_reward", InvalidResultError, AGENT, None),
        (ended({"rewards": [10**400, 1.0]}), "invalid", "no_reward", InvalidResultError, AGENT, None),
        (ended({"rewards": 1.0}, turns=()), "invalid", "no_tokens", InvalidResultError, OURS, None),
        (ended({"rewards": 1.0}, turns=[turn(trainable=False)]), "invalid", "no_tokens", InvalidResultError, OURS, None),
    ],
)  # fmt: skip
async def test_a_failure_is_masked_and_has_a_cause_and_the_infrastructures_is_never_scored(
    episode: Episode, outcome: str, reason: str, error: type[BaseException], cause: Cause, score: float | None
) -> None:
    rollout = await one(episode)
    assert (rollout.outcome, rollout.mask_reason, rollout.usable) == (outcome, reason, False)
    assert isinstance(rollout.error, error)
    assert (rollout.cause, rollout.score) == (cause, score)


async def test_what_the_policy_failed_at_is_trained_with_the_reward_that_its_agent_declares() -> None:
    cut = Episode(
        input_id="a", turns=[turn()], record=raised("policy", "tokens", rewards={"reward": -0.5, "format": 0.0})
    )
    rollout = await one(cut)
    assert rollout.usable
    assert (rollout.outcome, rollout.cause, rollout.failure) == (Outcome.AGENT_ERROR, Cause.POLICY, "tokens")
    assert (rollout.reward, rollout.score) == (-0.5, 0.0)
    assert isinstance(rollout.error, AgentError)
    assert (rollout.error.cause, rollout.error.failure) == ("policy", "tokens")
    assert rollout.trajectory is not None
    assert rollout.trajectory.report.trained_tokens == 2
    masked = await one(cut, config=CollectConfig(policy_failures="mask"))
    assert (masked.usable, masked.mask_reason, masked.score) == (False, "policy_failure", 0.0)


async def test_a_metric_beyond_floats_is_left_out() -> None:
    record = {"rewards": {"reward": 1.0, "far": 10**400, "near": 2}, "metrics": {"far": -(10**400)}}
    rollout = await one(Episode(input_id="a", turns=[turn()], record=record))
    assert rollout.usable
    assert rollout.reward_detail is not None
    assert rollout.reward_detail.metrics == {"near": 2.0}


async def test_an_error_of_ours_while_judging_is_the_infrastructures_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unreadable = replace(turn(), prompt_ids=5)  # type: ignore[arg-type]
    replay = Replay([Episode(input_id="a", turns=[unreadable], record={"rewards": 1.0}), good()])
    [group] = await collect_async(
        [GroupRequest(input_id="a", payload={}, n=2)], client=replay.client, gateway=replay.gateway
    )
    broken, fine = sorted(group.rollouts, key=lambda rollout: rollout.usable)
    assert (broken.outcome, broken.cause, broken.score) == (Outcome.LOST, Cause.INFRASTRUCTURE, None)
    assert fine.usable
    [logged] = [record for record in caplog.records if record.exc_info]
    assert broken.session_id in logged.getMessage()


async def test_a_rollout_that_never_answers_times_out_and_is_stopped() -> None:
    replay = Replay([Episode(input_id="a", turns=[turn()], delay_s=math.inf)])
    (group,) = await collect_async(
        [GroupRequest(input_id="a", payload={})],
        client=replay.client,
        gateway=replay.gateway,
        config=CollectConfig(rollout_timeout_s=1),
    )
    assert group.rollouts[0].outcome == Outcome.TIMEOUT
    assert group.rollouts[0].stage == Stage.RUN
    assert len(replay.stopped) == 1
    assert not replay.open_sessions


async def test_over_sampling_cancels_stragglers_once_enough_usable_rollouts_are_in() -> None:
    episodes = [good(), Episode(input_id="a", turns=[turn()], record=RECORD_ERROR), good(delay_s=0.02), good()]
    episodes.append(good(delay_s=math.inf))
    replay = Replay(episodes)
    (group,) = await collect_async(
        [GroupRequest(input_id="a", payload={}, n=3)],
        client=replay.client,
        gateway=replay.gateway,
        config=CollectConfig(extra_rollouts=2),
    )
    outcomes = [r.outcome for r in group.rollouts]
    assert outcomes == [Outcome.OK, Outcome.AGENT_ERROR, Outcome.OK, Outcome.OK, Outcome.CANCELLED]
    assert len(group.usable) == 3
    assert len(replay.stopped) == 1


async def test_an_evaluation_runs_each_input_as_often_as_it_was_asked_to() -> None:
    """Further rollouts would end slow ones, so that fast ones and failures would weigh more in the mean."""
    replay = Replay([good(), good()])
    (group,) = await collect_async(
        [GroupRequest(input_id="a", payload={})],
        client=replay.client,
        gateway=replay.gateway,
        config=CollectConfig(extra_rollouts=1).replace(evaluation=True),
    )
    assert [r.outcome for r in group.rollouts] == [Outcome.OK]
    assert len(replay.invoked) == 1


class Several(ReplayGateway):
    """Two gateways: all sessions are at the second one, which is away as soon as they are open."""

    urls = ("http://one", "http://two")

    @property
    def silent(self) -> dict[str, float]:
        return {"http://two": 1e9} if self.replay.open_sessions else {}

    async def away_async(self) -> None: ...

    async def create_sessions_async(self, session_ids: Sequence[str], **options: Any) -> list[Any]:
        made = await super().create_sessions_async(session_ids, **options)
        return [SimpleNamespace(**vars(a), gateway=self.urls[1]) for a in made]


async def test_rollouts_on_a_gateway_that_stays_away_end_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentcore_rl_toolkit.backends.collection.collect.GATEWAY_LOOK_S", 0.01)
    replay = Replay([good(delay_s=math.inf) for _ in range(2)])
    request = GroupRequest(input_id="a", payload={}, n=2)
    async with asyncio.timeout(20):
        (group,) = await collect_async([request], client=replay.client, gateway=Several(replay))
    assert [r.outcome for r in group.rollouts] == [Outcome.LOST] * 2
    assert caplog.text.count("gateway http://two does not answer: 2 rollouts that run on it are lost") == 1


async def test_cancelling_the_collection_stops_rollouts_and_deletes_sessions() -> None:
    replay = Replay([good(delay_s=math.inf) for _ in range(4)])
    task = asyncio.create_task(
        collect_async([GroupRequest(input_id="a", payload={}, n=4)], client=replay.client, gateway=replay.gateway)
    )
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(replay.stopped) == 4
    assert not replay.open_sessions
    assert replay.running == 0


async def test_input_ids_that_repeat_are_refused() -> None:
    replay = Replay([])
    ids = [*"aabbccddeeff", "g"]
    requests = [GroupRequest(input_id=name, payload={}) for name in ids]
    with pytest.raises(ConfigError, match=r"repeated: a, b, c, d, e$"):
        await collect_async(requests, client=replay.client, gateway=replay.gateway)
    assert await collect_async([], client=replay.client, gateway=replay.gateway) == []


async def test_a_client_that_retries_is_refused_because_attempts_would_share_a_session() -> None:
    replay = Replay([good()])
    replay.client.retries = 1  # type: ignore[attr-defined]
    request = GroupRequest(input_id="a", payload={})
    with pytest.raises(ConfigError, match="retries=0"):
        await collect_async([request], client=replay.client, gateway=replay.gateway)
    assert replay.invoked == []
    (group,) = await collect_async([request], client=replay.client, gateway=None)  # no session to share
    assert group.rollouts[0].reward == 1.0


class DeafGateway(ReplayGateway):
    """Makes sessions, then fails or hangs when trajectories are fetched."""

    def __init__(self, replay: Replay, *, hang: bool) -> None:
        super().__init__(replay)
        self.hang = hang

    async def fetch_async(self, session_ids: Sequence[str], *, close: bool = True) -> dict[str, ReplayCapture]:
        if self.hang:
            await asyncio.sleep(3600)
        raise GatewayError("refused")


@pytest.mark.parametrize("hang", [False, True])
async def test_a_gateway_that_gives_no_trajectories_invalidates_rollouts_but_not_the_run(hang: bool) -> None:
    replay = Replay([good()])
    (group,) = await collect_async(
        [GroupRequest(input_id="a", payload={})],
        client=replay.client,
        gateway=DeafGateway(replay, hang=hang),
        config=CollectConfig(gateway_timeout_s=0.1, gateway_patience_s=0.3),
    )
    rollout = group.rollouts[0]
    assert (rollout.outcome, rollout.mask_reason) == (Outcome.INVALID, "no_tokens")
    assert isinstance(rollout.error, GatewayError)
    assert rollout.reward == 1.0


class LostReply(ReplayGateway):
    """Opens sessions, but the first answer never arrives."""

    asked = 0

    async def create_sessions_async(self, session_ids: Sequence[str], **options: Any) -> list[ReplayAddress]:
        made = await super().create_sessions_async(session_ids, **options)
        self.asked += 1
        if self.asked == 1:
            raise ConnectionResetError("reset")
        return made


async def test_sessions_are_asked_for_again_when_the_answer_was_lost() -> None:
    replay = Replay([good() for _ in range(3)])
    (group,) = await collect_async(
        [GroupRequest(input_id="a", payload={}, n=3)], client=replay.client, gateway=LostReply(replay)
    )
    assert len(group.usable) == 3
    assert not replay.open_sessions


class OneError(ReplayGateway):
    """Opens sessions, but answers one request with an error."""

    def __init__(self, replay: Replay, request: int, status: int) -> None:
        super().__init__(replay)
        self.request, self.status, self.asked = request, status, 0

    async def create_sessions_async(self, session_ids: Sequence[str], **options: Any) -> list[ReplayAddress]:
        self.asked += 1
        if self.asked == self.request:
            raise GatewayError("no session", status=self.status)
        return await super().create_sessions_async(session_ids, **options)


async def test_a_session_that_cannot_be_opened_costs_its_rollout_only() -> None:
    replay = Replay([good() for _ in range(4)])
    (group,) = await collect_async(
        [GroupRequest(input_id="a", payload={}, n=4)],
        client=replay.client,
        gateway=OneError(replay, 2, 400),
        config=CollectConfig(max_concurrent=1),
    )
    assert sorted(r.outcome for r in group.rollouts) == [Outcome.LOST, Outcome.OK, Outcome.OK, Outcome.OK]
    assert {r.outcome: r.attempt for r in group.rollouts} == {Outcome.LOST: None, Outcome.OK: 1}
    assert not replay.open_sessions


@pytest.mark.parametrize(("request_number", "status"), [(1, 400), (2, 401)])
async def test_a_gateway_that_opens_no_session_or_refuses_its_key_ends_the_batch(
    request_number: int, status: int
) -> None:
    replay = Replay([good() for _ in range(4)])
    with pytest.raises(GatewayError, match="no session"):
        await collect_async(
            [GroupRequest(input_id="a", payload={}, n=4)],
            client=replay.client,
            gateway=OneError(replay, request_number, status),
            config=CollectConfig(max_concurrent=1),
        )


async def test_rollouts_without_rewards_are_usable_but_no_samples() -> None:
    replay = Replay([Episode(input_id="a", turns=[turn()], record={"status_code": 200, "metrics": {"m": 2}})] * 3)
    groups = await collect_async(
        [GroupRequest(input_id="a", payload={}, n=3)],
        client=replay.client,
        gateway=replay.gateway,
        config=CollectConfig(require_reward=False),
    )
    assert [r.reward for r in groups[0].usable] == [None, None, None]
    with pytest.raises(ConfigError, match="has no reward"):
        to_samples(groups)


class Slow(ReplayGateway):
    """The first call for sessions waits. ``made`` are the sessions of each call that came to its end."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self.asked, self.release = asyncio.Event(), asyncio.Event()
        self.made: list[int] = []
        self.deleted: list[int] = []

    async def create_sessions_async(self, session_ids: Sequence[str], **options: Any) -> list[ReplayAddress]:
        if not self.asked.is_set():
            self.asked.set()
            await self.release.wait()
        self.made.append(len(session_ids))
        return await super().create_sessions_async(session_ids, **options)

    async def delete_async(self, session_ids: Sequence[str]) -> int:
        self.deleted.append(len(session_ids))
        return await super().delete_async(session_ids)


async def test_a_cancelled_collection_leaves_the_shared_call_to_the_others() -> None:
    replay = Replay([good(input_id=name) for name in "abc"])
    gateway: Any = Slow(replay)

    def collection(name: str) -> asyncio.Task[Any]:
        request = GroupRequest(input_id=name, payload={})
        return asyncio.create_task(collect_async([request], client=replay.client, gateway=gateway))

    tasks = [collection("a"), collection("b")]
    await gateway.asked.wait()
    tasks.append(collection("c"))
    await asyncio.sleep(0)
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    gateway.release.set()
    groups = [(await task)[0] for task in tasks[1:]]
    assert [group.rewards for group in groups] == [[1.0], [1.0]]
    assert gateway.made == [2, 1], "a and b in one call, c in the next"
    assert gateway.deleted == [3], "when the last collection ended"
    assert not replay.open_sessions


async def test_the_last_collection_ends_a_call_that_nobody_waits_for() -> None:
    replay = Replay([good()])
    gateway: Any = Slow(replay)
    task = asyncio.create_task(
        collect_async([GroupRequest(input_id="a", payload={})], client=replay.client, gateway=gateway)
    )
    await gateway.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gateway.release.set()
    await asyncio.sleep(0)
    assert (gateway.made, gateway.deleted, replay.open_sessions) == ([], [1], {})


async def test_the_sync_face_works_inside_a_running_loop() -> None:
    replay = Replay([good(0.25)])
    (group,) = collect([GroupRequest(input_id="a", payload={})], client=replay.client, gateway=replay.gateway)
    assert group.rewards == [0.25]


INTERRUPTED = """
import math, os, signal, threading
from agentcore_rl_toolkit.backends.collection.collect import collect
from agentcore_rl_toolkit.backends.collection.groups import GroupRequest
from recorded import Episode, Replay

replay = Replay([Episode(input_id="a", delay_s=math.inf) for _ in range(3)])
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    collect([GroupRequest(input_id="a", payload={}, n=3)], client=replay.client, gateway=replay.gateway)
except KeyboardInterrupt:
    print("stopped", len(replay.stopped), "open", len(replay.open_sessions))
"""


def test_ctrl_c_stops_the_sessions_before_it_reaches_the_caller() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "stopped 3 open 0", done.stderr


BAD: list[tuple[Mapping[str, Any], str]] = [
    ({"max_concurrent": 0}, "max_concurrent"),
    ({"extra_rollouts": -1}, "extra_rollouts"),
    ({"rollout_timeout_s": 0.0}, "rollout_timeout_s"),
    ({"gateway_timeout_s": math.inf}, "gateway_timeout_s"),
    ({"gateway_patience_s": -1.0}, "gateway_patience_s"),
    ({"max_turns": 0}, "max_turns"),
    ({"policy_failures": "drop"}, "policy_failures"),
    ({"credit": "turn", "discount": 1.1}, "discount"),
]


@pytest.mark.parametrize(("arguments", "match"), BAD)
def test_bad_settings_are_refused(arguments: Mapping[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        CollectConfig(**arguments)
