"""Agents in another language: their program is started and ended with the session, and its model calls go through a relay."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from agentcore_rl_toolkit import Program
from agentcore_rl_toolkit.app.deployed import program
from agentcore_rl_toolkit.app.deployed.model_calls import WIRES, answer, variables
from agentcore_rl_toolkit.app.deployed.routes import Route, routed, unroute
from agentcore_rl_toolkit.app.deployed.start import PLACEHOLDER
from agentcore_rl_toolkit.app.relay import Relay
from agentcore_rl_toolkit.errors import ConfigError
from serving import Asked, answering, hosted, wait_for

from ..conftest import Agent, agents_in

KEY = "gateway-key-" + "k" * 20
NODE = """
const http = require("http");
const read = async (stream) => { let text = ""; for await (const part of stream) text += part; return text; };
http.createServer(async (request, response) => {
  if (request.url === "/ping") return response.end(JSON.stringify({ status: "Healthy" }));
  const payload = JSON.parse(await read(request));
  const calls = [];
  for (const [base, path, body] of payload.calls || []) {
    const reply = await fetch(process.env[base] + path, { method: "POST", body: JSON.stringify(body || {}),
      headers: { authorization: "Bearer sk-the-agents-own", "content-type": "application/json" } });
    calls.push([reply.status, await reply.text()]);
  }
  if (payload.fail) { response.statusCode = 500; return response.end("no luck"); }
  response.setHeader("content-type", "text/event-stream");
  for (const part of ["4", "2"]) response.write(`data: ${JSON.stringify(part)}\\n\\n`);
  const seen = JSON.stringify({ payload, calls, accept: request.headers.accept, pid: process.pid, environment: process.env });
  response.end(`data: ${JSON.stringify(seen)}\\n\\n`);
}).listen(process.env.PORT, "127.0.0.1");
"""
AGENT = """
import sys
import uvicorn
from agentcore_rl_toolkit import Program

app = Program("node", {script!r})
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    if shutil.which("node") is None:
        pytest.skip("the program is one of Node")
    folder = tmp_path_factory.mktemp("program")
    (folder / "main.js").write_text(NODE)
    with agents_in(folder, as_it_is=True) as start:
        yield start(AGENT.format(script=str(folder / "main.js")))


@pytest.fixture
def gateway() -> Iterator[tuple[str, list[Asked]]]:
    seen: list[Asked] = []

    def answer(asked: Asked) -> tuple[Any, ...]:
        seen.append(asked)
        return 200, b"from the gateway", {"content-type": "text/event-stream"}

    with answering(answer) as url:
        yield f"{url}/sessions/s/v1", seen


def test_a_programs_calls_go_to_the_session_and_its_answer_is_stored(
    agent: Agent, gateway: tuple[str, list[Asked]]
) -> None:
    url, seen = gateway
    calls = [
        ["OPENAI_BASE_URL", "/chat/completions"],
        ["ANTHROPIC_BASE_URL", "/v1/messages"],
        ["AWS_ENDPOINT_URL_BEDROCK_RUNTIME", "/model/us.anthropic.claude%3A0/converse-stream"],
        ["GOOGLE_GEMINI_BASE_URL", "/v1beta/models/g:streamGenerateContent?alt=sse"],
        ["OPENAI_BASE_URL", "/embeddings"],
    ]
    record = agent.run({"prompt": "x", "calls": calls, "_reference": "secret-42"}, base_url=url, api_key=KEY)
    assert record["outcome"] == "ok", record
    assert record["_answer"].startswith("42{")
    answer = json.loads(record["_answer"][2:])
    assert answer["payload"] == {"prompt": "x", "calls": calls}
    assert "text/event-stream" in answer["accept"]  # AgentCore's SDK for TypeScript streams to nobody else
    assert [status for status, _ in answer["calls"]] == [200, 200, 200, 200, 404]
    assert "is not a chat call to the policy" in answer["calls"][4][1]
    assert [asked.path.removeprefix("/sessions/s/v1") for asked in seen] == [
        "/chat/completions",
        "/messages",
        "/bedrock/model/us.anthropic.claude%3A0/converse-stream",
        "/models/g:streamGenerateContent?alt=sse",
    ]
    assert {asked.headers["authorization"] for asked in seen} == {f"Bearer {KEY}"}
    assert record["_calls"]["gateway"] == 4
    assert KEY not in json.dumps(answer)
    assert agent.run({"fail": True}, base_url=url, api_key=KEY)["stop_reason"].endswith("HTTP 500: no luck")


def test_calls_outside_of_a_rollout_are_refused(agent: Agent, gateway: tuple[str, list[Asked]]) -> None:
    calls = {"calls": [["OPENAI_BASE_URL", "/chat/completions"]]}
    connection = http.client.HTTPConnection("127.0.0.1", agent.port)
    agent.run(calls, base_url=gateway[0], api_key=KEY)
    wait_for(lambda: agent.ping() == "Healthy")
    connection.request("POST", "/invocations", json.dumps(calls))
    text = connection.getresponse().read().decode()
    connection.close()
    assert "503" in text
    assert "no rollout has begun" in text
    assert len(gateway[1]) == 1


def test_the_program_ends_with_its_session(agent: Agent, gateway: tuple[str, list[Asked]]) -> None:
    pid = json.loads(agent.run({}, base_url=gateway[0], api_key=KEY)["_answer"][2:])["pid"]
    agent.terminate()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or not os.path.exists(f"/proc/{pid}/exe"))


def test_a_program_has_keys_of_its_wires_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main.js").write_text(NODE)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-of-the-user")
    monkeypatch.setenv("OPENAI_API_KEY", PLACEHOLDER)
    if shutil.which("node") is None:
        pytest.skip("the program is one of Node")
    with TestClient(Program("node", str(tmp_path / "main.js"), wires=("bedrock",))) as client:
        text = client.post("/invocations", json={}).text
    assert '\\"ANTHROPIC_API_KEY\\":\\"sk-of-the-user\\"' in text
    assert "OPENAI_API_KEY" not in text


def test_a_program_has_a_command_and_known_wires() -> None:
    for command, wires in (((), WIRES), (("node",), ("bedrock", "soap"))):
        with pytest.raises(ConfigError, match="Program needs a command, and wires of bedrock, openai, "):
            Program(*command, wires=wires)


def test_a_program_that_cannot_be_started_is_named_and_leaves_no_relay() -> None:
    before = {*threading.enumerate()}
    with pytest.raises(ConfigError, match="nodeX cannot be started"), TestClient(Program("nodeX", "main.js")):
        pass
    wait_for(lambda: {*threading.enumerate()} <= before)


def test_sessions_that_start_together_have_different_ports() -> None:
    """A session whose port another program has would run its rollouts in that program."""
    held = [program.reserved_port() for _ in range(300)]
    ports = [place.getsockname()[1] for place in held]
    assert len({*ports}) == 300
    with socket.create_server(("127.0.0.1", ports[0])):  # the session's program may use it
        pass
    for place in held:
        place.close()


SERVER = """
import http.server, os, sys, urllib.request

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", b"{}")
        body = urllib.request.urlopen(asked, timeout=60).read()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_calls_of_a_program_pass_no_proxy_of_its_environment(
    gateway: tuple[str, list[Asked]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    with answering(lambda _: (502, b"")) as proxy:
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv(name, "corp.example")
        monkeypatch.setenv("OPENAI_API_KEY", "of-the-user")
        monkeypatch.delenv("GEMINI_API_KEY", raising=False)
        given = {"no_proxy": "corp.example,127.0.0.1,localhost", "OPENAI_API_KEY": "of-the-user"}
        assert variables("http://x").items() >= {**given, "GEMINI_API_KEY": PLACEHOLDER}.items()
        with (
            TestClient(Program(sys.executable, str(tmp_path / "server.py"))) as client,
            routed(Route(base_url=gateway[0], api_key=KEY)),
        ):
            assert client.post("/invocations", json={}).text == "from the gateway"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("false",), "ended with 1"),
        (("sleep", "60"), "did not answer /ping"),
        ((sys.executable, "-c", SERVER.replace("200", "500")), "did not answer /ping"),
    ],
)
def test_a_program_that_does_not_serve_is_named(
    words: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "START_S", 0.5)
    with pytest.raises(ConfigError, match=why), TestClient(Program(*words)):
        pass


@pytest.fixture
def relay(gateway: tuple[str, list[Asked]]) -> Iterator[Callable[..., tuple[int, str]]]:
    """Ask a relay as any process or web page of this machine could; ``{token}`` is the random part of its path."""
    unroute()
    app = Relay()
    token = app.open(answer).rpartition("/")[2]

    def ask(path: str, method: str = "POST", **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", app.port)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path.replace("{token}", token), b"{}", named)
        reply = connection.getresponse()
        found = reply.status, reply.read().decode()
        connection.close()
        return found

    yield ask
    app.end()


def test_a_stranger_gets_nothing_of_a_relay(
    relay: Callable[..., tuple[int, str]], gateway: tuple[str, list[Asked]]
) -> None:
    chat = "/{token}/v1/chat/completions"
    assert relay(chat) == (503, relay(chat)[1])
    with routed(Route(base_url=gateway[0], api_key=KEY)):
        assert relay(chat)[0] == 200
        for path in (
            "/",
            "/v1/chat/completions",
            "/x/v1/chat/completions",
            "/{token}x/v1/chat/completions",
            "/{token}/admin/x",
        ):
            assert relay(path)[0] == 404, path
        assert relay(chat, host="evil.example")[0] == 403
        assert relay(chat, origin="https://evil.example")[0] == 403
        assert relay(chat, origin="null")[0] == 403
        for path in (
            "/{token}/bedrock/model/../../other/v1/converse",
            "/{token}/bedrock/model/%2e%2e/%2e%2e/other/converse",
            "/{token}/v1/../../../sessions/chat/completions",
        ):
            assert relay(path)[0] == 404, path
        assert relay(chat, method="GET")[0] == 404
        assert relay(chat, authorization="Bearer of-another-session", x_api_key="another")[0] == 200
    assert relay(chat)[0] == 410
    assert {asked.headers["authorization"] for asked in gateway[1]} == {f"Bearer {KEY}"}
    assert not [asked for asked in gateway[1] if "x-api-key" in asked.headers]


@pytest.fixture
def chat() -> Iterator[str]:
    """The address of chats at a relay."""
    app = Relay()
    yield f"{app.open(answer)}/v1/chat/completions"
    app.end()


async def test_a_call_that_is_cut_ends_at_the_gateway_and_the_next_ones_are_answered(chat: str) -> None:
    cut = threading.Event()

    async def gateway(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        asked = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": asked, "more_body": asked == b"endless"})
        if asked == b"endless":
            assert (await receive())["type"] == "http.disconnect"
            cut.set()

    with hosted(gateway) as url, routed(Route(base_url=url, api_key=KEY)):
        async with httpx.AsyncClient() as client:
            for n in range(5):
                async with client.stream("POST", chat, content=b"endless") as reply:
                    assert await anext(reply.aiter_bytes()) == b"endless"
                assert (await client.post(chat, content=b"%d" % n)).text == str(n)
                assert await asyncio.to_thread(cut.wait, 10)
                cut.clear()


async def test_a_relay_carries_many_calls_at_once(chat: str) -> None:
    calls = 24
    together = asyncio.Barrier(calls)  # of the gateway's loop, on which it is first used

    async def gateway(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await together.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"yes"})

    with hosted(gateway) as url, routed(Route(base_url=url, api_key=KEY)):
        async with httpx.AsyncClient(timeout=20, limits=httpx.Limits()) as client:
            replies = await asyncio.gather(*(client.post(chat, content=b"{}") for _ in range(calls)))
    assert [reply.text for reply in replies] == ["yes"] * calls


def test_a_compressed_reply_stays_what_its_head_says(chat: str) -> None:
    body, headers = gzip.compress(b"42"), {"content-encoding": "gzip", "keep-alive": "timeout=5", "x-own": "kept"}
    with answering(lambda asked: (200, body, headers)) as url, routed(Route(base_url=url, api_key=KEY)):
        reply = httpx.post(chat, content=b"{}")
    assert (reply.text, reply.headers["content-length"], reply.headers["x-own"]) == ("42", str(len(body)), "kept")
    assert "keep-alive" not in reply.headers


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("http://127.0.0.1:1", "All connection attempts failed"),
        ("other://gateway", "Request URL has an unsupported protocol 'other://'."),
        ("http://127.0.0.1:99999", ""),
        (None, "Server disconnected without sending a response."),
    ],
)
def test_a_gateway_that_cannot_be_reached_is_a_502_with_the_reason(chat: str, address: str | None, why: str) -> None:
    with answering(lambda asked: None) as silent, routed(Route(base_url=address or silent, api_key=KEY)):
        reply = httpx.post(chat, content=b"{}")
    assert reply.status_code == 502
    assert reply.json()["message"].startswith(f"the gateway cannot be reached: {why}")
