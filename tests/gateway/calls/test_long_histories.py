"""A session whose history grows: each prompt extends the last turn, and the record has everything that was sent."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway import record
from agentcore_rl_toolkit.gateway.http.client import request
from scripted_engine import ScriptedEngine

from ..asking import MODEL, Start, captured, opened

LONG_TEXT = "The quick brown fox. " * 1_000
ROUTES = {"chat": "chat/completions", "anthropic": "messages", "responses": "responses"}


def body_of(dialect: str, items: list[Any]) -> dict[str, Any]:
    if dialect == "responses":
        return {"model": "m", "input": items, "max_output_tokens": 5}
    return {"model": "m", "messages": items, "max_tokens": 5}


def items_of(dialect: str, answer: Any) -> list[Any]:
    """The answer as the next request repeats it."""
    if dialect == "chat":
        return [answer["choices"][0]["message"]]
    return [{"role": "assistant", "content": answer["content"]}] if dialect == "anthropic" else list(answer["output"])


@pytest.mark.parametrize("mode", ["relay", "token", "threads"])
@pytest.mark.parametrize("dialect", ROUTES)
async def test_a_history_that_grows_and_branches_is_recorded_as_it_was_sent(
    dialect: str, mode: str, engine: ScriptedEngine, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "threads":  # as prompts of a megabyte are
        monkeypatch.setattr(record, "LARGE_BYTES", 1)
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, engine="vllm", model_dir=str(MODEL) if mode == "token" else None)
    session = await opened(gateway)
    url = f"{session.base_url}/{ROUTES[dialect]}"
    sent: list[list[str]] = []

    async def ask(items: list[Any]) -> Any:
        status, reply = await request("POST", url, body=body_of(dialect, items), key=session.api_key, timeout_s=60)
        assert status == 200, reply
        sent.append([item["content"] for item in items if item.get("role") == "user"])
        return json.loads(reply)

    items: list[Any] = []
    for turn in range(4):
        items.append({"role": "user", "content": f"{turn} {LONG_TEXT}"})
        items += items_of(dialect, await ask(items))
    await ask([items[0], {"role": "user", "content": "another branch"}])
    await ask([*items, {"role": "user", "content": "the last"}])
    capture = await captured(gateway, session)
    turns = [capture.turns[place] for place in (0, 1, 2, 3, 5)]
    if mode == "token":
        for before, after in itertools.pairwise(turns):
            whole = [*before.prompt_ids, *before.completion_ids]
            assert list(after.prompt_ids)[: len(whole)] == whole
        assert [list(turn.prompt_ids) for turn in capture.turns] == [call.prompt_ids for call in engine.calls]
    else:
        asked = [[m["content"] for m in call.body["messages"] if m["role"] == "user"] for call in engine.calls]
        assert asked == sent
    shown = [m["content"] for m in capture.dialogue if m["role"] == "user"]
    assert sorted(set(shown)) == sorted(set(itertools.chain(*sent)))
    stored = [len(stored.messages) + len(stored.prompt_ids) for stored in capture.records]
    assert max(stored[1:]) < 2 * len(LONG_TEXT) + len(capture.records[1].prompt_ids)  # of each call only what is new


async def test_a_mistake_far_back_is_named_by_its_place(engine: ScriptedEngine, start_gateway: Start) -> None:
    gateway = await start_gateway(engine)
    session = await opened(gateway)
    url = session.base_url + "/messages"
    history: list[Any] = [{"role": "user", "content": LONG_TEXT}]
    for wrong in (None, {"role": "robot", "content": "x"}, None):
        messages = [*history, {"role": "assistant", "content": "y"}, wrong or {"role": "user", "content": "z"}]
        body = {"model": "m", "max_tokens": 5, "messages": messages}
        status, reply = await request("POST", url, body=body, key=session.api_key, timeout_s=30)
        if wrong is None:
            assert status == 200
            history = messages
        else:
            assert status == 400
            assert "messages[4]: role" in json.loads(reply)["error"]["message"]
