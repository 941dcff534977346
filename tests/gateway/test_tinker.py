"""Sampling through Tinker's SDK: what it is asked, weights, trouble, agents that wait or leave."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import openai
import pytest

pytest.importorskip("tinker")

import tinker
from tinker.types import RequestErrorCategory

from agentcore_rl_toolkit.errors import ConfigError, GatewayError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, SessionHandle, UpstreamConfig
from agentcore_rl_toolkit.gateway.config import Limits
from agentcore_rl_toolkit.gateway.engines.sampling_service import Asked
from agentcore_rl_toolkit.gateway.sampling_services.tinker import TinkerService
from agentcore_rl_toolkit.messages.render import Renderer
from scripted_engine import Fault

from ..backends.tinker import local_service
from .asking import MODEL, Start, captured, gpt, opened, until
from .scripted_tinker import ScriptedTinker, status_error

USER = {"role": "user", "content": "What is 2 + 3?"}
NEW = "tinker://run/sampler_weights/new"


@pytest.fixture
def service() -> ScriptedTinker:
    made = ScriptedTinker()
    made.saved[NEW] = 1
    return made


@pytest.fixture
async def start(service: ScriptedTinker) -> AsyncIterator[Start]:
    running: list[Gateway] = []

    async def start(**more: Any) -> Gateway:
        upstream = UpstreamConfig(url=service.url, engine="tinker", api_key="tml-test")
        settings = {"upstreams": (upstream,), "model_dir": str(MODEL), "sampler": "builtin/policy", **more}
        running.append(Gateway(GatewayConfig(**settings), connect=service.connect))
        await running[-1].start()
        return running[-1]

    yield start
    for gateway in running:
        await gateway.stop(grace_s=0.2)


@pytest.fixture
async def gateway(start: Start) -> Gateway:
    return await start()


async def say(session: SessionHandle, **asked: Any) -> Any:
    async with gpt(session) as llm:
        return await llm.chat.completions.create(**{"model": "m", "messages": [USER], **asked})


def test_our_clients_have_the_sdks_methods() -> None:
    pairs = [
        (local_service.LocalService, tinker.ServiceClient),
        (local_service.LocalTrainingClient, tinker.TrainingClient),
        (local_service.LocalSamplingClient, tinker.SamplingClient),
    ]
    for ours, theirs in pairs:
        for name, method in inspect.getmembers(ours, inspect.isfunction):
            if not name.startswith("_"):
                known = list(inspect.signature(getattr(theirs, name)).parameters)
                asked = list(inspect.signature(method).parameters)
                assert [p for p in known if p in asked] == asked, name


async def test_the_sdk_is_asked_for_what_the_agent_asks_for(service: ScriptedTinker, gateway: Gateway) -> None:
    session = await opened(gateway)
    await say(session, n=2, seed=5, temperature=0.5, top_p=0.9, max_tokens=7, extra_body={"top_k": 20})
    [call] = service.calls
    ids = sorted(Renderer.from_path(MODEL).stop_token_ids)
    wanted = tinker.SamplingParams(max_tokens=7, seed=call.params.seed, stop=ids, temperature=0.5, top_k=20, top_p=0.9)
    assert (call.params, len(call.completion_ids)) == (wanted, 2)
    turns = (await captured(gateway, session)).turns
    assert [t.prompt_ids for t in turns] == [call.prompt_ids] * 2
    assert [t.completion_ids for t in turns] == call.completion_ids


async def test_without_stop_ids_the_models_own_end_of_text_still_stops(service: ScriptedTinker) -> None:
    asked = Asked(prompt=[1, 2], n=1, max_tokens=3, temperature=0.0)
    await (await TinkerService(service.connect).open(NEW)).sample(asked)
    assert service.calls[0].params == tinker.SamplingParams(max_tokens=3, temperature=0.0, top_k=-1, top_p=1.0)


# -- weights


@pytest.mark.parametrize("old", [3, None])
async def test_new_weights_are_sampled_at_once_and_running_calls_end_on_the_old_ones(
    service: ScriptedTinker, gateway: Gateway, old: int | None
) -> None:
    client, session = GatewayClient(gateway.url), await opened(gateway)
    if old is not None:
        await client.set_weight_version_async(old)
    gate = asyncio.Event()
    service.faults.append(Fault(gate=gate))
    slow = asyncio.ensure_future(say(session))
    await until(lambda: len(service.calls) == 1)
    await client.set_weight_version_async(4, sampler=NEW)
    await say(session)
    gate.set()
    await slow
    assert [call.path for call in service.calls] == [None, NEW]
    turns = (await captured(gateway, session)).turns
    versions = {tuple(t.completion_ids): (t.weight_version_first, t.weight_version_last) for t in turns}
    assert [versions[tuple(call.completion_ids[0])] for call in service.calls] == [(old, old), (4, 4)]


async def test_weights_that_are_published_while_others_are_opened_are_sampled(
    service: ScriptedTinker, start: Start
) -> None:
    service.saved["tinker://slow"] = 0
    held = service.opening["tinker://slow"] = Future()
    gateway = await start(sampler="tinker://slow")
    session, client = await opened(gateway), GatewayClient(gateway.url)
    asking = asyncio.ensure_future(say(session))
    await until(lambda: gateway.samplers is not None and gateway.samplers._opening.locked())
    await client.set_weight_version_async(2, sampler=NEW)
    held.set_result(None)
    await asking
    assert [call.path for call in service.calls] == [NEW]
    [turn] = (await captured(gateway, session)).turns
    assert (turn.weight_version_first, turn.weight_version_last) == (2, 2)


async def test_weights_that_are_not_there_change_nothing(service: ScriptedTinker, gateway: Gateway) -> None:
    client, session = GatewayClient(gateway.url), await opened(gateway)
    await client.set_weight_version_async(1)
    with pytest.raises(GatewayError, match="no weights"):
        await client.set_weight_version_async(2, sampler="tinker://nobody/none")
    await say(session)
    [turn] = (await captured(gateway, session)).turns
    assert turn.weight_version_first == 1


# -- trouble


async def test_agents_are_not_told_what_is_sampled_nor_where(service: ScriptedTinker, start: Start) -> None:
    gateway = await start(sampler="tinker://inner/secret")
    session = await opened(gateway)
    with pytest.raises(openai.APIStatusError) as caught:
        await say(session)
    assert "engine" in caught.value.response.text
    assert "inner" not in caught.value.response.text
    await GatewayClient(gateway.url).set_weight_version_async(0, sampler=NEW)
    service.faults.append(Fault(drop_after=0))
    with pytest.raises(openai.APIStatusError) as caught:
        await say(session)
    assert "inner" not in caught.value.response.text


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (status_error(429), 429),
        (status_error(503), 503),
        (status_error(422), 422),
        (status_error(401), 502),
        (tinker.RequestFailedError("scripted failure", "r", RequestErrorCategory.Server), 502),
        (tinker.RequestFailedError("exceeds the maximum context length", "r", RequestErrorCategory.User), 400),
        (ValueError("unforeseen"), 502),
    ],
    ids=str,
)
async def test_the_sdks_errors_reach_the_agent(
    service: ScriptedTinker, gateway: Gateway, failure: Exception, status: int
) -> None:
    session = await opened(gateway)
    service.errors.append(failure)
    with pytest.raises(openai.APIStatusError) as caught:
        await say(session)
    assert caught.value.status_code == status
    capture = await captured(gateway, session)
    assert (capture.turns, [e["status"] for e in capture.errors]) == ([], ["error"])


async def test_a_session_that_the_service_lost_is_opened_anew_once(service: ScriptedTinker, gateway: Gateway) -> None:
    session = await opened(gateway)
    service.errors.append(status_error(410))
    assert (await say(session)).choices
    assert service.connected == 2
    service.errors.extend([status_error(404), status_error(404)])
    with pytest.raises(openai.InternalServerError):  # a 404 would say that the agent's own request was wrong
        await say(session)


# -- agents


async def test_comments_keep_a_stream_alive_until_the_answer_is_there(service: ScriptedTinker, start: Start) -> None:
    gateway = await start(limits=Limits(keep_alive_s=0.05))
    session = await opened(gateway)
    gate = asyncio.Event()
    service.faults.append(Fault(gate=gate))
    lines: list[str] = []
    async with (
        gpt(session) as llm,
        llm.chat.completions.with_streaming_response.create(model="m", messages=[USER], stream=True) as reply,  # type: ignore[list-item]
    ):
        async for text in reply.iter_lines():
            lines.append(text)
            if lines.count(": waiting for the model") == 3:
                gate.set()
    assert "data: [DONE]" in lines[-2:]
    chunks = [json.loads(t[6:]) for t in lines if t.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    service.faults.append(Fault(gate=(gate := asyncio.Event())))
    service.errors.append(status_error(503))
    async with gpt(session) as llm:
        stream = await llm.chat.completions.create(model="m", messages=[USER], stream=True)  # type: ignore[list-item]
        gate.set()
        with pytest.raises(openai.APIError, match="scripted failure"):  # an event: the head is out
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_leaves_cancels_its_sampling(service: ScriptedTinker, start: Start, stream: bool) -> None:
    gateway = await start(limits=Limits(orphan_s=0.1))
    session = await opened(gateway)
    service.faults.append(Fault(gate=asyncio.Event()))
    asking = asyncio.ensure_future(say(session, stream=stream))
    await until(lambda: len(service.calls) == 1)
    asking.cancel()
    await until(lambda: service.calls[0].cancelled)
    assert not gateway.running.calls


async def test_a_call_past_its_deadline_is_cancelled_and_said_to_be(service: ScriptedTinker, start: Start) -> None:
    session = await opened(await start(limits=Limits(call_s=0.4)))
    service.faults.append(Fault(gate=asyncio.Event()))
    with pytest.raises(openai.InternalServerError, match="longer than"):
        await say(session)
    await until(lambda: service.calls[0].cancelled)


# -- settings


def test_tinker_needs_a_tokenizer_and_stands_alone() -> None:
    upstream = UpstreamConfig(url="http://127.0.0.1:1", engine="tinker")
    other = UpstreamConfig(url="http://127.0.0.1:2", engine="vllm")
    with pytest.raises(ConfigError, match="--model"):
        GatewayConfig(upstreams=(upstream,))
    with pytest.raises(ConfigError, match="from one service"):
        GatewayConfig(
            upstreams=(upstream, UpstreamConfig(url="http://127.0.0.1:3", engine="tinker")), model_dir=str(MODEL)
        )
    with pytest.raises(ConfigError, match="sampler"):
        GatewayConfig(upstreams=(other,), sampler="tinker://x")
