"""Agents that know nothing of rollouts, in processes of their own: what they get, what is stored, and how they fail."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serving import Asked, answering, wait_for

from ..conftest import Agent, agents_in, new_session

KEY, PROOF = "gateway-key-" + "k" * 20, "proof-key-" + "p" * 40
ECHO = """
import os, sys, time
import httpx
from bedrock_agentcore import BedrockAgentCoreApp

CLIENT = httpx.Client()
OPENAI = "https://api.openai.com/v1/chat/completions"

def ask(payload):
    if "url" in payload:
        CLIENT.post(payload["url"], json={"model": "m", "messages": []}).raise_for_status()
    if payload.get("fail") == "code":
        raise KeyError("lamp")
    if payload.get("fail") == "exit":
        sys.exit("a tool of the agent ended")
    if payload.get("fail") == "policy":
        raise type("MaxTokensReachedException", (Exception,), {"__module__": "strands.types.exceptions"})("cut")
    while payload.get("wait") and not os.path.exists(payload["wait"]):
        time.sleep(0.02)
    return {"payload": payload, "environment": dict(os.environ)}
"""
SYNC = (
    ECHO
    + """
app = BedrockAgentCoreApp()

@app.entrypoint
def invoke(payload, context):
    if payload.get("stream"):
        return (part for part in payload["stream"] if ask(payload))
    return {**ask(payload), "session": context.session_id, "headers": dict(context.request.headers)}

if __name__ == "__main__":
    app.run(port=int(sys.argv[1]))
"""
)
COROUTINE = (
    ECHO
    + """
app = BedrockAgentCoreApp()

@app.entrypoint
async def invoke(payload):
    return ask(payload)

app.run(port=int(sys.argv[1]))
"""
)
ASYNC = (
    ECHO
    + """
import logging.config

app = BedrockAgentCoreApp()

@app.entrypoint
async def invoke(payload):
    ask(payload)
    for part in payload.get("stream", ()):
        yield part
    if payload.get("fail") == "late":
        logging.config.dictConfig({"version": 1})  # which disables the SDK's logger
        raise KeyError("lamp")

app.run(port=int(sys.argv[1]))
"""
)
ASGI = (
    ECHO
    + """
import contextlib, json, uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

@contextlib.asynccontextmanager
async def lifespan(app):
    yield {"started": True}

async def parts(payload):
    yield "4"
    if payload["fail"] == "stream":
        raise KeyError("lamp")
    if payload["fail"] == "task":
        await BackgroundTask(raise_after_answer)()

async def as_it_is(request, call_next):
    return await call_next(request)

def raise_after_answer():
    raise KeyError("the background task failed")

def with_teardown(status):
    async def respond(scope, receive, send):
        await JSONResponse(42, status)(scope, receive, send)
        raise KeyError("the teardown failed")
    return respond

async def ending_always(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    try:
        raise KeyError("lamp")
    finally:
        await send({"type": "http.response.body", "body": b"42"})

async def invocations(request):
    payload = await request.json()
    if payload.get("fail") in ("teardown", "ended"):
        return with_teardown(payload["status"]) if payload["fail"] == "teardown" else ending_always
    if payload.get("fail") in ("stream", "task", "background"):
        background = BackgroundTask(raise_after_answer) if payload["fail"] == "background" else None
        response = StreamingResponse(parts(payload), media_type="text/plain", background=background)
        return BaseHTTPMiddleware(response, as_it_is) if payload["middleware"] else response
    if payload.get("fail") == "refuse":
        return JSONResponse({"detail": "no such order"}, status_code=400)
    if payload.get("text"):
        text = payload["text"].encode(payload.get("charset", "utf-8"))
        return PlainTextResponse(text, media_type=payload.get("type"))
    return JSONResponse({**ask(payload), "started": request.state.started})

async def ping(request):
    return JSONResponse({"status": "Healthy"})

routes = [Route("/invocations", invocations, methods=["POST"]), Route("/ping", ping)]

def make():
    return Starlette(routes=routes, lifespan=lifespan, middleware=[Middleware(GZipMiddleware, minimum_size=1)])

def by_wsgi(environ, start_response):
    answer = {"status": "Healthy"}
    if environ["PATH_INFO"] == "/invocations":
        answer = ask(json.loads(environ["wsgi.input"].read()))
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(answer).encode()]

sys.modules["agent"] = sys.modules[__name__]
options = json.loads(os.environ.get("UVICORN", '{"app": "app"}'))
if ":" not in options["app"]:
    options["app"] = {"app": make(), "make": make, "by_wsgi": by_wsgi}[options["app"]]
uvicorn.run(**options, port=int(sys.argv[1]), log_level="warning")
"""
)
SLOW_STORE = """
import time
from agentcore_rl_toolkit.app import engine

opened = engine.open_store

def open_store(*args, **options):
    print("the store is opened", flush=True)
    time.sleep(1)
    return opened(*args, **options)

engine.open_store = open_store
"""
Start = Callable[..., Agent]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a file of source code as it is."""
    with agents_in(tmp_path_factory.mktemp("as-it-is"), as_it_is=True) as start:
        yield start


@pytest.fixture(scope="module")
def agents(start: Start) -> Callable[[str], Agent]:
    """The agent of a source, which all tests share."""
    return functools.cache(start)


@pytest.fixture(params=["sync", "asgi"])
def agent(request: pytest.FixtureRequest, agents: Callable[[str], Agent]) -> Agent:
    """Agents that answer with what they see."""
    return agents({"sync": SYNC, "asgi": ASGI}[request.param])


@pytest.fixture
def streaming(agents: Callable[[str], Agent]) -> Agent:
    return agents(ASYNC)


@pytest.fixture
def model() -> Iterator[tuple[str, list[Asked]]]:
    """A session's address, and the calls that arrived there."""
    seen: list[Asked] = []

    def answer(asked: Asked) -> tuple[Any, ...]:
        seen.append(asked)
        return 200, {"choices": []}

    with answering(answer) as url:
        yield f"{url}/sessions/s/v1", seen


def test_the_agent_gets_its_row_and_no_key_and_its_answer_is_stored(
    agent: Agent, model: tuple[str, list[Asked]]
) -> None:
    url, calls = model
    row = {"prompt": "x", "url": "https://api.openai.com/v1/chat/completions", "_reference": "42-the-answer"}
    record = agent.run(row, base_url=url, api_key=KEY, proof_key=PROOF)
    answer = record["_answer"]
    assert answer["payload"] == {"prompt": "x", "url": row["url"]}
    assert all(secret not in json.dumps(answer) for secret in (KEY, PROOF, "42-the-answer"))
    assert record["_calls"] == {"gateway": 1, "elsewhere": {}}
    assert record["outcome"] == "ok"
    assert [call.headers["authorization"] for call in calls] == [f"Bearer {KEY}"]


def test_a_production_call_is_answered_by_the_agent_as_before(agent: Agent) -> None:
    session = new_session()
    wait_for(lambda: agent.ping() == "Healthy")  # a rollout of another test has stored its record
    status, reply = agent.invoke({"prompt": "x"}, session)
    assert (status, reply["payload"]) == (200, {"prompt": "x"})
    assert agent.invoke({"text": "_rollout", "prompt": '"_rollout"'}, session)[0] == 200 if "session" in reply else True


def test_the_agents_failures_have_their_causes_and_tracebacks(agent: Agent, model: tuple[str, list[Asked]]) -> None:
    failed = agent.run({"fail": "code"}, base_url=model[0], api_key=KEY)
    assert (failed["outcome"], failed["_agent"]["cause"], failed["error_type"]) == ("agent_error", "agent", "KeyError")
    lines = failed["traceback"].splitlines()
    assert "site-packages" not in failed["traceback"]
    assert "raise KeyError" in lines[-2]
    assert lines[-1] == "KeyError: 'lamp'"
    cut = agent.run({"fail": "policy"}, base_url=model[0], api_key=KEY)
    assert (cut["_agent"]["cause"], cut["_agent"]["failure"], cut["rewards"]) == ("policy", "tokens", 0.0)


def test_calls_that_went_elsewhere_are_named(agent: Agent, model: tuple[str, list[Asked]]) -> None:
    with answering(lambda _: (401, {})) as elsewhere:
        host = elsewhere.removeprefix("http://").partition(":")[0]
        row = {"url": f"{elsewhere}/v1/chat/completions"}
        failed = agent.run(row, base_url=model[0], api_key=KEY)
        assert f"--model-host {host} sends these calls to the gateway" in failed["stop_reason"]
        assert "401" in failed["stop_reason"]


def test_streamed_texts_are_joined_and_other_values_are_a_list(streaming: Agent) -> None:
    assert streaming.run({"stream": ["4", "2\n\n", "data: é"]})["_answer"] == "42\n\ndata: é"
    parts = [{"data": "4"}, "text", 7]
    assert streaming.run({"stream": parts})["_answer"] == parts
    assert streaming.run({})["_answer"] == ""
    assert streaming.run({"stream": [4, 2]})["_answer"] == [4, 2]
    assert streaming.run({"stream": ["is\u2028", "\x8542"]})["_answer"] == "is\u2028\x8542"


def test_an_exception_after_the_first_part_of_a_stream_is_the_agents(streaming: Agent) -> None:
    failed = streaming.run({"stream": ["4"], "fail": "late"})
    assert (failed["outcome"], failed["error_type"]) == ("agent_error", "KeyError")
    assert "_answer" not in failed


@pytest.mark.parametrize("middleware", [False, True])
def test_an_exception_after_the_complete_answer_is_logged_and_the_answer_counts(
    agents: Callable[[str], Agent], middleware: bool
) -> None:
    agent = agents(ASGI)
    record = agent.run({"fail": "background", "middleware": middleware})
    assert (record["outcome"], record["_answer"]) == ("ok", "4")
    assert "KeyError: 'the background task failed'" in agent.log
    assert agent.run({"fail": "teardown", "status": 399})["_answer"] == 42
    for fail in ("stream", "task", "ended", "teardown"):
        broken = agent.run({"fail": fail, "middleware": middleware, "status": 400})
        assert (broken["outcome"], broken["error_type"]) == ("agent_error", "KeyError")


def test_an_error_response_is_the_agents_failure_and_plain_text_an_answer(agents: Callable[[str], Agent]) -> None:
    agent = agents(ASGI)
    failed = agent.run({"fail": "refuse"})
    assert failed["outcome"] == "agent_error"
    assert failed["stop_reason"] == 'the agent answered with HTTP 400: {"detail":"no such order"}'
    assert agent.run({"text": "just text"})["_answer"] == "just text"
    block = {"exp_id": "exp", "input_id": "zipped", "s3_bucket": agent.store_url}
    asked = {"text": "of a client that takes compressed replies", "_rollout": block}
    reply = agent.request("POST", "/invocations", asked, headers={"Accept-Encoding": "gzip"})[1]
    assert agent.record(agent.results / reply["result_key"])["_answer"] == asked["text"]
    assert agent.run({"text": "1.50"})["_answer"] == "1.50"
    assert agent.run({"text": "1.50", "type": "application/json"})["_answer"] == 1.5
    for charset in ("latin-1", "utf-16", "utf-8"):
        asked = {"text": "42 \u00e9", "charset": charset, "type": f'text/plain; charset="{charset.upper()}"'}
        assert agent.run(asked)["_answer"] == "42 \u00e9"
    assert agent.run({"text": "42 \u00e9", "type": "text/plain; charset=none"})["_answer"] == "42 \u00e9"
    plain = "data: the\n\ndata:  sum\r\n\r\ndata:  is\u2028\n\ndata: 42\n\ndata: [DONE]\n\n"
    assert agent.run({"text": plain, "type": "text/event-stream"})["_answer"] == "the sum is\u202842"
    # AgentCore's SDK for TypeScript ends a stream in this way if the agent throws.
    broken = 'data: "4"\n\nevent: error\ndata: {"error":"fetch failed"}\n\n'
    failed = agent.run({"text": broken, "type": "text/event-stream"})
    assert (failed["outcome"], failed["_agent"]["cause"]) == ("agent_error", "agent")
    assert failed["stop_reason"] == 'the agent\'s stream ended with an error: {"error":"fetch failed"}'


@pytest.mark.parametrize("source", [SYNC, COROUTINE, ASGI])
def test_an_agent_that_calls_exit_fails_its_rollout_and_the_next_one_runs(
    agents: Callable[[str], Agent], source: str
) -> None:
    agent = agents(source)
    failed = agent.run({"fail": "exit"})
    assert (failed["outcome"], failed["_agent"]["cause"]) == ("agent_error", "agent")
    assert "a tool of the agent ended" in failed["stop_reason"] + failed["traceback"]
    assert agent.run({})["outcome"] == "ok"


@pytest.mark.parametrize(
    "options",
    [
        {"app": "make"},
        {"app": "agent:make", "factory": True, "workers": 2, "reload": True},
    ],
)
def test_no_way_of_serving_gives_the_agent_its_rollout(
    start: Start, options: dict[str, Any], model: tuple[str, list[Asked]]
) -> None:
    check_rollout(start(ASGI, env={"UVICORN": json.dumps(options)}), model)


def check_rollout(agent: Agent, model: tuple[str, list[Asked]]) -> None:
    row = {"prompt": "x", "url": "https://api.openai.com/v1/chat/completions"}
    record = agent.run(row, base_url=model[0], api_key=KEY, proof_key=PROOF)
    assert record["_answer"]["payload"] == row
    assert record["_calls"]["gateway"] == len(model[1]) == 1


def test_a_process_serves_one_rollout_or_production_calls_and_ends_with_a_record_at_sigterm(
    start: Start, model: tuple[str, list[Asked]], tmp_path: Path
) -> None:
    """The first rollout of a process opens its store, which takes a while here."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_STORE)
    env = {"AGENTCORE_RL_MODEL_HOSTS": "127.0.0.1", "AGENTCORE_RL_ALLOWED_BASE_URLS": model[0]}
    agent = start(SYNC, env={**env, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    block = {"exp_id": "e", "input_id": "i", "s3_bucket": agent.store_url, "base_url": model[0], "api_key": KEY}
    own_calls: list[Asked] = []
    with answering(lambda asked: own_calls.append(asked) or (200, {})) as own, ThreadPoolExecutor() as threads:
        row = {"url": f"{own}/v1/chat/completions"}
        waits = {**row, "wait": str(tmp_path / "go")}
        rollout = threads.submit(agent.rollout, waits, session=new_session(), base_url=model[0], api_key=KEY)
        wait_for(lambda: "the store is opened" in agent.log)
        assert agent.invoke(row)[0] == 503
        wait_for(lambda: len(model[1]) == 1)
        assert agent.invoke(row)[0] == 503
        (tmp_path / "go").touch()
        assert agent.record(rollout.result()[0])["_calls"] == {"gateway": 1, "elsewhere": {}}
        wait_for(lambda: agent.ping() == "Healthy")
        production = threads.submit(agent.invoke, {"wait": str(tmp_path / "again"), **row})
        wait_for(lambda: len(own_calls) == 1)
        assert agent.invoke({**row, "_rollout": block})[0] == 503
        (tmp_path / "again").touch()
        assert production.result()[0] == 200
    assert len(model[1]) == 1
    status, reply = agent.invoke({"_rollout": {**block, "base_url": "https://evil.example/v1"}})
    assert (status, "may not call" in reply["error"]) == (500, True)
    check_end(agent, tmp_path)


def test_an_agent_of_wsgi_takes_rollouts_and_ends_with_a_record_at_sigterm(
    start: Start, model: tuple[str, list[Asked]], tmp_path: Path
) -> None:
    agent = start(ASGI, env={"UVICORN": json.dumps({"app": "by_wsgi", "interface": "wsgi"})})
    assert agent.ping() == "Healthy"
    check_rollout(agent, model)
    check_end(agent, tmp_path)


def check_end(agent: Agent, tmp_path: Path) -> None:
    wait_for(lambda: agent.ping() == "Healthy")
    path, _ = agent.rollout({"wait": str(tmp_path / "never")}, session=new_session(), heartbeat_s=0.2)
    wait_for(lambda: agent.ping() == "HealthyBusy")
    agent.process.send_signal(signal.SIGTERM)
    record = agent.record(path)
    assert (record["error_type"], record["outcome"]) == ("Interrupted", "lost")
    (tmp_path / "never").touch()
    agent.process.wait(60)


def test_an_agent_that_blocks_its_loop_delays_no_reply_to_its_rollout(
    agents: Callable[[str], Agent], tmp_path: Path
) -> None:
    agent = agents(ASGI)
    path, reply = agent.rollout({"wait": str(tmp_path / "go")}, session=new_session())
    assert reply["status"] == "processing"
    assert not path.exists()
    (tmp_path / "go").touch()
    assert agent.record(path)["outcome"] == "ok"


def test_a_delivery_that_is_repeated_runs_the_agent_once(agent: Agent, model: tuple[str, list[Asked]]) -> None:
    url, calls = model
    session = new_session()
    row = {"url": "https://api.openai.com/v1/chat/completions"}
    path, first = agent.rollout(row, session=session, base_url=url, api_key=KEY)
    _, second = agent.rollout(row, session=session, base_url=url, api_key=KEY)
    agent.record(path)
    assert first == second
    assert len(calls) == 1


def test_rollouts_that_are_turned_off_are_refused_in_every_encoding(start: Start) -> None:
    agent = start(SYNC, env={"AGENTCORE_RL_ROLLOUTS": "off"})
    block = {"exp_id": "e", "input_id": "i", "s3_bucket": agent.store_url}
    status, reply = agent.invoke({"prompt": "x", "_rollout": block})
    assert (status, "rollouts are off" in reply["error"]) == (403, True)
    text = json.dumps({"prompt": "x", "_rollout": block})
    for body in (text.replace("_rollout", "\\u005frollout").encode(), text.encode("utf-16"), text.encode("utf-32-be")):
        asked = urllib.request.Request(f"http://127.0.0.1:{agent.port}/invocations", body)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(asked, timeout=60)
    assert agent.invoke({"prompt": "x"})[0] == 200


def test_a_production_call_that_looks_like_one_of_sagemaker_stays_one(agent: Agent) -> None:
    wait_for(lambda: agent.ping() == "Healthy")
    job = {
        "jobArn": "arn:aws:sagemaker:us-west-2:123456789012:job/AgentRFT/j",
        "rolloutId": "r",
        "endpoint": "http://x",
    }
    row = {"prompt": 'what is "_rollout"?', "metadata": job}
    status, reply = agent.invoke(row)
    assert (status, reply["payload"]) == (200, row)


def test_a_file_and_a_module_run_as_python_runs_them(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "main.py").write_text("import sys, tool\nprint(__name__, sys.argv, tool.__file__)")
    for folder in (tmp_path, tmp_path / "shop"):
        (folder / "tool.py").touch()
    for words in (["shop/main.py", "-m", "a"], ["-m", "shop.main", "a", "b"]):
        plain, ours = (
            subprocess.run([sys.executable, *starter, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
            for starter in ([], ["-m", "agentcore_rl_toolkit.app.deployed"])
        )
        assert ours.stdout == plain.stdout
