"""Calls of tools whose arguments are JSON to Python and not to others, from engine to agent and back."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from agentcore_rl_toolkit.gateway import SessionHandle
from agentcore_rl_toolkit.gateway.calls import agent
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine
from agentcore_rl_toolkit.messages.dialects import Delta

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


class Deltas:
    """An engine side whose reply comes as these, one list at a time."""

    def __init__(self, *deltas: list[Delta]) -> None:
        self._deltas = list(deltas)

    def feed(self, data: bytes) -> list[Delta]:
        return self._deltas.pop(0)


class Connection:
    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data


@pytest.mark.parametrize(
    ("dialect", "ping"),
    [("chat", b": more"), ("responses", b"event: response.in_progress\n"), ("anthropic", b"event: ping\n")],
)
@pytest.mark.parametrize(("silent_s", "pings"), [(agent.PING_S - 1, 0), (agent.PING_S + 1, 1)])
def test_an_agent_hears_that_its_stream_goes_on_while_a_call_is_written(
    dialect: str, ping: bytes, silent_s: float, pings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn, now = Connection(), 100.0
    monkeypatch.setattr(agent.time, "monotonic", lambda: now)
    these: Any = agent.TranslatingAgent(cast(Any, conn), dialect)
    engine = Deltas([Delta(text="I look.")], [], [])  # a parser waits for the end of a call
    these.take(b"", engine)
    conn.written = b""
    now += silent_s
    these.take(b"", engine)
    these.take(b"", engine)
    assert conn.written.count(ping) == pings
