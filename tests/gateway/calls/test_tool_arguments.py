"""Calls of tools whose arguments are JSON to Python and not to others, from engine to agent and back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agentcore_rl_toolkit.gateway import Limits, SessionHandle
from agentcore_rl_toolkit.gateway.http.client import request
from scripted_engine import ScriptedEngine

from ..asking import Start, opened

OWN = '{"x":  NaN, "y": [-Infinity, 1e999, 1.50], "text": "NaN \\" Infinity", "big": 12345678901234567890}'
MEANT = {"x": "NaN", "y": ["-Infinity", "Infinity", 1.5], "text": 'NaN " Infinity', "big": 12345678901234567890}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_bodies_are_json_to_every_reader(
    stream: bool, engine: ScriptedEngine, session: SessionHandle
) -> None:
    engine.replies.append(
        {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": OWN}}]}
    )
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "stream": stream}
    asked["tools"] = [{"name": "f", "input_schema": SCHEMA}]
    status, reply = await request("POST", session.base_url + "/messages", body=asked, key=session.api_key)
    assert status == 200
    if stream:
        events = [msgspec.json.decode(line[6:]) for line in reply.split(b"\n") if line.startswith(b"data: ")]
        pieces = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
        assert msgspec.json.decode("".join(pieces)) == MEANT
    else:
        assert msgspec.json.decode(reply)["content"][0]["input"] == MEANT


@pytest.mark.parametrize(
    ("wire", "ping"),
    [
        ("chat/completions", b": waiting"),
        ("responses", b"event: response.in_progress\n"),
        ("messages", b"event: ping\n"),
    ],
)
async def test_a_silent_stream_shows_that_it_is_alive(
    engine: ScriptedEngine, start_gateway: Start, wire: str, ping: bytes
) -> None:
    """The model may write a long call, of which an agent gets nothing until it is whole."""
    gateway = await start_gateway(engine, limits=Limits(connect_s=60.0, keep_alive_s=0.05))
    session = await opened(gateway)
    engine.tokens, engine.token_s = 2, 0.5
    asked = {
        "model": "m",
        "stream": True,
        "max_tokens": 9,
        "input": "x",
        "messages": [{"role": "user", "content": "x"}],
    }
    asked.pop("messages" if wire == "responses" else "input")
    if wire == "responses":
        del asked["max_tokens"]
    status, reply = await request("POST", f"{session.base_url}/{wire}", body=asked, key=session.api_key)
    assert status == 200
    assert reply.count(ping) >= 2
