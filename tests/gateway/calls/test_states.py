"""The table of a call's states: real calls go along its arrows only, reach every state, and another step ends a call."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agentcore_rl_toolkit
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, SessionHandle, UpstreamConfig
from agentcore_rl_toolkit.gateway.calls.call import Call
from agentcore_rl_toolkit.gateway.calls.states import ENDS, NEXT, State
from agentcore_rl_toolkit.gateway.config import Limits
from agentcore_rl_toolkit.gateway.testing import Fault, ScriptedEngine

MODEL = Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights"
Arrow = tuple[State, State]
Start = Callable[..., Awaitable[Gateway]]


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[State]]:
    """The states that each call goes through, in order."""
    found: dict[int, list[State]] = {}
    kept = []  # so that no call gets another one's id
    become = Call.become

    def noted(call: Call, state: State) -> None:
        become(call, state)
        kept.append(call)
        found.setdefault(id(call), [State.RECEIVED]).append(state)

    monkeypatch.setattr(Call, "become", noted)
    return found


BODY = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}
ANTHROPIC = {**BODY, "max_tokens": 50}


async def post(session: SessionHandle, path: str, body: dict[str, Any], **headers: str) -> int | None:
    """The status; None: the connection ended before the reply was whole."""
    key = {"authorization": f"Bearer {session.api_key}", **headers}
    try:
        async with httpx.AsyncClient(timeout=30) as client:
            return (await client.post(f"{session.base_url}/{path}", json=body, headers=key)).status_code
    except httpx.TransportError:
        return None


@contextlib.asynccontextmanager
async def served(*, model: bool = False, **limits: Any) -> AsyncIterator[tuple[Gateway, list[ScriptedEngine]]]:
    async with ScriptedEngine() as one, ScriptedEngine() as other:
        for engine in (one, other):
            engine.first_id, engine.last_id = 300, 500
        upstreams = tuple(UpstreamConfig(url=e.url, engine="vllm") for e in (one, other))
        more: dict[str, Any] = {"model_dir": str(MODEL)} if model else {}
        gateway = Gateway(GatewayConfig(upstreams=upstreams, limits=Limits(**limits), **more))
        await gateway.start()
        try:
            yield gateway, [one, other]
        finally:
            await gateway.stop(grace_s=0.2)


FAULTS = st.sampled_from(
    [
        None,
        Fault(status=500),
        Fault(status=503),
        Fault(status=400),
        Fault(drop_after=0),
        Fault(drop_after=200),
        Fault(drop_after=900),
        Fault(body=b"nonsense"),
        Fault(delay_s=0.05),
    ]
)
ASKED = st.fixed_dictionaries(
    {
        "path": st.sampled_from(["chat/completions", "messages"]),
        "stream": st.booleans(),
        "again": st.booleans(),
        "wrong": st.booleans() | st.just(False),
        "leave": st.sampled_from([None, None, 0.0, 0.02]),
        "faults": st.lists(FAULTS, max_size=3),
        "control": st.sampled_from([None, None, "pause", "close", "abort"]),
    }
)


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not reached():  # noqa: ASYNC110  (there is no event for it)
            await asyncio.sleep(0.005)


async def play(gateway: Gateway, engines: list[ScriptedEngine], plan: list[dict[str, Any]]) -> None:
    client = GatewayClient(gateway.url)
    [session] = await client.create_sessions_async([new_session_id()])
    for asked in plan:
        for engine in engines:
            engine.faults.clear()
            engine.faults.extend(fault for fault in asked["faults"] if fault is not None)
        body = dict(ANTHROPIC if asked["path"] == "messages" else BODY)
        if asked["stream"]:
            body["stream"] = True
        if asked["wrong"]:
            body |= {"messages": 7} if asked["path"] == "messages" else {"n": 0}
        again = {"x-stainless-retry-count": "1"} if asked["again"] else {}
        if asked["control"] == "pause":
            await gateway.running.pause(timeout_s=1)
        call = asyncio.ensure_future(post(session, asked["path"], body, **again))
        if asked["leave"] is not None:
            if asked["leave"] == "begun":
                await until(lambda: len(gateway.running) == 1)
            else:
                await asyncio.sleep(asked["leave"])
            call.cancel()
        elif asked["control"] == "pause" and not (asked["again"] or asked["wrong"]):
            await until(lambda call=call: call.done() or len(gateway.running.waiting) == 1)
        else:
            await asyncio.wait([call], timeout=0.01)
        if asked["control"] == "close":
            await client.close_sessions_async([session.session_id])
            [session] = await client.create_sessions_async([new_session_id()])
        elif asked["control"] == "abort":
            await gateway.running.pause(in_flight="abort", timeout_s=5)
        gateway.running.resume()
        await asyncio.wait([call], timeout=30)
        assert call.done()
    await gateway.running.until(lambda: not len(gateway.running), 30)
    assert not len(gateway.running)


def judge(ways: dict[int, list[State]]) -> set[Arrow]:
    """Every call went along arrows of the table and has ended. Returns the arrows."""
    arrows = {arrow for way in ways.values() for arrow in itertools.pairwise(way)}
    assert all(other in NEXT[one] for one, other in arrows)
    assert all(way[-1] in ENDS for way in ways.values())
    return arrows


@given(plan=st.lists(ASKED, min_size=1, max_size=4), model=st.booleans())
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_calls_through_failures_go_along_arrows_of_the_table(
    ways: dict[int, list[State]], plan: list[dict[str, Any]], model: bool
) -> None:
    ways.clear()

    async def run() -> None:
        async with served(model=model) as (gateway, engines):
            await play(gateway, engines, plan)
            assert not gateway.counters["broken_calls"]

    asyncio.run(run())
    judge(ways)


async def test_a_step_that_the_table_does_not_have_is_logged_and_ends_the_call(
    start_gateway: Start, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start_gateway(engine)
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    monkeypatch.setitem(NEXT, State.SENT, NEXT[State.SENT] - {State.COMPLETE})
    with caplog.at_level(logging.ERROR):
        assert await post(session, "chat/completions", BODY) == 500
    [logged] = [record for record in caplog.records if record.exc_info]
    assert "a call that is sent cannot become complete" in str(logged.exc_info)
    caplog.clear()
    monkeypatch.undo()
    assert (gateway.counters["broken_calls"], len(gateway.running)) == (1, 0)
    assert await post(session, "chat/completions", BODY) == 200
