"""The model gets the history that an agent sends: references are resolved, and the report lists what was left out."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.testing import Seen
from agentcore_rl_toolkit.trajectory import FidelityReport, build_trajectory
from scripted_engine import ScriptedEngine

from ..asking import MODEL, Start, captured, claude, gpt, opened

HALVES = '"cut \\ud83d", "\\ude00 cut", "\\ud83d\\ude00 whole", "a text that shows \\\\ud83d"'
ALTERED = ["cut \ufffd", "\ufffd cut", "\U0001f600 whole", "a text that shows \\ud83d"]
ROUTES = {
    "chat/completions": '{"messages": [{"role": "user", "content": %s}]}',
    "responses": '{"input": [{"role": "user", "content": %s}]}',
    "messages": '{"max_tokens": 5, "messages": [{"role": "user", "content": %s}]}',
    "bedrock/model/m/converse": '{"messages": [{"role": "user", "content": %s}]}',
}
KINDS = {"chat/completions": '"type": "text", ', "responses": '"type": "input_text", ', "messages": '"type": "text", '}
CALLING = {"tool_calls": [{"id": "", "type": "function", "function": {"name": "look_up", "arguments": '{"q": "x"}'}}]}
TOOL: Any = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}, "strict": False}


async def report_of(where: Gateway | GatewayClient, session: SessionHandle) -> FidelityReport:
    capture = await captured(where, session, close=False)
    assert capture.errors == []
    return build_trajectory(session.session_id, capture.turns).report


@pytest.mark.parametrize("mode", ["relay", "token"])
@pytest.mark.parametrize("route", ROUTES)
async def test_half_surrogates_are_replaced_and_counted(
    route: str, mode: str, engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine, model_dir=str(MODEL) if mode == "token" else None)
    session = await opened(gateway)
    parts = ", ".join(f'{{{KINDS.get(route, "")}"text": {part}}}' for part in HALVES.split(", "))
    body = ROUTES[route] % f"[{parts}]"
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}) as llm:
        for _ in range(2):
            reply = await llm.post(f"{session.base_url}/{route}", content=body.encode(), timeout=60)
            assert reply.status_code == 200, reply.text
    report = await report_of(gateway, session)
    assert (report.turns, report.left_out) == (2, {"half surrogate": 2})
    [shown] = [m for m in (await captured(gateway, session)).dialogue if m["role"] == "user"][:1]
    content = shown["content"]
    found = content if isinstance(content, str) else "".join(part["text"] for part in content)
    assert all(part in found for part in ALTERED)


def thinks_calls_and_answers(seen: Seen) -> dict[str, Any]:
    if seen.body["messages"][-1]["role"] == "user":
        return {"reasoning_content": "let me see", **CALLING}
    return {"content": f"answer {len(seen.body['messages'])}", "reasoning_content": "that is it"}


async def converse(llm: openai.AsyncOpenAI, *, by_reference: bool, stream: bool, turns: int = 2) -> None:
    """Talk as the AI SDK does: with ``store``, its default, it refers to each earlier item of the model by its id."""
    history: Any = [{"role": "user", "content": [{"type": "input_text", "text": "go on"}]}]
    for _ in range(2 * turns):
        if stream:
            async with llm.responses.stream(model="m", input=history, tools=[TOOL]) as events:
                response = await events.get_final_response()
        else:
            response = await llm.responses.create(model="m", input=history, tools=[TOOL])
        for item in response.output:
            whole = item.model_dump(exclude_none=True)
            history.append({"type": "item_reference", "id": item.id} if by_reference else whole)
        called = [item for item in response.output if item.type == "function_call"]
        history += [{"type": "function_call_output", "call_id": c.call_id, "output": "found"} for c in called]
        if not called:
            history.append({"role": "user", "content": [{"type": "input_text", "text": "and then?"}]})


@pytest.mark.parametrize("stream", [False, True])
async def test_references_to_items_mean_the_same_as_the_items(
    stream: bool, engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    engine.decide = thinks_calls_and_answers
    gateway = await start_gateway(engine, store_dir=tmp_path)
    seen = []
    for by_reference in (False, True):
        session = await opened(gateway)
        async with gpt(session) as llm:
            await converse(llm, by_reference=by_reference, stream=stream)
        texts = json.dumps([call.body["messages"] for call in engine.calls[len(seen) * 4 :]])
        for turn in (await captured(gateway, session)).turns:
            texts = texts.replace((turn.reply_id or "").removeprefix("chatcmpl-"), "REPLY")
        seen.append(texts)
        assert '"reasoning_content": "let me see"' in texts
        assert "look_up" in texts
    assert seen[0] == seen[1]


async def test_references_are_resolved_in_token_mode_and_after_a_restart(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(engine, store_dir=tmp_path, model_dir=str(MODEL), port=0)
    session = await opened(gateway)
    async with gpt(session) as llm:
        first = await llm.responses.create(model="m", input="hello")
    await gateway.stop()
    gateway = await start_gateway(engine, store_dir=tmp_path, model_dir=str(MODEL))
    again = SessionHandle(
        session_id=session.session_id,
        base_url=session.base_url.replace(session.base_url.split("/sessions")[0], gateway.url),
        api_key=session.api_key,
    )
    history: Any = [{"role": "user", "content": "hello"}]
    history += [{"type": "item_reference", "id": item.id} for item in first.output]
    async with gpt(again) as llm:
        await llm.responses.create(model="m", input=[*history, {"role": "user", "content": "and?"}])
    report = await report_of(gateway, again)
    assert (report.turns, report.sequences, report.left_out) == (2, 2, {})  # the second prompt is rendered whole


async def test_other_requests_are_answered_while_replies_are_read(
    client: GatewayClient, gateway: Gateway, session: SessionHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, begun, may_end = gateway.store.for_threads, threading.Event(), threading.Event()
    numbers = reader.numbers

    def long_numbers(session: int) -> list[int]:
        begun.set()
        assert may_end.wait(30)
        return numbers(session)

    async with gpt(session) as llm:
        first = await llm.responses.create(model="m", input="hello")
        monkeypatch.setattr(reader, "numbers", long_numbers)
        item: Any = {"type": "item_reference", "id": first.output[0].id}
        again = asyncio.create_task(llm.responses.create(model="m", input=[item, {"role": "user", "content": "hi"}]))
        assert await asyncio.to_thread(begun.wait, 30)
        async with httpx.AsyncClient() as other:
            assert (await other.get(f"{gateway.url}/healthz")).status_code == 200
        may_end.set()
        await again


@pytest.mark.parametrize("item_id", ["msg_of_another_provider-0", "msg_0123", "rs_", "fc_{}-7", "x"])
async def test_a_reference_to_an_unknown_item_is_refused(
    item_id: str, engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    async with gpt(session) as llm:
        first = await llm.responses.create(model="m", input="hello")
        item: Any = {"type": "item_reference", "id": item_id.format(first.id.removeprefix("resp_"))}
        with pytest.raises(openai.BadRequestError, match="store: false") as caught:
            await llm.responses.create(model="m", input=[item, {"role": "user", "content": "hi"}])
    assert caught.value.param == "input[0]"
    assert len(engine.calls) == 1


async def test_replies_of_another_session_cannot_be_referred_to(client: GatewayClient, gateway: Gateway) -> None:
    one, other = await opened(gateway), await opened(gateway)
    async with gpt(one) as llm:
        first = await llm.responses.create(model="m", input="hello")
    item: Any = {"type": "item_reference", "id": first.output[0].id}
    async with gpt(other) as llm:
        with pytest.raises(openai.BadRequestError, match="unknown"):
            await llm.responses.create(model="m", input=[item, {"role": "user", "content": "hi"}])


async def test_items_parts_and_fields_that_are_left_out_are_in_the_report(gateway: Gateway) -> None:
    session = await opened(gateway)
    blocks: Any = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        {"type": "tool_use", "id": "c1", "name": "look_up", "input": {}},
    ]
    result: Any = {"type": "tool_result", "tool_use_id": "c1", "content": "no such file", "is_error": True}
    history: Any = [
        {"role": "user", "content": [{"type": "text", "text": "go on"}, {"type": "container_upload", "file_id": "f"}]},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result]},
    ]
    async with claude(session) as llm:
        for _ in range(2):
            reply = await llm.messages.create(model="m", max_tokens=5, messages=history)
            history += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "more"}]
    items: Any = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "another provider's"},
        {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]},
    ]
    async with gpt(session) as llm:
        await llm.responses.create(model="m", input=items)
    report = await report_of(gateway, session)
    twice = dict.fromkeys(["container_upload", "redacted_thinking", "server_tool_use", "is_error"], 2)
    assert report.left_out == {**twice, **dict.fromkeys(["web_search_call", "encrypted_content", "input_file"], 1)}


THOUGHTS: list[Any] = [
    {"content": [{"type": "thinking", "thinking": "let me see"}, {"type": "text", "text": "Found."}]},
    {
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "let me see"}]},
            {"type": "text", "text": "Found."},
        ]
    },
    {"content": [{"type": "reasoning", "text": "let me see"}, {"type": "text", "text": "Found."}]},
    {"content": "Found.", "thinking_blocks": [{"type": "thinking", "thinking": "let me see", "signature": "s"}]},
    {"content": "Found.", "reasoning_details": [{"type": "reasoning.text", "text": "let me see"}]},
    {"content": "Found.", "reasoning": "let me see"},
    {
        "content": [{"type": "thinking", "thinking": "let me see"}, {"type": "text", "text": "Found."}],
        "reasoning_content": "let me see",
    },
]


@pytest.mark.parametrize("message", THOUGHTS)
async def test_an_assistants_thinking_is_reasoning(message: Any, engine: ScriptedEngine, start_gateway: Start) -> None:
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    plain = {"content": "Found.", "reasoning_content": "let me see"}
    prompts = []
    for said in (plain, message):
        session = await opened(gateway)
        async with gpt(session) as llm:
            history: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", **said}]
            history += [{"role": "user", "content": "and?"}]
            await llm.chat.completions.create(model="m", messages=history)
        capture = await captured(gateway, session)
        prompts.append(list(capture.turns[0].prompt_ids))
        assert [m.get("reasoning_content") for m in capture.dialogue][1] == "let me see"
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("mode", ["relay", "token"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template", "{{ messages }}"),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("guided_json", {"type": "object"}),
        ("prompt_logprobs", 1),
        ("request_id", "another call's"),
        ("chat_template_kwargs", {"add_generation_prompt": False}),
        ("chat_template_kwargs", {"continue_final_message": True}),
        ("chat_template_kwargs", {"messages": []}),
    ],
)
async def test_fields_that_would_change_the_prompt_are_refused_in_both_modes(
    name: str, value: Any, mode: str, engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine, model_dir=str(MODEL) if mode == "token" else None)
    session = await opened(gateway)
    async with gpt(session) as llm:
        with pytest.raises(openai.BadRequestError, match=name):
            await llm.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], extra_body={name: value}
            )
    assert engine.calls == []
