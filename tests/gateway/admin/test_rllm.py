"""rLLM's client and module names over our gateway, as rLLM uses them."""

from __future__ import annotations

import asyncio
import base64
import importlib
import io
import json
import os
import re
import signal
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway import Gateway
from agentcore_rl_toolkit.gateway.http.client import request
from scripted_engine import Fault, ScriptedEngine

from ..asking import Start, attempt, opened, until
from ..stores import locked, spoil

USER = [{"role": "user", "content": "hello there"}]


FOLDER = str(Path(__file__).parents[3] / "compat" / "rllm_model_gateway" / "src")


@pytest.fixture
def rllm() -> Iterator[ModuleType]:
    sys.path.insert(0, FOLDER)
    try:
        import rllm_model_gateway

        yield rllm_model_gateway
    finally:
        sys.path.remove(FOLDER)
        for name in [n for n in sys.modules if n.split(".")[0] == "rllm_model_gateway"]:
            del sys.modules[name]


@pytest.fixture
def start_rllm(start_gateway: Start, rllm: ModuleType) -> Start:
    """Start a gateway with rLLM's routes."""

    async def start(*engines: ScriptedEngine, **settings: Any) -> Gateway:
        gateway = await start_gateway(*engines, **settings)
        importlib.import_module("rllm_model_gateway.routes").add_routes(gateway)
        return gateway

    return start


async def test_a_gateway_without_this_distribution_has_no_such_routes(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        assert (await http.post("/sessions", json={})).status_code == 404
        assert (await http.get("/sessions/s/traces")).status_code == 404


async def test_a_wrong_request_is_refused(start_rllm: Start) -> None:
    async with httpx.AsyncClient(base_url=(await start_rllm()).url) as http:
        for path, body in (
            ("/sessions/batch_delete", {"session_ids": {"a": 1}}),
            ("/sessions", {"session_id": 1}),
            ("/sessions", {"session_id": 0}),
            ("/sessions", {"sampling_params": {"temperature": "hot"}}),
        ):
            assert (await http.post(path, json=body)).status_code == 400, (path, body)
        assert (await http.post("/sessions", json={"session_id": "s", "session_ids": 1})).status_code == 200


@pytest.mark.parametrize("batch", [False, True])
async def test_a_deletion_is_answered_when_it_is_stored(
    start_rllm: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: bool
) -> None:
    gateway = await start_rllm(store_dir=str(tmp_path))
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        await http.post("/sessions", json={"session_id": "s"})
        with locked(tmp_path, monkeypatch):
            path, body = ("/sessions/batch_delete", {"session_ids": ["s"]}) if batch else ("/sessions/s", None)
            reply = asyncio.ensure_future(http.request("POST" if batch else "DELETE", path, json=body))
            done, _ = await asyncio.wait({reply}, timeout=0.5)
            assert not done
        assert (await reply).status_code == 200


async def test_a_trainer_creates_a_session_reads_its_traces_and_deletes_it(
    engine: ScriptedEngine, start_rllm: Start, rllm: ModuleType
) -> None:
    engine.weight_version = None
    gateway = await start_rllm(session_keys=False)
    sync = rllm.GatewayClient(gateway.url)
    try:
        assert (await asyncio.to_thread(sync.health))["status"] == "ok"
        worker = await asyncio.to_thread(sync.add_worker, url=engine.url + "/v1")
        assert [(w.worker_id, w.url) for w in await asyncio.to_thread(sync.list_workers)] == [(worker, engine.url)]
        await asyncio.to_thread(sync.set_weight_version, 5)
        name = await asyncio.to_thread(sync.create_session, session_id="task:1", sampling_params={"temperature": 0.3})
        assert sync.get_session_url(name) == f"{gateway.url}/sessions/task:1/v1"
        async with openai.AsyncOpenAI(base_url=sync.get_session_url(name), api_key="EMPTY", max_retries=0) as llm:
            engine.faults.append(Fault(status=400))
            with pytest.raises(openai.BadRequestError):
                await llm.chat.completions.create(model="m", messages=USER)
            replies = [await llm.chat.completions.create(model="m", messages=USER, temperature=1.0)]
            async for event in await llm.chat.completions.create(model="m", messages=USER, n=2, stream=True):
                replies.append(event)
            members = {name for reply in replies for part in (reply, *reply.choices) for name in part.model_fields_set}
            assert not members & {"prompt_token_ids", "token_ids", "logprobs"}  # the agent asked for none
            assert await asyncio.to_thread(sync.flush)
            traces = await asyncio.to_thread(sync.get_session_traces, name)
            assert [t.completion_token_ids for t in traces] == [ids for r in engine.calls for ids in r.completion_ids]
            assert all(len(t.logprobs) == len(t.completion_token_ids) and t.prompt_token_ids for t in traces)
            assert {t.weight_version for t in traces} == {5}
            assert traces[0].messages == USER
            assert engine.calls[1].body["temperature"] == 0.3
            assert await asyncio.to_thread(sync.delete_session, name) == 3
            with pytest.raises(openai.NotFoundError):
                await llm.chat.completions.create(model="m", messages=USER)
        assert await asyncio.to_thread(sync.get_session_traces, name) == []
    finally:
        sync.close()
    async with rllm.AsyncGatewayClient(gateway.url) as client:
        assert await client.create_session(session_id="task:2") == "task:2"
        assert await client.flush(timeout=30)
        assert await client.get_session_traces("task:2") == []
        assert await client.delete_sessions(["task:2"]) == 0


@asynccontextmanager
async def using(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application of rLLM's; it is stopped afterwards."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
        yield http
    await app.stop()


async def test_create_app_serves_a_local_handler(rllm: ModuleType) -> None:
    async def handler(asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["messages"] == USER
        entry = {"token": "hi", "logprob": -0.5, "bytes": None, "top_logprobs": []}
        message = {"role": "assistant", "content": "hi"}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "stop",
            "token_ids": [9],
            "logprobs": {"content": [entry]},
        }
        return {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "prompt_token_ids": [1, 2]}

    async with using(rllm.create_app(config=rllm.GatewayConfig(), local_handler=handler)) as http:
        for stream in (False, True):
            body = {"model": "m", "messages": USER, "stream": stream}
            answer = await http.post("/sessions/s1/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert '"hi"' in answer.text
        traces = (await http.get("/sessions/s1/traces")).json()
    assert [t["completion_token_ids"] for t in traces] == [[9], [9]]
    assert [t["logprobs"] for t in traces] == [[-0.5], [-0.5]]


async def run_module(*options: str, **environment: str) -> asyncio.subprocess.Process:
    line = [sys.executable, "-m", "rllm_model_gateway", *options]
    env = {**os.environ, "PYTHONPATH": FOLDER, **environment}
    return await asyncio.create_subprocess_exec(*line, env=env, stderr=asyncio.subprocess.PIPE)


async def test_the_module_runs_as_a_process_and_keeps_traces_over_a_restart(
    engine: ScriptedEngine, rllm: ModuleType, tmp_path: Path
) -> None:
    options = ["--port", "0", "--worker", engine.url, "--store", "sqlite", "--db-path", str(tmp_path / "traces")]
    found = []
    for start in range(2):
        process = await run_module(*options)
        assert process.stderr is not None
        try:
            line = (await asyncio.wait_for(process.stderr.readline(), 40)).decode()
            match = re.search(r"http://[\d.]+:\d+", line)
            assert match is not None, line + (await process.stderr.read()).decode()
            async with rllm.AsyncGatewayClient(match[0]) as client:
                if start == 0:
                    assert [w.url.rstrip("/") for w in await client.list_workers()] == [engine.url]
                    name = await client.create_session(session_id="task:1", sampling_params={"temperature": 0.3})
                    url = client.get_session_url(name)
                    async with openai.AsyncOpenAI(base_url=url, api_key="EMPTY", max_retries=0) as llm:
                        await llm.chat.completions.create(model="m", messages=USER)
                    assert await client.flush(timeout=30)
                found.append(await client.get_session_traces("task:1"))
        finally:
            process.send_signal(signal.SIGTERM)
            _, output = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0, output.decode()
    assert [t.completion_token_ids for t in found[0]] == engine.calls[0].completion_ids
    assert engine.calls[0].body["temperature"] == 0.3
    assert found[1] == found[0]


@pytest.mark.nightly
async def test_the_module_says_what_is_wrong_and_leaves() -> None:
    process = await run_module("--port", "0", "--host", "0.0.0.0")
    _, output = await asyncio.wait_for(process.communicate(), 40)
    assert process.returncode == 2
    assert "rllm-model-gateway: error" in output.decode()


async def test_an_application_that_others_can_reach_wants_an_admin_key(
    rllm: ModuleType, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [rllm.WorkerConfig(url=engine.url)]
    app = rllm.create_app(config=rllm.GatewayConfig(host="0.0.0.0", workers=workers))
    with pytest.raises(ConfigError, match="admin key"):
        await app.start()
    monkeypatch.setenv("AGENTCORE_RL_GATEWAY_ADMIN_KEY", "trainers-secret")
    async with using(rllm.create_app(config=rllm.GatewayConfig(host="0.0.0.0", workers=workers))) as http:
        assert (await http.get("/admin/sessions")).status_code == 401
        assert (await http.get("/admin/sessions", headers={"x-admin-key": "trainers-secret"})).status_code == 200


async def test_a_late_reply_does_not_bring_a_deleted_session_back(
    engine: ScriptedEngine, start_rllm: Start, rllm: ModuleType
) -> None:
    gateway = await start_rllm(engine, session_keys=False)
    gate = asyncio.Event()
    engine.faults.append(Fault(gate=gate))
    async with rllm.AsyncGatewayClient(gateway.url) as client:
        name = await client.create_session()
        async with httpx.AsyncClient(base_url=client.get_session_url(name), timeout=60) as agent:
            body = {"model": "m", "messages": USER}
            late = asyncio.ensure_future(agent.post("/chat/completions", json=body))
            await until(lambda: engine.calls)
            assert await client.delete_session(name) == 0
            gate.set()
            assert (await late).status_code == 403
            await gateway.running.until(lambda: not gateway.running.calls, 30)
            assert (await agent.post("/chat/completions", json=body)).status_code == 404
        assert await client.get_session_traces(name) == []
    assert not gateway.sessions.by_id


async def test_every_call_is_made_with_the_configured_model(rllm: ModuleType) -> None:
    async with ScriptedEngine() as engine:
        config = rllm.GatewayConfig(workers=[{"url": engine.url}], model="the-policy")
        async with using(rllm.create_app(config=config)) as http:
            for path, body in (
                ("chat/completions", {"messages": USER}),
                ("responses", {"input": "hello"}),
                ("messages", {"messages": USER, "max_tokens": 5}),
            ):
                answer = await http.post(f"/sessions/s1/v1/{path}", json={"model": "an-agents-own", **body})
                assert answer.status_code == 200, answer.text
            listed = (await http.get("/sessions/s1/v1/models")).json()
            assert [model["id"] for model in listed["data"]] == ["the-policy"]
            # A session whose trainer names a model keeps that one.
            await http.post("/admin/sessions", json={"session_ids": ["s2"], "settings": {"model_id": "another"}})
            await http.post("/sessions/s2/v1/chat/completions", json={"model": "x", "messages": USER})
        assert [call.body["model"] for call in engine.calls] == ["the-policy"] * 3 + ["another"]


@pytest.mark.parametrize(
    ("given", "base", "path"),
    [
        ({"url": "URL"}, "URL", "/v1"),
        ({"url": "URL/openai/v3/"}, "URL", "/openai/v3"),
        ({"url": "URL/cluster", "api_path": "/v2"}, "URL/cluster", "/v2"),
    ],
)
async def test_a_worker_is_called_below_its_api_path(
    rllm: ModuleType, given: dict[str, str], base: str, path: str
) -> None:
    route = f"{base}{path}".removeprefix("URL")
    async with ScriptedEngine(api_path=route) as engine:
        given = {**given, "url": given["url"].replace("URL", engine.url)}
        worker = {**given, "worker_id": "mine", "model_name": "small", "weight": 2}
        async with using(rllm.create_app(config=rllm.GatewayConfig(workers=[worker]))) as http:
            answer = await http.post("/sessions/s1/v1/chat/completions", json={"model": "m", "messages": USER})
            assert answer.status_code == 200
            [reply] = (await http.get("/admin/workers")).json()
        found = rllm.WorkerInfo(**reply)
        base = base.replace("URL", engine.url)
        assert (found.url, found.api_path, found.api_url) == (base, path, base + path)
        assert (found.worker_id, found.model_name) == ("mine", "small")
        assert [call.path for call in engine.calls] == [f"{route}/chat/completions"]


async def test_traces_of_sessions_that_nobody_knows_are_none(
    engine: ScriptedEngine, start_rllm: Start, rllm: ModuleType
) -> None:
    gateway = await start_rllm(engine, session_keys=False)
    async with rllm.AsyncGatewayClient(gateway.url) as client:
        assert await client.get_session_traces("nobody") == []
        assert await client.get_session_traces("nobody") == []


async def test_first_requests_at_the_same_time_start_one_gateway(rllm: ModuleType, tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        config = rllm.GatewayConfig(workers=[{"url": engine.url}], store="sqlite", db_path=str(tmp_path / "traces"))
        async with using(rllm.create_app(config=config)) as http:
            names = [f"s{n}" for n in range(8)]
            body = {"model": "m", "messages": USER}
            calls = [http.post(f"/sessions/{name}/v1/chat/completions", json=body) for name in names]
            assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 8
            traces = [(await http.get(f"/sessions/{name}/traces")).json() for name in names]
        assert [len(found) for found in traces] == [1] * 8


async def test_an_evaluation_run_asks_its_provider_for_nothing_extra(rllm: ModuleType) -> None:
    async with ScriptedEngine(gives_tokens=False) as provider:
        config = rllm.GatewayConfig(add_logprobs=False, add_return_token_ids=False)
        async with using(rllm.create_app(config=config)) as http:
            assert (await http.post("/admin/workers", json={"url": provider.url, "api_path": "/v1"})).status_code == 200
            answer = await http.post("/sessions/s1/v1/chat/completions", json={"model": "m", "messages": USER})
            assert answer.status_code == 200
        assert provider.calls[0].body == {"model": "m", "messages": USER}


async def test_traces_of_other_calls_are_given_beside_a_damaged_one(engine: ScriptedEngine, start_rllm: Start) -> None:
    gateway = await start_rllm(engine)
    damaged, whole = await opened(gateway), await opened(gateway)
    for session in (damaged, whole):
        for seed in range(2):
            await attempt(session, seed=seed)
    spoil(gateway, damaged.session_id, 1)
    traces = {}
    for session in (damaged, whole):
        status, reply = await request("GET", f"{gateway.url}/sessions/{session.session_id}/traces")
        traces[session.session_id] = json.loads(reply)
        assert status == 200
    assert [len(traces[s.session_id]) for s in (damaged, whole)] == [1, 2]


async def test_traces_have_the_routing_with_its_shape(engine: ScriptedEngine, start_rllm: Start) -> None:
    gateway = await start_rllm(engine)
    session = await opened(gateway)
    experts = np.arange(91, 91 + 12, dtype=np.int16).reshape(3, 2, 2)
    file = io.BytesIO()
    np.save(file, experts)

    def edit(reply: dict[str, Any]) -> dict[str, Any]:
        reply["choices"][0]["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return reply

    engine.faults.append(Fault(edit=edit))
    await attempt(session)
    status, body = await request("GET", f"{gateway.url}/sessions/{session.session_id}/traces")
    assert status == 200
    [trace] = json.loads(body)
    head, data = trace["routing_matrices"]
    assert json.loads(head) == {"shape": [2, 2], "dtype": "int32"}
    assert np.array_equal(np.frombuffer(base64.b64decode(data), "<i4").reshape(3, 2, 2), experts)


async def test_traces_hold_the_routing_of_one_call_at_a_time(engine: ScriptedEngine, start_rllm: Start) -> None:
    gateway, size = await start_rllm(engine), 3 * 2**20
    handle = await opened(gateway)

    def edit(reply: dict[str, Any]) -> dict[str, Any]:
        reply["choices"][0]["routed_experts"] = base64.b64encode(bytes(size)).decode()
        return reply

    for _ in range(8):
        engine.faults.append(Fault(edit=edit))
        await attempt(handle)
    session, routes = gateway.sessions.by_id[handle.session_id.encode()], sys.modules["rllm_model_gateway.routes"]
    tracemalloc.start()
    try:
        for _ in routes.traces_of(session, gateway.store.reader):
            pass
        assert tracemalloc.get_traced_memory()[1] < 7 * size
    finally:
        tracemalloc.stop()
