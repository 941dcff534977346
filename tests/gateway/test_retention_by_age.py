"""How old a segment is, which is what `--retention-hours` goes by: that of the last call in it, and only of one that began."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, UpstreamConfig
from agentcore_rl_toolkit.gateway.http_client import request
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


def aged(store: Path, by_s: float) -> None:
    """Let the store be as if it had been written some time ago."""
    for segment in store.glob("calls-*.log"):
        os.utime(segment, (time.time() - by_s,) * 2)


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
            looked = gateway.lag_s
            async with asyncio.timeout(30):
                while gateway.lag_s == looked:  # noqa: ASYNC110  (another look)
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
    await gateway.stop()
    aged(tmp_path, 7200.0)
    gateway = await start_gateway(engine, store_dir=str(tmp_path), retention_s=3600.0)
    client = GatewayClient(gateway.url)
    async with asyncio.timeout(30):
        while await client.fetch_async([old]):  # noqa: ASYNC110  (the gateway's clock)
            await asyncio.sleep(0.05)
    young = await one_call(gateway)
    assert set(await client.fetch_async([young])) == {young}
