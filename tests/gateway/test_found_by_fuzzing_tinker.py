"""Small cases of what random trouble at a Tinker service found: weights that change while calls wait, sessions lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

import agentcore_rl_toolkit
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, SessionHandle, UpstreamConfig
from agentcore_rl_toolkit.gateway.testing import Fault
from agentcore_rl_toolkit.policy.tinker.listening import Answer, Asked
from agentcore_rl_toolkit.policy.tinker.service import ScriptedModel, TinkerServer

MODEL = Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights"
NEW = "tinker://run/sampler_weights/new"


class Service(TinkerServer):
    """One whose next answer to a route can be held back: ``held[name]`` is set when it is due, ``free`` lets it go."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__(model)
        self.scripted = model
        self.held: dict[str, asyncio.Event] = {}
        self.free = asyncio.Event()

    async def _answer(self, asked: Asked) -> Answer:
        answer = await super()._answer(asked)
        held = self.held.pop(asked.path.rpartition("/api/v1/")[2], None)
        if held is not None:
            held.set()
            await self.free.wait()
        return answer


@pytest.fixture
async def services() -> AsyncIterator[list[Service]]:
    made = []
    for _ in range(2):
        model = ScriptedModel()
        model.first_id, model.last_id = 300, 500
        model.saved[NEW] = 1
        made.append(Service(model))
        await made[-1].start()
    yield made
    for service in made:
        await service.stop()


@pytest.fixture
async def gateway(services: list[Service]) -> AsyncIterator[Gateway]:
    upstream = UpstreamConfig(url=services[0].url, engine="tinker", api_key="tml-test")
    made = Gateway(
        GatewayConfig(
            upstreams=(upstream,),
            model_dir=str(MODEL),
            sampler="scripted/model",
            weight_version=1,
            upstream_hosts=("127.0.0.1",),
        )
    )
    await made.start()
    yield made
    await made.stop(grace_s=0.2)


async def opened(gateway: Gateway) -> SessionHandle:
    return (await GatewayClient(gateway.url).create_sessions_async([new_session_id()]))[0]


async def say(session: SessionHandle) -> Any:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        return await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "What is 2 + 3?"}])


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not reached():  # noqa: ASYNC110  (there is no event for it)
            await asyncio.sleep(0.01)


async def test_a_call_that_waited_for_new_weights_is_all_of_their_version(
    services: list[Service], gateway: Gateway
) -> None:
    session, client = await opened(gateway), GatewayClient(gateway.url)
    services[0].faults.append(Fault(status=429))
    asking = asyncio.ensure_future(say(session))
    await until(lambda: gateway.counters["backpressure"] == 1)
    await client.set_weight_version_async(2, sampler=NEW)
    await asking
    assert [call.path for call in services[0].calls] == [NEW]
    [turn] = (await client.fetch_async([session.session_id]))[session.session_id].turns
    assert (turn.weight_version_first, turn.weight_version_last) == (2, 2)


async def test_weights_that_are_published_while_a_session_is_opened_are_sampled(
    services: list[Service], gateway: Gateway
) -> None:
    """The first call opens it with the weights of before; when those are there, others are wanted."""
    service, session, client = services[0], await opened(gateway), GatewayClient(gateway.url)
    held = service.held["create_sampling_session"] = asyncio.Event()
    asking = asyncio.ensure_future(say(session))
    await asyncio.wait_for(held.wait(), 30)
    await client.set_weight_version_async(2, sampler=NEW)
    service.free.set()
    await asking
    await say(session)
    assert [call.path for call in service.calls] == [NEW, NEW]


async def test_a_server_that_comes_while_weights_are_published_samples_these(
    services: list[Service], gateway: Gateway
) -> None:
    client = GatewayClient(gateway.url)
    held = services[0].held["create_sampling_session"] = asyncio.Event()
    publishing = asyncio.ensure_future(client.set_weight_version_async(2, sampler=NEW))
    await asyncio.wait_for(held.wait(), 30)
    await client.add_worker_async(services[1].url, api_key="tml-test")
    sessions = [await opened(gateway) for _ in range(3)]
    asking = [asyncio.ensure_future(say(session)) for session in sessions]
    await until(lambda: len(services[1].calls) > 0)  # with the weights of before: the others are not there yet
    services[0].free.set()
    await publishing
    await asyncio.gather(*asking)
    before = len(services[1].calls)
    for session in sessions:
        await say(session)
    assert {call.path for call in services[1].calls[before:]} == {NEW}


async def test_a_server_that_was_out_while_weights_were_published_samples_these(
    services: list[Service], gateway: Gateway
) -> None:
    client, session = GatewayClient(gateway.url), await opened(gateway)
    await say(session)
    services[0].faults.append(Fault(delay_s=30))
    asking = asyncio.ensure_future(say(session))  # so that it is not taken out at once
    await until(lambda: len(services[0].calls) == 2)
    await client.remove_worker_async("w0")
    await client.set_weight_version_async(2, sampler=NEW)
    await client.add_worker_async(services[0].url)
    await say(await opened(gateway))
    assert services[0].calls[-1].path == NEW
    asking.cancel()


async def test_a_service_that_was_taken_out_is_left_alone(
    services: list[Service], gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentcore_rl_toolkit.gateway.tinker.service.HEARTBEAT_S", 0.05)
    client, session = GatewayClient(gateway.url), await opened(gateway)
    await say(session)
    await until(lambda: len(services[0].heartbeats) > 0)
    await client.add_worker_async(services[1].url, api_key="tml-test")
    await client.remove_worker_async("w0")
    await until(lambda: services[0].finished == list(services[0].sessions))
    received = len(services[0].heartbeats)
    await say(session)
    await until(lambda: len(services[1].heartbeats) > 3)
    assert len(services[0].heartbeats) == received


async def test_a_session_that_is_lost_twice_during_a_call_is_opened_twice(
    services: list[Service], gateway: Gateway
) -> None:
    session = await opened(gateway)
    await say(session)
    services[0].forget_sessions()
    services[0].fail("asample", 404, 404)
    assert (await say(session)).choices


async def test_an_agent_is_not_told_that_its_request_is_wrong_when_a_service_keeps_no_session(
    services: list[Service], gateway: Gateway
) -> None:
    session = await opened(gateway)
    services[0].fail("asample", *[404] * 20)
    with pytest.raises(openai.InternalServerError, match="loses every session"):
        await say(session)
