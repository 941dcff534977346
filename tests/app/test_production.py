"""One file serves production calls and rollouts: our app beside the SDK's with the same functions, over real HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from agentcore_rl_toolkit import AgentCoreRLApp
from agentcore_rl_toolkit.app import AgentSettings
from agentcore_rl_toolkit.errors import ConfigError

from .conftest import SESSION_HEADER, new_session

# The same functions on either app, each kind of function as an app of its own below its name.
FUNCTIONS = """
import dataclasses
import bedrock_agentcore.runtime as sdk
from bedrock_agentcore.runtime.context import BedrockAgentCoreContext
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Mount

@dataclasses.dataclass
class Point:
    x: int = 1

def value(payload):
    made = payload.get("make") if isinstance(payload, dict) else payload
    if made == "fail":
        raise ValueError("no luck")
    if made == "not found":
        raise HTTPException(404, "no such order")
    if made == "stop":
        raise StopIteration("over")
    if made == "response":
        return JSONResponse({"busy": True}, status_code=429, headers={"retry-after": "3"})
    if made == "object":
        return {"point": Point(), "set": {1}, "bytes": b"x"}
    return {"answer": payload, "text": "é日\\U0001f600"} if made != "none" else None

def kinds():
    def plain(payload):
        return value(payload)

    async def asynchronous(payload, context):
        await asyncio.sleep(0)
        headers = context.request_headers or {}
        seen = BedrockAgentCoreContext.get_session_id(), headers.get("x-order"), headers.get("Authorization")
        return {"value": value(payload), "session": context.session_id, "seen": seen}

    def stream(payload):
        yield "one"
        yield value(payload)
        yield {"done": True}

    async def asynchronous_stream(payload):
        yield "one"
        await asyncio.sleep(0)
        yield value(payload)
        yield {"done": True}

    class Instance:
        def __call__(self, payload, context):
            return value(payload)

    return {"plain": plain, "async": asynchronous, "stream": stream, "async-stream": asynchronous_stream,
            "response": lambda payload: value({"make": "response"}), "instance": Instance()}
"""
SERVE = """
app = Starlette(routes=[Mount(f"/{name}", one) for name, one in apps.items()] + [Mount("/", apps["async"])])
import uvicorn
app.run = lambda port: uvicorn.run(app, port=port, log_level="warning")
"""
THEIRS = f"""{FUNCTIONS}
apps = {{name: sdk.BedrockAgentCoreApp() for name in kinds()}}
for name, function in kinds().items():
    apps[name].entrypoint(function)
{SERVE}"""
OURS = f"""{FUNCTIONS}
async def rollout(payload):
    return {{"rewards": 1.0, "model": payload["_rollout"].get("model_id")}}

apps = {{name: AgentCoreRLApp(rollouts=True) for name in kinds()}}
for number, (name, function) in enumerate(kinds().items()):
    steps = [apps[name].entrypoint, function], [apps[name].rollout_entrypoint, rollout]
    for register, it in steps if number % 2 else reversed(steps):  # in either order
        register(it)
{SERVE}"""
KINDS = ("plain", "async", "stream", "async-stream", "response", "instance")
BODIES: dict[str, bytes] = {
    "an object": b'{"prompt": "hi"}',
    "text": b'"hi"',
    "an array": b"[1, 2]",
    "null": b"null",
    "an error": b'{"make": "fail"}',
    "a status": b'{"make": "not found"}',
    "StopIteration": b'{"make": "stop"}',
    "no JSON form": b'{"make": "object"}',
    "None": b'{"make": "none"}',
    "half an object": b'{"prompt": ',
    "nothing": b"",
    "not UTF-8": b'{"prompt": "\xff"}',
    "a block inside": b'{"input": {"_rollout": {"exp_id": "e", "input_id": "i", "s3_bucket": "b"}}}',
    "a block in text": b'"{\\"_rollout\\": {}}"',
    "no block": b'{"_rollout": null, "prompt": "hi"}',
    "another name": b'{"_ROLLOUT": {}, "rollout": {}, "_agent_core_app_action": "ping_status"}',
    "metadata": b'{"metadata": {"jobArn": "mine", "rolloutId": "7"}, "prompt": "hi"}',
}


def send(port: int, path: str, body: bytes | None, method: str = "POST") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body as they come."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"X-Order": "7", "authorization": "Bearer token", SESSION_HEADER: "s" * 40}
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    try:
        found = {name.lower(): text for name, text in response.getheaders()}
        found.pop("date")
        return response.status, found, response.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def theirs(start_shared_agent: Any) -> Any:
    return start_shared_agent(THEIRS)


@pytest.fixture(scope="module")
def ours(start_shared_agent: Any) -> Any:
    return start_shared_agent(OURS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_production_call_gets_the_bytes_of_the_sdks_app(ours: Any, theirs: Any, kind: str) -> None:
    path = f"/{kind}/invocations"
    record = ours.run({}, model_id="before")
    for name, body in BODIES.items():
        assert send(ours.port, path, body) == send(theirs.port, path, body), name
    block = {"exp_id": "e", "input_id": kind, "s3_bucket": ours.store_url, "model_id": "m"}
    status, _, reply = send(ours.port, path, json.dumps({"_rollout": block}).encode())
    assert (record["model"], status) == ("before", 200)
    assert ours.record(ours.results / json.loads(reply)["result_key"])["model"] == "m"
    assert send(ours.port, path, BODIES["an object"]) == send(theirs.port, path, BODIES["an object"])


def test_other_routes_are_the_sdks(ours: Any, theirs: Any) -> None:
    for method, path in (("GET", "/async/invocations"), ("GET", "/async/absent")):
        assert send(ours.port, path, None, method) == send(theirs.port, path, None, method)
    (status, headers, body), their_ping = (send(agent.port, "/plain/ping", None, "GET") for agent in (ours, theirs))
    assert (status, headers) == their_ping[:2]
    assert list(json.loads(body)) == list(json.loads(their_ping[2]))
    assert json.loads(body)["status"] == "Healthy"


# -- rollouts beside a production entrypoint

CLOSED = """
import pathlib

@app.entrypoint
def answer(payload):
    return {"answer": payload}

@app.rollout_entrypoint
def rollout(payload):
    pathlib.Path("rollout-ran").touch()
    return {"rewards": 1.0}
"""
JOB = "arn:aws:sagemaker:us-west-2:123456789012:job/AgentRFT/a-job"


@pytest.fixture(scope="module")
def closed(start_shared_agent: Any) -> Any:
    env = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AGENTCORE_RL_HEARTBEAT_S": "0"}
    return start_shared_agent(CLOSED, env=env)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """An address that an attacker names; nothing may connect to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def test_a_production_app_refuses_every_form_of_a_rollout_and_does_nothing(
    closed: Any, listener: socket.socket
) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    block = {"exp_id": "e", "input_id": "i", "s3_bucket": closed.store_url, "base_url": f"{url}/v1"}
    probe = {**block, "exp_id": "agentcore-rl-doctor", "input_id": "probe", "proof_key": "p" * 64}
    metadata = {"jobArn": JOB, "rolloutId": "1", "endpoint": url}
    payloads: list[Any] = [
        {"prompt": "hi", "_rollout": value} for value in (block, {}, "x", "", 5, 0, False, [], [block])
    ]
    payloads += [{"_rollout": {"base_url": url}}, {"_rollout": {"exp_id": "../.."}}]
    payloads += [{"_probe": {}, "_rollout": probe}, {"_probe": {"job_arn": JOB}}, {"_probe": None}]
    payloads += [
        {"prompt": "hi", "metadata": metadata},
        {"metadata": {"job_arn": JOB, "trajectory_id": "1", "endpoint": url}},
    ]
    payloads += [{"prompt": "hi", "metadata": metadata, "inferenceParams": [1]}]
    bodies = [json.dumps(payload).encode() for payload in payloads]
    text = json.dumps(block)
    bodies += [f'{{"_rollout": null, "_rollout": {text}}}'.encode(), f'{{"\\u005frollout": {text}}}'.encode()]
    bodies += [f'{{"_rollout": {text}}}'.encode("utf-16")]
    for body in bodies:
        status, headers, reply = send(closed.port, "/invocations", body)
        assert (status, headers["content-type"]) == (403, "application/json"), body
        assert "AGENTCORE_RL_ROLLOUTS=on" in json.loads(reply)["error"]
        assert closed.ping() == "Healthy"
    with pytest.raises(BlockingIOError):
        listener.accept()
    assert not closed.results.exists()
    assert not closed.results.with_name("rollout-ran").exists()


def test_what_only_looks_like_a_rollout_is_a_production_call(closed: Any) -> None:
    block = {"exp_id": "e", "input_id": "i", "s3_bucket": closed.store_url}
    for payload in (
        {"input": {"_rollout": block}},
        {"_rollout": None},
        {"rollout": block},
        {"metadata": {"jobArn": 7}},
    ):
        assert closed.invoke(payload) == (200, {"answer": payload})
    twice = f'{{"_rollout": {json.dumps(block)}, "_rollout": null}}'.encode()
    assert json.loads(send(closed.port, "/invocations", twice)[2]) == {"answer": {"_rollout": None}}


async def answered(app: AgentCoreRLApp, payload: Any) -> tuple[int, Any]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
        reply = await client.post("/invocations", json=payload, headers={SESSION_HEADER: new_session()})
    return reply.status_code, reply.json()


def adapted(**options: Any) -> AgentCoreRLApp:
    app = AgentCoreRLApp(**options)
    app.entrypoint(lambda payload: {"answer": 1})
    app.rollout_entrypoint(lambda payload: {"rewards": 1.0})
    return app


@pytest.mark.parametrize(
    ("app", "status"),
    [
        (lambda: adapted(), 403),
        (lambda: adapted(rollouts=True), 200),
        (lambda: adapted(settings=AgentSettings(rollouts=True)), 200),
        (lambda: adapted(settings=AgentSettings.from_env({"AGENTCORE_RL_ROLLOUTS": "on"})), 200),
        (lambda: adapted(settings=AgentSettings.from_env({"AGENTCORE_RL_ROLLOUTS": "off"})), 403),
        (lambda: adapted(settings=AgentSettings.from_env({"AGENTCORE_RL_ROLLOUTS": " "})), 403),
        (lambda: adapted(rollouts=False, settings=AgentSettings(rollouts=True)), 403),
        (lambda: adapted(rollouts=True, settings=AgentSettings(rollouts=False)), 403),
    ],
)
async def test_rollouts_are_on_where_the_author_or_the_version_says_so(app: Any, status: int) -> None:
    app = app()
    assert (await answered(app, {"_rollout": {}}))[0] == status
    assert await answered(app, {"prompt": "hi"}) == (200, {"answer": 1})


async def test_async_functions_of_both_kinds_share_a_loop() -> None:
    """Clients in globals are bound to one."""
    loops: list[Any] = []
    app, ran = AgentCoreRLApp(rollouts=True), threading.Event()

    @app.entrypoint
    async def answer(payload: Any) -> Any:
        loops.append(asyncio.get_running_loop())

    @app.rollout_entrypoint
    async def rollout(payload: Any) -> Any:
        await answer(payload)
        ran.set()

    assert await answered(app, {}) == (200, None)
    assert (await answered(app, {"_rollout": {}}))[0] == 200
    assert await asyncio.to_thread(ran.wait, 20)
    wrapped = AgentCoreRLApp()
    wrapped.rollout_entrypoint(lambda payload: answer(payload))
    assert await answered(wrapped, {}) == (200, None)
    assert loops[0] is loops[1] is not asyncio.get_running_loop()
    assert loops[2] is not asyncio.get_running_loop()


def test_one_function_has_one_decorator() -> None:
    app = AgentCoreRLApp()
    with pytest.raises(ConfigError, match="rollout_entrypoint also serves production calls"):
        app.entrypoint(app.rollout_entrypoint(lambda payload: {}))


@pytest.mark.parametrize(("rollouts", "status"), [(True, 500), (False, 200)])
async def test_a_rollout_does_not_change_what_a_production_call_gets(rollouts: bool, status: int) -> None:
    app, over = AgentCoreRLApp(rollouts=rollouts), threading.Event()

    @app.entrypoint
    def answer(payload: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:  # whose thread does not know its call
            return pool.submit(lambda: app.model(default="hosted").model_id).result()

    app.rollout_entrypoint(lambda payload: {"over": over.wait(20)})
    before = await answered(app, {})
    await answered(app, {"_rollout": {}})
    during = await answered(app, {})
    over.set()
    assert during == before
    assert before[0] == status


def test_a_websocket_is_a_production_call() -> None:
    app, over = AgentCoreRLApp(), threading.Event()
    app.rollout_entrypoint(lambda payload: {"over": over.wait(20)})

    @app.websocket
    async def answer(websocket: Any, context: Any) -> None:
        await websocket.accept()
        await websocket.send_json(app.model(default="hosted").model_id)

    with TestClient(app) as client:
        assert client.post("/invocations", json={"_rollout": {}}).status_code == 403
    app = AgentCoreRLApp(rollouts=True)
    app.rollout_entrypoint(lambda payload: {"over": over.wait(20)})
    app.websocket(answer)
    with TestClient(app) as client:
        assert client.post("/invocations", json={"_rollout": {}}).json() == {"status": "processing"}
        with client.websocket_connect("/ws") as connection:
            assert connection.receive_json() == "hosted"
        over.set()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_rollout_that_got_no_thread_is_tried_again_when_it_is_delivered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    app, start, ran = AgentCoreRLApp(rollouts=True), threading.Thread.start, threading.Event()
    refused = []

    def run(payload: Any) -> dict[str, Any]:
        ran.set()
        return {"rewards": 1.0}

    async def run_async(payload: Any) -> dict[str, Any]:
        return run(payload)

    app.rollout_entrypoint(run if kind == "sync" else run_async)

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("rollout-") and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    block = {"exp_id": "e", "input_id": "i", "s3_bucket": f"file://{tmp_path}"}
    send = {"json": {"_rollout": block}, "headers": {SESSION_HEADER: new_session()}}
    with TestClient(app) as client:
        assert client.post("/invocations", **send).status_code == 500
        assert client.get("/ping").json()["status"] == "Healthy"
        assert client.post("/invocations", **send).json()["status"] == "processing"
        assert ran.wait(60)
    assert refused


async def test_a_worker_that_a_rollout_has_started_serves_no_later_call() -> None:
    app, questions = AgentCoreRLApp(rollouts=True), asyncio.Queue[Any]()
    found, over = [], threading.Event()

    async def work() -> None:
        while True:
            reply = await questions.get()
            try:
                reply.set_result(app.model(default="hosted").model_id)
            except ConfigError as e:
                reply.set_exception(e)

    async def ask() -> Any:
        if not found:
            found.append(asyncio.create_task(work()))
        reply = asyncio.get_running_loop().create_future()
        await questions.put(reply)
        return await reply

    @app.entrypoint
    async def answer(payload: Any) -> Any:
        return await ask()

    @app.rollout_entrypoint
    async def rollout(payload: Any) -> Any:
        found.append(await ask())
        over.set()

    await answered(app, {"_rollout": {"base_url": "http://gateway/v1", "model_id": "policy"}})
    assert await asyncio.to_thread(over.wait, 20)
    assert found[1] == "policy"
    status, reply = await answered(app, {})
    assert (status, "without the context of its call" in reply["error"]) == (500, True)


ADDRESSES: list[tuple[Any, bool]] = [
    (None, True),
    ("http://gateway:8089/s/1/v1", True),
    ("http://10.0.7.9:8089/v1", True),
    ("https://models.example.com/v1/", True),
    ("https://models.example.com:443/v1", True),
    ("http://plain:80/v1", True),
    ("HTTP://gateway:8089/v1", False),
    ("http://gateway/v1", False),
    ("https://gateway:8089/v1", False),
    ("http://gateway:80890/v1", False),
    ("http://gateway:8089@evil.example/v1", False),
    ("http://evil.example/http://gateway:8089", False),
    ("http://10.0.7.9.evil.example:8089/v1", False),
    ("http://10.0.evil:8089/v1", True),  # `*` stands for one part of a name
    ("http://*:8089/v1", False),
    ("https://models.example.com/v1/../admin", False),
    ("https://models.example.com/v1%2f..%2fadmin", False),
    ("https://models.example.com/v12", False),
    ("https://models.example.com\\@evil.example/v1", False),
    ("https://models.example.com/v1?x=1", False),
    ("file:///etc/passwd", False),
    (["http://gateway:8089"], False),
    ("", False),
]


@pytest.mark.parametrize("make", [adapted, AgentCoreRLApp])
async def test_an_allow_list_keeps_callers_from_naming_another_model(make: Any) -> None:
    urls = "http://gateway:8089, http://plain, http://10.0.7.*:8089, http://10.0.*:8089, https://models.example.com/v1"
    app = make(settings=AgentSettings.from_env({"AGENTCORE_RL_ALLOWED_BASE_URLS": urls}), rollouts=True)
    if make is AgentCoreRLApp:
        app.rollout_entrypoint(lambda payload: {})
    for base_url, allowed in ADDRESSES:
        status, reply = await answered(app, {"_rollout": {"base_url": base_url}})
        assert status == (200 if allowed else 500), (base_url, reply)
        assert allowed or "AGENTCORE_RL_ALLOWED_BASE_URLS" in reply["error"]


# -- without a production entrypoint


async def test_the_rollout_function_answers_production_calls() -> None:
    app = AgentCoreRLApp()

    @app.rollout_entrypoint
    async def run(payload: Any, context: Any) -> Any:
        if payload["do"] == "read":
            return {"rewards": payload["_rollout"]}
        return {"rewards": 1.0, "response": {"to": payload["do"]}} if payload["do"] else {"rewards": 1.0}

    assert await answered(app, {"do": "reply"}) == (200, {"to": "reply"})
    assert await answered(app, {"do": ""}) == (200, {"rewards": 1.0})
    status, reply = await answered(app, {"do": "read"})
    assert (status, "_rollout" in reply["error"]) == (500, True)
    assert (await answered(app, {"do": "reply", "_rollout": {}}))[1] == {"status": "processing"}


async def test_the_published_behavior_without_a_block_is_an_argument() -> None:
    ran = threading.Event()
    app = AgentCoreRLApp(foreground=False)
    app.rollout_entrypoint(lambda payload: {"ran": ran.set()})
    assert await answered(app, {"prompt": "hi"}) == (200, {"status": "processing"})
    assert await asyncio.to_thread(ran.wait, 20)


# -- what callers of rollouts see

OFF = """
from agentcore_rl_toolkit import AgentCoreRLApp
app = AgentCoreRLApp()
app.entrypoint(lambda payload: {"answer": 1})

@app.rollout_entrypoint
def rollout(payload):
    return {"rewards": 1.0}

if __name__ == "__main__":
    app.run()
"""


@pytest.mark.system
def test_the_local_runtime_turns_rollouts_on_and_a_refusal_has_its_reason(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(OFF)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    command = [sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit", "eval", "--agent", "agent.py", "--data"]
    command += ["rows.jsonl", "--model", "none"]
    done, refused = (
        subprocess.run([*command, *words], capture_output=True, text=True, timeout=200, cwd=tmp_path)
        for words in ([], ["--session-env", "AGENTCORE_RL_ROLLOUTS=off"])
    )
    assert done.returncode == 0, done.stderr
    assert (refused.returncode, "AGENTCORE_RL_ROLLOUTS=on" in refused.stdout + refused.stderr) == (1, True), (
        refused.stdout
    )
