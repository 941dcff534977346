"""Large bodies are parsed by another process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import msgspec
import pytest

from agentcore_rl_toolkit.gateway.wire.bodies import LARGE_BYTES, BodyParser
from agentcore_rl_toolkit.messages.wire import DIALECTS, RequestError

TEXT = "word é " * 2000
MESSAGES = [{"role": "user", "content": f"{n} {TEXT}"} for n in range(600)]
BODIES = {
    "chat": {"messages": MESSAGES, "temperature": 0.5},
    "anthropic": {"messages": MESSAGES, "max_tokens": 5, "system": "be brief"},
    "responses": {"input": MESSAGES, "instructions": "be brief"},
}
SMALL = json.dumps({"messages": MESSAGES[:1]}).encode()


@pytest.fixture
def parser() -> BodyParser:
    return BodyParser()


@pytest.mark.parametrize("dialect", BODIES)
async def test_another_process_parses_a_body_as_this_one_would(dialect: str, parser: BodyParser) -> None:
    body = json.dumps(BODIES[dialect]).encode()
    assert len(body) > LARGE_BYTES
    parsed = await parser.parse(body, dialect)
    assert parsed.request == DIALECTS[dialect].parse_request(body)
    assert [msgspec.json.decode(text) for text in parsed.texts] == parsed.request.messages


async def test_the_members_of_a_body_stay_as_they_were_sent(parser: BodyParser) -> None:
    body = b'{"messages": [ {"content": "cut \\ud83d"}], "n":1 }'
    fields, halves = await parser.fields(body)
    assert {name: bytes(raw) for name, raw in fields.items()} == {
        "messages": b'[ {"content": "cut \\ufffd"}]',
        "n": b"1",
    }
    assert halves == 1


async def test_half_surrogates_of_a_parsed_body_are_counted(parser: BodyParser) -> None:
    body = b'{"messages": [{"role": "user", "content": "cut \\ud83d"}]}'
    parsed = await parser.parse(body, "chat")
    assert (parsed.request.messages[0]["content"], parsed.request.left_out) == ("cut \ufffd", {"half surrogate": 1})
    with pytest.raises(RequestError, match="object"):
        await parser.parse(b"[1]", "chat")


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages": [{"content": "\xff"}]}'])
async def test_a_body_that_is_no_json_object_is_refused(body: bytes, parser: BodyParser) -> None:
    with pytest.raises(RequestError) as caught:
        await parser.fields(body)
    assert caught.value.status == 400


async def test_a_refused_field_is_named_and_a_reference_is_resolved(parser: BodyParser) -> None:
    with pytest.raises(RequestError) as caught:
        await parser.parse(json.dumps({"messages": MESSAGES[:1], "n": "two"}).encode(), "chat")
    assert (caught.value.param, caught.value.kind) == ("n", "invalid_request")
    body = json.dumps({"input": [{"type": "item_reference", "id": "msg_abc-0"}]}).encode()
    parsed = await parser.parse(body, "responses", {"abc": {"role": "assistant", "content": "hello"}})
    assert parsed.request.messages == [{"role": "assistant", "content": "hello"}]
    with pytest.raises(RequestError, match="store: false"):
        await parser.parse(body, "responses")


async def test_one_message_over_the_size_that_this_process_decodes_is_refused(parser: BodyParser) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * (LARGE_BYTES + 1)}]}).encode()
    with pytest.raises(RequestError, match=r"messages\[0\] is larger") as caught:
        await parser.parse(body, "chat")
    assert caught.value.status == 413


async def test_bodies_at_the_same_time_get_their_own_results(parser: BodyParser) -> None:
    bodies = [json.dumps({"messages": MESSAGES[n : n + 1]}).encode() for n in range(5)]
    parsed = await asyncio.gather(*(parser.parse(body, "chat") for body in bodies))
    assert [p.request.messages for p in parsed] == [MESSAGES[n : n + 1] for n in range(5)]


def processes() -> list[str]:
    """The processes that parse a body for this one."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        found += (task / "children").read_text().split()
    return [pid for pid in found if "bodies" in Path(f"/proc/{pid}/cmdline").read_text()]


async def parsing() -> str:
    async with asyncio.timeout(30):
        while not (found := processes()):  # noqa: ASYNC110  (a process starts)
            await asyncio.sleep(0.001)
    return found[0]


async def test_a_cancelled_parse_leaves_no_process_and_nothing_for_the_next(parser: BodyParser) -> None:
    first = asyncio.ensure_future(parser.parse(json.dumps(BODIES["chat"]).encode(), "chat"))
    await parsing()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert processes() == []
    assert (await parser.parse(SMALL, "chat")).request.messages == MESSAGES[:1]


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGSTOP, "timeout"), (signal.SIGKILL, "internal")])
async def test_a_process_that_hangs_or_dies_fails_one_body(number: signal.Signals, kind: str) -> None:
    parser = BodyParser(deadline_s=1.0 if kind == "timeout" else 30.0)
    first = asyncio.ensure_future(parser.parse(SMALL, "chat"))
    os.kill(int(await parsing()), number)
    with pytest.raises(RequestError) as caught:
        await first
    assert caught.value.kind == kind
    assert processes() == []
    assert (await BodyParser().parse(SMALL, "chat")).request.messages == MESSAGES[:1]
