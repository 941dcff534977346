"""The stream of groups over replayed episodes: order, age, resumption."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.backends import CollectConfig, Group, GroupRequest, GroupStream
from agentcore_rl_toolkit.errors import GatewayError, RolloutLostError
from agentcore_rl_toolkit.trajectory import Turn

from ..recorded import Episode, Replay, ReplayCapture, ReplayGateway

N = 2  # rollouts of a group


def request(position: int) -> GroupRequest:
    return GroupRequest(input_id=f"i{position}", payload={"position": position}, n=N)


class Live(ReplayGateway):
    """A gateway whose turns say the weight version that was in place when the rollout started and when it ended."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self.began: dict[str, int] = {}

    def turn(self, session_id: str) -> Turn:
        version = self.replay.weight_version
        assert version is not None
        return Turn(
            turn_id=f"{session_id}-0",
            index=0,
            prompt_ids=[1],
            completion_ids=[2, 3],
            logprobs=[-0.5, -0.5],
            finish_reason="stop",
            weight_version_first=self.began[session_id],
            weight_version_last=version,
        )

    async def fetch_async(self, session_ids: Any, *, close: bool = True) -> dict[str, ReplayCapture]:
        await super().fetch_async(session_ids, close=close)
        return {s: ReplayCapture(session_id=s, turns=[self.turn(s)]) for s in session_ids}


class World:
    """Rollouts whose length and end are decided by their input; the world of one process."""

    def __init__(
        self,
        *,
        length_s: Any = lambda position: 0.0,
        fails: Any = lambda position, k: False,
        reward: Any = lambda position, k: 1.0,
    ) -> None:
        self.length_s, self.fails, self.reward = length_s, fails, reward
        self.replay = Replay([], by_input=False)
        self.gateway = Live(self.replay)
        self.started: Counter[int] = Counter()
        self.replay.weight_version = 0

    def submit(self, payload: Any, session_id: Any = None, input_id: Any = None, **more: Any) -> Any:
        position = payload["position"]
        fails = self.fails(position, self.started[position])
        reward = self.reward(position, self.started[position])
        self.started[position] += 1
        assert self.replay.weight_version is not None
        self.gateway.began[session_id] = self.replay.weight_version
        self.replay.waiting[""] = deque(
            [
                Episode(
                    input_id=input_id,
                    record={"rewards": reward, "status_code": 200},
                    failure=RolloutLostError("gone") if fails else None,
                    delay_s=self.length_s(position),
                )
            ]
        )
        return self.replay.client.submit(payload, session_id, input_id, **more)

    def stream(
        self,
        requests: Any = request,
        *,
        batch: int = 2,
        staleness: int = 1,
        places: int = 64,
        credit: Any = "episode",
        extra: int = 0,
        **more: Any,
    ) -> GroupStream:
        return GroupStream(
            requests,
            client=self,
            gateway=self.gateway,
            batch_groups=batch,
            max_staleness=staleness,
            config=CollectConfig(max_concurrent=places, credit=credit, extra_rollouts=extra),
            **more,
        )

    def publish(self, stream: GroupStream) -> None:
        version = stream.weight_version + 1
        self.replay.weight_version = version
        stream.published(version)


def positions(groups: list[Group]) -> list[int]:
    return [int(group.input_id[1:]) for group in groups]


async def test_no_group_starts_before_the_rollouts_of_the_earlier_ones_have_places() -> None:
    """Those on top of a group wait for a place, too."""
    world = World(length_s=lambda position: 0.05)
    stream = world.stream(batch=4, staleness=0, places=1, extra=2)
    async with stream:
        taking = asyncio.ensure_future(stream.take_async())
        await asyncio.sleep(0)
        assert stream.state() == {"next": 1, "in_flight": [0], "replaced": 0}
        assert [group.request.payload["position"] for group in await taking] == [0, 1, 2, 3]


async def test_an_error_of_the_gateway_or_the_data_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: Any, **__: Any) -> Any:
        raise GatewayError("no key", status=401)

    world = World()
    async with asyncio.timeout(30), world.stream(lambda position: [request(0)][position]) as stream:
        with pytest.raises(IndexError):
            await stream.take_async()
    monkeypatch.setattr(world.gateway, "create_sessions_async", refused)
    async with asyncio.timeout(30), world.stream() as stream:
        with pytest.raises(GatewayError, match="no key"):
            await stream.take_async()


async def test_without_staleness_every_batch_is_the_next_part_of_the_data_and_nothing_runs_beside_training() -> None:
    world = World(length_s=lambda position: 0.01 * (position % 3))
    async with world.stream(staleness=0) as stream:
        for step in range(4):
            assert positions(await stream.take_async()) == [2 * step, 2 * step + 1]
            await asyncio.sleep(0.02)  # the training
            assert set(world.started) == set(range(2 * step + 2))
            world.publish(stream)
    assert not world.replay.open_sessions


async def test_rollouts_run_while_the_trainer_trains_and_a_slow_one_is_passed_by_until_it_is_due() -> None:
    world = World(length_s=lambda position: 0.2 if position == 0 else 0.0)
    taken = []
    async with world.stream(batch=2, staleness=2) as stream:
        for _ in range(5):
            batch = await stream.take_async()
            taken.append(positions(batch))
            assert all(r.usable for group in batch for r in group.rollouts)
            world.publish(stream)
    assert 0 not in taken[0]
    assert 0 in taken[2]  # it started at version 0, and 2 is the last that may train it
    assert len({position for batch in taken for position in batch}) == 10


async def test_what_the_engine_sampled_from_older_weights_than_allowed_is_masked() -> None:
    world = World()
    async with world.stream(staleness=0, weight_version=5) as stream:  # the engine still says 0
        groups = await stream.take_async()
    assert {r.mask_reason for g in groups for r in g.rollouts} == {"stale"}


async def test_data_that_ends_ends_the_stream_with_what_is_left() -> None:
    world = World()
    async with world.stream(lambda position: request(position) if position < 5 else None) as stream:
        sizes = []
        while batch := await stream.take_async():
            sizes.append(len(batch))
            world.publish(stream)
    assert sizes == [2, 2, 1]


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 3),
    staleness=st.integers(0, 3),
    places=st.integers(1, 12),
    kills=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=3),
)
async def test_every_started_group_is_trained_once_or_in_flight_at_the_checkpoint(
    seed: int, batch: int, staleness: int, places: int, kills: list[tuple[int, bool]]
) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice((0.0, 0.0, 0.001, 0.004)) for _ in range(200)]
    failing = {(position, k) for position in range(200) for k in range(N) if rng.random() < 0.15}
    trained: Counter[int] = Counter()
    state: dict[str, Any] | None = None
    version = 0
    for steps, trained_but_not_saved in [*kills, (6, False)]:
        world = World(length_s=lengths.__getitem__, fails=lambda position, k: (position, k) in failing)
        world.replay.weight_version = version
        async with world.stream(
            batch=batch, staleness=staleness, places=places, weight_version=version, state=state
        ) as stream:
            for _ in range(steps):
                groups = await stream.take_async()
                assert len(groups) == batch
                for group in groups:
                    for rollout in group.rollouts:
                        assert (rollout.mask_reason is None) == (rollout.outcome == "ok")
                        began = world.gateway.began[rollout.session_id]
                        assert began >= stream.weight_version - staleness
                if rng.random() < 0.5:
                    await asyncio.sleep(0.001)
                world.publish(stream)
                trained.update(positions(groups))
                version = stream.weight_version
                state = json.loads(json.dumps(stream.state()))  # the checkpoint
                # Every position is trained, in flight or still to come; none is skipped, none is there twice.
                assert sorted([*trained, *state["in_flight"]]) == list(range(state["next"]))
                assert max(trained.values()) == 1
            if trained_but_not_saved:
                await stream.take_async()  # and the process is gone before it is trained
        assert not world.replay.open_sessions
        assert world.replay.running == 0


async def test_a_stream_that_is_closed_at_any_moment_leaves_no_session_and_no_unread_error() -> None:
    loop, unread = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda loop, context: unread.append(context))
    gc.freeze()  # the collections below look at the objects of this test only
    for moment in range(80):  # turns of the event loop
        world = World(fails=lambda position, k: position % 2 == 0)
        async with world.stream(batch=1, places=2) as stream:
            taking = asyncio.create_task(stream.take_async())
            for _ in range(moment):
                await asyncio.sleep(0)
            if taking.done():
                world.publish(stream)
        taking.cancel()
        assert not world.replay.open_sessions, moment
        assert world.replay.running == 0, moment
        del world, stream
        gc.collect()
        assert unread == [], moment


async def test_groups_without_spread_are_replaced_up_to_a_factor_and_counted() -> None:
    # Positions 0, 1, 4 and 5 have spread.
    world = World(reward=lambda position, k: float(k) if position % 4 < 2 else 0.5)
    recorded: list[tuple[str, str | None]] = []

    class Kept:
        phase = "train"

        def at(self, *_: Any) -> Kept:
            return self

        def add(self, rollout: Any, request: GroupRequest, version: int) -> None:
            recorded.append((request.input_id, rollout.mask_reason))

    async with world.stream(staleness=0, replace_up_to=2.0, recording=Kept()) as stream:
        assert positions(await stream.take_async()) == [0, 1]
        world.publish(stream)
        # 2 and 3 are replaced, then 4 and 5 are taken.
        assert positions(await stream.take_async()) == [4, 5]
        assert stream.replaced == 2
        state = json.loads(json.dumps(stream.state()))
        world.publish(stream)
    assert Counter(recorded)["i2", "no_spread"] == N
    assert Counter(recorded)["i4", None] == N
    async with world.stream(staleness=0, replace_up_to=2.0, state=state) as again:
        assert positions(await again.take_async()) == [4, 5], "they were not trained"
        assert again.replaced == 2


async def test_a_resumed_run_repeats_and_counts_a_group_that_was_replaced_after_the_last_batch() -> None:
    world = World(reward=lambda position, k: 0.5 if position == 2 else float(k))
    async with world.stream(staleness=1, replace_up_to=2.0) as stream:
        assert positions(await stream.take_async()) == [0, 1]
        while not stream.replaced:  # noqa: ASYNC110  # a count, and no event
            await asyncio.sleep(0.001)
        world.publish(stream)
        state = stream.state()
    world.started.clear()
    async with world.stream(staleness=1, replace_up_to=2.0, state=state) as again:
        assert positions(await again.take_async()) == [3, 4]
        assert (positions(again.left_out), again.replaced) == ([2], 1)


async def test_a_batch_is_taken_as_it_is_when_enough_groups_were_replaced() -> None:
    world = World(reward=lambda position, k: 0.0)
    async with world.stream(staleness=0, replace_up_to=2.5) as stream:
        assert positions(await stream.take_async()) == [3, 4]
        assert stream.replaced == 3
        world.publish(stream)
        assert positions(await stream.take_async()) == [8, 9]


@pytest.mark.parametrize(("factor", "batch", "replaced"), [(1.0, 2, 0), (1.4, 5, 2), (1.15, 20, 3), (1.25, 3, 0)])
async def test_the_factor_of_replacements_is_exact(factor: float, batch: int, replaced: int) -> None:
    world = World(reward=lambda position, k: 0.0)
    async with world.stream(staleness=0, batch=batch, replace_up_to=factor) as stream:
        await stream.take_async()
        assert stream.replaced == replaced


async def test_groups_with_rewards_of_turns_are_not_replaced() -> None:
    """Turns may have different rewards although the episodes have equal ones."""
    world = World(reward=lambda position, k: [1.0])
    async with world.stream(staleness=0, replace_up_to=2.0, credit="turn") as stream:
        groups = await stream.take_async()
    assert positions(groups) == [0, 1]
    assert all(rollout.usable for group in groups for rollout in group.rollouts)
