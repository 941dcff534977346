"""What a request may hold: much text, and not so many parts that reading them stops the event loop."""

from __future__ import annotations

import asyncio
import base64
import functools
import itertools
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentcore_rl_toolkit
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import CaptureError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient
from agentcore_rl_toolkit.gateway.capture.reply import read_reply
from agentcore_rl_toolkit.gateway.http import structure
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

from ...conftest import NIGHTLY

MODEL = Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights"
SIZE = 20_000_000  # bytes of a hostile body
MOST_S = 0.8  # of CPU that the event loop may spend on one; without bounds most of them take 1 to 10 s
Start = Callable[..., Awaitable[Gateway]]

HEADS = {
    "chat/completions": b'{"model":"m","messages":[{"role":"user","content":"hi"}],',
    "completions": b'{"model":"m","prompt":"hi","max_tokens":8,',
    "responses": b'{"model":"m","input":"hi",',
    "messages": b'{"model":"m","max_tokens":8,"messages":[{"role":"user","content":"hi"}],',
    "messages/count_tokens": b'{"model":"m","messages":[{"role":"user","content":"hi"}],',
}
TOOLS = {
    "chat/completions": b'{"type":"function","function":{"name":"f"}}',
    "completions": b"{}",
    "responses": b'{"type":"function","name":"f"}',
    "messages": b'{"name":"f"}',
    "messages/count_tokens": b'{"name":"f"}',
}


@functools.cache
def many(item: bytes) -> bytes:
    return b",".join([item] * (SIZE // (len(item) + 1)))


@functools.cache
def names(begin: bytes) -> bytes:
    return b",".join(b'"%b%d":1' % (begin, i) for i in range(SIZE // 14))


@pytest.fixture(scope="module", autouse=True)
def bodies_are_kept_for_these_tests_only() -> Iterator[None]:
    yield
    many.cache_clear()
    names.cache_clear()


def hostile(route: str) -> Iterator[tuple[str, bytes]]:
    head = HEADS[route]
    yield "unknown members", head + names(b"k") + b"}"
    yield "lists", head + b'"metadata":[' + many(b"[]") + b"]}"
    yield "deep", head + b'"metadata":' + b"[" * SIZE
    yield "strings", head + b'"stop":[' + many(b'"a"') + b"]}"
    yield "numbers", head + b'"stop_token_ids":[' + many(b"1") + b"]}"
    yield "tools", head + b'"tools":[' + many(TOOLS[route]) + b"]}"
    yield "biases", head + b'"logit_bias":{' + names(b"") + b"}}"
    yield "escapes", head + b'"user":"' + b'\\"' * (SIZE // 2) + b'"}'
    if route == "responses":
        yield "items", b'{"model":"m","input":[' + many(b'{"role":"user","content":""}') + b"]}"
    elif route != "completions":
        listed = many(b'{"role":"user","content":""}')
        yield "messages", b'{"model":"m","max_tokens":8,"messages":[' + listed + b"]}"
        blocks = many(b'{"type":"text","text":""}')
        yield "blocks", b'{"model":"m","max_tokens":8,"messages":[{"role":"user","content":[' + blocks + b"]}]}"


def send(port: int, path: str, key: str, body: bytes) -> bytes:
    """The head of the answer. In a thread of its own, whose CPU is not the gateway's."""
    with socket.create_connection(("127.0.0.1", port), timeout=300) as peer:
        lines = (f"POST {path} HTTP/1.1", "host: localhost", f"x-api-key: {key}", f"content-length: {len(body)}")
        peer.sendall("\r\n".join([*lines, "", ""]).encode())
        peer.sendall(body)
        return peer.recv(1000)


@pytest.mark.parametrize(
    ("route", "rendered"),
    [*((r, False) for r in HEADS), pytest.param("chat/completions", True, marks=pytest.mark.nightly)],
)
async def test_no_body_stops_the_event_loop(
    route: str, rendered: bool, engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine, **({"model_dir": str(MODEL)} if rendered else {}))
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    port = int(gateway.url.rsplit(":", 1)[1])
    path = f"/sessions/{session.session_id}/v1/{route}"
    # The bounds are the same on every route: one body shows that a route has them, the others what they hold against.
    for name, body in hostile(route) if NIGHTLY or route == "chat/completions" else itertools.islice(hostile(route), 1):
        before = time.thread_time()
        reply = await asyncio.to_thread(send, port, path, session.api_key, body)
        spent = time.thread_time() - before
        assert reply.startswith(b"HTTP/1.1 413 "), (name, reply)
        assert b"more than" in reply
        assert spent < MOST_S, name
    assert engine.calls == []


@pytest.mark.parametrize("route", ["/admin/sessions", "/sessions", "/admin/workers", "/admin/fetch", "/traces/query"])
async def test_administration_has_the_same_bounds(route: str, gateway: Gateway) -> None:
    port = int(gateway.url.rsplit(":", 1)[1])
    bodies = (b"{" + names(b"k") + b"}", b'{"session_ids":[' + many(b"[]") + b"]}")
    for body in bodies if NIGHTLY or route == "/admin/sessions" else bodies[:1]:
        before = time.thread_time()
        reply = await asyncio.to_thread(send, port, route, "", body)
        assert reply.startswith(b"HTTP/1.1 413 "), reply
        assert time.thread_time() - before < MOST_S


async def test_long_conversations_with_images_and_results_in_json_are_taken(
    engine: ScriptedEngine, gateway: Gateway
) -> None:
    """Far more than 128,000 tokens, and half of it characters that are structure where they stand outside of strings."""
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    rows = json.dumps(
        [{"id": i, "name": f'row "{i}"', "tags": ["a", "b"], "at": {"x": 1, "y": [1, 2]}} for i in range(60)]
    )
    picture = "data:image/png;base64," + base64.b64encode(random.Random(1).randbytes(9_000_000)).decode()
    parts = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "what is it?"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    for i in range(1000):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "query", "arguments": rows[:200]}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": rows})
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "d"} for i in range(20)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(200)]
    asked = {"model": "m", "messages": messages, "tools": tools, "logit_bias": {str(i): 1 for i in range(50_000)}}
    assert json.dumps(asked).count(",") > structure.PARTS
    status, reply = await request("POST", session.base_url + "/chat/completions", body=asked, key=session.api_key)
    assert status == 200, reply
    ids = list(range(1000, 2000)) * 900  # 900,000 tokens
    prompt = {"model": "m", "prompt": ids, "max_tokens": 2}
    status, reply = await request("POST", session.base_url + "/completions", body=prompt, key=session.api_key)
    assert status == 200, reply


@pytest.mark.parametrize("engine_kind", ["vllm", "openai"])
async def test_more_tools_and_stop_strings_than_anyone_has_are_refused_by_name(
    engine_kind: str, engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine, engine=engine_kind)
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    tools = [{"type": "function", "name": f"f{i}", "parameters": {}} for i in range(10_001)]
    asked = {"model": "m", "input": "hi", "tools": tools}
    status, reply = await request("POST", session.base_url + "/responses", body=asked, key=session.api_key)
    assert (status, json.loads(reply)["error"]["param"]) == (400, "tools")
    assert b"10000 at most" in reply


@pytest.mark.parametrize("stops", [["a"] * 16_385, ["a" * 16_385]])
async def test_stop_strings_are_bounded_where_each_token_is_compared_with_them(
    stops: list[str], engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        with pytest.raises(openai.BadRequestError, match="16384 characters") as caught:
            await llm.completions.create(model="m", prompt="hi", stop=stops)
        assert caught.value.param == "stop"


def test_a_reply_of_more_parts_than_any_has_is_not_decoded() -> None:
    body = b'{"choices":[' + many(b"{}") + b"]}"
    before = time.thread_time()
    with pytest.raises(CaptureError, match="more than"):
        read_reply(body)
    assert time.thread_time() - before < MOST_S


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab",:{}[]\\\n é'),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a",:{[\\', max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def parts_of(value: Any) -> tuple[int, int, int]:
    """Lists, objects and members; strings; commas."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    named = isinstance(value, dict)
    inner = [parts_of(v) for v in (value.values() if isinstance(value, dict) else value)]
    here = (1 + named * len(value), named * len(value), max(0, len(value) - 1))
    first, second, third = (sum(column) for column in zip(here, *inner, strict=True))
    return first, second, third


@settings(max_examples=100, deadline=None)
@given(value=values, chunk=st.integers(1, 9), ascii_only=st.booleans())
def test_parts_are_counted_as_a_decoder_would_find_them(value: Any, chunk: int, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    parts, strings, commas = parts_of(value)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(structure, "_CHUNK", chunk)
        for bound, count in (("PARTS", parts), ("STRINGS", strings), ("ITEMS", commas)):
            for name in ("PARTS", "STRINGS", "ITEMS", "ESCAPES"):
                m.setattr(structure, name, 10**6)
            m.setattr(structure, bound, max(count, 1))
            assert structure._counted(body, structure.PARTS) is None
            if count > 1:
                m.setattr(structure, bound, count - 1)
                most = structure.PARTS
                assert structure._counted(body, most) is not None
