"""Several gateways used as one: in this process, and as processes that are killed, stopped and started again."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import GatewayError, GatewayLostError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient
from scripted_engine import ScriptedEngine

from ..asking import Start, asked_by, talking, until
from ..asking import status_of as ask
from ..served import Served

KEY = "key-of-the-administrator"


async def all_answer(client: GatewayClient) -> None:
    async with asyncio.timeout(60):
        while await client.away_async():  # noqa: ASYNC110  (other processes)
            await asyncio.sleep(0.1)


@pytest.fixture
async def two(engine: ScriptedEngine, start_gateway: Start) -> list[Gateway]:
    return [await start_gateway(engine, admin_key=KEY) for _ in range(2)]


@pytest.fixture
def both(two: list[Gateway]) -> GatewayClient:
    return GatewayClient([gateway.url for gateway in two], admin_key=KEY)


async def test_sessions_are_spread_and_everything_of_them_is_found(both: GatewayClient, two: list[Gateway]) -> None:
    names = [new_session_id() for _ in range(10)]
    sessions = await both.create_sessions_async(names, max_turns=3)
    assert [s.session_id for s in sessions] == names
    assert Counter(s.gateway for s in sessions) == {gateway.url: 5 for gateway in two}
    assert all(s.base_url.startswith(s.gateway) for s in sessions)
    assert await asyncio.gather(*map(ask, sessions * 2)) == [200] * 20
    captures = await both.fetch_async([*names, "nobody"], close=False)
    assert {name: len(c.turns) for name, c in captures.items()} == dict.fromkeys(names, 2)
    assert len(await both.fetch_async(names[:4])) == 4
    [more] = await both.create_sessions_async([new_session_id()])
    assert (
        len(await GatewayClient(both.url, admin_key=KEY).fetch_async(names)) == 10
    )  # a client that opened none of them
    stats = await both.stats_async()
    assert [sum(each[name] for each in stats["gateways"].values()) for name in ("turns", "sessions")] == [20, 11]
    assert [each["status"] for each in (await both.health_async())["gateways"].values()] == ["ok", "ok"]
    assert await both.delete_async([*names, more.session_id, "nobody"]) == 11
    assert [len(gateway.sessions.by_id) for gateway in two] == [0, 0]


async def test_a_session_that_is_opened_again_stays_where_it_is(both: GatewayClient, two: list[Gateway]) -> None:
    [first] = await both.create_sessions_async(["rollout-1"], max_turns=1)
    await both.create_sessions_async(["filler-1", "filler-2", "filler-3"])
    [again] = await both.create_sessions_async(["rollout-1"], max_turns=2)
    assert again == first
    with pytest.raises(GatewayError, match="session id"):
        await both.create_sessions_async(["a//b", "rollout-1"], max_turns=9)
    assert sum(len(gateway.sessions.by_id) for gateway in two) == 4


async def test_a_lost_gateway_is_no_error_of_a_deletion_while_another_answers(
    both: GatewayClient, two: list[Gateway]
) -> None:
    [session] = await both.create_sessions_async(["rollout-1"])
    lost, other = sorted(two, key=lambda gateway: gateway.url != session.gateway)
    await lost.stop()
    assert await both.delete_async(["rollout-1"]) == 0
    await other.stop()
    for client, error in ((both, GatewayLostError), (GatewayClient(other.url, admin_key=KEY), GatewayError)):
        with pytest.raises(GatewayError) as caught:
            await client.fetch_async(["rollout-1"])
        assert type(caught.value) is error
    with pytest.raises(GatewayError):
        await both.delete_async(["rollout-1"])


async def test_versions_and_pauses_are_those_of_all(both: GatewayClient, two: list[Gateway]) -> None:
    sessions = await both.create_sessions_async([new_session_id() for _ in range(4)])
    await both.set_weight_version_async(7)
    assert await both.pause_async() == {"paused": True, "in_flight": 0}
    assert [gateway.running.paused for gateway in two] == [True, True]
    asked = asyncio.gather(*map(ask, sessions))
    await both.resume_async()
    assert await asked == [200] * 4
    captures = await both.fetch_async([s.session_id for s in sessions])
    assert {c.turns[0].weight_version_first for c in captures.values()} == {7}
    with pytest.raises(GatewayError, match="sampler"):
        await both.set_weight_version_async(8, sampler="tinker://none")
    assert [gateway.running.weight_version for gateway in two] == [7, 7]


@pytest.mark.parametrize("change", ["pause", "set_weight_version", "resume"])
async def test_a_change_reaches_a_gateway_that_came_back_a_moment_ago(
    both: GatewayClient, two: list[Gateway], engine: ScriptedEngine, start_gateway: Start, change: str
) -> None:
    if change == "resume":
        await both.pause_async()
    lost, other = two
    await lost.stop()
    [(url, seconds)] = (await both.away_async()).items()
    assert (url, 0 <= seconds < 60) == (lost.url, True)
    back = await start_gateway(engine, admin_key=KEY, port=int(lost.url.rpartition(":")[2]))
    if change == "resume":
        await GatewayClient(back.url, admin_key=KEY).pause_async()  # as its store would
    await getattr(both, f"{change}_async")(*([7] if change == "set_weight_version" else []))
    assert both.silent == {}
    assert back.running.paused == other.running.paused == (change == "pause")
    assert back.running.weight_version == other.running.weight_version == (7 if "version" in change else None)


async def test_a_gateway_that_catches_up_slowly_ends_with_the_newest_change(gateway: Gateway) -> None:
    """The server of the test is down at first. Then it handles its first weight version after all others."""
    handled: list[int] = []
    heads: list[bytes] = []
    first, released, up = asyncio.Event(), asyncio.Event(), False

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, body = await asked_by(reader)
        heads.append(head)
        if not up:
            return
        if head.startswith(b"POST /admin/weight_version"):
            version = json.loads(body)["weight_version"]
            if version == 1:
                first.set()
                await released.wait()
            handled.append(version)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()

    async with talking(talk) as url:
        client = GatewayClient([gateway.url, url])
        await client.set_weight_version_async(1)
        assert list(client.silent) == [url]
        count, up = len(heads), True
        assert list((await client.stats_async())["gateways"]) == [gateway.url]
        assert len(heads) == count  # it is not asked again before it has rested
        returning = asyncio.ensure_future(client.away_async())
        await first.wait()
        await client.set_weight_version_async(2)
        released.set()
        assert await returning == {}
        assert handled[-1] == 2


async def test_a_change_does_not_wait_for_a_gateway_that_hangs(gateway: Gateway) -> None:
    versions: list[int] = []
    up, released = False, asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, body = await asked_by(reader)
        if not up:
            return
        await released.wait()
        if head.startswith(b"POST /admin/weight_version"):
            versions.append(json.loads(body)["weight_version"])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()

    async with talking(talk) as url:
        client = GatewayClient([gateway.url, url])
        assert list(await client.away_async()) == [url]
        up = True
        change = asyncio.ensure_future(client.set_weight_version_async(1))
        await until(lambda: gateway.running.weight_version == 1)
        released.set()
        await change
    assert set(versions) == {1}
    assert client.silent == {}


@pytest.fixture
async def processes(engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[Sequence[Served]]:
    made = [
        Served(tmp_path / name, engine, "--store", str(tmp_path / name / "store"), AGENTCORE_RL_GATEWAY_ADMIN_KEY=KEY)
        for name in ("first", "second")
    ]
    try:
        await asyncio.gather(*(each.start() for each in made))
        yield made
    finally:
        for each in made:
            each.kill()


async def test_one_that_is_killed_costs_its_sessions_only_and_is_used_again_when_it_is_back(
    processes: Sequence[Served], caplog: pytest.LogCaptureFixture
) -> None:
    killed, other = processes
    client = GatewayClient([p.url for p in processes], admin_key=KEY)
    sessions = await client.create_sessions_async([new_session_id() for _ in range(6)])
    theirs = {p.url: [s for s in sessions if s.gateway == p.url] for p in processes}
    assert await asyncio.gather(*map(ask, sessions)) == [200] * 6
    killed.kill()
    with pytest.raises(GatewayLostError) as lost:
        await client.fetch_async([s.session_id for s in sessions])
    assert lost.value.gateway == killed.url
    assert set(lost.value.session_ids) == {s.session_id for s in theirs[killed.url]}
    assert {n: len(c.turns) for n, c in lost.value.found.items()} == {s.session_id: 1 for s in theirs[other.url]}
    assert set(await client.away_async()) == {killed.url}
    await client.set_weight_version_async(5)
    await client.pause_async()
    assert set((await client.health_async())["gateways"]) == {other.url}
    more = await client.create_sessions_async([new_session_id() for _ in range(4)])
    assert {s.gateway for s in more} == {other.url}
    assert await client.delete_async([theirs[killed.url][0].session_id, theirs[other.url][0].session_id]) == 1
    [moved] = await client.create_sessions_async([theirs[killed.url][2].session_id])  # an agent that is tried again
    assert moved.gateway == other.url
    assert caplog.text.count(f"gateway {killed.url} does not answer: ") == 1

    await killed.start()
    await all_answer(client)
    assert "answers again" in caplog.text
    alone = GatewayClient(killed.url, admin_key=KEY)
    assert ((await alone.stats_async())["weight_version"], (await alone.health_async())["paused"]) == (5, True)
    rest = [s.session_id for s in theirs[killed.url]]
    captures = await client.fetch_async(rest[1:])  # nothing that was recorded is gone
    assert {n: len(c.turns) for n, c in captures.items()} == {rest[1]: 1, rest[2]: 0}
    await client.resume_async()
    again = await client.create_sessions_async([new_session_id() for _ in range(6)])
    assert {s.gateway for s in again} >= {killed.url}
    assert await asyncio.gather(*map(ask, again)) == [200] * 6


@pytest.mark.nightly
async def test_one_that_hangs_delays_nothing_beyond_the_deadline_and_doubles_nothing(
    processes: Sequence[Served],
) -> None:
    hung, other = processes
    limit_s = 4.0
    client = GatewayClient([p.url for p in processes], admin_key=KEY, timeout_s=limit_s)
    old = await client.create_sessions_async([new_session_id() for _ in range(4)])
    hung.process.send_signal(signal.SIGSTOP)
    try:
        names = [new_session_id() for _ in range(6)]
        began_s = time.monotonic()
        async with asyncio.timeout(6 * limit_s):
            sessions = await client.create_sessions_async(names)
        assert {s.gateway for s in sessions} == {other.url}
        assert time.monotonic() - began_s >= limit_s  # it was asked, and its deadline waited for
        async with asyncio.timeout(3 * limit_s):  # it is known to be away now: a look at it is all that may wait
            assert await asyncio.gather(*map(ask, sessions)) == [200] * 6
            await client.create_sessions_async([new_session_id()])
            assert len(await client.fetch_async(names, close=False)) == 6
        async with asyncio.timeout(6 * limit_s):
            await client.set_weight_version_async(3)
            with pytest.raises(GatewayLostError):
                await client.fetch_async([s.session_id for s in old])
            assert len(await client.fetch_async([names[0]])) == 1
    finally:
        hung.process.send_signal(signal.SIGCONT)
    await all_answer(client)
    alone = GatewayClient(hung.url, admin_key=KEY)
    assert not any(c.turns for c in (await alone.fetch_async(names)).values())
    assert (await alone.stats_async())["weight_version"] == 3
    captures = await client.fetch_async(names)
    assert {n: len(c.turns) for n, c in captures.items()} == dict.fromkeys(names, 1)


@pytest.mark.system
async def test_where_none_answers_the_error_is_that_of_a_gateway_that_is_away(processes: Sequence[Served]) -> None:
    client = GatewayClient([p.url for p in processes], admin_key=KEY, timeout_s=10.0)
    [session] = await client.create_sessions_async([new_session_id()])
    for each in processes:
        each.kill()
    for attempt in (
        client.create_sessions_async([new_session_id()]),
        client.fetch_async([session.session_id]),
        client.set_weight_version_async(1),
        client.delete_async([session.session_id]),
        client.health_async(),
    ):
        with pytest.raises(GatewayError) as error:
            await attempt
        assert error.value.status is None
    for each in processes:
        await each.start()
    await all_answer(client)
    assert await asyncio.gather(*map(ask, await client.create_sessions_async(["a", "b"]))) == [200, 200]


async def test_a_request_that_is_cancelled_at_any_moment_leaves_nothing_behind(both: GatewayClient) -> None:
    for passes in range(8):
        task = asyncio.ensure_future(both.set_weight_version_async(passes))
        for _ in range(passes):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gc.collect()  # a coroutine that was made and never started is an error here
