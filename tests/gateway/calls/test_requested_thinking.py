"""A reply of Anthropic's, Amazon's and Google's APIs has the model's thinking only if the request asks for it.

Agents read the first block of a reply. They run unmodified here, with the official clients.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from botocore.config import Config

from agentcore_rl_toolkit.gateway import Limits, SessionHandle
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.trajectory import build_trajectory
from scripted_engine import ScriptedEngine

from ..asking import MODEL, TLS, Start, boto, captured, claude, opened

genai = pytest.importorskip("google.genai")
# The client subclasses aiohttp's session, and leaves it open.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning"),
]

RENDERER = Renderer.from_path(MODEL)
STOP = min(RENDERER.stop_token_ids)
APIS = ["messages", "converse", "invoke", "gemini"]
ON: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
# A setting of each API that is about thinking and does not ask to see it.
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"thinking": {"type": "disabled"}}),
    ("messages", {"output_config": {"effort": "high"}}),
    ("messages", {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}),
    ("invoke", {"output_config": {"effort": "high"}}),
    ("converse", {"additionalModelRequestFields": {"thinking": {"type": "disabled"}}}),
    ("converse", {"additionalModelRequestFields": {"reasoning_effort": "high"}}),
    ("gemini", {"thinking_config": {"thinking_budget": 1024}}),
    ("gemini", {"thinking_config": {"include_thoughts": False, "thinking_level": "HIGH"}}),
]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("messages", ON),
    ("messages", {"thinking": {"type": "adaptive", "display": "omitted"}}),
    ("invoke", ON),
    ("converse", {"additionalModelRequestFields": ON}),
    ("gemini", {"thinking_config": {"include_thoughts": True}}),
]
MODES = [pytest.param("relay", marks=pytest.mark.nightly), "token"]
Blocks = list[dict[str, Any]]


def aws(session: SessionHandle) -> Any:
    return boto(aws_access_key_id=session.api_key, aws_secret_access_key="x").client(
        "bedrock-runtime",
        region_name="us-west-2",
        endpoint_url=f"{session.base_url}/bedrock",
        config=Config(retries={"total_max_attempts": 1}),
    )


async def messages(session: SessionHandle, history: list[Any], *, stream: bool, **more: Any) -> Blocks:
    asked: Any = {"model": "m", "max_tokens": 2000, "messages": history, **more}
    async with claude(session) as llm:
        if not stream:
            reply = await llm.messages.create(**asked)
        else:
            async with llm.messages.stream(**asked) as events:
                reply = await events.get_final_message()
    return [block.model_dump(exclude_none=True) for block in reply.content]


async def invoke(session: SessionHandle, history: list[Any], *, stream: bool, **more: Any) -> Blocks:
    body = {"anthropic_version": "bedrock-2023-05-31", "max_tokens": 2000, "messages": history, **more}
    asked = {"modelId": "m", "body": json.dumps(body)}

    def ask() -> Blocks:
        llm = aws(session)
        if not stream:
            return list(json.load(llm.invoke_model(**asked)["body"])["content"])
        blocks: Blocks = []
        for event in llm.invoke_model_with_response_stream(**asked)["body"]:
            chunk = json.loads(event["chunk"]["bytes"])
            if chunk["type"] == "content_block_start":
                blocks.append(chunk["content_block"])
            elif chunk["type"] == "content_block_delta":
                for name, text in chunk["delta"].items():
                    if name != "type":
                        blocks[-1][name] += text
        return blocks

    return await asyncio.to_thread(ask)


async def converse(session: SessionHandle, history: list[Any], *, stream: bool, **more: Any) -> Blocks:
    asked: Any = {"modelId": "m", "messages": history, **more}

    def ask() -> Blocks:
        llm = aws(session)
        if not stream:
            return list(llm.converse(**asked)["output"]["message"]["content"])
        blocks: dict[int, dict[str, Any]] = {}
        for event in llm.converse_stream(**asked)["stream"]:
            if "contentBlockDelta" in event:
                at, delta = event["contentBlockDelta"]["contentBlockIndex"], event["contentBlockDelta"]["delta"]
                thought = delta.get("reasoningContent")
                block = blocks.setdefault(at, {"text": ""} if thought is None else {"reasoningContent": {}})
                if thought is None:
                    block["text"] += delta["text"]
                else:
                    shown = block["reasoningContent"].setdefault("reasoningText", {"text": ""})
                    shown |= {name: shown.get(name, "") + text for name, text in thought.items()}
        return [blocks[i] for i in range(len(blocks))]

    return await asyncio.to_thread(ask)


async def gemini(session: SessionHandle, history: list[Any], *, stream: bool, **config: Any) -> Blocks:
    base_url = session.base_url.removesuffix("/v1")
    options = {"base_url": base_url, "client_args": TLS, "async_client_args": TLS}
    asked: Any = {"model": "m", "contents": history, "config": config}
    async with genai.Client(api_key=session.api_key, http_options=options).aio as llm:
        if stream:
            replies = [each async for each in await llm.models.generate_content_stream(**asked)]
        else:
            replies = [await llm.models.generate_content(**asked)]
    parts = [part for reply in replies for part in reply.candidates[0].content.parts]
    blocks: Blocks = []
    for part in parts:  # events of one kind are one block
        if not blocks or bool(part.thought) != blocks[-1].get("thought", False):
            blocks.append({"text": "", **({"thought": True} if part.thought else {})})
        blocks[-1]["text"] += part.text
    return blocks


CLIENTS: dict[str, Callable[..., Any]] = {
    "messages": messages,
    "invoke": invoke,
    "converse": converse,
    "gemini": gemini,
}


def said(api: str, content: str | Blocks, *, by: str = "user") -> dict[str, Any]:
    """A message in an API's form."""
    if api == "gemini":
        parts = [{"text": content}] if isinstance(content, str) else content
        return {"role": "user" if by == "user" else "model", "parts": parts}
    if api == "converse" and isinstance(content, str):
        return {"role": by, "content": [{"text": content}]}
    return {"role": by, "content": content}


def thought_of(block: dict[str, Any]) -> str | None:
    """The thinking of a block, None for a text."""
    if "reasoningContent" in block:
        return str(block["reasoningContent"]["reasoningText"]["text"])
    if block.get("thought"):
        return str(block["text"])
    return block.get("thinking")


async def first_reply(engine: ScriptedEngine, start_gateway: Start, mode: str, text: str) -> SessionHandle:
    """Open a session of a gateway in a mode, whose model thinks and then says a text."""
    if mode == "relay":
        engine.replies.append({"content": text, "reasoning_content": "w5 w6"})
        return await opened(await start_gateway(engine))
    engine.replies.append({"token_ids": [*RENDERER.encode(f"<think>\nw5 w6\n</think>\n\n{text}"), STOP]})
    return await opened(await start_gateway(engine, model_dir=str(MODEL)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("api", "more"), [*((api, {}) for api in APIS), *SETTINGS])
async def test_the_first_block_is_the_text_if_the_request_does_not_ask_for_the_thinking(
    engine: ScriptedEngine, start_gateway: Start, api: str, more: dict[str, Any], mode: str, stream: bool
) -> None:
    session = await first_reply(engine, start_gateway, mode, "w7")
    blocks = await CLIENTS[api](session, [said(api, "w1")], stream=stream, **more)
    assert blocks == [{"type": "text", "text": "w7"} if api in ("messages", "invoke") else {"text": "w7"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("api", "more"), REQUESTS)
async def test_a_request_for_the_thinking_gets_it(
    engine: ScriptedEngine, start_gateway: Start, api: str, more: dict[str, Any], mode: str, stream: bool
) -> None:
    session = await first_reply(engine, start_gateway, mode, "w7")
    thought, text = await CLIENTS[api](session, [said(api, "w1")], stream=stream, **more)
    assert (str(thought_of(thought)).strip(), text["text"]) == ("w5 w6", "w7")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
async def test_in_token_mode_a_history_without_the_thinking_is_one_sequence(
    engine: ScriptedEngine, start_gateway: Start, api: str, stream: bool
) -> None:
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    session = await opened(gateway)
    history: list[Any] = []
    for place in range(3):
        engine.replies.append({"token_ids": [*RENDERER.encode(f"<think>\nw{place}\n</think>\n\nIt is {place}."), STOP]})
        history.append(said(api, f"question {place}"))
        blocks = await CLIENTS[api](session, history, stream=stream)
        assert [block["text"] for block in blocks] == [f"It is {place}."]
        history.append(said(api, blocks, by="assistant"))
    capture = await captured(gateway, session)
    assert [turn.completion_ids for turn in capture.turns] == [seen.completion_ids[0] for seen in engine.calls]
    assert "<think>\nw0\n</think>" in RENDERER.decode(engine.calls[2].prompt_ids)
    trajectory = build_trajectory(session.session_id, capture.turns)
    [sequence] = trajectory.sequences
    assert sum(sequence.loss_mask) == sum(len(turn.completion_ids) for turn in capture.turns)
    report = trajectory.report
    assert (report.branch_reasons, report.left_out, report.history_difference) == ({}, {}, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["relay", "token"])
@pytest.mark.parametrize("api", APIS)
async def test_an_answer_of_only_thinking_has_one_empty_text(
    engine: ScriptedEngine, start_gateway: Start, api: str, mode: str, stream: bool
) -> None:
    if mode == "relay":
        engine.replies += [{"content": None, "reasoning_content": "w5 w6"}, {"content": "w7"}]
    else:
        engine.replies += [{"token_ids": [*RENDERER.encode(text), STOP]} for text in ("<think>\nw5 w6", "w7")]
    gateway = await start_gateway(engine, model_dir=None if mode == "relay" else str(MODEL))
    session = await opened(gateway)
    history = [said(api, "w1")]
    blocks = await CLIENTS[api](session, history, stream=stream)
    assert blocks == [{"type": "text", "text": ""} if api in ("messages", "invoke") else {"text": ""}]
    history += [said(api, blocks, by="assistant"), said(api, "w2")]
    assert (await CLIENTS[api](session, history, stream=stream))[0]["text"] == "w7"
    capture = await captured(gateway, session)
    assert [turn.answered for turn in capture.turns] == [False, True]
    assert capture.errors == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["relay", "token"])
@pytest.mark.parametrize(("more", "kinds"), [({}, ["text"]), (ON, ["thinking", "text"])])
async def test_a_repeated_reply_has_the_thinking_only_on_request(
    engine: ScriptedEngine, start_gateway: Start, more: dict[str, Any], kinds: list[str], mode: str, stream: bool
) -> None:
    session = await first_reply(engine, start_gateway, mode, "w7")
    for _ in range(2):
        headers = {"idempotency-key": "k"}
        blocks = await messages(session, [said("messages", "w1")], stream=stream, extra_headers=headers, **more)
        assert [block["type"] for block in blocks] == kinds
    assert len(engine.calls) == 1


async def test_a_stream_is_kept_alive_while_the_thinking_is_left_out(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    limits = Limits(connect_s=60.0, keep_alive_s=0.05)
    gateway = await start_gateway(engine, model_dir=str(MODEL), limits=limits)
    engine.token_s = 0.1
    streams = {
        "messages": {"model": "m", "max_tokens": 99, "stream": True, "messages": [said("messages", "w1")]},
        "models/m:streamGenerateContent?alt=sse": {"contents": [said("gemini", "w1")]},
        "bedrock/model/m/converse-stream": {"messages": [said("converse", "w1")]},
    }
    ids = [*RENDERER.encode("<think>\n" + "well " * 10 + "\n</think>\n\nw7"), STOP]
    engine.replies += [{"token_ids": ids}] * len(streams)

    async def ask(url: str, body: dict[str, Any]) -> None:
        session = await opened(gateway)
        headers = {"authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(60.0, read=2.0)) as llm:
            reply = await llm.post(f"{session.base_url}/{url}", json=body)
        assert (reply.status_code, b"well" in reply.content) == (200, False)
        capture = await captured(gateway, session)
        assert [turn.completion_ids for turn in capture.turns] == [ids]

    await asyncio.gather(*(ask(url, body) for url, body in streams.items()))
