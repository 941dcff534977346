"""Small cases of what random loads, kills and damage found: what must hold is what `test_store_trouble` says of one segment."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

import agentcore_rl_toolkit
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionCapture, SessionHandle
from agentcore_rl_toolkit.gateway.store.journal import DELETED
from agentcore_rl_toolkit.gateway.testing import Fault, ScriptedEngine

MODEL = str(Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights")
Start = Callable[..., Awaitable[Gateway]]
Place = tuple[Path, int, int]  # a frame's segment, where it begins, its length


async def opened(gateway: Gateway, *names: str) -> list[SessionHandle]:
    return await GatewayClient(gateway.url).create_sessions_async(names or [new_session_id()])


async def ask(session: SessionHandle, *said: str, **asked: Any) -> None:
    messages: list[Any] = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        await llm.chat.completions.create(model="m", messages=messages, **asked)


async def finish_reason(session: SessionHandle, said: str, *, stream: bool) -> str | None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        told = await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": said}], stream=stream)
        if isinstance(told, openai.AsyncStream):
            return [c.choices[0].finish_reason async for c in told if c.choices][-1]
        return told.choices[0].finish_reason


async def fetched(gateway: Gateway, *sessions: SessionHandle) -> list[SessionCapture]:
    names = [s.session_id for s in sessions]
    found = await GatewayClient(gateway.url).fetch_async(names, close=False)
    return [found[name] for name in names]


def stored(gateway: Gateway, session: SessionHandle, place: int = -1) -> Place:
    """Where a call of a session lies."""
    held = gateway.sessions.by_id[session.session_id.encode()]
    number, at = held.positions[place] >> 40, held.positions[place] & (1 << 40) - 1
    return gateway.journal.directory / f"calls-{number:08d}.log", at, held.lengths[place]


def change(path: Path, at: int, new: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        assert file.read(len(new)) != new
        file.seek(at)
        file.write(new)


def flip(place: Place, offset: int = -20) -> None:
    path, at, length = place
    at += offset % length
    change(path, at, bytes([path.read_bytes()[at] ^ 0x10]))


def only_true(engine: ScriptedEngine, capture: SessionCapture) -> int:
    """How many turns there are, each of which the engine has answered."""
    answered = {tuple(call.completion_ids[0]): call.prompt_ids for call in engine.calls if call.completion_ids}
    for turn in capture.turns:
        assert turn.prompt_ids == answered[tuple(turn.completion_ids)]
    return len(capture.turns)


async def test_damage_at_the_end_of_a_segment_costs_the_call_that_lies_there(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    gateway.journal.segment_bytes = 1000
    [session] = await opened(gateway)
    said = ["w11 w12"]
    await ask(session, *said)
    await ask(session, "w13 " * 1000)  # the last one of its segment
    place = stored(gateway, session)
    for k in range(3):
        said += [engine.calls[0].body["messages"][0]["content"], f"w{k + 20}"]
        await ask(session, *said)
    assert stored(gateway, session)[0] != place[0]
    await gateway.stop()
    flip(place)
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    [found] = await fetched(gateway, session)
    assert only_true(engine, found) == 4
    assert [e["type"] for e in found.errors] == ["store"]
    assert gateway.journal.damaged_bytes == place[2]


async def test_damage_of_the_last_call_of_a_store_is_told(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    [session] = await opened(gateway)
    await ask(session, "w11")
    await ask(session, "w12")
    place = stored(gateway, session)
    await gateway.stop()
    flip(place)
    for calls in (2, 3):
        gateway = await start_gateway(engine, store_dir=str(tmp_path))
        [found] = await fetched(gateway, session)
        assert only_true(engine, found) == calls - 1
        assert [e["type"] for e in found.errors] == ["store"]
        here = SessionHandle(
            session_id=session.session_id,
            base_url=f"{gateway.url}/sessions/{session.session_id}/v1",
            api_key=session.api_key,
        )
        await ask(here, f"w{calls + 20}")
        await gateway.stop()


async def test_damage_that_hides_several_calls_makes_no_prompt_up(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    one, two = await opened(gateway, new_session_id(), new_session_id())
    await ask(one, "w11")
    await ask(two, "w12 w13")
    first, second = stored(gateway, one), stored(gateway, two)
    for session in (one, two):
        await ask(session, "w14 w15 w16")
        await ask(session, "w19")
        await ask(session, "w14 w15 w16", "w17", "w18")
    await gateway.stop()
    assert first[1] < second[1]
    middle = first[1] + first[2] // 2  # whose the first one was can still be read
    change(first[0], middle, bytes(second[1] + second[2] // 2 - middle))
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    found = await fetched(gateway, one, two)
    assert [only_true(engine, capture) for capture in found] == [3, 2]


async def test_damage_of_a_name_that_makes_it_another_sessions_makes_no_prompt_up(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    one, two = await opened(gateway, "rollout-1", "rollout-2")
    for session in (one, two):
        await ask(session, "w11")
    place = stored(gateway, one)
    for session in (one, two):
        await ask(session, "w12 w13")
        await ask(session, "w12 w13", "w14", "w15")
    await gateway.stop()
    change(place[0], place[1] + 10, b"rollout-2")
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    for capture in await fetched(gateway, one, two):
        assert only_true(engine, capture) >= 1


async def test_deleting_a_session_with_a_damaged_call_leaves_the_calls_beside_it(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    one, two = await opened(gateway, new_session_id(), new_session_id())
    await ask(one, "w11")
    place = stored(gateway, one)
    await ask(one, "w13")
    gateway.journal.segment_bytes = 1
    await ask(two, "w12")  # in another segment
    await gateway.stop()
    flip(place)
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    await GatewayClient(gateway.url).delete_async([one.session_id])
    assert place[0].exists()  # the other session was opened in it
    await gateway.stop()
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    [found] = await fetched(gateway, two)
    assert not found.closed
    assert only_true(engine, found) == 1


async def test_damage_is_remembered_when_all_that_lies_beside_it_is_deleted(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    one, two = await opened(gateway, new_session_id(), "two")
    gateway.journal.segment_bytes = 1  # from here on every call has a segment of its own
    await ask(two, "w11")
    place = stored(gateway, two)
    for said in (["w12 w13"], ["w14"], ["w12 w13", "w15", "w16"]):
        await ask(two, *said)
    await gateway.stop()
    change(place[0], place[1] + 10, b"one")  # there is no such session
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    assert only_true(engine, (await fetched(gateway, two))[0]) == 2
    await GatewayClient(gateway.url).delete_async([one.session_id])
    await gateway.stop()
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    assert only_true(engine, (await fetched(gateway, two))[0]) == 2
    await GatewayClient(gateway.url).delete_async([two.session_id])
    assert not place[0].exists()  # until nobody is left who could lack a call


async def test_a_damaged_deletion_brings_nothing_back_into_the_session_opened_after_it(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    [session] = await opened(gateway)
    await ask(session, "w11")
    client = GatewayClient(gateway.url)
    await client.delete_async([session.session_id])
    await opened(gateway, session.session_id)
    await ask(session, "w12")
    segment = stored(gateway, session)[0]
    await gateway.stop()
    name = session.session_id.encode()
    flip((segment, segment.read_bytes().index(bytes([DELETED, len(name)]) + name) - 8, 8), 5)
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    [found] = await fetched(gateway, session)
    assert only_true(engine, found) == 1
    assert found.turns[0].prompt_ids == engine.calls[-1].prompt_ids


async def test_a_session_that_is_opened_anew_is_not_told_as_finished_after_a_restart(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    client = GatewayClient(gateway.url)
    await opened(gateway, "one", "two")
    await client.close_sessions_async(["one", "two"])
    await client.delete_async(["one"])
    await opened(gateway, "one")
    await gateway.stop()
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    assert (await GatewayClient(gateway.url).finished_async(wait_s=0))[0] == ["two"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_token_ids_is_no_turn_where_prompts_are_rendered_here(
    engine: ScriptedEngine, start_gateway: Start, stream: bool
) -> None:
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, model_dir=MODEL)
    [session] = await opened(gateway)

    def without(reply: dict[str, Any]) -> dict[str, Any]:
        for choice in reply["choices"]:
            choice["token_ids"] = choice["logprobs"] = None
        return reply

    engine.faults.append(Fault(edit=without))
    with pytest.raises(openai.APIError, match=r"token ids|before it was whole"):
        await finish_reason(session, "hello", stream=stream)
    async with asyncio.timeout(30):
        while gateway.running:  # noqa: ASYNC110  (the reply's last bytes come before the end of the call)
            await asyncio.sleep(0.005)
    [found] = await fetched(gateway, session)
    assert found.turns == []
    assert len(found.errors) == 1


@pytest.mark.parametrize("how", ["pause", "close"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_ended_while_the_disk_takes_its_record_is_answered(
    engine: ScriptedEngine,
    start_gateway: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
    how: str,
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path), fsync=True)
    [session] = await opened(gateway)
    syncing, go_on, real = threading.Event(), threading.Event(), os.fsync

    def fsync(fd: int) -> None:
        syncing.set()
        assert go_on.wait(30)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    client = GatewayClient(gateway.url)

    answered = asyncio.ensure_future(finish_reason(session, "w11", stream=stream))
    try:
        assert await asyncio.to_thread(syncing.wait, 30)
        names = [session.session_id]
        told: Any = client.pause_async(in_flight="abort") if how == "pause" else client.close_sessions_async(names)
        ended = asyncio.ensure_future(told)
        async with asyncio.timeout(30):
            while gateway.running.paused is None and not gateway.sessions.by_id[session.session_id.encode()].closed:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    finally:
        go_on.set()
    assert await ended == ({"paused": True, "in_flight": 0} if how == "pause" else 1)
    assert await answered == "stop"
    [found] = await fetched(gateway, session)
    assert only_true(engine, found) == 1
    assert found.errors == []
