"""Requests of some megabytes: the same calls and records as small ones."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from agentcore_rl_toolkit.gateway import Limits
from agentcore_rl_toolkit.gateway.testing import encode_messages
from agentcore_rl_toolkit.trajectory import build_trajectory
from scripted_engine import ScriptedEngine

from .asking import MODEL, Start, captured, claude, gpt, opened

LARGE_BYTES = 4 * 2**20
MESSAGES: Any = [{"role": "user", "content": f"{n} " + "w7 é " * 1000} for n in range(LARGE_BYTES // 5000 + 100)]


@pytest.mark.parametrize("dialect", ["chat", "anthropic", "responses"])
async def test_a_large_request_is_answered_and_recorded(
    dialect: str, engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine)
    session = await opened(gateway)
    for turn in range(2):
        history: Any = [*MESSAGES, *[{"role": "user", "content": "more"}] * turn]
        if dialect == "anthropic":
            async with claude(session) as llm:
                await llm.messages.create(model="m", max_tokens=5, messages=history)
        else:
            async with gpt(session) as llm:
                if dialect == "chat":
                    await llm.chat.completions.create(model="m", max_tokens=5, messages=history)
                else:
                    await llm.responses.create(model="m", max_output_tokens=16, input=history)
    capture = await captured(gateway, session)
    assert (capture.errors, len(capture.turns)) == ([], 2)
    assert [m["content"] for m in engine.calls[0].body["messages"]] == [m["content"] for m in MESSAGES]
    assert list(capture.turns[0].prompt_ids) == encode_messages(MESSAGES)
    assert [m["content"] for m in capture.dialogue if m["role"] == "user"][: len(MESSAGES)] == [
        m["content"] for m in MESSAGES
    ]


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_a_large_request_is_rendered(path: str, engine: ScriptedEngine, start_gateway: Start) -> None:
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    session = await opened(gateway)
    text = "w7 " * (LARGE_BYTES // 18 + 1)  # sent in six bytes per character: these are few tokens for so large a body
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in text)
    history = "input" if path == "responses" else "messages"
    body = f'{{"model": "m", "max_tokens": 16, "{history}": [{{"role": "user", "content": "{escaped}"}}]}}'
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}, timeout=60) as agent:
        reply = await agent.post(f"{session.base_url}/{path}", content=body)
        assert reply.status_code == 200, reply.text[:500]
    capture = await captured(gateway, session)
    assert (capture.errors, len(capture.turns)) == ([], 1)
    assert len(capture.turns[0].prompt_ids) > len(text) // 2
    assert capture.dialogue[0]["content"] == text


async def test_references_and_half_surrogates_of_a_large_request(engine: ScriptedEngine, start_gateway: Start) -> None:
    gateway = await start_gateway(engine)
    session = await opened(gateway)
    async with gpt(session) as llm:
        first = await llm.responses.create(model="m", input="hello")
    items: Any = [
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "w7 " * (LARGE_BYTES // 3 - 1000)},
        {"role": "user", "content": "cut \ud83d " + "w7 " * 2000},
    ]
    body = json.dumps({"input": items})
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}, timeout=60) as agent:
        reply = await agent.post(session.base_url + "/responses", content=body.encode())
        assert reply.status_code == 200, reply.text[:500]
    assert engine.calls[1].body["messages"][0]["content"] == first.output_text
    report = build_trajectory("s", (await captured(gateway, session)).turns).report
    assert (report.turns, report.left_out) == (2, {"half surrogate": 1})


async def test_a_refused_field_of_a_large_request_is_named(engine: ScriptedEngine, start_gateway: Start) -> None:
    gateway = await start_gateway(engine, limits=Limits(connect_s=60.0, body_bytes=LARGE_BYTES * 2))
    session = await opened(gateway)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}, timeout=60) as agent:
        body: Any = {"messages": MESSAGES, "chat_template": "x"}
        reply = await agent.post(session.base_url + "/chat/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "chat_template")
        body = {"messages": MESSAGES, "temperature": "hot", "max_tokens": 5}
        reply = await agent.post(session.base_url + "/messages", json=body)
        assert (reply.status_code, "temperature" in reply.text) == (400, True)
        reply = await agent.post(session.base_url + "/chat/completions", content=b"x" * (LARGE_BYTES * 2 + 1))
        assert reply.status_code == 413
