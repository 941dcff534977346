"""One suite over all token engines: the gateway tokenises, the engine samples ids, every turn extends the one before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from agentcore_rl_toolkit.gateway import (
    Gateway,
    GatewayClient,
    GatewayConfig,
    SessionHandle,
    UpstreamConfig,
)
from agentcore_rl_toolkit.gateway.testing import logprob_of
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.trajectory import build_trajectory
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, captured, gpt, until
from ..scripted_tinker import ScriptedTinker

SYSTEM = {"role": "system", "content": "Solve the problem. Use the calculator."}
USER = {"role": "user", "content": "What is 2 + 3?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate one arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.from_path(MODEL)


@pytest.fixture(params=["vllm", pytest.param("policy", marks=pytest.mark.nightly), "sglang", "tinker"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def engine(kind: str) -> AsyncIterator[ScriptedEngine | ScriptedTinker]:
    """What all of them share: ``replies``, ``faults``, ``calls``."""
    if kind == "tinker":
        yield ScriptedTinker()
        return
    async with ScriptedEngine() as running:
        running.first_id, running.last_id = 300, 500
        yield running


@pytest.fixture
async def gateway(kind: str, engine: ScriptedEngine | ScriptedTinker) -> AsyncIterator[Gateway]:
    upstream = UpstreamConfig(url=engine.url, engine=kind, api_key="tml-test")  # type: ignore[arg-type]
    sampler = "builtin/policy" if kind == "tinker" else None
    made = Gateway(
        GatewayConfig(upstreams=(upstream,), model_dir=str(MODEL), sampler=sampler),
        connect=engine.connect if isinstance(engine, ScriptedTinker) else None,
    )
    await made.start()
    yield made
    await made.stop(grace_s=0.2)


async def reply_of(llm: openai.AsyncOpenAI, stream: bool, **asked: object) -> tuple[str, list[dict[str, str]], str]:
    """Text, tool calls and finish reason of a reply, streamed or not."""
    reply = await llm.chat.completions.create(model="m", stream=stream, **asked)  # type: ignore[call-overload]
    if not stream:
        choice = reply.choices[0]
        calls = [
            {"id": c.id, "name": c.function.name, "arguments": c.function.arguments}
            for c in choice.message.tool_calls or []
        ]
        return choice.message.content or "", calls, choice.finish_reason
    text, finish, calls = "", "", []
    async for chunk in reply:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                if call.index == len(calls):
                    calls.append({"id": call.id, "name": "", "arguments": ""})
                calls[call.index]["name"] += call.function.name or ""
                calls[call.index]["arguments"] += call.function.arguments or ""
    return text, calls, finish


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_using_dialogue_is_one_sequence_of_exactly_the_sampled_tokens(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, renderer: Renderer, stream: bool
) -> None:
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call>'
    stop = min(renderer.stop_token_ids)
    scripted = [[*renderer.encode(call), stop], [*renderer.encode("The answer is 5"), stop]]
    engine.replies.extend({"token_ids": ids} for ids in scripted)
    messages: list[dict[str, object]] = [SYSTEM, USER]
    async with gpt(session) as llm:
        text, calls, finish = await reply_of(llm, stream, messages=messages, tools=TOOLS, max_tokens=64)
        assert (text.strip(), finish) == ("", "tool_calls")
        assert [(c["name"], c["arguments"]) for c in calls] == [("calculator", '{"expression": "2 + 3"}')]
        function = {"name": calls[0]["name"], "arguments": calls[0]["arguments"]}
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": calls[0]["id"], "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": "5"},
        ]
        text, calls, finish = await reply_of(llm, stream, messages=messages, tools=TOOLS, max_tokens=64)
        assert (text, calls, finish) == ("The answer is 5", [], "stop")
    capture = await captured(client, session)
    first, second = capture.turns
    assert [t.completion_ids for t in capture.turns] == scripted
    assert second.prompt_ids[: len(first.prompt_ids) + len(scripted[0])] == [*first.prompt_ids, *scripted[0]]
    assert first.prompt_ids == renderer.encode(
        renderer.template.render([SYSTEM, USER], tools=TOOLS, options=None, now=None)
    )
    assert [t.logprobs for t in capture.turns] == [[logprob_of(i) for i in ids] for ids in scripted]
    assert [t.parse_status for t in capture.turns] == ["parsed", "none"]
    assert second.parent_turn == first.turn_id
    trajectory = build_trajectory(session.session_id, capture.turns)
    assert len(trajectory.sequences) == 1
    assert trajectory.report.trained_token_share == 1.0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_breaks_off_is_no_turn_and_the_next_call_goes_on_as_before(
    kind: str, engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, stream: bool
) -> None:
    begins = stream and kind != "tinker"  # which answers whole: the agent has seen nothing of a reply that broke off
    # Where the agent has seen nothing yet, the only server is asked once more.
    engine.faults += [Fault(drop_after=700 if begins else 30)] * (1 if begins or kind == "tinker" else 2)
    async with gpt(session) as llm:
        with pytest.raises(openai.APIError):
            await reply_of(llm, stream, messages=[USER])
        await reply_of(llm, stream, messages=[USER])
    capture = await captured(client, session)
    assert [e["status"] for e in capture.errors] == ["partial" if begins else "error"]
    [turn] = capture.turns
    assert turn.branch_reason is None


async def test_a_missing_logprob_is_reported_and_not_filled_in(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    def edit(reply: dict[str, object]) -> dict[str, object]:
        if "sequences" in reply:
            reply["sequences"][0]["logprobs"].pop()  # type: ignore[index]
        elif "meta_info" in reply:
            reply["meta_info"]["output_token_logprobs"][0][0] = None  # type: ignore[index]
        else:
            reply["choices"][0]["logprobs"]["content"].pop()  # type: ignore[index]
        return reply

    engine.faults.append(Fault(edit=edit))
    async with gpt(session) as llm:
        await reply_of(llm, False, messages=[USER])
    capture = await captured(client, session)
    assert capture.turns == []
    assert [e["status"] for e in capture.errors] == ["invalid"]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_and_the_weight_version_are_kept(
    kind: str, engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, stream: bool
) -> None:
    if kind == "tinker":  # its replies do not say; each sampler stands for one version
        await client.set_weight_version_async(7)
    else:
        engine.weight_version = 7
    async with gpt(session) as llm:
        reply = await llm.chat.completions.create(model="m", messages=[USER], n=2, stream=stream)
        if stream:
            async for _ in reply:
                pass
    turns = (await captured(client, session)).turns
    assert [t.completion_ids for t in turns] == engine.calls[0].completion_ids
    assert {t.weight_version_first for t in turns} == {7}


async def test_parallel_calls_are_branches(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    gate = asyncio.Event()
    engine.faults.append(Fault(gate=gate))
    async with gpt(session) as llm:
        slow = asyncio.ensure_future(reply_of(llm, False, messages=[SYSTEM, USER]))
        await until(lambda: engine.calls)
        await reply_of(llm, False, messages=[SYSTEM, {"role": "user", "content": "What is 7 + 1?"}])
        gate.set()
        await slow
    turns = (await captured(client, session)).turns
    assert [t.branch_reason for t in turns] == [None, "parallel_calls"]
