"""The sessions' histories: their order, their threads, and a restart of the gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.token_calls import sampling
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, Start, captured, claude, opened, until
from ..asking import message_of as ask

SYSTEM = {"role": "system", "content": "Solve the problem. Use the calculator."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture
def start(engine: ScriptedEngine, start_gateway: Start, tmp_path: Path) -> Callable[..., Awaitable[Gateway]]:
    """Start a gateway that renders prompts, with the same store each time."""
    engine.first_id, engine.last_id = 300, 500

    async def started(**settings: Any) -> Gateway:
        defaults = {"model_dir": str(MODEL), "store_dir": str(tmp_path / "store")}
        return await start_gateway(engine, **{**defaults, **settings})

    return started


def assert_one_sequence(turns: list[Any]) -> None:
    """Each turn's prompt begins with the one before it and what was sampled there."""
    for before, after in itertools.pairwise(turns):
        sampled = [*before.prompt_ids, *before.completion_ids]
        assert after.prompt_ids[: len(sampled)] == sampled
        assert (after.parent_turn, after.branch_reason) == (before.turn_id, None)


async def test_a_long_rendering_delays_no_other_session_and_no_reply(engine: ScriptedEngine, start: Start) -> None:
    """Later calls of its own session wait for it, and go on exactly from what was answered meanwhile."""
    gateway = await start()
    client, (session, other) = GatewayClient(gateway.url), [await opened(gateway) for _ in range(2)]
    gate, text = asyncio.Event(), "What is 12 + 30? The calculator says 42. " * 15_000
    engine.faults.append(Fault(gate=gate))
    first = asyncio.ensure_future(ask(session, [user("one")]))
    await until(lambda: engine.calls)
    slow = asyncio.ensure_future(ask(session, [user(text)]))
    while "rendering" not in [c["state"] for s in await client.sessions_async(running=True) for c in s["calls"]]:
        assert not slow.done()
    gate.set()
    reply = await first
    await ask(other, [user("a short one")])
    assert [len(c.prompt_ids) < 1000 for c in engine.calls] == [True, True]
    await asyncio.gather(slow, *(ask(session, [user("one"), reply, user(f"and {n}?")]) for n in range(3)))
    turns = (await captured(gateway, session)).turns
    assert sorted(t.prompt_ids for t in turns) == sorted(c.prompt_ids for c in engine.calls if c is not engine.calls[1])
    sampled = [*turns[0].prompt_ids, *turns[0].completion_ids]
    assert all(t.prompt_ids[: len(sampled)] == sampled for t in turns[2:])
    assert [t.parent_turn for t in turns] == [None, None, *[turns[0].turn_id] * 3]


async def test_counting_the_tokens_of_long_prompts_delays_no_other_session(
    engine: ScriptedEngine, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session uses one thread at a time."""
    gateway = await start()
    assert gateway.token_mode is not None
    session, other = [await opened(gateway) for _ in range(2)]
    begun, released, count = threading.Semaphore(0), threading.Event(), gateway.token_mode.renderer.count

    def slow(*args: Any) -> int:
        begun.release()
        assert released.wait(60)
        return count(*args)

    monkeypatch.setattr(gateway.token_mode.renderer, "count", slow)
    asked, url = {"model": "m", "messages": [user("2 + 3?")]}, f"{session.base_url}/messages/count_tokens"
    counts = [
        asyncio.ensure_future(request("POST", url, body=asked, key=session.api_key, timeout_s=120.0)) for _ in range(8)
    ]
    assert await asyncio.to_thread(begun.acquire, timeout=60)
    monkeypatch.setattr(sampling, "SHORT_BYTES", 0)  # a thread renders the other session's request
    await ask(other, [user("a short one")])
    assert not begun.acquire(timeout=0)
    released.set()
    assert {status for status, _ in await asyncio.gather(*counts)} == {200}


async def test_other_dialects_branches_and_failures_come_back_too(engine: ScriptedEngine, start: Start) -> None:
    gateway = await start()
    session = await opened(gateway)
    async with claude(session) as llm:
        first = await llm.messages.create(model="m", max_tokens=64, system="be brief", messages=[user("one")])  # type: ignore[list-item]
        message = {"role": "assistant", "content": [b.model_dump() for b in first.content]}
        engine.faults.append(Fault(status=400))
        with pytest.raises(anthropic.BadRequestError):
            await llm.messages.create(
                model="m",
                max_tokens=64,
                system="be brief",
                messages=[user("one"), message, user("no")],  # type: ignore[list-item]
            )
        for text in ("two", "three"):
            await llm.messages.create(
                model="m",
                max_tokens=64,
                system="be brief",
                messages=[user("one"), message, user(text)],  # type: ignore[list-item]
            )
    await ask(session, [user("a helper's own question")], n=2)
    turns = (await captured(gateway, session)).turns
    assert [t.branch_reason for t in turns] == [None, None, "history_rewritten", "sub_agent", "sub_agent"]
    assert [t.parent_turn for t in turns] == [None, turns[0].turn_id, turns[0].turn_id, None, None]
    assert_one_sequence(turns[:2])


def other_vocabulary(folder: Path) -> Path:
    """The model's folder with a tokenizer in which the same ids are other texts."""
    shutil.copytree(MODEL, folder)
    reply = json.loads((folder / "tokenizer.json").read_text())
    added = {token["content"] for token in reply["added_tokens"]}
    names = [name for name in reply["model"]["vocab"] if name not in added]
    ids = [reply["model"]["vocab"][name] for name in names]
    reply["model"]["vocab"] |= dict(zip(names, reversed(ids), strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(reply))
    return folder


async def test_another_model_wants_another_store(engine: ScriptedEngine, start: Start, tmp_path: Path) -> None:
    """To its tokenizer the recorded ids are other words."""
    gateway = await start()
    session = await opened(gateway)
    await ask(session, [user("one")])
    await gateway.stop(grace_s=0.2)
    with pytest.raises(ConfigError, match="another --store"):
        await start(model_dir=str(other_vocabulary(tmp_path / "other")))


async def test_after_a_restart_a_session_goes_on_and_its_next_prompt_is_rendered_whole(
    engine: ScriptedEngine, start: Start
) -> None:
    gateway, messages = await start(), [SYSTEM, user("one")]
    session = await opened(gateway)
    for text in ("two", "three"):
        messages += [await ask(session, messages), user(text)]
    await gateway.stop(grace_s=0.2)
    gateway = await start()
    path = session.base_url.split("/", 3)[3]
    session = dataclasses.replace(session, base_url=f"{gateway.url}/{path}")
    for text in ("four", "five"):
        messages += [await ask(session, messages), user(text)]
    turns = (await captured(gateway, session)).turns
    assert [turn.prompt_ids for turn in turns] == [call.prompt_ids for call in engine.calls]
    assert_one_sequence(turns[:2])
    assert_one_sequence(turns[2:])
    assert turns[2].parent_turn is None
