"""Sampling through Tinker: what goes over the wire, sessions and samplers, weights, waiting, trouble, agents that leave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest

import agentcore_rl_toolkit
from agentcore_rl_toolkit._protobuf import (
    bytes_field,
    double_field,
    double_of,
    number_field,
    pack,
    read_fields,
    unpack,
)
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import CaptureError, ConfigError, GatewayError, UpstreamError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, SessionHandle, UpstreamConfig
from agentcore_rl_toolkit.gateway.config import Limits
from agentcore_rl_toolkit.gateway.engines import tinker as wire
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import Fault, logprob_of
from agentcore_rl_toolkit.messages.dialects.canonical import ModelRequest, Sampling
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.policy.tinker.service import ScriptedModel, TinkerServer

MODEL = Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights"
USER = {"role": "user", "content": "What is 2 + 3?"}
TOKEN = "eyJhbGciOiJub25lIn0.eyJleHAiOjQxMDI0NDQ4MDAsImlhdCI6MH0.x"


@pytest.fixture
def model() -> ScriptedModel:
    made = ScriptedModel()
    made.first_id, made.last_id = 300, 500
    return made


@pytest.fixture
async def service(model: ScriptedModel) -> AsyncIterator[TinkerServer]:
    async with TinkerServer(model) as running:
        yield running


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
async def gateway(service: TinkerServer, limits: Limits) -> AsyncIterator[Gateway]:
    made = Gateway(config(service, limits=limits))
    await made.start()
    yield made
    await made.stop(grace_s=0.2)


def config(service: TinkerServer, **more: Any) -> GatewayConfig:
    # Production has a path in its URL too.
    upstream = UpstreamConfig(url=service.url + "/services/test", engine="tinker", api_key="tml-test")
    return GatewayConfig(**{"upstreams": (upstream,), "model_dir": str(MODEL), "sampler": "scripted/model", **more})


@pytest.fixture
def client(gateway: Gateway) -> GatewayClient:
    return GatewayClient(gateway.url)


@pytest.fixture
async def session(client: GatewayClient) -> SessionHandle:
    return (await client.create_sessions_async([new_session_id()]))[0]


def agent(session: SessionHandle) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)


async def say(session: SessionHandle, **asked: Any) -> Any:
    async with agent(session) as llm:
        return await llm.chat.completions.create(**{"model": "m", "messages": [USER], **asked})


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not reached():  # noqa: ASYNC110  (the service under test has no event for it)
            await asyncio.sleep(0.01)


# -- the wire


async def test_a_request_has_the_fields_that_the_sdk_sends(service: TinkerServer, session: SessionHandle) -> None:
    tinker = pytest.importorskip("tinker")
    from tinker.types import SampleRequest

    await say(session, n=2, seed=5, temperature=0.5, top_p=0.9, max_tokens=7, extra_body={"top_k": 20})
    call = service.calls[0]
    ids = sorted(Renderer.from_path(MODEL).stop_token_ids)
    theirs = SampleRequest(
        sampling_session_id=call.sampler,
        seq_id=0,
        num_samples=2,
        prompt=tinker.ModelInput.from_ints(call.prompt_ids),
        sampling_params=tinker.SamplingParams(max_tokens=7, seed=5, stop=ids, temperature=0.5, top_k=20, top_p=0.9),
        prompt_logprobs=False,
        record_stability_info=False,
    )
    assert call.body == theirs.model_dump(exclude_none=True, mode="json")
    assert call.headers["x-tinker-sampling-backpressure"] == "1"
    assert call.headers["x-api-key"] == "tml-test"
    assert "authorization" not in call.headers


def test_the_sdks_own_message_is_read() -> None:
    pytest.importorskip("tinker")
    from tinker.proto import tinker_public_pb2 as messages

    ids, logprobs = [1, 2**31 - 1, 3], [-0.5, -1.25, float("nan")]
    result = messages.SampleResponse(prompt_cache_hit_tokens=7)
    result.sequences.add(stop_reason=messages.STOP_REASON_STOP, tokens=pack("i", ids), logprobs=pack("f", logprobs))
    result.sequences.add(stop_reason=messages.STOP_REASON_LENGTH, tokens=pack("i", [9]))
    first, second = wire.TinkerEngine().reply(result.SerializeToString())
    assert (first.ids, first.logprobs, first.finish_reason) == (ids, [-0.5, -1.25, None], "stop")
    assert (second.choice, second.ids, second.logprobs, second.finish_reason) == (1, [9], None, "length")


@pytest.mark.parametrize("data", [b"\x0a\x05abc", b"\xff", b"\x0b", b"\x12", b"\x80" * 11])
def test_a_message_that_breaks_off_is_an_error(data: bytes) -> None:
    with pytest.raises(CaptureError):
        list(read_fields(data))


def test_fields_survive_writing_and_reading() -> None:
    data = number_field(1, 300) + bytes_field(16, "ü") + double_field(3, -0.1) + number_field(2, -1)
    found = list(read_fields(data))
    assert found[0] == (1, 300)
    assert found[1] == (16, "ü".encode())
    assert isinstance(found[2][1], bytes)
    assert double_of(found[2][1]) == -0.1
    assert found[3] == (2, 2**64 - 1)


def test_whole_numbers_only() -> None:
    with pytest.raises(CaptureError):
        unpack("i", b"\x01\x02\x03")


def test_without_stop_ids_the_models_own_end_of_text_still_stops() -> None:
    asked = ModelRequest(dialect="chat", model="m", sampling=Sampling(temperature=0.0))
    _, body = wire.TinkerEngine().request(b"[1,2]", asked, max_tokens=3, stop_token_ids=[], stream=False)
    sampling = msgspec.json.decode(body)["sampling_params"]
    assert "stop" not in sampling
    assert sampling["temperature"] == 0.0


# -- sessions and weights


async def test_one_session_and_one_sampler_serve_all_calls_and_end_with_the_gateway(service: TinkerServer) -> None:
    gateway = Gateway(config(service))
    await gateway.start()
    client = GatewayClient(gateway.url)
    sessions = await client.create_sessions_async([new_session_id() for _ in range(3)])
    await asyncio.gather(*(say(s) for s in sessions for _ in range(3)))
    assert [name for _, name in service.requests].count("create_session") == 1
    assert [name for _, name in service.requests].count("create_sampling_session") == 1
    assert sorted(call.body["seq_id"] for call in service.calls) == list(range(9))
    await gateway.stop(grace_s=0.2)
    assert len(service.finished) == 1


async def test_hundreds_of_calls_that_wait_for_the_session_all_get_their_answer(
    service: TinkerServer, session: SessionHandle, client: GatewayClient
) -> None:
    service.fail("client/config", 503, 503)
    body = {"model": "m", "messages": [USER]}
    url = f"{session.base_url}/chat/completions"
    asking = (request("POST", url, body=body, key=session.api_key, timeout_s=60) for _ in range(360))
    assert {status for status, _ in await asyncio.gather(*asking)} == {200}
    turns = (await client.fetch_async([session.session_id]))[session.session_id].turns
    sampled = sorted(ids for call in service.calls for ids in call.completion_ids)
    assert sorted(t.completion_ids for t in turns) == sampled


@pytest.mark.parametrize("old", [3, None])
async def test_new_weights_are_sampled_at_once_and_running_calls_end_on_the_old_ones(
    service: TinkerServer, model: ScriptedModel, client: GatewayClient, session: SessionHandle, old: int | None
) -> None:
    if old is not None:
        await client.set_weight_version_async(old)
    path = "tinker://run/sampler_weights/four"
    model.saved[path] = 4
    gate = asyncio.Event()
    service.faults.append(Fault(gate=gate))
    slow = asyncio.ensure_future(say(session))
    await until(lambda: len(service.calls) == 1)
    await client.set_weight_version_async(4, sampler=path)
    await say(session)
    gate.set()
    await slow
    assert [call.path for call in service.calls] == [None, path]
    turns = (await client.fetch_async([session.session_id]))[session.session_id].turns
    versions = {tuple(t.completion_ids): (t.weight_version_first, t.weight_version_last) for t in turns}
    assert [versions[tuple(call.completion_ids[0])] for call in service.calls] == [(old, old), (4, 4)]


async def test_weights_that_are_not_there_change_nothing(
    service: TinkerServer, client: GatewayClient, session: SessionHandle
) -> None:
    await client.set_weight_version_async(1)
    with pytest.raises(GatewayError, match="no weights"):
        await client.set_weight_version_async(2, sampler="tinker://nobody/none")
    await say(session)
    [turn] = (await client.fetch_async([session.session_id]))[session.session_id].turns
    assert turn.weight_version_first == 1


@pytest.mark.parametrize("what", ["weights", "port", "path"])
async def test_agents_are_not_told_where_the_service_is_nor_what_it_samples(
    service: TinkerServer, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = "tinker://inner/secret" if what == "weights" else "scripted/model"
    url = service.url + ("/inner/services" if what != "path" else "/inner")
    if what == "port":
        await service.stop()
    if what == "path":
        service.fail("client/config", 404)
    upstream = UpstreamConfig(url=url, engine="tinker", api_key="tml-test")
    gateway = Gateway(config(service, upstreams=(upstream,), sampler=sampler, limits=Limits(patience_s=0.0)))
    await gateway.start()
    client = GatewayClient(gateway.url)
    [session] = await client.create_sessions_async([new_session_id()])
    with caplog.at_level("WARNING"), pytest.raises(openai.APIStatusError) as caught:
        await say(session)
    shown = caught.value.response.text
    assert "inference server" in shown
    for inner in ("127.0.0.1", url.rpartition(":")[2].partition("/")[0], "inner", "secret", "api/v1"):
        assert inner not in shown
    assert url in caplog.text  # the operator is
    if what == "weights":
        with pytest.raises(GatewayError, match="no weights") as refused:  # and so is the trainer
            await client.set_weight_version_async(1, sampler="tinker://inner/other")
        assert url in str(refused.value)
    await gateway.stop(grace_s=0.2)


async def test_a_service_that_goes_away_is_not_named_to_agents(service: TinkerServer) -> None:
    gateway = Gateway(config(service, limits=Limits(patience_s=0.0)))
    await gateway.start()
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    await say(session)
    await service.stop()
    with pytest.raises(openai.APIStatusError) as caught:
        await say(session)
    assert "inference server" in caught.value.response.text
    assert service.url.partition("://")[2] not in caught.value.response.text
    assert "127.0.0.1" not in caught.value.response.text
    await gateway.stop(grace_s=0.2)


async def test_before_any_weights_a_call_is_told_so(service: TinkerServer) -> None:
    gateway = Gateway(config(service, sampler=None))
    await gateway.start()
    client = GatewayClient(gateway.url)
    [session] = await client.create_sessions_async([new_session_id()])
    with pytest.raises(openai.InternalServerError, match="no weights to sample from"):
        await say(session)
    await client.set_weight_version_async(0, sampler="scripted/model")
    assert (await say(session)).choices
    async with agent(session) as llm:
        assert [m.id async for m in await llm.models.list()] == ["scripted/model"]
    await gateway.stop(grace_s=0.2)


async def test_a_session_that_the_service_forgot_is_opened_anew(
    service: TinkerServer, session: SessionHandle, client: GatewayClient
) -> None:
    await say(session)
    service.forget_sessions()
    assert (await say(session)).choices
    assert len((await client.fetch_async([session.session_id]))[session.session_id].turns) == 2


async def test_the_key_is_exchanged_and_a_rejected_token_replaced(model: ScriptedModel) -> None:
    async with TinkerServer(model, jwt=TOKEN) as service:
        gateway = Gateway(config(service))
        await gateway.start()
        [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
        await say(session)
        assert service.calls[0].headers["x-api-key"] == TOKEN
        service.jwt = TOKEN + "2"
        await say(session)
        assert service.calls[1].headers["x-api-key"] == TOKEN + "2"
        await gateway.stop(grace_s=0.2)


async def test_opening_is_tried_again_and_so_is_publishing(
    service: TinkerServer, model: ScriptedModel, session: SessionHandle, client: GatewayClient
) -> None:
    service.fail("client/config", 503)
    service.fail("create_session", 500)
    service.fail("create_sampling_session", 429)
    assert (await say(session)).choices
    path = "tinker://run/sampler_weights/one"
    model.saved[path] = 1
    service.fail("create_sampling_session", 502)
    service.forget_sessions()  # and we have not heard of it
    await client.set_weight_version_async(1, sampler=path)
    assert (await say(session)).choices
    assert service.calls[-1].path == path


# -- waiting and trouble


async def test_an_answer_that_takes_long_is_asked_for_again(service: TinkerServer, session: SessionHandle) -> None:
    service.hold_s = 0.05
    service.faults.append(Fault(delay_s=0.6))
    assert (await say(session)).choices
    assert len(service.calls) == 1
    assert 2 <= service.requests.count(("POST", "retrieve_future")) <= 6


@pytest.mark.parametrize("status", [429, 503])
async def test_a_service_with_too_much_to_do_is_waited_for(
    service: TinkerServer, gateway: Gateway, session: SessionHandle, status: int
) -> None:
    service.faults.append(Fault(status=status))
    assert (await say(session)).choices
    assert gateway.counters["retries"] == 1
    assert len(service.calls) == 1


async def test_after_a_429_other_calls_wait_too(
    service: TinkerServer, gateway: Gateway, session: SessionHandle, client: GatewayClient
) -> None:
    await say(session)
    service.faults.append(Fault(status=429))
    first = asyncio.ensure_future(say(session))
    await until(lambda: gateway.counters["backpressure"] == 1)
    started_s = time.monotonic()
    await asyncio.gather(first, *(say(session) for _ in range(4)))
    assert time.monotonic() - started_s > 0.9
    assert service.requests.count(("POST", "asample")) == 7  # nobody was refused a second time


async def test_broken_connections_do_not_sample_twice(
    service: TinkerServer, gateway: Gateway, session: SessionHandle, client: GatewayClient
) -> None:
    await say(session)
    service.fail("retrieve_future", 500, 400, 502)
    assert (await say(session)).choices
    assert len(service.calls) == 2
    assert len((await client.fetch_async([session.session_id]))[session.session_id].turns) == 2


async def test_a_request_that_the_service_lost_is_sent_again(service: TinkerServer, session: SessionHandle) -> None:
    service.fail("retrieve_future", 410)
    assert (await say(session)).choices
    assert [call.body["seq_id"] for call in service.calls] == [0, 1]


class TestWithoutPatience:
    @pytest.fixture
    def limits(self) -> Limits:
        return Limits(patience_s=0.0)

    @pytest.mark.parametrize(
        ("status", "error"),
        [
            (429, openai.RateLimitError),
            (503, openai.InternalServerError),
            (402, openai.APIStatusError),
            (422, openai.UnprocessableEntityError),
        ],
    )
    async def test_the_services_errors_reach_the_agent(
        self, service: TinkerServer, client: GatewayClient, session: SessionHandle, status: int, error: type[Exception]
    ) -> None:
        await client.set_weight_version_async(1)
        service.faults.append(Fault(status=status, body=b'{"detail":"scripted failure"}'))
        with pytest.raises(error, match="scripted failure") as caught:
            await say(session)
        assert isinstance(caught.value, openai.APIStatusError)
        assert caught.value.status_code == status
        capture = (await client.fetch_async([session.session_id]))[session.session_id]
        assert (capture.turns, [e["status"] for e in capture.errors]) == ([], ["error"])

    async def test_a_wrong_key_is_the_gateways_fault_not_the_agents(self, service: TinkerServer) -> None:
        upstream = UpstreamConfig(url=service.url, engine="tinker")
        gateway = Gateway(config(service, upstreams=(upstream,), limits=Limits(patience_s=0.0)))
        await gateway.start()
        [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
        with pytest.raises(openai.InternalServerError, match="UPSTREAM_KEY"):
            await say(session)
        await gateway.stop(grace_s=0.2)


# -- agents


class TestOfWaitingStreams:
    @pytest.fixture
    def limits(self) -> Limits:
        return Limits(keep_alive_s=0.1, patience_s=0.0)

    async def test_comments_keep_a_stream_alive_until_the_answer_is_there(
        self, service: TinkerServer, session: SessionHandle, client: GatewayClient
    ) -> None:
        gate = asyncio.Event()
        service.faults.append(Fault(gate=gate))
        lines: list[str] = []
        async with (
            agent(session) as llm,
            llm.chat.completions.with_streaming_response.create(model="m", messages=[USER], stream=True) as reply,
        ):
            async for text in reply.iter_lines():
                lines.append(text)
                if lines.count(": waiting for the model") == 3:
                    gate.set()
        assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
        chunks = [json.loads(t[6:]) for t in lines if t.startswith("data: {")]
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
        assert len((await client.fetch_async([session.session_id]))[session.session_id].turns) == 1

    async def test_anthropics_client_skips_the_comments(self, service: TinkerServer, session: SessionHandle) -> None:
        service.faults.append(Fault(delay_s=0.4))
        async with (
            anthropic.AsyncAnthropic(
                base_url=session.base_url.removesuffix("/v1"), api_key=session.api_key, max_retries=0
            ) as llm,
            llm.messages.stream(model="m", max_tokens=16, messages=[USER]) as stream,
        ):  # type: ignore[list-item]
            message = await stream.get_final_message()
        assert message.stop_reason == "end_turn"
        assert message.usage.output_tokens == len(service.calls[0].completion_ids[0])

    async def test_trouble_after_the_first_comment_is_an_error_event(
        self, service: TinkerServer, session: SessionHandle, client: GatewayClient
    ) -> None:
        service.faults.append(Fault(delay_s=0.3, drop_after=5))
        async with agent(session) as llm:
            stream = await llm.chat.completions.create(model="m", messages=[USER], stream=True)
            with pytest.raises(openai.APIError, match="closed the connection"):
                async for _ in stream:
                    pass
        capture = (await client.fetch_async([session.session_id]))[session.session_id]
        assert [e["status"] for e in capture.errors] == ["error"]

    async def test_an_answer_that_cannot_be_written_after_comments_is_an_error_event(
        self, service: TinkerServer, session: SessionHandle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: object) -> bytes:
            raise UpstreamError("the engine's message cannot be read")

        monkeypatch.setattr("agentcore_rl_toolkit.gateway.calls.agent.replay", fails)
        service.faults.append(Fault(delay_s=0.3))
        async with agent(session) as llm:
            stream = await llm.chat.completions.create(model="m", messages=[USER], stream=True, timeout=20)
            with pytest.raises(openai.APIError, match="cannot be read"):
                async for _ in stream:
                    pass


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_leaves_cancels_its_sampling(
    service: TinkerServer, gateway: Gateway, session: SessionHandle, stream: bool
) -> None:
    service.faults.append(Fault(delay_s=30))
    asking = asyncio.ensure_future(say(session, stream=stream))
    await until(lambda: len(service.calls) == 1 and ("POST", "retrieve_future") in service.requests)
    asking.cancel()
    await until(lambda: service.calls[0].cancelled)
    assert not gateway.running


async def test_a_call_past_its_deadline_is_cancelled_and_said_to_be(service: TinkerServer) -> None:
    gateway = Gateway(config(service, limits=Limits(call_s=0.4)))
    await gateway.start()
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    service.faults.append(Fault(delay_s=30))
    with pytest.raises(openai.InternalServerError, match="longer than"):
        await say(session)
    await until(lambda: service.calls[0].cancelled)
    await gateway.stop(grace_s=0.2)


# -- settings


def test_tinker_needs_a_tokenizer_and_stands_alone() -> None:
    upstream = UpstreamConfig(url="http://127.0.0.1:1", engine="tinker")
    other = UpstreamConfig(url="http://127.0.0.1:2", engine="vllm")
    with pytest.raises(ConfigError, match="--model"):
        GatewayConfig(upstreams=(upstream,))
    with pytest.raises(ConfigError, match="stands alone"):
        GatewayConfig(upstreams=(upstream, other), model_dir=str(MODEL))
    with pytest.raises(ConfigError, match="sampler"):
        GatewayConfig(upstreams=(other,), sampler="tinker://x")


async def test_the_command_line_serves_it(service: TinkerServer, model: ScriptedModel, tmp_path: Path) -> None:
    path = "tinker://run/sampler_weights/one"
    model.saved[path] = 1
    ready = tmp_path / "ready.json"
    words = ["gateway", "serve", "--engine", "tinker", "--model", str(MODEL), "--upstream", path]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "agentcore_rl_toolkit.cli",
        *words,
        "--ready-file",
        str(ready),
        env={**os.environ, "TINKER_BASE_URL": service.url, "TINKER_API_KEY": "tml-test"},
        stdin=asyncio.subprocess.DEVNULL,
    )
    try:
        give_up_s = time.monotonic() + 60
        while not ready.exists():
            assert process.returncode is None
            assert time.monotonic() < give_up_s
            await asyncio.sleep(0.05)
        client = GatewayClient(json.loads(ready.read_text())["url"])
        sessions = await client.create_sessions_async([new_session_id() for _ in range(6)])
        await asyncio.gather(*(say(s) for s in sessions))
        assert {call.path for call in service.calls} == {path}
        model.saved[path + "b"] = 2
        await client.set_weight_version_async(2, sampler=path + "b")
        await asyncio.gather(*(say(s) for s in sessions))
        captures = await client.fetch_async([s.session_id for s in sessions])
        for capture in captures.values():
            assert [t.weight_version_first for t in capture.turns] == [None, 2]
            assert all(t.logprobs == [logprob_of(i) for i in t.completion_ids] for t in capture.turns)
        assert {call.path for call in service.calls[6:]} == {path + "b"}
    finally:
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
