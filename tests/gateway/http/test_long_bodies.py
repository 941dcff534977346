"""Long requests and replies, over real connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway import SessionHandle
from serving import certificate

from ..asking import Start, ask, asked_by, captured, claude, gpt, opened, talking


def answering(reply: Callable[[bytes], Iterable[bytes]], **options: Any) -> AbstractAsyncContextManager[str]:
    """A server that answers each request's body with those writes, one after the other."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await asked_by(reader)
            for piece in reply(body):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)

    return talking(talk, limit=2**22, **options)


async def test_long_requests_and_replies_over_tls(
    start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, context = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(chain))
    received: list[bytes] = []

    def reply(body: bytes) -> list[bytes]:
        received.append(body)
        choice = {"index": 0, "message": {"role": "assistant", "content": "y" * 10}, "finish_reason": "stop"}
        choice |= {"token_ids": [1], "logprobs": {"content": [{"token": "y", "logprob": -0.5}]}}
        answer = json.dumps(
            {"choices": [choice], "prompt_token_ids": list(range(100_000))}, separators=(",", ":")
        ).encode()
        return [
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer
        ]

    async with answering(reply, ssl=context) as url:
        gateway = await start_gateway(url)
        session = await opened(gateway)
        for turn in range(2):
            content = f"{turn}" * 400_000
            status, _ = await ask(session, content)
            assert status == 200
            assert json.loads(received[-1])["messages"][0]["content"] == content
        capture = await captured(gateway, session)
        assert [list(turn.prompt_ids) for turn in capture.turns] == [list(range(100_000))] * 2


def events_of(count: int) -> bytes:
    """A stream whose first event carries a long prompt's ids, as vLLM writes it."""
    delta: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    entries = [{"id": "r", "choices": [delta], "prompt_token_ids": list(range(count))}]
    for i in range(3):
        token = {"token": f"w{i}", "logprob": -0.5, "bytes": [119], "top_logprobs": []}
        entries.append(
            {
                "id": "r",
                "choices": [
                    {"index": 0, "delta": {"content": f"w{i} "}, "logprobs": {"content": [token]}, "token_ids": [i]}
                ],
            }
        )
    entries.append({"id": "r", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return (
        b"".join(b"data: %b\n\n" % json.dumps(t, separators=(",", ":")).encode() for t in entries) + b"data: [DONE]\n\n"
    )


async def streamed(session: SessionHandle, letter: str, *, dialect: str = "chat") -> str:
    """The text of a streamed call, by the official client."""
    if dialect == "anthropic":
        asked: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": letter}]}
        async with claude(session) as llm, llm.messages.stream(**asked) as events:
            return "".join([text async for text in events.text_stream])
    async with gpt(session) as llm:
        stream = await llm.chat.completions.create(
            model="m", messages=[{"role": "user", "content": letter}], stream=True, timeout=30
        )
        return "".join([event.choices[0].delta.content or "" async for event in stream])


@pytest.mark.parametrize(("step", "dialect"), [(1_000, "anthropic"), (65_536, "chat")])
async def test_a_stream_that_begins_with_a_long_prompt_is_read_in_pieces(
    start_gateway: Start, step: int, dialect: str
) -> None:
    text = events_of(100_000)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    cut = len(text) - 5_000 if step == 1_000 else 0  # the small pieces are those in which the events end
    pieces = [text[:cut]] * bool(cut) + [text[at : at + step] for at in range(cut, len(text), step)]

    def reply(body: bytes) -> list[bytes]:
        return [head, *[b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces], b"0\r\n\r\n"]

    async with answering(reply) as url:
        gateway = await start_gateway(url)
        session = await opened(gateway)
        assert await streamed(session, "x", dialect=dialect) == "w0 w1 w2 "
        [turn] = (await captured(gateway, session)).turns
        assert list(turn.prompt_ids) == list(range(100_000))
        assert list(turn.completion_ids) == [0, 1, 2]


async def test_the_beginning_of_a_broken_stream_does_not_get_into_the_next_try(start_gateway: Start) -> None:
    """The first answer ends in the middle of its first event: nothing has reached the agent, so the call is tried again."""
    text = events_of(5_000)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    tries: list[bytes] = []

    def reply(body: bytes) -> Iterator[bytes]:
        tries.append(body)
        if len(tries) == 1:
            yield head + b"%x\r\n%b\r\n" % (9_000, text[:9_000])
            raise ConnectionResetError
        yield head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)

    async with answering(reply) as first, answering(reply) as second:
        gateway = await start_gateway(first, second)
        session = await opened(gateway)
        assert await streamed(session, "x") == "w0 w1 w2 "
        assert len(tries) == 2
        [turn] = (await captured(gateway, session)).turns
        assert len(turn.prompt_ids) == 5_000
