"""Which call a repeated request is joined to when several have the same body."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from agentcore_rl_toolkit.gateway import Gateway, SessionHandle
from agentcore_rl_toolkit.trajectory.experts import read
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, Start, attempt, captured, gpt, opened, until
from ..capture.reading import read_reply

USER = [{"role": "user", "content": "hello there"}]


async def test_of_two_equal_samples_the_repetition_is_that_of_the_agent_that_gave_up(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle
) -> None:
    """Agents sample one prompt several times at once. The one that gave up must not take the reply of another."""
    answered = asyncio.Event()
    engine.faults += [Fault(gate=answered), Fault(gate=answered)]
    first = asyncio.ensure_future(attempt(session))
    await until(lambda: len(engine.calls) == 1)
    second = asyncio.ensure_future(attempt(session))
    await until(lambda: len(engine.calls) == 2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await until(lambda: not all(call.reply.connections for call in gateway.running.calls))
    retried = asyncio.ensure_future(attempt(session, retry=1))
    await until(lambda: all(call.reply.connections for call in gateway.running.calls))
    answered.set()
    again = await retried
    assert again != await second
    assert len(engine.calls) == 2
    assert len((await captured(gateway, session)).turns) == 2


async def test_a_sample_that_failed_is_drawn_again_though_an_equal_one_succeeded(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle
) -> None:
    engine.faults.append(Fault(status=500))
    with pytest.raises(openai.InternalServerError):
        await attempt(session)
    other = await attempt(session)
    again = await attempt(session, retry=1)
    assert again != other
    assert await attempt(session, retry=1) == again  # its reply may have been lost as well
    assert len((await captured(gateway, session)).turns) == 2


@pytest.mark.parametrize(
    ("asked", "model_dir"),
    [
        ({"logprobs": True}, None),
        ({"logprobs": True}, str(MODEL)),
        ({"extra_body": {"return_token_ids": True}}, None),
    ],
)
async def test_a_request_for_numbers_gets_no_recorded_reply(
    engine: ScriptedEngine, start_gateway: Start, asked: dict[str, Any], model_dir: str | None
) -> None:
    engine.first_id, engine.last_id = 300, 500
    session = await opened(await start_gateway(engine, model_dir=model_dir))
    async with gpt(session) as llm:
        for retry in ("0", "1"):
            reply: Any = await llm.chat.completions.create(
                model="m", messages=USER, extra_headers={"x-stainless-retry-count": retry}, **asked
            )
            assert "logprobs" not in asked or reply.choices[0].logprobs.content
    assert len(engine.calls) == 2


async def test_the_last_turn_that_is_allowed_can_be_repeated(engine: ScriptedEngine, start_gateway: Start) -> None:
    gateway = await start_gateway(engine)
    session = await opened(gateway, max_turns=1)
    first = await attempt(session)
    assert (await attempt(session, retry=1), gateway.counters["turns_joined"]) == (first, 1)
    with pytest.raises(openai.PermissionDeniedError, match="turn_limit_reached"):
        await attempt(session)


async def test_a_second_try_waits_while_the_gateway_is_paused(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle
) -> None:
    gate = asyncio.Event()
    engine.faults.append(Fault(gate=gate, drop_after=0))
    call = asyncio.ensure_future(attempt(session))
    await until(lambda: len(engine.calls) == 1)
    await gateway.running.pause(in_flight="continue")
    gate.set()
    await asyncio.sleep(0.6)
    assert len(engine.calls) == 1
    gateway.running.resume()
    assert await call


async def test_the_sessions_model_is_what_a_token_engine_is_asked_for(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    session = await opened(gateway, model_id="real-model")
    assert await attempt(session, model="gpt-4")
    assert engine.calls[-1].body["model"] == "real-model"


# -- expert routing


def routed(reply: Any) -> bytes:
    choice: Any = {"index": 0, "token_ids": [1, 2], "routed_experts": reply, "finish_reason": "stop"}
    choice["message"] = {"role": "assistant", "content": "x"}
    choice["logprobs"] = {"content": [{"token": "x", "logprob": -0.5}, {"token": "y", "logprob": -0.25}]}
    return json.dumps({"choices": [choice], "prompt_token_ids": [7, 8]}).encode()


@pytest.mark.parametrize("kind", [np.int32, np.int16, np.uint8, np.int64])
def test_vllms_routing_is_kept_as_bytes_and_read_as_int32(kind: Any) -> None:
    experts = np.arange(3 * 2 * 4).reshape(3, 2, 4).astype(kind)
    file = io.BytesIO()
    np.save(file, experts)
    captured = read_reply(routed(base64.b64encode(file.getvalue()).decode()))
    kept = captured.choices[0].routed_experts
    assert captured.problem is None
    assert kept == file.getvalue()
    shape, numbers = read(kept)
    assert shape == (3, 2, 4)
    assert np.array_equal(np.frombuffer(numbers, "<i4").reshape(3, 2, 4), experts)


@pytest.mark.parametrize("expected", ["not base64!", [[1, 2]], [[[1], [2, 3]]], [[[2**40]]], 5, {"a": 1}])
def test_routing_that_cannot_be_read_makes_the_turn_invalid_and_says_why(expected: Any) -> None:
    captured = read_reply(routed(expected))
    assert captured.choices[0].routed_experts is None
    assert "routed_experts" in (captured.problem or "")


def without_name(reply: dict[str, Any]) -> None:
    called = {"id": "a", "type": "function", "function": {"name": None, "arguments": "{}"}}
    reply["choices"][0]["message"]["tool_calls"] = [called]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_recorded_reply_that_cannot_be_written_is_sampled_again(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, restarted: bool
) -> None:
    """Otherwise the gateway fails the same request for ever."""
    gateway = await start_gateway(engine, store_dir=tmp_path)
    session = await opened(gateway)
    answered = asyncio.Event()
    engine.faults.append(Fault(gate=answered, edit=without_name))
    first = asyncio.ensure_future(attempt(session))
    await until(lambda: engine.calls)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await until(lambda: not any(call.reply.connections for call in gateway.running.calls))
    answered.set()
    await until(lambda: not gateway.running.calls)
    if restarted:
        await gateway.stop()
        gateway = await start_gateway(engine, store_dir=tmp_path)
        path = session.base_url.split("/", 3)[3]
        session = dataclasses.replace(session, base_url=f"{gateway.url}/{path}")
    assert await attempt(session)
    assert await attempt(session, retry=1)
    assert len(engine.calls) == 2
    capture = await captured(gateway, session)
    assert [turn.delivered for turn in capture.turns] == [False, True]
    assert capture.errors == []


@pytest.mark.parametrize("key", [None, "k1"])
async def test_a_call_can_be_repeated_after_a_restart(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, key: str | None
) -> None:
    """The gateway died after it had stored the reply: whether the agent has it, only the agent knows."""
    store = tmp_path / "store"
    gateway = await start_gateway(engine, store_dir=store)
    session = await opened(gateway)
    first = await attempt(session, key=key)
    other = await attempt(session, key="k2", temperature=0.5)
    await gateway.stop(grace_s=0.2)
    gateway = await start_gateway(engine, store_dir=store)
    path = session.base_url.split("/", 3)[3]
    session = dataclasses.replace(session, base_url=f"{gateway.url}/{path}")
    assert await attempt(session, retry=1, key=key) == first
    assert await attempt(session, retry=1, key="k2", temperature=0.5) == other
    assert await attempt(session, retry=1, temperature=0.7) not in (first, other)
    assert len((await captured(gateway, session)).turns) == 3


async def test_anthropics_other_credential_does_not_stand_in_the_way(
    session: SessionHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client sends a token of its environment beside the key it is given."""
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "somebody-elses")
    url = session.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=session.api_key, max_retries=0) as llm:
        assert (await llm.messages.create(model="m", max_tokens=8, messages=USER)).content  # type: ignore[arg-type]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as llm:
        with pytest.raises(anthropic.AuthenticationError):
            await llm.messages.create(model="m", max_tokens=8, messages=USER)  # type: ignore[arg-type]
