"""How old a session is, which is what `--retention-hours` goes by: as its last frame, whatever the wall clock says."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, UpstreamConfig
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.store.retention import ages
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

Start = Callable[..., Awaitable[Gateway]]


async def one_call(gateway: Gateway) -> str:
    """A closed session with a call; returns its id."""
    client = GatewayClient(gateway.url)
    [session] = await client.create_sessions_async([new_session_id()])
    body = {"messages": [{"role": "user", "content": "hi"}]}
    status, _ = await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key)
    assert status == 200
    await client.close_sessions_async([session.session_id])
    return session.session_id


def aged(store: Path, *by_s: float) -> None:
    """Let the segments of a store be as if they had been written some time ago."""
    for segment, age_s in zip(sorted(store.glob("calls-*.log")), by_s, strict=True):
        os.utime(segment, (time.time() - age_s,) * 2)


async def test_a_segment_that_cannot_be_begun_is_tried_again_at_once_and_told_once(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    await one_call(gateway)
    await gateway.stop()
    aged(tmp_path, 500.0)
    bound_s = 2400.0  # an eighth of it is five minutes
    upstreams = (UpstreamConfig(url=engine.url, engine="vllm"),)
    gateway = Gateway(GatewayConfig(upstreams=upstreams, store_dir=str(tmp_path), retention_s=bound_s))
    wall = tmp_path / "calls-00000002.log"
    wall.symlink_to(tmp_path / "nowhere")  # the name is taken: the system refuses to make the file
    before = gateway.journal.segments
    try:
        with caplog.at_level(logging.ERROR):
            await gateway.start()
            async with asyncio.timeout(30):
                while "no further segment" not in caplog.text:  # noqa: ASYNC110  (the gateway's clock)
                    await asyncio.sleep(0.02)
            looked = gateway.lag.now_s
            async with asyncio.timeout(30):
                while gateway.lag.now_s == looked:  # noqa: ASYNC110  (another look)
                    await asyncio.sleep(0.02)
            assert gateway.journal.segments == before
            assert caplog.text.count("no further segment") == 1
            wall.unlink()
            async with asyncio.timeout(30):
                while gateway.journal.segments == before:  # noqa: ASYNC110  (the gateway's clock)
                    await asyncio.sleep(0.02)
    finally:
        await gateway.stop(grace_s=0.2)


async def test_calls_of_before_a_restart_are_as_old_as_they_are(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    """The last segment is begun anew before it can be dropped: that makes it no younger."""
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    old = await one_call(gateway)
    gateway.journal.begin_anew(-1.0)
    late = await one_call(gateway)
    await gateway.stop()
    aged(tmp_path, 5000.0, 2000.0)
    gateway = await start_gateway(engine, store_dir=str(tmp_path), retention_s=3600.0)
    client = GatewayClient(gateway.url)
    async with asyncio.timeout(30):
        while await client.fetch_async([old]):  # noqa: ASYNC110  (the gateway's clock)
            await asyncio.sleep(0.05)
    young = await one_call(gateway)
    assert set(await client.fetch_async([late, young])) == {late, young}


async def looked(gateway: Gateway, times: int = 3) -> None:
    """Return when the gateway has looked after its store so many times."""
    for _ in range(times):
        before = gateway.lag.now_s
        async with asyncio.timeout(30):
            while gateway.lag.now_s == before:  # noqa: ASYNC110  (the gateway's clock)
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("years", [1, -1])
async def test_a_step_of_the_wall_clock_makes_nothing_older(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path), retention_s=3600.0)
    client, real = GatewayClient(gateway.url), time.time
    [opened] = await client.create_sessions_async([new_session_id()])
    names = [opened.session_id, await one_call(gateway)]
    gateway.journal.begin_anew(-1.0)
    monkeypatch.setattr(time, "time", lambda: real() + years * 365 * 86400)
    names.append(await one_call(gateway))
    gateway.journal.begin_anew(-1.0)
    await looked(gateway)
    assert set(await client.fetch_async(names, close=False)) == set(names)
    assert gateway.counters["sessions_expired"] == 0


@pytest.mark.parametrize("years", [1, -1])
async def test_a_step_of_the_wall_clock_between_two_starts_deletes_nothing_young(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, years: int
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    names = [await one_call(gateway)]
    gateway.journal.begin_anew(-1.0)
    names.append(await one_call(gateway))
    await gateway.stop()
    aged(tmp_path, years * 365 * 86400 + 10.0, years * 365 * 86400)
    gateway = await start_gateway(engine, store_dir=str(tmp_path), retention_s=3600.0)
    await looked(gateway)
    assert set(await GatewayClient(gateway.url).fetch_async(names, close=False)) == set(names)


async def test_an_open_session_is_never_too_old_and_a_closed_one_is_as_old_as_its_closing(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    client = GatewayClient(gateway.url)
    sessions = await client.create_sessions_async([new_session_id() for _ in range(4)])
    stays, quiet, just_closed, closed = [s.session_id for s in sessions]
    for session in (sessions[0], sessions[2], sessions[3]):
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key))[0] == 200
    await client.close_sessions_async([closed])
    gateway.journal.begin_anew(-1.0)
    await client.close_sessions_async([just_closed])
    await gateway.stop()
    aged(tmp_path, 5000.0, 2000.0)
    for starts in range(2):
        with caplog.at_level(logging.WARNING):
            gateway = await start_gateway(engine, store_dir=str(tmp_path), retention_s=3600.0)
            await looked(gateway)
        client = GatewayClient(gateway.url)
        assert set(await client.fetch_async([s.session_id for s in sessions], close=False)) == {
            stays,
            quiet,
            just_closed,
        }
        assert caplog.text.count("deleted 1 closed sessions") == 1
        assert caplog.text.count("--retention-hours") == 1 + starts
        assert caplog.text.count("kept 2 as old that are open") == 1 + starts
        await gateway.stop()
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    sessions = [dataclasses.replace(s, base_url=f"{gateway.url}/{s.base_url.split('/', 3)[3]}") for s in sessions[:2]]
    for session in sessions:  # they are as they were
        assert (await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key))[0] == 200
    found = await GatewayClient(gateway.url).fetch_async([stays, quiet])
    assert [len(found[name].turns) for name in (stays, quiet)] == [2, 1]


async def test_a_bound_of_size_says_what_it_deletes(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    client = GatewayClient(gateway.url)
    [session] = await client.create_sessions_async([new_session_id()])
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert (await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key))[0] == 200
    await one_call(gateway)
    gateway.journal.begin_anew(-1.0)
    await one_call(gateway)
    await gateway.stop()
    with caplog.at_level(logging.WARNING):
        gateway = await start_gateway(engine, store_dir=str(tmp_path), retention_bytes=500)
        async with asyncio.timeout(30):
            while not gateway.counters["sessions_expired"]:  # noqa: ASYNC110  (the gateway's clock)
                await asyncio.sleep(0.02)
    assert "deleted the 2 oldest sessions, 1 of them open" in caplog.text
    assert "--retention-gb" in caplog.text


YEAR_S = 365 * 86400.0


@pytest.mark.parametrize(
    ("written", "now", "found"),
    [
        ([], 100.0, []),
        ([10.0, 70.0], 100.0, [90.0, 30.0]),
        ([10.0, 70.0], 60.0, [60.0, 0.0]),  # the clock was set back since
        ([10.0, YEAR_S, 50.0], 70.0, [45.0, 20.0, 20.0]),  # it was wrong for a while
        ([10.0, 20.0], YEAR_S, [35.0, 25.0]),  # it is wrong now, or nobody was here
    ],
)
def test_segments_are_as_old_as_their_times_allow(written: list[float], now: float, found: list[float]) -> None:
    assert ages(written, now, 100.0) == found


def test_without_a_bound_the_clock_is_believed() -> None:
    assert ages([0.0], YEAR_S, None) == [YEAR_S]
