"""The CPU time of a streamed reply grows with its length and no faster, on every wire, from the engine to the agent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentcore_rl_toolkit.gateway import SessionHandle
from agentcore_rl_toolkit.messages.render import Renderer

from ..asking import MODEL, Start, asked_by, opened, talking

SHORT, LONG = 1_000, 4_000  # deltas
MOST = 2.3**2  # times the CPU time, for two doublings
WIRES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "responses": ("responses", {"input": "hi"}),
    "anthropic": ("messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100_000}),
    "bedrock": ("bedrock/model/m/converse-stream", {"messages": [{"role": "user", "content": [{"text": "hi"}]}]}),
}
TOOL = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}
TOOLS: dict[str, Any] = {
    "chat": [{"type": "function", "function": TOOL}],
    "responses": [{"type": "function", **TOOL}],
    "anthropic": [{"name": "f", "input_schema": TOOL["parameters"]}],
}
CONVERSE = {"tools": [{"toolSpec": {"name": "f", "inputSchema": {"json": TOOL["parameters"]}}}]}


def event(delta: dict[str, Any] | None, ids: list[int], finish: str | None = None) -> bytes:
    """One event of a chat completion's stream, or of a text completion's where there is no delta."""
    numbers = (
        {"content": [{"logprob": -0.5}] * len(ids)} if delta is not None else {"token_logprobs": [-0.5] * len(ids)}
    )
    said = {} if delta is None else {"delta": delta}
    choice = {"index": 0, **said, "logprobs": numbers, "token_ids": ids, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "r", "model": "m", "choices": [choice]}).encode() + b"\n\n"


def arguments(n: int) -> list[bytes]:
    """A call with long arguments, as an engine writes it that reads calls itself."""
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"q": "'}}
    piece = event({"tool_calls": [{"index": 0, "function": {"arguments": "some words "}}]}, [5])
    last = event({"tool_calls": [{"index": 0, "function": {"arguments": '"}'}}]}, [6], "tool_calls")
    return [event({"tool_calls": [call]}, [4]), *[piece] * n, last]


def tokens(n: int, *, text: str) -> list[bytes]:
    """The tokens of a call with long arguments, or of a reply that is no UTF-8."""
    renderer = Renderer.from_path(MODEL)
    invalid = next(i for i in range(renderer.tokenizer.vocabulary_size) if renderer.decode([i]) == "\ufffd")
    begin = renderer.encode('<tool_call>\n{"name": "f", "arguments": {"q": "')
    if text == "invalid":
        return [*[event(None, [invalid])] * n, event(None, [min(renderer.stop_token_ids)], "stop")]
    end = [*renderer.encode('"}}\n</tool_call>'), min(renderer.stop_token_ids)]
    return [event(None, begin), *[event(None, renderer.encode(" a")[:1])] * n, event(None, end, "stop")]


REPLIES: dict[str, Callable[[int], list[bytes]]] = {
    "arguments, relayed": arguments,
    "arguments, sampled": lambda n: tokens(n, text="call"),
    "no UTF-8, sampled": lambda n: tokens(n, text="invalid"),
}


@pytest.mark.parametrize("kind", REPLIES)
async def test_a_streamed_reply(kind: str, start_gateway: Start) -> None:
    replies = {n: b"".join([*REPLIES[kind](n), b"data: [DONE]\n\n"]) for n in (SHORT, LONG)}
    length = SHORT

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await asked_by(reader)
            body = replies[length]
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(body)
            )
            for at in range(0, len(body), 4096):
                writer.write(body[at : at + 4096])
                await writer.drain()

    async def cpu_s(session: SessionHandle, wire: str) -> float:
        path, body = WIRES[wire]
        asked = {"model": "m", "stream": True, "tools": TOOLS.get(wire), **body}
        if wire == "bedrock":
            asked["toolConfig"] = CONVERSE
        started = time.process_time()
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}, timeout=60) as agent:
            reply = await agent.post(f"{session.base_url}/{path}", json=asked)
        assert reply.status_code == 200, reply.text
        assert '"error"' not in reply.text.replace('"error":null', "")
        assert b":exception-type" not in reply.content
        return time.process_time() - started

    async with talking(talk) as url:
        gateway = await start_gateway(url, model_dir=str(MODEL) if "sampled" in kind else None)
        for wire in WIRES:
            ratios = []
            while not ratios or (ratios[-1] > MOST and len(ratios) < 4):
                length = SHORT
                short_s = await cpu_s(await opened(gateway), wire)
                length = LONG
                ratios.append(await cpu_s(await opened(gateway), wire) / short_s)
            assert min(ratios) < MOST, (
                f"{wire}: {LONG // SHORT} times the deltas took {min(ratios):.1f} times the CPU time"
            )
