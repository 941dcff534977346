"""Servers of several kinds behind one gateway: what only one kind takes goes to that kind, or is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest

import agentcore_rl_toolkit
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, SessionHandle, UpstreamConfig
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import Fault, ScriptedEngine

MODEL = str(Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights")
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]
PARTICULAR = {"vllm": {"structured_outputs": {"regex": "[0-9]+"}}, "sglang": {"regex": "[0-9]+"}}

Engines = dict[str, ScriptedEngine]
Start = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    async with ScriptedEngine() as vllm, ScriptedEngine() as sglang:
        for each in (vllm, sglang):
            each.first_id, each.last_id = 300, 500
        yield {"vllm": vllm, "sglang": sglang}


@pytest.fixture(params=["messages", "tokens"])
async def mixed(request: pytest.FixtureRequest, engines: Engines) -> AsyncIterator[Gateway]:
    model = {"model_dir": MODEL} if request.param == "tokens" else {}
    upstreams = tuple(UpstreamConfig(url=e.url, engine=kind) for kind, e in engines.items())  # type: ignore[arg-type]
    gateway = Gateway(GatewayConfig(upstreams=upstreams, **model))  # type: ignore[arg-type]
    await gateway.start()
    yield gateway
    await gateway.stop(grace_s=0.2)


async def opened(gateway: Gateway, **settings: Any) -> SessionHandle:
    return (await GatewayClient(gateway.url).create_sessions_async([new_session_id()], **settings))[0]


async def ask(session: SessionHandle, **more: Any) -> tuple[int, Any]:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 4, **more}
    status, reply = await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key)
    return status, msgspec.json.decode(reply)


@pytest.mark.parametrize("kind", PARTICULAR)
async def test_a_call_goes_to_a_server_that_takes_what_it_asks_for(mixed: Gateway, engines: Engines, kind: str) -> None:
    sessions = [await opened(mixed) for _ in range(4)]
    for session in sessions:
        assert (await ask(session))[0] == 200
    assert {len(engine.calls) for engine in engines.values()} == {2}  # half of them are with the other kind
    for session in sessions:
        assert (await ask(session, **PARTICULAR[kind]))[0] == 200
    [other] = [engine for name, engine in engines.items() if name != kind]
    assert (len(engines[kind].calls), len(other.calls)) == (6, 2)


async def test_what_a_sessions_settings_ask_for_counts_too(mixed: Gateway, engines: Engines) -> None:
    for _ in range(3):
        session = await opened(mixed, sampling_params=PARTICULAR["sglang"])
        assert (await ask(session))[0] == 200
    assert (len(engines["vllm"].calls), len(engines["sglang"].calls)) == (0, 3)


async def test_what_no_single_server_takes_is_a_400_that_names_a_field(mixed: Gateway, engines: Engines) -> None:
    status, reply = await ask(await opened(mixed), **PARTICULAR["vllm"], **PARTICULAR["sglang"])
    assert (status, reply["error"]["param"] in ("regex", "structured_outputs")) == (400, True), reply
    assert [engine.calls for engine in engines.values()] == [[], []]


async def test_a_server_that_would_pass_over_a_field_is_no_second_choice(mixed: Gateway, engines: Engines) -> None:
    engines["sglang"].faults += [Fault(drop_after=0)] * 2
    status, reply = await ask(await opened(mixed), **PARTICULAR["sglang"])
    assert (status, len(engines["sglang"].calls), engines["vllm"].calls) == (502, 2, []), reply
    engines["sglang"].faults.append(Fault(status=429))
    status, reply = await ask(await opened(mixed), **PARTICULAR["sglang"])
    assert (status, engines["vllm"].calls) == (429, []), reply
    engines["sglang"].faults.append(Fault(status=503))
    session = await opened(mixed)
    inside = mixed.sessions.by_id[session.session_id.encode()]
    inside.worker = next(w for w in mixed.router.workers.values() if w.config.engine == "sglang")
    assert (await ask(session))[0] == 200  # either will do for a plain call
    assert len(engines["vllm"].calls) == 1


@pytest.mark.parametrize(
    ("kind", "asked", "param"),
    [
        ("vllm", {"regex": "a"}, "regex"),
        ("vllm", {"stop_regex": "a"}, "stop_regex"),
        ("sglang", {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("sglang", {"bad_words": ["a"]}, "bad_words"),
        ("sglang-experts", {"guided_json": {"type": "object"}}, "guided_json"),
        ("vllm", {"regex": None, "ebnf": "", "bad_words": ["a"]}, None),
        ("sglang", {"bad_words": [], "truncate_prompt_tokens": None, "regex": "a"}, None),
        ("openai", {"regex": "a", "structured_outputs": {}}, None),
    ],
)
async def test_a_field_that_an_engine_would_pass_over_is_refused(
    engine: ScriptedEngine, start_gateway: Start, kind: str, asked: dict[str, Any], param: str | None
) -> None:
    engine.gives_tokens = kind != "openai"
    session = await opened(await start_gateway(engine, engine=kind))
    status, reply = await ask(session, **asked)
    assert (status, len(engine.calls)) == ((400, 0) if param else (200, 1)), reply
    if param:
        assert reply["error"]["param"] == param
        capture = await GatewayClient(session.base_url.partition("/sessions/")[0]).fetch_async([session.session_id])
        assert (capture[session.session_id].turns, capture[session.session_id].errors) == ([], [])


async def test_an_operator_knows_better_what_the_engine_takes(engine: ScriptedEngine, start_gateway: Start) -> None:
    gateway = await start_gateway(engine, engine="vllm", allow_fields=("regex",))
    status, reply = await ask(await opened(gateway), regex="a")
    assert (status, [call.body["regex"] for call in engine.calls]) == (200, ["a"]), reply


async def test_a_server_that_goes_while_a_call_waits_is_missed_by_name(mixed: Gateway, engines: Engines) -> None:
    client = GatewayClient(mixed.url)
    session = await opened(mixed)
    await client.pause_async()
    asking = asyncio.create_task(ask(session, **PARTICULAR["sglang"]))
    async with asyncio.timeout(60):
        while not mixed.running:  # noqa: ASYNC110  # nobody tells that a call has begun to wait
            await asyncio.sleep(0.01)
    [gone] = [w.id for w in mixed.router.workers.values() if w.config.engine == "sglang"]
    await client.remove_worker_async(gone)
    await client.resume_async()
    status, reply = await asking
    assert (status, "no inference server that takes regex" in reply["error"]["message"]) == (503, True), reply
    assert engines["vllm"].calls == []


async def test_it_is_refused_in_other_dialects_as_well(engine: ScriptedEngine, start_gateway: Start) -> None:
    session = await opened(await start_gateway(engine, engine="sglang"))
    root = session.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=root, api_key=session.api_key, max_retries=0) as llm:
        asked: Any = {"model": "m", "max_tokens": 4, "messages": MESSAGES, "extra_body": PARTICULAR["vllm"]}
        with pytest.raises(anthropic.BadRequestError, match="structured_outputs"):
            await llm.messages.create(**asked)
        await llm.messages.create(**{**asked, "extra_body": PARTICULAR["sglang"]})
    assert [call.body["regex"] for call in engine.calls] == ["[0-9]+"]
