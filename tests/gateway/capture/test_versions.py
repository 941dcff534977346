"""The weight versions of a turn's tokens, while weights change: never newer than what sampled them, at the last token never older
where that can be known.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway import Gateway, GatewayClient
from agentcore_rl_toolkit.gateway.testing import logprob_of
from agentcore_rl_toolkit.trajectory import Turn, build_trajectory
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, Start, asked_by, captured, opened, status_of, talking, until

Step = Callable[[Callable[[bytes], Awaitable[None]]], Awaitable[None]]


def event(
    *ids: int, finish: str | None = None, prompt: bool = False, version: int | None = None, choice: int = 0
) -> bytes:
    entries = [{"token": f"w{i}", "logprob": logprob_of(i), "bytes": None, "top_logprobs": []} for i in ids]
    content = "".join(f" w{i}" for i in ids)
    answer: dict[str, Any] = {"index": choice, "delta": {"content": content}, "finish_reason": finish}
    answer |= {"token_ids": list(ids), "logprobs": {"content": entries}}
    reply: dict[str, Any] = {"id": "r", "model": "m", "choices": [answer]}
    if prompt:
        reply["prompt_token_ids"] = [1, 2, 3]
    if version is not None:
        reply["weight_version"] = version
    return b"data: " + json.dumps(reply, separators=(",", ":")).encode() + b"\n\n"


@asynccontextmanager
async def scripted(start_gateway: Start, step: Step, **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway in front of an engine whose streams a test writes, event by event. Version 1 is published."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked_by(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

        async def write(data: bytes) -> None:
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()

        await step(write)
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    async with talking(talk) as url:
        gateway = await start_gateway(url, **settings)
        gateway.running.weight_version = 1
        yield gateway


async def call(gateway: Gateway, **fields: Any) -> list[Turn]:
    """Return the turns of a call in a session of its own."""
    session = await opened(gateway)
    assert await status_of(session, **fields) == 200
    return (await captured(gateway, session)).turns


MODES: list[dict[str, Any]] = [{}, {"model_dir": str(MODEL)}]


@pytest.mark.parametrize("settings", MODES, ids=["relayed", "rendered"])
@pytest.mark.parametrize("published", [False, True])
async def test_tokens_count_as_sampled_by_the_older_version_if_the_engine_names_none(
    start_gateway: Start, settings: dict[str, Any], published: bool
) -> None:
    """Other weights are published during the reply, or they are about to be."""
    gateway: Gateway

    async def step(write: Callable[[bytes], Awaitable[None]]) -> None:
        client = GatewayClient(gateway.url)
        await write(event(301, prompt=True) + event(302))
        await client.pause_async(in_flight="continue")
        if published:
            await client.set_weight_version_async(2)
        await write(event(303) + event(finish="stop"))

    async with scripted(start_gateway, step, **settings) as gateway:
        [turn] = await call(gateway, stream=True)
    assert (turn.weight_version_first, turn.weight_version_last) == (1, 2 if published else 1)
    made = build_trajectory("s", [turn])
    assert [v for v in made.sequences[0].weight_versions if v is not None] == [1, 1, 1]
    assert made.report.mixed_version_turns == published


@pytest.mark.parametrize("settings", MODES, ids=["relayed", "rendered"])
async def test_each_choice_has_the_versions_that_were_said_of_it(
    start_gateway: Start, settings: dict[str, Any]
) -> None:
    """And only what is said beside tokens counts: an event at the end says what is there by then."""

    async def step(write: Callable[[bytes], Awaitable[None]]) -> None:
        await write(event(301, prompt=True, version=4) + event(302, prompt=True, version=4, choice=1))
        await write(event(303, version=6) + event(304, version=4, choice=1))
        await write(event(finish="stop", version=7) + event(finish="stop", version=5, choice=1))

    async with scripted(start_gateway, step, **settings) as gateway:
        turns = await call(gateway, stream=True, n=2)
    assert [(t.weight_version_first, t.weight_version_last) for t in turns] == [(4, 6), (4, 4)]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_each_choice_of_a_whole_reply_has_its_own_versions(
    engine: ScriptedEngine, start_gateway: Start, kind: str
) -> None:
    """The built-in policy names both ends of each choice, SGLang one version."""
    engine.first_id, engine.last_id = 300, 500

    def edit(reply: dict[str, Any]) -> Any:
        if kind == "sglang":
            other = json.loads(json.dumps(reply))
            reply["meta_info"]["weight_version"], other["meta_info"]["weight_version"] = "5", "4"
            return [reply, {**other, "index": 1}]
        reply["weight_version"] = 5
        for choice, (first, last) in zip(reply["choices"], [(4, 5), (3, 3)], strict=True):
            choice["weight_version_first"], choice["weight_version_last"] = first, last
        return reply

    gateway = await start_gateway(engine, engine=kind, model_dir=str(MODEL))
    gateway.running.weight_version = 5
    engine.faults.append(Fault(edit=edit))
    turns = await call(gateway, n=2)
    spans = [(t.weight_version_first, t.weight_version_last) for t in turns]
    assert spans == ([(4, 5), (3, 3)] if kind == "vllm" else [(5, 5), (4, 4)])


async def test_a_whole_relayed_reply_has_the_versions_that_the_policy_names(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    def edit(reply: dict[str, Any]) -> dict[str, Any]:
        reply["weight_version"] = 5
        reply["choices"][0] |= {"weight_version_first": 3, "weight_version_last": 5}
        return reply

    gateway = await start_gateway(engine)
    gateway.running.weight_version = 4
    engine.faults.append(Fault(edit=edit))
    [turn] = await call(gateway)
    assert (turn.weight_version_first, turn.weight_version_last) == (3, 5)
    assert build_trajectory("s", [turn]).sequences[0].weight_versions[-8:] == [3] * 7 + [5]


@pytest.mark.parametrize("model", [None, str(MODEL)])
async def test_a_whole_reply_that_began_before_the_change_counts_as_older(
    engine: ScriptedEngine, start_gateway: Start, model: str | None
) -> None:
    """Whether its engine names the version it ended with before or after the gateway was told of it."""
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, **({"model_dir": model} if model else {}))
    gateway.running.weight_version = 1
    client = GatewayClient(gateway.url)
    gate = asyncio.Event()
    engine.faults.append(Fault(gate=gate))
    running = asyncio.ensure_future(call(gateway))
    await until(lambda: engine.calls)
    await client.pause_async(in_flight="continue")
    engine.weight_version = 2
    gate.set()
    [turn] = await running
    await client.set_weight_version_async(2)
    await client.resume_async()
    assert (turn.weight_version_first, turn.weight_version_last) == (1, 2)
    [after] = await call(gateway)
    assert (after.weight_version_first, after.weight_version_last) == (2, 2)


async def test_versions_that_are_times_in_milliseconds_count_from_the_first(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    """A record has spans of versions with 32 bits. Without spans, all tokens but the last count as sampled by the older one."""
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    session, first, last = await opened(gateway), 1_796_040_740_000, 1_796_040_750_000

    def changed(reply: dict[str, Any]) -> None:
        spans = [{"version": str(first), "start": 0, "end": 2}, {"version": str(last), "start": 2, "end": 8}]
        reply["choices"][0]["weight_versions"] = spans

    engine.faults.append(Fault(edit=changed))
    assert await status_of(session) == 200
    [turn] = (await captured(gateway, session)).turns
    assert turn.token_versions() == [first] * 7 + [last]
