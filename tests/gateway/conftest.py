"""A gateway and a scripted engine on free loopback ports, in the test's own loop."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, Limits, SessionHandle, UpstreamConfig
from agentcore_rl_toolkit.gateway.token_calls import mode
from agentcore_rl_toolkit.messages.render import Renderer
from scripted_engine import ScriptedEngine

from .asking import MODEL


def pytest_make_parametrize_id(val: object) -> str | None:
    return (
        "rendered" if isinstance(val, str) and val == str(MODEL) else None
    )  # a test has the same name in every checkout


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as running:
        yield running


# Clients, gateway and engine share one process, which a full disk queue or a busy machine may stop for longer than the five
# seconds that the providers' clients give a connection.
for client in (openai, anthropic):
    base = client._base_client
    base.DEFAULT_TIMEOUT = type(base.DEFAULT_TIMEOUT)(600.0)


@functools.cache
def renderer(path: str, history: Any) -> Renderer:
    return Renderer.from_path(path, history=history)


class SharedRenderers:
    """Loading a model takes 40 ms of CPU. The gateways of a process share that of the built-in model, as sessions do."""

    @staticmethod
    def from_path(path: str, *, template: Any, parser: Any, history: Any) -> Renderer:
        if (path, template, parser) == (str(MODEL), None, None):
            return renderer(path, history)
        return Renderer.from_path(path, template=template, parser=parser, history=history)


mode.Renderer = SharedRenderers  # type: ignore[misc, assignment]


@pytest.fixture
async def start_gateway() -> AsyncIterator[Callable[..., Awaitable[Gateway]]]:
    """Make gateways that are stopped after the test: ``await start_gateway(engine, store_dir=...)``."""
    running: list[Gateway] = []

    async def start(*engines: ScriptedEngine | str, engine: str = "vllm", **settings: Any) -> Gateway:
        urls = [e if isinstance(e, str) else e.url for e in engines]
        upstreams = tuple(UpstreamConfig(url=url, engine=engine) for url in urls)  # type: ignore[arg-type]
        # The engines live in this process too: on a busy machine it may have no CPU for as long as `connect_s` is by itself.
        settings = {"limits": Limits(connect_s=60.0), **settings}
        gateway = Gateway(GatewayConfig(upstreams=upstreams, **settings))
        await gateway.start()
        running.append(gateway)
        return gateway

    yield start
    for gateway in running:
        await gateway.stop(grace_s=0.2)


@pytest.fixture
async def gateway(engine: ScriptedEngine, start_gateway: Callable[..., Awaitable[Gateway]]) -> Gateway:
    return await start_gateway(engine)


@pytest.fixture
def client(gateway: Gateway) -> GatewayClient:
    return GatewayClient(gateway.url)


@pytest.fixture
async def session(client: GatewayClient) -> SessionHandle:
    return (await client.create_sessions_async([new_session_id()]))[0]
