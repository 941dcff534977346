"""Calls while all engines are down, the cause of failures then, and turns that must not be trained on."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest
from aiohttp import web

from agentcore_rl_toolkit.app.causes import blame
from agentcore_rl_toolkit.contract import Cause
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.capture.record import CONSTRAINED, LOST_WEIGHTS
from agentcore_rl_toolkit.gateway.config import Limits
from agentcore_rl_toolkit.gateway.http.client import request
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, Start, ask, asked_by, captured, gpt, opened, talking, until


async def health(gateway: Gateway) -> dict[str, Any]:
    status, body = await request("GET", gateway.url + "/healthz")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_wait_for_the_only_server_and_health_says_so(
    engine: ScriptedEngine, start_gateway: Start, stream: bool
) -> None:
    gateway = await start_gateway(engine, limits=Limits(outage_s=60))
    sessions = [await opened(gateway) for _ in range(3)]
    assert (await ask(sessions[0]))[0] == 200
    port = int(engine.url.rpartition(":")[2])
    await engine.stop()
    calls = [asyncio.ensure_future(ask(session, stream=stream)) for session in sessions]
    await until(lambda: gateway.router.waiting == 3)
    seen = await health(gateway)
    assert (seen["status"], seen["waiting_for_a_server"]) == ("all engines are down", 3)
    async with ScriptedEngine() as again:
        await again.stop()
        await again.start(port)
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 3
        assert (await health(gateway))["status"] == "ok"
        turns = await GatewayClient(gateway.url).fetch_async([s.session_id for s in sessions])
        assert sum(len(t.turns) for t in turns.values()) == 4


async def test_what_waited_in_vain_is_for_later_and_is_the_infrastructures(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine, limits=Limits(outage_s=0.3))
    first, second = await opened(gateway), await opened(gateway)
    await engine.stop()

    async def fails(session: SessionHandle) -> openai.APIStatusError:
        async with gpt(session) as llm:
            with pytest.raises(openai.APIStatusError) as failed:
                await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return failed.value

    waiting = asyncio.ensure_future(fails(first))
    await until(lambda: gateway.router.waiting == 1)
    for error in (await fails(second), await waiting):  # no room to wait; waited in vain
        assert error.status_code in (502, 503)
        assert error.response.headers["retry-after"] == "1"
        assert blame(error).cause is Cause.INFRASTRUCTURE


async def test_a_call_waits_for_one_outage_and_tells_the_cause_of_the_second(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine, limits=Limits(outage_s=2))
    session, port = await opened(gateway), int(engine.url.rpartition(":")[2])
    await engine.stop()
    call = asyncio.ensure_future(ask(session))
    await until(lambda: gateway.router.waiting == 1)
    begun_s = time.monotonic()
    async with ScriptedEngine() as again:
        await again.stop()
        again.faults.append(Fault(delay_s=60))
        await again.start(port)
        await until(lambda: again.calls and time.monotonic() > begun_s + 2)
        await again.stop()
        status, body = await call
    assert (status, "all engines have been down" in str(body)) == (502, False)


async def test_turns_of_a_server_that_lost_its_weights_are_not_trained(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine)
    [worker] = gateway.router.workers.values()
    await GatewayClient(gateway.url).set_weight_version_async(4)
    session = await opened(gateway)
    worker.report_weights("default")  # it has never said a number: somebody else moves its weights
    await ask(session)
    worker.report_weights("4")
    worker.report_weights("default")
    await ask(session)
    assert (await health(gateway))["status"].startswith("an engine was restarted")
    await GatewayClient(gateway.url).set_weight_version_async(5)
    await ask(session)
    found = await captured(gateway, session)
    assert [t.untrainable_reason for t in found.turns] == [None, LOST_WEIGHTS, None]
    assert [t.weight_version_last for t in found.turns] == [4, None, 5]
    assert (await health(gateway))["status"] == "ok"


class VersionedEngine(ScriptedEngine):
    """Reports the version of its weights by vLLM's route only, as vLLM's chat does."""

    reported = "default"

    async def _answer(self, seen: Any, http: web.BaseRequest) -> web.StreamResponse:
        if seen.path == "/weight_info":
            return web.json_response({"weight_version": self.reported})
        return await super()._answer(seen, http)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_restarted_server_is_asked_for_its_weights_while_another_one_takes_the_calls(
    start_gateway: Start, stream: bool
) -> None:
    async with VersionedEngine() as one, VersionedEngine() as other:
        one.reported = other.reported = "4"
        gateway = await start_gateway(one, other, limits=Limits(outage_s=60, connect_s=60))
        await GatewayClient(gateway.url).set_weight_version_async(4)
        await until(lambda: all(worker._named for worker in gateway.router.workers.values()))
        session = await opened(gateway)
        await ask(session, "before", stream=stream)
        restarted = one if one.calls else other
        port = int(restarted.url.rpartition(":")[2])
        await restarted.stop()
        await ask(session, "meanwhile", stream=stream)
        restarted.reported = "default"
        await restarted.start(port)
        [worker] = [w for w in gateway.router.workers.values() if w.config.url == restarted.url]
        await until(lambda: worker.resting_until < time.monotonic())
        sessions = [await opened(gateway) for _ in "12"]  # one for each server
        for each in sessions:
            await ask(each, "after", stream=stream)
        assert [len(one.calls), len(other.calls)] == [2, 2]
        found = await GatewayClient(gateway.url).fetch_async([each.session_id for each in (session, *sessions)])
        reasons = [turn.untrainable_reason for capture in found.values() for turn in capture.turns]
        assert sorted(map(str, reasons)) == ["None", "None", "None", LOST_WEIGHTS]


@pytest.mark.parametrize(("kind", "route"), [("vllm", "/weight_info"), ("sglang", "/model_info")])
async def test_a_server_is_asked_which_weights_it_has(start_gateway: Start, kind: str, route: str) -> None:
    entries: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await asked_by(reader)
        body = (
            json.dumps({"weight_version": entries[-1]}).encode() if head.startswith(f"GET {route} ".encode()) else b"{}"
        )
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    async with talking(answer) as url:
        entries.append("7")
        gateway = await start_gateway(url, engine=kind, model_dir=str(MODEL))
        [worker] = gateway.router.workers.values()
        forgot = []
        for version in ("7", "default", "8"):
            entries.append(version)
            await worker.ask_weights()
            forgot.append(worker.forgot)
    assert forgot == [False, True, False]


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


FORMS: list[tuple[dict[str, Any], bool]] = [
    ({"response_format": SCHEMA}, True),
    ({"response_format": {"type": "json_object"}}, True),
    ({"tools": [TOOL], "tool_choice": "required"}, True),
    ({"structured_outputs": {"regex": "a+"}}, True),
    ({"response_format": {"type": "text"}, "tools": [TOOL], "tool_choice": "auto"}, False),
]


@pytest.mark.parametrize("mode", [{}, {"model_dir": str(MODEL)}], ids=["relay", "token"])
async def test_answers_held_to_a_form_are_not_trained_unless_the_user_says_so(
    engine: ScriptedEngine, start_gateway: Start, mode: dict[str, Any]
) -> None:
    engine.first_id, engine.last_id = 300, 500
    for allowed in (False, True):
        gateway = await start_gateway(engine, train_constrained=allowed, **mode)
        for asked, held in FORMS:
            session = await opened(gateway)
            status, body = await ask(session, **asked)
            assert status == 200, body
            found = await captured(gateway, session)
            assert found.turns[0].untrainable_reason == (CONSTRAINED if held and not allowed else None)


async def test_a_closed_token_route_is_told_in_the_servers_own_words(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    answer = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    refusal = json.dumps({"error": {"message": answer, "type": "PermissionDeniedError", "code": 403}}).encode()
    engine.faults.append(Fault(status=403, body=refusal))
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    status, body = await ask(await opened(gateway))
    assert status == 502
    assert answer in body.decode()
    assert "key" not in body.decode()
