"""What is not a turn: errors, broken streams, agents that hang up, replies whose tokens do not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from agentcore_rl_toolkit.backends.collection.judge import end_of_calls
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, Limits, SessionHandle
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, Start, captured, claude, gpt, hang_up, opened, until

USER = [{"role": "user", "content": "hello there"}]


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_an_engines_error_reaches_the_agent_and_is_no_turn(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle, status: int
) -> None:
    engine.faults.append(Fault(status=status, headers=(("Retry-After", "7"),)))
    async with gpt(session) as llm:
        with pytest.raises(openai.APIStatusError) as caught:
            await llm.chat.completions.create(model="m", messages=USER)
        await llm.chat.completions.create(model="m", messages=USER)
    assert caught.value.status_code == status
    assert caught.value.response.headers["retry-after"] == "7"
    capture = await captured(gateway, session)
    assert (gateway.counters["calls"], gateway.counters["turns_error"], len(capture.turns)) == (2, 1, 1)
    assert [(e["status"], e["http_status"]) for e in capture.errors] == [("error", status)]


async def test_a_request_without_fields_gets_the_engines_error(engine: ScriptedEngine, session: SessionHandle) -> None:
    engine.faults.append(Fault(status=400))
    async with gpt(session) as llm:
        with pytest.raises(openai.BadRequestError):
            await llm.post("/chat/completions", cast_to=object, body={})


@pytest.mark.parametrize("status", [204, 301, 307, 401, 403])
async def test_an_engine_that_sends_the_agent_away_is_a_502(
    engine: ScriptedEngine, session: SessionHandle, status: int
) -> None:
    engine.faults.append(Fault(status=status, body=b"", headers=(("Location", "http://169.254.169.254/"),)))
    async with gpt(session) as llm:
        with pytest.raises(openai.InternalServerError) as caught:
            await llm.chat.completions.create(model="m", messages=USER)
    assert caught.value.status_code == 502
    assert "location" not in caught.value.response.headers


@pytest.mark.parametrize("cut", [0, 40])
async def test_a_reply_cut_off_before_it_was_relayed_is_a_clean_error(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, cut: int
) -> None:
    engine.faults.extend([Fault(drop_after=cut)] * 4)
    async with gpt(session) as llm:
        with pytest.raises(openai.APIStatusError) as caught:
            await llm.chat.completions.create(model="m", messages=USER)
    assert caught.value.status_code == 502
    capture = await captured(client, session)
    assert capture.turns == []
    assert [e["status"] for e in capture.errors] == ["error"]


async def test_a_stream_that_breaks_off_is_partial_and_the_agent_is_told(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle
) -> None:
    engine.faults.append(Fault(drop_after=900))
    seen = 0
    async with gpt(session) as llm:
        with pytest.raises(openai.APIError, match="closed the connection"):  # noqa: PT012  (the stream is what raises)
            async for _ in await llm.chat.completions.create(model="m", messages=USER, stream=True):
                seen += 1
    assert seen > 0
    capture = await captured(gateway, session)
    assert (capture.turns, gateway.counters["turns_partial"]) == ([], 1)
    assert [e["status"] for e in capture.errors] == ["partial"]


def out_of_memory(event: dict[str, Any]) -> dict[str, Any]:
    error = {"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}}
    return error if any(choice["finish_reason"] for choice in event["choices"]) else event


def aborted(event: dict[str, Any]) -> dict[str, Any]:
    for choice in event["choices"]:
        choice["finish_reason"] = choice["finish_reason"] and "abort"
    return event


@pytest.mark.parametrize("edit", [out_of_memory, aborted])
@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic"])
@pytest.mark.parametrize("model_dir", [None, str(MODEL)])
async def test_an_engine_that_ends_a_stream_by_itself_has_failed_and_not_the_agent(
    engine: ScriptedEngine, start_gateway: Start, edit: Any, dialect: str, model_dir: str | None
) -> None:
    gateway = await start_gateway(engine, model_dir=model_dir)
    session = await opened(gateway)
    engine.faults.append(Fault(edit=edit))
    words = "out of memory" if edit is out_of_memory else "the engine ended its reply too early"
    async with gpt(session) as llm, claude(session) as other:
        if dialect == "responses":
            events = [event async for event in await llm.responses.create(model="m", input="hi", stream=True)]
            assert events[-1].type == "response.failed"
            assert words in events[-1].response.error.message
        elif dialect == "anthropic":
            with pytest.raises(anthropic.APIStatusError, match=words):
                async with other.messages.stream(model="m", max_tokens=50, messages=USER) as stream:
                    await stream.get_final_message()
        else:
            with pytest.raises(openai.APIError, match=words):
                async for _ in await llm.chat.completions.create(model="m", messages=USER, stream=True):
                    pass
    capture = await captured(gateway, session)
    assert (capture.turns, [(e["status"], e["http_status"]) for e in capture.errors]) == ([], [("partial", 502)])
    assert (gateway.counters["turns_partial"], gateway.sessions.turns) == (1, 0)
    assert end_of_calls(capture)[0] == f"its last model call failed: {words}"  # an agent that hides it gets no reward


@pytest.mark.parametrize("body", [b"<html>the proxy is busy</html>", b'{"choices": []}'])
@pytest.mark.parametrize("model_dir", [None, str(MODEL)])
async def test_a_200_without_a_reply_is_the_engines_failure(
    engine: ScriptedEngine, start_gateway: Start, body: bytes, model_dir: str | None
) -> None:
    gateway = await start_gateway(engine, model_dir=model_dir)
    session = await opened(gateway)
    engine.faults += [Fault(body=body), Fault(body=body)]
    async with gpt(session) as llm:
        with pytest.raises(openai.InternalServerError, match=r"200 without a reply|cannot be read"):
            await llm.chat.completions.create(model="m", messages=USER)
        with pytest.raises(openai.APIError, match="the engine ended its reply too early"):
            async for _ in await llm.chat.completions.create(model="m", messages=USER, stream=True):
                pass
    capture = await captured(gateway, session)
    assert [e["http_status"] for e in capture.errors] == [502, 502]
    assert end_of_calls(capture)[0]


@pytest.mark.parametrize("model_dir", [None, str(MODEL)])
async def test_a_reply_that_the_engine_aborted_is_sampled_again_when_the_client_asks_again(
    engine: ScriptedEngine, start_gateway: Start, model_dir: str | None
) -> None:
    gateway = await start_gateway(engine, model_dir=model_dir)
    session = await opened(gateway)
    engine.faults.append(Fault(edit=aborted))
    async with gpt(session).with_options(max_retries=1) as llm:
        reply = await llm.chat.completions.create(model="m", messages=USER)
    assert (reply.choices[0].finish_reason, len(engine.calls)) == ("stop", 2)
    capture = await captured(gateway, session)
    assert [turn.completion_ids for turn in capture.turns] == [engine.calls[1].completion_ids[0]]
    assert end_of_calls(capture) == (None, None)


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "without a logprob": lambda reply: reply["choices"][0]["logprobs"]["content"].pop(),
    "with a null logprob": lambda reply: reply["choices"][0]["logprobs"]["content"][0].update(logprob=None),
    "without ids": lambda reply: reply["choices"][0].pop("token_ids"),
    "without prompt": lambda reply: reply.pop("prompt_token_ids"),
    "with another count": lambda reply: reply["usage"].update(
        completion_tokens=reply["usage"]["completion_tokens"] + 1
    ),
}


@pytest.mark.parametrize("how", EDITS)
async def test_tokens_that_do_not_fit_together_are_reported_and_never_padded(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, how: str
) -> None:
    def edit(reply: dict[str, Any]) -> dict[str, Any]:
        EDITS[how](reply)
        return reply

    engine.faults.append(Fault(edit=edit))
    async with gpt(session) as llm:
        assert (await llm.chat.completions.create(model="m", messages=USER)).choices
    capture = await captured(client, session)
    assert capture.turns == []
    [error] = capture.errors
    assert error["status"] == "invalid"
    assert error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_hangs_up_and_does_not_ask_again_cancels_the_call_at_the_engine(
    engine: ScriptedEngine, start_gateway: Start, stream: bool
) -> None:
    gateway = await start_gateway(engine, limits=Limits(connect_s=60.0, orphan_s=0.1))
    session = await opened(gateway)
    engine.token_s = 0.5
    engine.faults.append(Fault(delay_s=0.0 if stream else 30.0))
    await hang_up(engine, session, stream=stream)
    await until(lambda: engine.active == 0)
    assert engine.calls[0].cancelled
    capture = await captured(gateway, session)
    assert capture.turns == []
    assert [(e["status"], e["type"]) for e in capture.errors] == [("aborted", "agent_gone")]
    assert not gateway.running.calls


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_n_choices_keeps_its_own_tokens(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, stream: bool
) -> None:
    async with gpt(session) as llm:
        reply = await llm.chat.completions.create(model="m", messages=USER, n=3, stream=stream)
        if stream:
            async for _ in reply:
                pass
    turns = (await captured(client, session)).turns
    assert [t.completion_ids for t in turns] == engine.calls[0].completion_ids
    assert [t.choice_index for t in turns] == [0, 1, 2]
    assert len({t.turn_id for t in turns}) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("retry", [0, 1])
async def test_an_agent_that_hung_up_and_asks_again_gets_the_call_that_still_runs(
    engine: ScriptedEngine, gateway: Gateway, client: GatewayClient, session: SessionHandle, stream: bool, retry: int
) -> None:
    """A client whose timeout is shorter than the generation gets the first generation."""
    gate = asyncio.Event()
    engine.token_s = 0.2
    if not stream:
        engine.faults.append(Fault(gate=gate))
    async with gpt(session) as llm:

        async def ask(retry: int) -> str:
            reply = await llm.chat.completions.create(
                model="m", messages=USER, stream=stream, extra_headers={"x-stainless-retry-count": str(retry)}
            )
            if not stream:
                return str(reply.choices[0].message.content)
            return "".join([c.choices[0].delta.content or "" async for c in reply])

        first = asyncio.ensure_future(ask(0))
        await until(lambda: any(call.buffer or not stream for call in gateway.running.calls) and engine.calls)
        first.cancel()
        await until(lambda: not any(call.reply.connections for call in gateway.running.calls))
        again = asyncio.ensure_future(ask(retry))
        await until(lambda: any(call.reply.connections for call in gateway.running.calls))
        gate.set()
        text = await again
    assert len(engine.calls) == 1
    capture = await captured(client, session)
    assert len(capture.turns) == 1
    assert capture.turns[0].delivered
    assert capture.dialogue[-1]["content"] == text


async def test_a_retry_leaves_a_call_alone_that_its_agent_waits_for(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle
) -> None:
    """Two equal samples at once: one of them is a retry, by its header, of a call that nobody knows any more."""
    gate = asyncio.Event()
    engine.faults += [Fault(gate=gate), Fault(gate=gate)]
    async with gpt(session) as llm:

        async def ask(retry: int) -> Any:
            return await llm.chat.completions.create(
                model="m", messages=USER, extra_headers={"x-stainless-retry-count": str(retry)}
            )

        both = [asyncio.ensure_future(ask(retry)) for retry in (0, 1)]
        await until(lambda: len(engine.calls) == 2)
        gate.set()
        first, second = await asyncio.gather(*both)
    assert first.choices[0].message.content != second.choices[0].message.content
    assert len((await captured(gateway, session)).turns) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_is_too_large_fails_its_call(
    engine: ScriptedEngine, start_gateway: Start, stream: bool
) -> None:
    gateway = await start_gateway(engine, limits=Limits(connect_s=60.0, reply_bytes=20_000))
    session = await opened(gateway)
    engine.tokens = 500
    async with gpt(session) as llm:
        for size, why in ((20_000, "cannot be read"), (20_001, "larger than 20000 bytes")):
            engine.faults.append(Fault(body=b"x" * size))
            with pytest.raises(openai.APIError, match=why):
                await llm.chat.completions.create(model="m", messages=USER)
        with pytest.raises(openai.APIError, match="larger than 20000 bytes"):  # noqa: PT012  (the stream is what raises)
            reply = await llm.chat.completions.create(model="m", messages=USER, stream=stream)
            if stream:
                async for _ in reply:
                    pass
    capture = await captured(gateway, session)
    assert (capture.turns, len(capture.errors)) == ([], 3)


async def test_a_call_past_its_deadline_is_ended(engine: ScriptedEngine, start_gateway: Start) -> None:
    gateway = await start_gateway(engine, limits=Limits(call_s=0.2))
    session = await opened(gateway)
    engine.faults.append(Fault(delay_s=20.0))
    async with gpt(session) as llm:
        with pytest.raises(openai.APIStatusError) as caught:
            await llm.chat.completions.create(model="m", messages=USER)
    assert (caught.value.status_code, gateway.counters["deadlines"]) == (504, 1)
    await until(lambda: engine.active == 0)


async def test_a_session_has_no_more_turns_than_allowed(client: GatewayClient, engine: ScriptedEngine) -> None:
    [session] = await client.create_sessions_async([new_session_id()], max_turns=1)
    engine.faults += [Fault(status=500)] * 2
    async with gpt(session) as llm:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError):
                await llm.chat.completions.create(model="m", messages=USER)
        await llm.chat.completions.create(model="m", messages=USER)
        with pytest.raises(openai.PermissionDeniedError, match="1 model calls") as refused:
            await llm.chat.completions.create(model="m", messages=USER)
    assert refused.value.code == "turn_limit_reached"
    assert len(engine.calls) == 3


async def test_a_refused_request_is_an_entry_of_the_session_and_no_turn(
    gateway: Gateway, session: SessionHandle
) -> None:
    async with gpt(session) as llm:
        for _ in range(60):
            with pytest.raises(openai.BadRequestError):
                await llm.chat.completions.create(model="m", messages=USER, extra_body={"lora_path": "/x"})  # type: ignore[arg-type]
        await llm.chat.completions.create(model="m", messages=USER)  # type: ignore[arg-type]
    assert (gateway.counters["calls"], gateway.counters["refused"]) == (61, 60)
    capture = await captured(gateway, session)
    assert (len(capture.turns), len(capture.errors)) == (1, 50)  # an agent may repeat one forever
    [first, *_] = capture.errors
    assert (first["status"], first["http_status"], first["field"]) == ("refused", 400, "lora_path")
    assert first["type"] == "unsupported"
    assert "beyond this call" in first["message"]
    assert first["started_s"] <= first["finished_s"]


async def test_a_plain_openai_endpoint_is_recorded_as_untrainable(start_gateway: Start) -> None:
    async with ScriptedEngine(gives_tokens=False) as plain:
        gateway = await start_gateway(plain, engine="openai")
        client = GatewayClient(gateway.url)
        [session] = await client.create_sessions_async([new_session_id()])
        async with gpt(session) as llm:
            await llm.chat.completions.create(model="m", messages=USER, extra_body={"wings": 2})
        capture = await captured(client, session)
        # Such an endpoint may be OpenAI itself, which refuses what it does not know.
        assert plain.calls[0].body.keys() == {"model", "messages", "wings"}
    [turn] = capture.turns
    assert not turn.trainable
    assert capture.dialogue[0] == USER[0]
