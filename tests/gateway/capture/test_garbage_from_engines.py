"""Whatever an engine answers with a good status: what is no reply is an error, in every dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import GatewayClient, SessionHandle
from agentcore_rl_toolkit.trajectory import build_trajectory
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, Start, captured, opened, status_of

DIALECTS = ("chat", "responses", "anthropic")
HEAD = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
ENDS = {"index": 0, "finish_reason": "stop"}
TOLD = {"error": {"message": "out of memory", "type": "server_error", "code": None}}

# What comes with status 200 in place of a reply, streamed or not.
NO_REPLY: dict[str, bytes] = {
    "nothing": b"",
    "blanks": b" \r\n\r\n ",
    "words": b"upstream connect error or disconnect/reset before headers",
    "a page": b"<!DOCTYPE html>\n<html><body>\n\n<h1>Bad gateway</h1></body></html>",
    "half of a reply": b'{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"he',
    "a list": b"[]",
    "null": b"null",
    "a number": b"17",
    "an object of something else": b'{"status":"ok"}',
    "no choices": json.dumps({**HEAD, "choices": []}).encode(),
    "null for choices": json.dumps({**HEAD, "choices": None}).encode(),
    "choices that are none": json.dumps({**HEAD, "choices": [None]}).encode(),
    "words for choices": json.dumps({**HEAD, "choices": "none"}).encode(),
    "a choice of nothing": json.dumps({**HEAD, "choices": [{}]}).encode(),
    "a choice without a message": json.dumps({**HEAD, "choices": [{**ENDS, "message": None}]}).encode(),
    "an error": json.dumps(TOLD).encode(),
    "an error in words": b'{"error":"out of memory"}',
    "an error beside no choices": json.dumps({**HEAD, **TOLD, "choices": []}).encode(),
    "bytes that are no text": b'{"choices":[{"index":0,"message":{"content":"\xff\xfe"},"finish_reason":"stop"}]}',
    "too deep": b"[" * 100_000,
}


def event(reply: Any) -> bytes:
    return b"data: " + (reply if isinstance(reply, bytes) else json.dumps(reply).encode()) + b"\n\n"


def piece(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    answer = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": answer, "finish_reason": finish, **more}
    return event({**HEAD, "object": "chat.completion.chunk", "choices": [choice]})


DONE = b"data: [DONE]\n\n"
# Streams that end well as HTTP, and are no whole reply.
NO_STREAM: dict[str, bytes] = {
    "only an end": DONE,
    "only comments": b": wait\n\n: wait\n\n",
    "events of nothing": event({}) + DONE,
    "events without choices": event({**HEAD, "choices": []}) + DONE,
    "only usage": event({**HEAD, "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 0}}) + DONE,
    "no finish reason": piece("he") + piece("llo") + DONE,
    "no finish reason and no end": piece("he") + piece("llo"),
    "half an event": piece("he") + b'data: {"choices":[{"index":0,"delta":{"content":"l',
    "an event of words": piece("he") + event(b"internal server error") + DONE,
    "a page in the middle": piece("he") + b"<html>\n\n</html>\n\n",
    "an error first": event(TOLD) + DONE,
    "an error named so": b"event: error\n" + event({"message": "out of memory"}),
    "an error in the middle": piece("he") + event(TOLD) + DONE,
    "an error in words": piece("he") + event({"error": "out of memory"}) + DONE,
    "an error in the place of an end": piece("he") + event(TOLD),
}

MODES = ("vllm", "openai", "tokens-vllm", "tokens-sglang")
BY_DAY = {("vllm", "chat"), ("openai", "anthropic"), ("tokens-vllm", "responses"), ("tokens-sglang", "chat")}
PAIRS = [
    pytest.param(mode, dialect, marks=() if (mode, dialect) in BY_DAY else pytest.mark.nightly)
    for mode in MODES
    for dialect in DIALECTS
]


@asynccontextmanager
async def clients(session: SessionHandle) -> AsyncIterator[Callable[[str, bool], Awaitable[str]]]:
    """What an agent reads with the providers' own clients: ``await ask(dialect, stream)``, which raises what they raise."""
    base = session.base_url.removesuffix("/v1")
    async with (
        anthropic.AsyncAnthropic(base_url=base, api_key=session.api_key, max_retries=0) as claude,
        openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm,
    ):

        async def ask(dialect: str, stream: bool) -> str:
            user: Any = [{"role": "user", "content": "hello"}]
            if dialect == "anthropic":
                if not stream:
                    return str(await claude.messages.create(model="m", max_tokens=16, messages=user))
                async with claude.messages.stream(model="m", max_tokens=16, messages=user) as events:
                    return str(await events.get_final_message())
            if dialect == "responses":
                if not stream:
                    return str(await llm.responses.create(model="m", input="hello"))
                text = ""
                async for answer in await llm.responses.create(model="m", input="hello", stream=True):
                    if answer.type == "response.failed":  # this client leaves it to its caller
                        assert answer.response.error is not None
                        raise openai.APIError(answer.response.error.message, httpx.Request("POST", base), body=None)
                    text += str(answer)
                return text
            call: Any = llm.chat.completions if dialect == "chat" else llm.completions
            asked = {"messages": user} if dialect == "chat" else {"prompt": "hello"}
            reply = await call.create(model="m", max_tokens=16, stream=stream, **asked)
            return "".join([str(part) async for part in reply]) if stream else str(reply)

        yield ask


async def mistaken(
    kinds: dict[str, bytes], dialect: str, stream: bool, mode: str, engine: ScriptedEngine, start_gateway: Start
) -> dict[str, str]:
    """The kinds that an agent took for an answer, or that left something other than one failed call."""
    rendered = mode.startswith("tokens-")
    more = {"model_dir": str(MODEL)} if rendered else {}
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, engine=mode.removeprefix("tokens-"), **more)
    trainer = GatewayClient(gateway.url)
    [session] = await trainer.create_sessions_async([new_session_id()])
    inside = gateway.sessions.by_id[session.session_id.encode()]
    found: dict[str, str] = {}
    content_type = "text/event-stream" if stream else "application/json"
    async with clients(session) as ask:
        for good, (name, body) in enumerate(kinds.items()):
            engine.faults.append(Fault(body=body, headers=(("content-type", content_type),)))
            error: Exception | None = None
            try:
                found[name] = f"an answer: {await ask(dialect, stream)}"
            except (openai.APIError, anthropic.APIError) as e:
                error = e
                if not e.message:
                    found[name] = "an error without a word"
            except Exception as e:
                error = e
                found[name] = f"not the client's own error: {e!r}"
            assert not engine.faults, f"{name}: the engine was not asked, and the client raised {error!r}"
            if (inside.turns, inside.errors) != (good, good + 1):
                found[name] = (
                    f"{found.get(name)}; {inside.turns} turns, {inside.errors} errors, after {good} good calls"
                )
            await ask(dialect, stream)
    captured = (await trainer.fetch_async([session.session_id]))[session.session_id]
    assert (len(captured.turns), len(captured.errors)) == (len(kinds), len(kinds)), found
    return found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("mode", "dialect"), PAIRS)
async def test_what_is_no_reply_is_an_error(
    mode: str, dialect: str, stream: bool, engine: ScriptedEngine, start_gateway: Start
) -> None:
    assert await mistaken(NO_REPLY, dialect, stream, mode, engine, start_gateway) == {}


@pytest.mark.parametrize(("mode", "dialect"), PAIRS)
async def test_what_is_no_whole_stream_is_an_error(
    mode: str, dialect: str, engine: ScriptedEngine, start_gateway: Start
) -> None:
    assert await mistaken(NO_STREAM, dialect, True, mode, engine, start_gateway) == {}


@pytest.mark.parametrize("number", [-1, 2**31, 2**32 - 1, 10**30])
@pytest.mark.parametrize("mode", ["vllm", "tokens-vllm", "tokens-sglang"])
async def test_a_token_id_that_is_none_does_not_hide_the_other_turns_of_its_session(
    engine: ScriptedEngine, start_gateway: Start, mode: str, number: int
) -> None:
    """Engines fill up lists of tokens with -1. The call is no turn, and in token mode it is an error of the engine."""
    engine.first_id, engine.last_id = 300, 500
    more = {"model_dir": str(MODEL)} if mode.startswith("tokens-") else {}
    gateway = await start_gateway(engine, engine=mode.removeprefix("tokens-"), **more)
    session = await opened(gateway)

    def edit(reply: dict[str, Any]) -> None:
        if "output_ids" in reply:
            reply["output_ids"][1] = reply["meta_info"]["output_token_logprobs"][1][1] = number
        else:
            reply["choices"][0]["token_ids"][1] = number

    engine.faults.append(Fault(edit=edit))
    assert await status_of(session) == (502 if more else 200)
    assert await status_of(session) == 200
    capture = await captured(gateway, session)
    assert len(capture.errors) == 1
    assert build_trajectory(session.session_id, capture.turns).report.turns == 1
