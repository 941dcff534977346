"""Streams that rest while there is too much to read lose nothing, and others are not delayed at all."""

from __future__ import annotations

import asyncio
import time

import openai
import pytest

from agentcore_rl_toolkit.gateway import GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine
from agentcore_rl_toolkit.gateway.upstreams import read_pacing


@pytest.mark.parametrize("busy", [0.0001, read_pacing.BUSY])
async def test_a_stream_arrives_whole_whether_it_rests_or_not(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, busy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_pacing, "BUSY", busy)
    monkeypatch.setattr(read_pacing, "FEW_PER_S", 10)
    engine.tokens, engine.token_s = 40, 0.004
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        for _ in range(2):
            text = ""
            async for chunk in await llm.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hello"}], stream=True
            ):
                text += chunk.choices[0].delta.content or ""
            assert len(text.split()) == 39
    turns = (await client.fetch_async([session.session_id]))[session.session_id].turns
    assert [t.completion_ids for t in turns] == [r.completion_ids[0] for r in engine.calls]


def settled(
    streams: int,
    pieces_per_s: float,
    *,
    read_us: float = 33.0,
    at: float = 1000.0,
    pace: read_pacing.Pace | None = None,
) -> tuple[read_pacing.Pace, float]:
    """A pace after so many streams were read for a while, each whenever it brings a piece or its rest is over, and the
    share of the time that the reading took in the last second. A thread can do no more than it has time for."""
    pace = pace or read_pacing.Pace()
    now, busy, last = at, 0.0, 0.0
    while now < at + 4.0:
        each_s = max(1 / pieces_per_s, pace.rest_s)
        now += max(each_s / streams, read_us / 1e6)
        busy += read_us / 1e6
        if now < at + 3.0:
            last = busy
        if pace.due(now):
            pace.judge(now, busy)
    return pace, busy - last


def test_what_there_is_time_for_is_not_delayed() -> None:
    assert settled(1000, 16)[0].rest_s == 0.0
    assert settled(100, 128)[0].rest_s == 0.0


@pytest.mark.parametrize("read_us", [20, 33, 50, 70])
def test_too_many_small_pieces_are_gathered_until_there_is_time_for_them(read_us: float) -> None:
    """However fast the machine is at the moment."""
    pace, busy = settled(1000, 128, read_us=read_us)
    assert read_pacing.SHORTEST_S <= pace.rest_s <= read_pacing.LONGEST_S
    assert 0.5 * read_pacing.BUSY < busy < read_pacing.BUSY * 1.15


def test_no_stream_rests_longer_than_an_agent_would_notice() -> None:
    assert settled(10_000, 128)[0].rest_s == read_pacing.LONGEST_S


def test_a_thread_that_is_not_let_run_is_busy_too() -> None:
    """Others take half of the core: the thread waits as long as it runs, and waiting counts."""
    before, started = read_pacing.busy_s(), time.monotonic()
    while time.monotonic() < started + 0.2:
        pass
    busy_s, passed_s = read_pacing.busy_s() - before, time.monotonic() - started
    assert 0.75 * passed_s <= busy_s <= passed_s + 0.05
    before, started = read_pacing.busy_s(), time.monotonic()
    time.sleep(0.2)
    busy_s, passed_s = read_pacing.busy_s() - before, time.monotonic() - started
    assert busy_s < passed_s - 0.15  # it may wait for a core after its sleep


def test_streams_stop_resting_when_there_are_fewer() -> None:
    assert settled(100, 128, at=1010.0, pace=settled(1000, 128)[0])[0].rest_s == 0.0


async def test_many_streams_that_are_woken_a_few_at_a_time_arrive_whole(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_pacing, "BUSY", 0.0001)
    monkeypatch.setattr(read_pacing, "FEW_PER_S", 10)
    monkeypatch.setattr(read_pacing, "AT_ONCE", 3)
    engine.tokens, engine.token_s = 60, 0.01

    async def read(number: int) -> int:
        message = [{"role": "user", "content": f"hello {number}"}]
        pieces = await llm.chat.completions.create(model="m", messages=message, stream=True)
        return len("".join([c.choices[0].delta.content or "" async for c in pieces if c.choices]).split())

    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        assert await asyncio.gather(*map(read, range(40))) == [59] * 40
    turns = (await client.fetch_async([session.session_id]))[session.session_id].turns
    assert len(turns) == 40
    assert all(len(t.completion_ids) == 60 for t in turns)
