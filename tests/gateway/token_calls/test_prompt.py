"""What the gateway's own tokenising puts before the engine, and what it tells of the tokens that come back."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from agentcore_rl_toolkit.gateway import Gateway, Limits, SessionHandle
from agentcore_rl_toolkit.gateway.testing import logprob_of
from agentcore_rl_toolkit.gateway.token_calls.mode import RENDERING_THREADS
from agentcore_rl_toolkit.gateway.token_calls.sampling import SHORT_BYTES
from agentcore_rl_toolkit.messages.errors import RequestError
from agentcore_rl_toolkit.messages.render import Renderer
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, Start, captured, claude, gpt, message_of, opened, status_of, until

USER = {"role": "user", "content": "What is 2 + 3?"}
START = 0  # the token that this model's tokenizer puts before a bare text
EFFORT = """{%- if reasoning_effort is defined and reasoning_effort -%}
  {{- '<|im_start|>system\\nEffort ' + reasoning_effort + '<|im_end|>\\n' -}}
{%- endif -%}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in policy's tokenizer, with a start token before bare text and a template that reads the effort."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        shutil.copy(MODEL / name, folder)
    (folder / "chat_template.jinja").write_text(EFFORT + (MODEL / "chat_template.jinja").read_text())
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    token = tokenizer["added_tokens"][START]["content"]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [START], "tokens": [token]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def renderer(model: Path) -> Renderer:
    return Renderer.from_path(model)


@pytest.fixture(params=["vllm", pytest.param("sglang", marks=pytest.mark.nightly)])
async def gateway(
    request: pytest.FixtureRequest,
    engine: ScriptedEngine,
    start_gateway: Start,
    model: Path,
) -> Gateway:
    engine.first_id, engine.last_id = 300, 500
    return await start_gateway(engine, engine=request.param, model_dir=str(model))


async def test_counted_tokens_are_those_of_the_prompt_that_is_sent(
    engine: ScriptedEngine, session: SessionHandle
) -> None:
    asked = {"model": "m", "messages": [USER], "output_config": {"effort": "low"}}
    async with claude(session) as llm:
        plain = await llm.messages.count_tokens(model="m", messages=[USER])  # type: ignore[list-item]
        counted = await llm.messages.count_tokens(**asked)  # type: ignore[arg-type]
        assert engine.calls == []
        await llm.messages.create(**asked, max_tokens=8)  # type: ignore[call-overload]
    assert counted.input_tokens == len(engine.calls[0].prompt_ids) > plain.input_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_carry_each_token_which_is_the_only_known_alternative(
    engine: ScriptedEngine, session: SessionHandle, renderer: Renderer, stream: bool
) -> None:
    ids = renderer.encode("5 +")
    engine.replies.append({"token_ids": [*ids, min(renderer.stop_token_ids)]})
    async with gpt(session) as llm:
        reply = await llm.chat.completions.create(
            model="m", messages=[USER], logprobs=True, top_logprobs=5, stream=stream
        )
        if isinstance(reply, openai.AsyncStream):
            entries = [
                entry
                async for chunk in reply
                for choice in chunk.choices
                if choice.logprobs is not None
                for entry in choice.logprobs.content or []
            ]
        else:
            assert reply.choices[0].logprobs is not None
            entries = reply.choices[0].logprobs.content or []
    assert bytes(b for entry in entries[:-1] for b in entry.bytes or []).decode() == "5 +"
    assert [entry.logprob for entry in entries[:-1]] == [logprob_of(i) for i in ids]
    assert all([(t.token, t.logprob) for t in e.top_logprobs] == [(e.token, e.logprob)] for e in entries)


async def test_a_rendering_that_is_cancelled_twice_keeps_its_history_to_itself(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    """An abort and then the deadline: the thread may still use the history when both have cancelled the call."""
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, model_dir=str(MODEL), limits=Limits(connect_s=60.0, call_s=1.0))
    session, mode, free = await opened(gateway), gateway.token_mode, threading.Event()
    assert mode is not None
    try:
        for _ in range(RENDERING_THREADS):
            mode.executor.submit(free.wait)
        call = asyncio.ensure_future(status_of(session, "word " * SHORT_BYTES))
        await until(lambda: gateway.running.calls)
        [running] = gateway.running.calls
        await until(lambda: running.deadline is not None)
        history, deadline = mode.history(gateway.sessions.by_id[session.session_id.encode()]), running.deadline
        running.abort(RequestError("aborted", kind="overloaded"))
        await until(lambda: asyncio.get_running_loop().time() > deadline)
        await asyncio.sleep(0)
        assert history.order.locked()
    finally:
        free.set()
    assert await call == 503
    assert not history.order.locked()
    assert [await status_of(session, *texts) for texts in (("hi",), ("hi", "a", "b"))] == [200, 200]


async def test_a_short_request_that_refers_to_a_long_reply_is_rendered_in_a_thread(
    engine: ScriptedEngine, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all other calls wait: the items that it refers to may be a long conversation."""
    gateway, threads = await start_gateway(engine, model_dir=str(MODEL)), list[bool]()
    assert gateway.token_mode is not None
    render = gateway.token_mode.renderer.render

    def watched(*args: Any) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        return render(*args)

    monkeypatch.setattr(gateway.token_mode.renderer, "render", watched)
    engine.replies.append({"token_ids": [301] * SHORT_BYTES, "finish_reason": "length"})
    async with gpt(await opened(gateway)) as llm:
        first = await llm.responses.create(model="m", input="hello")
        item: Any = {"type": "item_reference", "id": first.output[0].id}
        await llm.responses.create(model="m", input=[{"role": "user", "content": "bye"}, item])
    assert threads == [False, True]


async def test_a_call_that_failed_leaves_its_history_whatever_comes_meanwhile(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    """Its end waits while another call of the session is rendered: neither a hang-up nor the deadline ends that wait."""
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    session, mode, gate = await opened(gateway), gateway.token_mode, asyncio.Event()
    assert mode is not None
    texts = "hi", (await message_of(session, [{"role": "user", "content": "hi"}]))["content"], "b"
    history = mode.history(gateway.sessions.by_id[session.session_id.encode()])
    engine.faults.append(Fault(status=400, gate=gate))
    failed = asyncio.ensure_future(status_of(session, *texts))
    await until(lambda: len(engine.calls) == 2)
    [running] = gateway.running.calls
    async with history.order:
        gate.set()
        await until(lambda: history.order._waiters)
        assert running.deadline is None
        running.abort(RequestError("aborted", kind="overloaded"))
    assert await failed == 400
    assert await status_of(session, *texts) == 200
    assert [t.branch_reason for t in (await captured(gateway, session)).turns] == [None, None]


async def test_a_gateway_says_at_its_start_that_no_parser_reads_its_models_calls(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "unknown.jinja"
    template.write_text(
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<<do {{ c.function.name }} {{ c.function.arguments | tojson }}>>"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    await start_gateway(engine, model_dir=str(MODEL), template=str(template))
    assert "<<do probe_tool" in caplog.text
