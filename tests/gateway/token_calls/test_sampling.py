"""Calls over token engines: how they are ended early, and what a session's settings make of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway import Gateway, Limits
from agentcore_rl_toolkit.gateway.engines import Piece
from agentcore_rl_toolkit.gateway.router import Worker
from agentcore_rl_toolkit.gateway.token_calls.reply import joined
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, Start, ask, hang_up, opened, until

USER = {"role": "user", "content": "What is 2 + 3?"}


@pytest.fixture
def start(engine: ScriptedEngine, start_gateway: Start) -> Start:
    async def start(kind: str, **settings: Any) -> Gateway:
        engine.first_id, engine.last_id = 300, 500
        return await start_gateway(engine, engine=kind, model_dir=str(MODEL), **settings)

    return start


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_an_engine_ends_the_call_of_an_agent_that_hung_up(
    engine: ScriptedEngine, start: Start, kind: str, stream: bool
) -> None:
    """SGLang is also asked by the call's name. vLLM's connection is closed, and nothing else is sent."""
    session = await opened(await start(kind, limits=Limits(connect_s=60.0, orphan_s=0.1)))
    engine.tokens, engine.token_s = 50, 0.05
    engine.faults.append(Fault(delay_s=0 if stream else 5))
    await hang_up(engine, session, stream=stream)
    [call] = engine.calls
    await until(lambda: call.cancelled and (kind == "vllm" or engine.aborted))
    assert engine.aborted == ([call.body["rid"]] if kind == "sglang" else [])
    paths = [r.path for r in engine.requests if r.method == "POST"]
    assert paths[1:] == ([] if kind == "vllm" else ["/abort_request"])


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_gateway_that_stops_asks_sglang_to_end_its_calls_and_leaves_no_task(
    engine: ScriptedEngine, start: Start, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    gateway = await start("sglang")
    session = await opened(gateway)
    engine.tokens, engine.token_s = 500, 0.05
    agent = asyncio.create_task(ask(session, stream=True))
    await until(lambda: len(engine.calls) == 1)
    if hangs:
        monkeypatch.setattr(Worker, "ask", lambda *_, **options: asyncio.sleep(60))
    await gateway.stop(grace_s=0.2 if hangs else 1.0)
    assert engine.aborted == ([] if hangs else [engine.calls[0].body["rid"]])
    assert gateway.token_mode is not None
    assert not gateway.token_mode.tasks
    await asyncio.gather(agent, return_exceptions=True)


async def test_a_call_that_is_tried_again_has_another_name_and_a_finished_one_is_not_aborted(
    engine: ScriptedEngine, start: Start, start_gateway: Start
) -> None:
    async with ScriptedEngine() as other:
        other.first_id, other.last_id = 300, 500
        gateway = await start_gateway(engine, other, engine="sglang", model_dir=str(MODEL))
        session = await opened(gateway)
        for each in (engine, other):
            each.faults += [Fault(drop_after=0)] * 2
        status, _ = await ask(session)  # one server, the other, and that one once more
        assert status == 502
        engine.faults.clear()
        other.faults.clear()
        status, _ = await ask(session)
        assert status == 200
        names = [call.body["rid"] for each in (engine, other) for call in each.calls]
        assert len(set(names)) == len(names) == 4
        assert engine.aborted == other.aborted == []


async def test_a_sessions_sampling_parameters_win_over_the_agents(engine: ScriptedEngine, start: Start) -> None:
    params = {"temperature": 0.5, "max_completion_tokens": 5, "stop": "END", "logprobs": True, "top_k": 7}
    session = await opened(await start("vllm"), sampling_params=params)
    status, reply = await ask(session, temperature=1.0, max_tokens=50, stop=["x", "y"])
    assert status == 200, reply
    sampling = engine.calls[0].body["sampling_params"]
    assert (sampling["temperature"], sampling["max_tokens"], sampling["top_k"]) == (0.5, 5, 7)
    assert sampling["stop"] == ["END"]


SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("calculator", "look_up")
]


def constraint(body: dict[str, Any]) -> dict[str, Any]:
    """What an engine was asked to hold the answer to, in one shape for both."""
    sampling = body.get("sampling_params", body)
    if "structured_outputs" in sampling:
        return {k: json.loads(v) if k == "structural_tag" else v for k, v in sampling["structured_outputs"].items()}
    names = {"json_schema": "json", "structural_tag": "structural_tag"}
    return {names[k]: json.loads(sampling[k]) for k in names if k in sampling}


@pytest.mark.parametrize(("kind", "stream"), [("vllm", True), ("sglang", False)])
async def test_a_json_schema_and_a_required_call_are_enforced_by_the_engine(
    engine: ScriptedEngine, start: Start, kind: str, stream: bool
) -> None:
    session = await opened(await start(kind))
    for asked in (
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object"}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"tools": TOOLS},
        {"response_format": {"type": "text"}},
    ):
        status, reply = await ask(session, stream=stream, **asked)
        assert status == 200, reply
    schema, any_object, required, named, *free = [constraint(c.body) for c in engine.calls]
    assert schema == {"json": SCHEMA}
    assert any_object == ({"json": {"type": "object"}} if kind == "sglang" else {"json_object": True})
    _, calls = required["structural_tag"]["format"]["elements"]
    begins = [f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in ("calculator", "look_up")]
    assert ([tag["begin"] for tag in calls["tags"]], calls["stop_after_first"]) == (begins, False)
    assert {json.dumps(tag["content"]["json_schema"]) for tag in calls["tags"]} == {json.dumps(PARAMETERS)}
    _, calls = named["structural_tag"]["format"]["elements"]
    assert [tag["begin"] for tag in calls["tags"]] == begins[1:]
    assert free == [{}, {}, {}]  # a single call is a wish


@pytest.mark.parametrize(
    ("kind", "asked", "param"),
    [
        ("vllm", {"regex": "a"}, "regex"),
        ("sglang", {"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
        ("sglang", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    ],
)
async def test_what_cannot_be_honoured_is_a_400_that_names_the_field(
    engine: ScriptedEngine, start: Start, kind: str, asked: dict[str, Any], param: str
) -> None:
    session = await opened(await start(kind))
    status, reply = await ask(session, **asked)
    assert status == 400, reply
    assert json.loads(reply)["error"]["param"] == param
    assert engine.calls == []


def test_pieces_that_come_together_are_joined_up_to_the_end_of_a_choice_or_another_version() -> None:
    pieces = [
        Piece(ids=[1], logprobs=[-1.0], weight_version="3", routed_experts="AA=="),
        Piece(ids=[2, 3], logprobs=[-2.0, -3.0], weight_version="3"),
        Piece(ids=[4], logprobs=[-4.0], weight_version="4"),
        Piece(ids=[5], logprobs=[-5.0], weight_version="4", finish_reason="stop", stop_sequence="x"),
        Piece(ids=[], logprobs=[], weight_version="4"),
        Piece(choice=1, ids=[6], weight_version="4"),
        Piece(choice=1, ids=[7], weight_version="4"),
    ]
    assert joined(pieces) == [
        Piece(ids=[1, 2, 3], logprobs=[-1.0, -2.0, -3.0], weight_version="3", routed_experts="AA=="),
        Piece(ids=[4, 5], logprobs=[-4.0, -5.0], weight_version="4", finish_reason="stop", stop_sequence="x"),
        Piece(ids=[], logprobs=[], weight_version="4"),
        Piece(choice=1, ids=[6, 7], weight_version="4"),
    ]
