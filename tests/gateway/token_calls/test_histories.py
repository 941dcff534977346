"""Histories beyond the memory budget, and of a gateway that was killed, come back from the store token for token."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, Limits
from agentcore_rl_toolkit.gateway.capture.record import decode, unpack_ids
from agentcore_rl_toolkit.gateway.capture.turns import expand, places_of, whole_prompt
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.token_calls.histories import Histories, past_calls
from agentcore_rl_toolkit.messages.render import Renderer, replay
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, Start, captured, claude, opened, until
from ..asking import message_of as ask
from ..served import Served
from ..stores import spoil

SYSTEM = {"role": "system", "content": "Solve the problem. Use the calculator."}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS: Any = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.from_path(MODEL)


@pytest.fixture
def small(engine: ScriptedEngine, start_gateway: Start, tmp_path: Path) -> Callable[..., Awaitable[Gateway]]:
    """A gateway that keeps no quiet history in memory."""
    engine.first_id, engine.last_id = 300, 500

    async def start(**settings: Any) -> Gateway:
        defaults = {
            "model_dir": str(MODEL),
            "limits": Limits(connect_s=60.0, history_bytes=1),
            "store_dir": str(tmp_path / "store"),
        }
        return await start_gateway(engine, **{**defaults, **settings})

    return start


def histories_of(gateway: Gateway) -> Histories:
    assert gateway.token_mode is not None
    return gateway.token_mode.histories


def assert_one_sequence(turns: list[Any]) -> None:
    """Each turn's prompt begins with the one before it and what was sampled there."""
    for before, after in itertools.pairwise(turns):
        sampled = [*before.prompt_ids, *before.completion_ids]
        assert after.prompt_ids[: len(sampled)] == sampled
        assert (after.parent_turn, after.branch_reason) == (before.turn_id, None)


async def test_a_tool_using_session_goes_on_exactly_with_no_memory_for_quiet_ones(
    engine: ScriptedEngine, small: Start, renderer: Renderer
) -> None:
    gateway = await small()
    histories = histories_of(gateway)
    session = await opened(gateway)
    odd = [i for c in "The answer is 5" for i in renderer.encode(c)]  # not how the tokenizer would write it
    stop = min(renderer.stop_token_ids)
    messages: list[Any] = [SYSTEM, user("What is 2 + 3?")]
    for step in range(3):
        engine.replies.append({"token_ids": [*renderer.encode(CALL), stop]})
        reply = await ask(session, messages, tools=TOOLS)
        call_id = reply["tool_calls"][0]["id"]
        messages += [reply, {"role": "tool", "tool_call_id": call_id, "content": "5"}]
        engine.replies.append({"token_ids": [*odd, stop]})
        messages += [await ask(session, messages, tools=TOOLS), user(f"and {step}?")]
        assert histories.held_bytes == 0
    assert histories.reloads == 5
    turns = (await captured(gateway, session)).turns
    assert_one_sequence(turns)
    assert turns[-1].completion_ids == [*odd, stop]


async def test_a_long_rendering_delays_no_other_session_and_no_reply(engine: ScriptedEngine, small: Start) -> None:
    """Later calls of its own session wait for it, and go on exactly from what was answered meanwhile."""
    gateway = await small(limits=Limits(connect_s=60.0))
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
    engine: ScriptedEngine, small: Start
) -> None:
    gateway = await small(limits=Limits(connect_s=60.0))
    session, other = [await opened(gateway) for _ in range(2)]
    asked, url = (
        {"model": "m", "messages": [user("What is 12 + 30? " * 15_000)]},
        f"{session.base_url}/messages/count_tokens",
    )
    counts = [
        asyncio.ensure_future(request("POST", url, body=asked, key=session.api_key, timeout_s=120.0)) for _ in range(8)
    ]
    await asyncio.wait(counts, return_when=asyncio.FIRST_COMPLETED)
    await ask(other, [user("a short one")])
    assert sum(count.done() for count in counts) < 4
    assert {status for status, _ in await asyncio.gather(*counts)} == {200}


async def test_other_dialects_branches_and_failures_come_back_too(engine: ScriptedEngine, small: Start) -> None:
    gateway = await small()
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


async def test_histories_made_again_are_the_ones_that_were_there(
    engine: ScriptedEngine, small: Start, renderer: Renderer
) -> None:
    gateway = await small(limits=Limits(connect_s=60.0, history_bytes=2**30))
    client = GatewayClient(gateway.url)
    [handle] = await client.create_sessions_async([new_session_id()])
    messages: list[Any] = [SYSTEM, user("one")]
    await ask(handle, messages, chat_template_kwargs={"x": 1}, reasoning_effort="low")
    for text in ("two", "three", "four"):
        messages = [*messages, await ask(handle, messages, tools=TOOLS), user(text)]
    await ask(handle, messages[:3], tools=TOOLS)
    session = gateway.sessions.by_id[handle.session_id.encode()]
    history = histories_of(gateway)._of.get(session)
    assert history is not None
    kept = history.conversation
    assert kept is not None
    records = [decode(p) for p in gateway.store.reader.calls(session.number)]
    whole = [unpack_ids(whole_prompt(records, i, places_of(records))) for i in range(len(records))]
    assert whole == [turn.prompt_ids for turn in expand(records).turns]
    made = replay(renderer, past_calls(records), now=session.created_s)
    assert made.commits.keys() == kept.commits.keys()
    assert made.asked.keys() == kept.asked.keys()
    assert made.roots == kept.roots
    for digest, commit in made.commits.items():
        other = kept.commits[digest]
        assert (commit.turn_id, commit.row.length, commit.row.text_bytes, commit.continued) == (
            other.turn_id,
            other.row.length,
            other.row.text_bytes,
            other.continued,
        )
        assert commit.row.ids() == other.row.ids()
    assert made.size_bytes == kept.size_bytes


async def test_the_budget_holds_and_the_sessions_that_were_active_last_stay(
    engine: ScriptedEngine, small: Start
) -> None:
    gateway = await small()
    histories = histories_of(gateway)
    client = GatewayClient(gateway.url)
    sessions = await client.create_sessions_async([new_session_id() for _ in range(8)])
    asked = [user("What is 2 + 3? " * 40)]
    histories.budget_bytes = 2**30
    reply = {s.session_id: await ask(s, asked) for s in sessions}
    each = histories.held_bytes // 8
    histories.budget_bytes = 3 * each + each // 2
    for session in sessions:
        await ask(session, [*asked, reply[session.session_id], user("and?")])
        assert histories.held_bytes <= histories.budget_bytes
    open_ones = {session.id for session in histories._of}
    held = [s.session_id for s in sessions if s.session_id in open_ones]
    assert held == [s.session_id for s in sessions[-len(held) :]]
    assert 2 <= len(held) <= 3
    await client.fetch_async([sessions[-1].session_id])
    await client.delete_async([s.session_id for s in sessions[:-1]])
    assert histories.held_bytes == 0


async def test_a_damaged_record_costs_the_prefix_and_not_the_call(
    engine: ScriptedEngine, small: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await small()
    session = await opened(gateway)
    messages = [SYSTEM, user("one")]
    reply = await ask(session, messages)
    spoil(gateway, session.session_id, 0)
    await ask(session, [*messages, reply, user("two")])
    assert "cannot be made from its records" in caplog.text
    assert engine.calls[-1].prompt_ids[:4] == engine.calls[0].prompt_ids[:4]


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


async def test_another_model_wants_another_store(engine: ScriptedEngine, small: Start, tmp_path: Path) -> None:
    """To its tokenizer the recorded ids are other words."""
    gateway = await small()
    session = await opened(gateway)
    await ask(session, [user("one")])
    await gateway.stop(grace_s=0.2)
    with pytest.raises(ConfigError, match="another --store"):
        await small(model_dir=str(other_vocabulary(tmp_path / "other")))


@pytest.mark.system
async def test_after_kill_9_a_session_goes_on_with_the_very_tokens_it_had(
    engine: ScriptedEngine, renderer: Renderer, tmp_path: Path
) -> None:
    engine.first_id, engine.last_id = 300, 500
    store = ("--model", str(MODEL), "--store", str(tmp_path / "store"))
    served, name = Served(tmp_path, engine, *store), new_session_id()
    odd = [i for c in "The answer is 5" for i in renderer.encode(c)]
    messages: list[Any] = [SYSTEM, user("What is 2 + 3?")]
    for life in range(2):
        try:
            client = GatewayClient(await served.start())
            [session] = await client.create_sessions_async([name])
            for step in range(2):
                engine.replies.append({"token_ids": [*odd, min(renderer.stop_token_ids)]})
                messages += [await ask(session, messages), user(f"and {life} {step}?")]
            if life == 1:
                turns = (await client.fetch_async([name]))[name].turns
        finally:
            served.kill()
    assert len(turns) == 4
    assert_one_sequence(turns)
    assert [t.prompt_ids for t in turns] == [c.prompt_ids for c in engine.calls]
