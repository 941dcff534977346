"""What rLLM's branch `terminal-rl` asks of its gateway beyond `main`: compact traces, and a sampler in the gateway's process.

The module under `compat/` is used as rLLM uses it: its client, and `python -m rllm_model_gateway` as a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest

from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

COMPAT = Path(__file__).parents[3] / "compat" / "rllm_model_gateway" / "src"
USER = {"role": "user", "content": "hello there"}

# What rLLM gives `--handler-factory` as `module:function`: here one token for every message that came.
FACTORY = """
def make(settings):
    async def handler(asked):
        count = len(asked["messages"])
        entry = {"token": "x", "logprob": settings["logprob"], "bytes": None, "top_logprobs": []}
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop",
                  "token_ids": [100 + count], "logprobs": {"content": [entry]}}
        prompt = [1]
        for n in range(1, count, 2):
            prompt += [100 + n, 2]
        return {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "prompt_token_ids": prompt}
    return handler
"""


@pytest.fixture
def rllm() -> Iterator[ModuleType]:
    sys.path.insert(0, str(COMPAT))
    try:
        import rllm_model_gateway

        yield rllm_model_gateway
    finally:
        sys.path.remove(str(COMPAT))
        for name in [n for n in sys.modules if n.split(".")[0] == "rllm_model_gateway"]:
            del sys.modules[name]


async def started(*options: str, path: Path = COMPAT) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rllm_model_gateway", "--port", "0", *options),
        env={**os.environ, "PYTHONPATH": f"{COMPAT}{os.pathsep}{path}"},
        stderr=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def served(*options: str, path: Path = COMPAT) -> AsyncIterator[str]:
    """The module as a process until the block ends. Gives its URL."""
    process = await started(*options, path=path)
    assert process.stderr is not None
    try:
        line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
        assert "http://" in line, line + (await process.stderr.read()).decode()
        yield "http://" + line.split("http://")[1].split()[0].rstrip(",.;")
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        _, output = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, output.decode()


def same(found: list[Any], wanted: list[Any]) -> bool:
    """Whether these traces are the same, but for the nulls that a client added to replies it sent back."""

    def cleaned(trace: Any) -> dict[str, Any]:
        reply: dict[str, Any] = trace.model_dump()
        return {**reply, "messages": [{k: v for k, v in m.items() if v} for m in reply["messages"]]}

    return [cleaned(t) for t in found] == [cleaned(t) for t in wanted]


async def talk(url: str, *questions: str) -> list[dict[str, Any]]:
    """A conversation that sends back what it was told, with the nulls that clients add. Returns its messages."""
    messages: list[dict[str, Any]] = []
    async with openai.AsyncOpenAI(base_url=url, api_key="EMPTY", max_retries=0) as llm:
        for question in questions:
            messages.append({"role": "user", "content": question})
            made = await llm.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
            messages.append({**made.choices[0].message.model_dump(), "refusal": None})
    return messages


async def test_a_compact_graph_holds_what_the_list_holds_and_each_token_once(rllm: ModuleType) -> None:
    async with ScriptedEngine(tokens=5) as engine, served("--worker", engine.url, "--store", "compact") as url:
        async with rllm.AsyncGatewayClient(url) as client:
            name = await client.create_session(session_id="task:1")
            await talk(client.get_session_url(name), "one", "two", "three")
            await talk(client.get_session_url(name), "another question altogether")
            flat = await client.get_session_traces(name)
            graph = await client.get_session_traces(name, format="compact", flatten=False)
            assert same(await client.get_session_traces(name, format="compact"), flat)
            first = await client.get_session_traces(name, format="compact", flatten=False, limit=1)
            with pytest.raises(ValueError, match="compact"):
                await client.get_session_traces(name, flatten=False)
        sync = rllm.GatewayClient(url)
        try:
            assert same(await asyncio.to_thread(sync.get_session_traces, name, format="compact"), flat)
        finally:
            sync.close()
    assert isinstance(graph, rllm.TraceGraph)
    ids = [t.trace_id for t in flat]
    assert [d.trace_id for d in graph.deltas] == ids
    assert [d.parent_trace_id for d in graph.deltas] == [None, ids[0], ids[1], None]
    longest = flat[2]
    kept = sum(len(d.prompt_ids_suffix) + len(d.completion_token_ids) for d in graph.deltas[:3])
    assert kept == len(longest.prompt_token_ids) + len(longest.completion_token_ids)
    assert [[m["content"] for m in d.messages_suffix] for d in graph.deltas[1:3]] == [["two"], ["three"]]
    assert same(first.flatten(), flat[:1])
    assert same([graph.resolve(ids[2])], [longest])
    alone = graph.slice([ids[2], ids[3]])  # its parent left out: whole
    assert [d.parent_trace_id for d in alone.deltas] == [None, None]
    assert same(alone.flatten(), flat[2:])
    assert same(graph.slice(ids[:2]).flatten(), flat[:2])


async def test_a_history_that_was_edited_begins_anew(rllm: ModuleType) -> None:
    async with (
        ScriptedEngine(tokens=5) as engine,
        served("--worker", engine.url) as url,
        rllm.AsyncGatewayClient(url) as client,
    ):
        name = await client.create_session(session_id="task:2")
        messages = await talk(client.get_session_url(name), "one")
        messages[1]["content"] = "what the agent thinks was said"
        async with openai.AsyncOpenAI(base_url=client.get_session_url(name), api_key="EMPTY") as llm:
            await llm.chat.completions.create(model="m", messages=[*messages, USER])  # type: ignore[list-item]
        graph = await client.get_session_traces(name, format="compact", flatten=False)
        flat = await client.get_session_traces(name)
    assert [d.parent_trace_id for d in graph.deltas] == [None, None]
    assert graph.flatten() == flat


def test_a_graph_whose_parents_do_not_come_first_is_refused(rllm: ModuleType) -> None:
    child = {"trace_id": "b", "session_id": "s", "parent_trace_id": "a", "messages_suffix": [], "prompt_ids_suffix": []}
    for deltas in ([child], [{**child, "parent_trace_id": None}] * 2):
        with pytest.raises(ValueError, match="trace 'b'"):
            rllm.TraceGraph(format="compact", version=1, deltas=deltas)


async def test_a_factory_puts_a_sampler_into_the_gateways_process(rllm: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "samplers.py").write_text(FACTORY)
    (tmp_path / "settings.json").write_text(json.dumps({"logprob": -0.25}))
    options = ["--handler-factory", "samplers:make", "--handler-config", str(tmp_path / "settings.json")]
    async with served(*options, path=tmp_path) as url, rllm.AsyncGatewayClient(url) as client:
        name = await client.create_session(session_id="task:3")
        await talk(client.get_session_url(name), "one", "two")
        graph = await client.get_session_traces(name, format="compact", flatten=False)
        assert await client.set_weight_version(weight_version=7) == 7
        assert await client.get_weight_version() == 7
    assert [d.completion_token_ids for d in graph.deltas] == [[101], [103]]
    assert [d.prompt_ids_suffix for d in graph.deltas] == [[1], [2]]
    assert [d.logprobs for d in graph.deltas] == [[-0.25], [-0.25]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--handler-factory", "no_such_module:make"], "--handler-factory no_such_module:make"),
        (["--handler-factory", "json:no_such_function"], "no_such_function"),
        (["--handler-factory", "json:dumps", "--handler-config", "no.json"], "no.json"),
        (["--front"], "num_workers to 1"),
    ],
)
async def test_what_cannot_be_served_is_said(options: list[str], expected: str) -> None:
    process = await started(*options)
    _, output = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert expected in output.decode()
