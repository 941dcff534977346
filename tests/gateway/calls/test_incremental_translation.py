"""Long requests in dialects that are not the servers': what is heard in parts is what is heard whole."""

from __future__ import annotations

import dataclasses
import itertools
import json
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.gateway.capture.prefix_index import Budget, Prefixes
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine
from agentcore_rl_toolkit.gateway.wire.long_requests import LISTS, Translated, translate, understand
from agentcore_rl_toolkit.messages.wire import DIALECTS, Dialect, RequestError

from ..asking import MODEL, Start, captured, opened

Item = dict[str, Any]

words = st.text(alphabet='ab \\"é\n😀[],', max_size=8)
names = st.sampled_from(["f", "g"])


def chat_items() -> st.SearchStrategy[Item]:
    call = st.builds(
        lambda n, a: {"id": "c1", "type": "function", "function": {"name": n, "arguments": a}}, names, words
    )
    return st.one_of(
        st.builds(lambda r, t: {"role": r, "content": t}, st.sampled_from(["user", "assistant", "developer"]), words),
        st.builds(lambda t: {"role": "user", "content": [{"type": "text", "text": t}]}, words),
        st.builds(lambda c, t: {"role": "assistant", "content": t, "tool_calls": c}, st.lists(call, max_size=2), words),
        st.builds(lambda t: {"role": "tool", "tool_call_id": "c1", "content": t}, words),
        st.builds(lambda t: {"role": "assistant", "content": None, "reasoning": t}, words),
    )


def anthropic_items() -> st.SearchStrategy[Item]:
    text = st.builds(lambda t: {"type": "text", "text": t}, words)
    thought = st.builds(lambda t: {"type": "thinking", "thinking": t, "signature": "x"}, words)
    call = st.builds(lambda n, t: {"type": "tool_use", "id": "c1", "name": n, "input": {"x": t}}, names, words)
    result = st.builds(lambda t: {"type": "tool_result", "tool_use_id": "c1", "content": t}, words)
    return st.one_of(
        st.builds(lambda r, t: {"role": r, "content": t}, st.sampled_from(["user", "assistant"]), words),
        st.builds(lambda c: {"role": "assistant", "content": c}, st.lists(st.one_of(text, thought, call), max_size=3)),
        st.builds(lambda c: {"role": "user", "content": c}, st.lists(st.one_of(text, result), max_size=3)),
    )


def responses_items() -> st.SearchStrategy[Item]:
    return st.one_of(
        st.builds(lambda r, t: {"role": r, "content": t}, st.sampled_from(["user", "assistant", "developer"]), words),
        st.builds(lambda t: {"type": "reasoning", "summary": [{"type": "summary_text", "text": t}]}, words),
        st.builds(lambda n, a: {"type": "function_call", "call_id": "c1", "name": n, "arguments": a}, names, words),
        st.builds(lambda t: {"type": "function_call_output", "call_id": "c1", "output": t}, words),
    )


ITEMS = {"chat": chat_items(), "anthropic": anthropic_items(), "responses": responses_items()}
LEAD = {"anthropic": "system", "responses": "instructions", "chat": "user"}
LIMIT = {"anthropic": {"max_tokens": 9}, "responses": {}, "chat": {}}


def as_sent(messages: list[Item]) -> list[Item]:
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def body_of(dialect: str, items: list[Item], lead: str, first: bool) -> bytes:
    about: Item = {"model": "m", **({LEAD[dialect]: lead} if lead else {})}
    history = {LISTS[dialect]: items}
    reply = {**about, **history, **LIMIT[dialect]} if first else {**history, **LIMIT[dialect], **about}
    return json.dumps(reply, separators=(",", ":"), ensure_ascii=False).encode()


def outcome(dialect: str, body: bytes, known: Prefixes) -> Any:
    """What is heard: the request, its messages as they are sent, and what tells it from others; or what is wrong."""
    speaks = DIALECTS[dialect]
    found = understand(body, known, LISTS[dialect])
    if found is None:
        return None
    digest = found.digest()
    try:
        asked, sent = translate(found, known, speaks, as_sent)
    except RequestError as e:
        return str(e)
    assert sent.crc == zlib.crc32(sent.text)
    return asked, bytes(sent.text), digest


@pytest.mark.parametrize("dialect", ITEMS)
@given(data=st.data())
def test_a_conversation_that_grows_means_what_it_means_whole(dialect: str, data: st.DataObject) -> None:
    known = Prefixes(Budget(10_000))
    items: list[Item] = []
    lead = data.draw(words)
    for _ in range(data.draw(st.integers(1, 6))):
        how = data.draw(st.integers(0, 9))
        if how == 0 and items:
            items = items[: data.draw(st.integers(0, len(items)))]  # rewritten
        if how == 1:
            lead = data.draw(words)
        if how == 2 and known._seen:
            data.draw(st.sampled_from(known._seen)).fold()
        items = [*items, *data.draw(st.lists(ITEMS[dialect], min_size=how > 3, max_size=3))]
        body = body_of(dialect, items, lead, data.draw(st.booleans()))
        assert outcome(dialect, body, known) == outcome(dialect, body, Prefixes())


def recorded(speaks: Dialect, sizes: list[int]) -> Dialect:
    """The dialect, telling how much it reads."""

    def parse(body: Any) -> Any:
        sizes.append(len(body))
        return speaks.parse_request(body)

    return dataclasses.replace(speaks, parse_request=parse)


@pytest.mark.parametrize("dialect", ITEMS)
def test_only_what_is_new_is_read(dialect: str) -> None:
    known = Prefixes(Budget(10**7))
    items: list[Item] = []
    sizes: list[int] = []
    for turn in range(5):
        items.append({"role": "user", "content": f"{turn}" * 10_000})
        found = understand(body_of(dialect, items, "be good", True), known, LISTS[dialect])
        assert found is not None
        asked, _ = translate(found, known, recorded(DIALECTS[dialect], sizes), as_sent)
        assert len(asked.messages) == 2 * turn + 1 + (dialect != "chat")
        items.append({"role": "assistant", "content": "yes"})
    assert max(sizes) < 11_000


def test_what_is_no_longer_in_memory_is_read_again() -> None:
    known = Prefixes(Budget(10**7))
    items: list[Item] = [{"role": "user", "content": "x" * 1000}]
    for turn in range(3):
        found = understand(body_of("anthropic", items, "s", True), known)
        assert found is not None
        sizes: list[int] = []
        asked, _ = translate(found, known, recorded(DIALECTS["anthropic"], sizes), as_sent)
        assert len(asked.messages) == len(items) + 1
        assert sizes == [len(found.body)] if turn != 1 else sizes[0] < 500
        items += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
        if turn == 1:
            received = known._seen[-1]
            assert isinstance(received, Translated)
            received.fold()


# -- over real connections


LONG_TEXT = "The quick brown fox. " * 2_000


async def test_a_mistake_far_back_is_named_by_its_place(engine: ScriptedEngine, start_gateway: Start) -> None:
    gateway = await start_gateway(engine)
    session = await opened(gateway)
    url = session.base_url + "/messages"
    history: list[Any] = [{"role": "user", "content": LONG_TEXT}]
    for wrong in (None, {"role": "robot", "content": "x"}, None):
        messages = [*history, {"role": "assistant", "content": "y"}, wrong or {"role": "user", "content": "z"}]
        body = {"model": "m", "max_tokens": 5, "messages": messages}
        status, reply = await request("POST", url, body=body, key=session.api_key, timeout_s=30)
        if wrong is None:
            assert status == 200
            history = messages
        else:
            assert status == 400
            assert "messages[4].role" in json.loads(reply)["error"]["message"]


def test_the_member_beside_the_list_is_compared_as_it_came() -> None:
    known = Prefixes(Budget(10**6))
    item = {"role": "user", "content": "x" * 100}
    for lead in ([{"type": "text", "text": "a"}], [{"type": "text", "text": "b"}], []):
        body = msgspec.json.encode({"max_tokens": 5, "messages": [item], "system": lead})
        found = understand(body, known)
        assert found is not None
        asked, sent = translate(found, known, DIALECTS["anthropic"], as_sent)
        assert asked.messages == [*({"role": "system", "content": part["text"]} for part in lead), item]
        assert json.loads(bytes(sent.text) + b"]") == asked.messages


@pytest.mark.parametrize("dialect", ["chat", "anthropic", "responses"])
async def test_prompts_rendered_here_are_the_same_whether_or_not_only_the_new_is_read(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch, dialect: str
) -> None:
    sent: list[list[list[int]]] = []
    for least in (32 * 2**10, 10**12):
        monkeypatch.setattr("agentcore_rl_toolkit.gateway.wire.request.LONG", least)
        async with ScriptedEngine() as engine:
            gateway = await start_gateway(engine, engine="vllm", model_dir=str(MODEL))
            session = await opened(gateway)
            items: list[Any] = []
            for turn in range(4):
                items.append({"role": "user", "content": f"{turn} {LONG_TEXT[:30_000]}"})
                route = {"chat": "chat/completions", "anthropic": "messages", "responses": "responses"}[dialect]
                body = json.loads(body_of(dialect, items, "me", True)) | {"max_tokens": 5}
                if dialect == "responses":
                    body["max_output_tokens"] = body.pop("max_tokens")
                url = f"{session.base_url}/{route}"
                status, reply = await request("POST", url, body=body, key=session.api_key, timeout_s=60)
                assert status == 200, reply
                answer = json.loads(reply)
                if dialect == "chat":
                    items.append(answer["choices"][0]["message"])
                elif dialect == "anthropic":
                    items.append({"role": "assistant", "content": answer["content"]})
                else:
                    items += answer["output"]
            turns = (await captured(gateway, session)).turns
            for before, after in itertools.pairwise(turns):
                whole = [*before.prompt_ids, *before.completion_ids]
                assert list(after.prompt_ids)[: len(whole)] == whole
            sent.append([list(call.prompt_ids or ()) for call in engine.calls])
    assert sent[0] == sent[1]
    assert len(sent[0]) == 4
