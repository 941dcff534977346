"""The weight version and a pause outlive the gateway that was told of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, SessionHandle, UpstreamConfig
from scripted_engine import ScriptedEngine

from ..asking import MODEL, Start, until
from ..asking import status_of as ask
from ..scripted_tinker import ScriptedTinker
from ..stores import killed, refused


async def versions(client: GatewayClient, *sessions: SessionHandle) -> list[int | None]:
    """The weight version of the last turn of each session."""
    found = await client.fetch_async([s.session_id for s in sessions], close=False)
    return [found[s.session_id].turns[-1].weight_version_first for s in sessions]


async def test_version_and_pause_are_there_after_everything_was_killed(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    first = await start_gateway(engine, store_dir=str(tmp_path / "first"))
    client = GatewayClient(first.url)
    await client.create_sessions_async([f"rollout-{k}" for k in range(6)])
    await client.set_weight_version_async(7)
    await client.pause_async()
    second = await start_gateway(engine, store_dir=killed(first, tmp_path / "second"))
    client = GatewayClient(second.url)
    stats = await client.stats_async()
    assert (stats["weight_version"], (await client.health_async())["paused"]) == (7, True)
    sessions = await client.create_sessions_async([f"rollout-{k}" for k in range(6)])
    held = [asyncio.ensure_future(ask(s)) for s in sessions]
    await until(lambda: len(second.running.waiting) == 6)
    await client.resume_async()
    assert await asyncio.gather(*held) == [200] * 6
    assert await versions(client, *sessions) == [7] * 6
    third = await start_gateway(engine, store_dir=killed(second, tmp_path / "third"))
    assert (third.running.paused, third.running.weight_version) == (False, 7)


async def test_a_change_that_cannot_be_stored_is_no_success(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    client = GatewayClient(gateway.url)
    changes: tuple[Callable[[], Awaitable[Any]], ...] = (
        lambda: client.set_weight_version_async(7),
        client.pause_async,
        client.resume_async,
    )
    with refused(gateway):
        for change in changes:
            with pytest.raises(GatewayError, match="the gateway cannot store it") as caught:
                await change()
            assert caught.value.status == 503
    await until(lambda: gateway.store.failed is None)
    await client.resume_async()
    await gateway.stop()
    assert (await start_gateway(engine, store_dir=str(tmp_path))).running.weight_version == 7


async def test_weights_at_tinker_are_known_after_a_restart_with_their_version(
    start_gateway: Start, engine: ScriptedEngine, tmp_path: Path
) -> None:
    service = ScriptedTinker()
    paths = [f"tinker://run:train:0/sampler_weights/{k}" for k in range(2)]
    service.saved.update({path: k for k, path in enumerate(paths)})
    running: list[Gateway] = []

    async def start(**more: Any) -> GatewayClient:
        for gateway in running:
            await gateway.stop(grace_s=0.2)
        upstream = UpstreamConfig(url=service.url, engine="tinker", api_key="tml-test")
        settings = {"upstreams": (upstream,), "model_dir": str(MODEL), "store_dir": str(tmp_path), **more}
        running.append(Gateway(GatewayConfig(**settings), connect=service.connect))
        await running[-1].start()
        return GatewayClient(running[-1].url)

    async def sampled(client: GatewayClient) -> tuple[str | None, int | None]:
        [session] = await client.create_sessions_async([new_session_id()])
        assert await ask(session) == 200
        [version] = await versions(client, session)
        return service.calls[-1].path, version

    try:
        client = await start(sampler="builtin/policy")
        assert await sampled(client) == (None, None)  # a base model
        await client.set_weight_version_async(4, sampler=paths[0])
        assert await sampled(await start()) == (paths[0], 4)
        assert await sampled(await start(sampler=paths[0])) == (paths[0], 4)
        assert await sampled(await start(sampler=paths[1])) == (paths[1], None)
        assert await sampled(await start()) == (paths[1], None)
    finally:
        await running[-1].stop(grace_s=0.2)
    # Another engine's weights have no version yet.
    assert (await start_gateway(engine, store_dir=str(tmp_path))).running.weight_version is None
