"""Warm invocations that go past ASGI: which do, and that a caller cannot tell.

The runtime serves inside the test's process here, so that the requests which reach its ASGI application can be counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import uvicorn
import websockets
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from websockets.asyncio.client import connect as connect_websocket

from agentcore_rl_toolkit._servers.bounded_http import Bounds
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.runtime.api.faults import FaultPlan
from agentcore_rl_toolkit.runtime.api.quotas import profile
from agentcore_rl_toolkit.runtime.config import RuntimeConfig, TimeLimits
from agentcore_rl_toolkit.runtime.http.app import RuntimeApp
from agentcore_rl_toolkit.runtime.http.protocol import DIRECT_BYTES, RuntimeProtocol, aws_error
from agentcore_rl_toolkit.runtime.runtime import Runtime
from agentcore_rl_toolkit.runtime.sessions.connection import UpstreamLostError, connect

from ..conftest import AGENTS

SESSION = "x-amzn-bedrock-agentcore-runtime-session-id"
Reply = tuple[int, dict[str, str], bytes]


class CountingApp(RuntimeApp):
    """Counts what goes the long way."""

    asgi = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asgi += scope["type"] == "http"
        await super().__call__(scope, receive, send)


class Inside:
    """A runtime in this process, and raw connections to it."""

    def __init__(self, runtime: Runtime, app: CountingApp, server: uvicorn.Server, arn: str) -> None:
        self.runtime, self.app, self.server, self.arn = runtime, app, server, arn
        self.port: int = server.servers[0].sockets[0].getsockname()[1]
        self.session_id = new_session_id()

    def request(self, payload: Any, *lines: str, version: str = "1.1", query: str = "", length: bool = True) -> bytes:
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        head = [
            f"POST /runtimes/{quote(self.arn, safe='')}/invocations{query} HTTP/{version}",
            "host: localhost",
            "content-type: application/json",
            f"{SESSION}: {self.session_id}",
            *([f"content-length: {len(body)}"] if length else []),
            *lines,
        ]
        return "\r\n".join(head).encode() + b"\r\n\r\n" + body

    @contextlib.asynccontextmanager
    async def caller(self) -> AsyncIterator[Caller]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        try:
            yield Caller(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):  # a loop that ends before would leave the socket to the collector
                await writer.wait_closed()

    async def warm(self, caller: Caller) -> None:
        """Start the session; it keeps a connection then. Counting begins anew."""
        status, _, body = await caller.ask(self.request({}))
        assert (status, json.loads(body)["calls"]) == (200, 1)
        self.app.asgi = 0


class Caller:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def reply(self) -> Reply:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        else:
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body

    async def ask(self, request: bytes) -> Reply:
        self.writer.write(request)
        return await self.reply()


async def until(reached: Callable[[], bool]) -> None:
    """Wait for what has no event."""
    async with asyncio.timeout(30):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def served(
    folder: Path, *, keep_alive_s: int = 75, invoke_timeout_s: float = 900.0, **config: Any
) -> AsyncIterator[Inside]:
    """Such a runtime; the keywords are RuntimeConfig's, and uvicorn's keep-alive."""
    times = TimeLimits(stop_grace_s=1.0, invoke_timeout_s=invoke_timeout_s)
    runtime = Runtime(RuntimeConfig(state_dir=folder / "state", times=times, **config))
    app = CountingApp(runtime)
    http: Any = functools.partial(RuntimeProtocol, direct=app.direct, bounds=Bounds(error=aws_error))
    options: dict[str, Any] = {"lifespan": "on", "log_level": "warning", "ws": "websockets-sansio", "port": 0}
    options |= {
        "date_header": False,
        "server_header": False,
        "timeout_keep_alive": keep_alive_s,
        "timeout_graceful_shutdown": 10,
    }
    server = uvicorn.Server(uvicorn.Config(app, http=http, **options))
    arns = await runtime.start([("probe", AGENTS / "probe.py")])
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        yield Inside(runtime, app, server, arns["probe"])
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Start runtimes; all are stopped afterwards."""
    async with contextlib.AsyncExitStack() as stack:

        async def begin(**options: Any) -> Inside:
            return await stack.enter_async_context(served(tmp_path, **options))

        yield begin


async def test_a_warm_call_goes_past_asgi_and_its_reply_looks_the_same(start: Any) -> None:
    inside = await start()
    trace = "traceparent: 00-1-2-01"
    async with inside.caller() as caller:
        cold = await caller.ask(inside.request({"n": 1}, trace))
        assert inside.app.asgi == 1
        warm = await caller.ask(inside.request({"n": 1}, trace, query="?qualifier=DEFAULT"))
        assert inside.app.asgi == 1
        ids = [headers.pop("x-amzn-requestid") for headers in (cold[1], warm[1])]
        assert ids[0] != ids[1]
        assert (cold[0], list(cold[1].items())) == (warm[0], list(warm[1].items()))
        assert warm[1][SESSION] == inside.session_id
        assert warm[1]["traceparent"] == "00-1-2-01"
        assert [json.loads(r[2])["calls"] for r in (cold, warm)] == [1, 2]
        described = inside.runtime.table.describe()[0]
        assert (described["state"], described["inflight"], described["invocations"]) == ("idle", 0, 2)
        assert inside.runtime.metrics.requests == {("InvokeAgentRuntime", 200): 2}
        seen = json.loads((await caller.ask(inside.request({"do": "headers"}, "x-not-allowed: no", "baggage: a=b")))[2])
        assert "x-not-allowed" not in seen["headers"]
        assert seen["headers"]["baggage"] == "a=b"


@pytest.mark.parametrize("kind", ["chunked", "expect", "large", "HTTP/1.0", "no invocation"])
async def test_what_is_not_plain_goes_the_long_way(start: Any, kind: str) -> None:
    inside = await start()
    async with inside.caller() as caller:
        await inside.warm(caller)
        expected = 200
        if kind == "chunked":
            request = inside.request(b"2\r\n{}\r\n0\r\n\r\n", "transfer-encoding: chunked", length=False)
        elif kind == "expect":
            request = inside.request({}, "expect: 100-continue")
        elif kind == "large":
            request = inside.request({"pad": "x" * DIRECT_BYTES})
        elif kind == "HTTP/1.0":
            request = inside.request({}, version="1.0")
        else:
            request, expected = inside.request({}).replace(b"/invocations", b"/commands"), 400
        caller.writer.write(request)
        if kind == "expect":
            assert await caller.reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        status, headers, _ = await caller.reply()
        assert (status, inside.app.asgi) == (expected, 1)
        assert headers.get("connection") == ("close" if kind == "HTTP/1.0" else None)


async def test_requests_in_any_pieces_are_answered_in_their_order(start: Any) -> None:
    inside = await start()
    async with inside.caller() as caller:
        await inside.warm(caller)
        one = inside.request({"n": 1})
        for at in range(1, len(one), 13):  # split in two
            caller.writer.write(one[:at])
            await asyncio.sleep(0.002)
            assert (await caller.ask(one[at:]))[0] == 200
        assert inside.app.asgi == 0
        several = [inside.request({"n": n}) for n in range(20)]
        for writes in ([b"".join(several)], several, [several[0] + several[1][:40], several[1][40:], *several[2:]]):
            for data in writes:
                caller.writer.write(data)
                await asyncio.sleep(0)
            assert [json.loads((await caller.reply())[2])["echo"]["n"] for _ in several] == list(range(20))


async def test_what_is_sent_ahead_of_a_reply_waits_for_it(start: Any) -> None:
    inside = await start()
    async with inside.caller() as caller:
        await inside.warm(caller)
        caller.writer.write(inside.request({"do": "sleep", "s": 0.4}))
        await asyncio.sleep(0.1)
        for n in range(3):
            caller.writer.write(inside.request({"n": n}))
            await asyncio.sleep(0.02)
        caller.writer.write(b"GET /_local/status HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert json.loads((await caller.reply())[2])["calls"] == 2
        assert [json.loads((await caller.reply())[2])["echo"] for _ in range(3)] == [{"n": n} for n in range(3)]
        assert "uptime_s" in json.loads((await caller.reply())[2])
        assert inside.runtime.table.describe()[0]["inflight"] == 0


async def test_other_replies_are_as_on_the_long_way(start: Any) -> None:
    inside = await start()
    async with inside.caller() as caller:
        await inside.warm(caller)
        status, headers, body = await caller.ask(inside.request({"do": "raise"}))
        assert (status, headers["x-amzn-errortype"]) == (424, "RuntimeClientError")
        assert json.loads(body)["message"].startswith("Received error (500) from runtime")
        status, headers, body = await caller.ask(inside.request({"do": "stream", "n": 3, "size": 5}))
        assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        assert body.count(b"data: ") == 3
        status, headers, body = await caller.ask(inside.request({"do": "stream", "n": 3, "size": 3_000_000}))
        assert len(body) > 9_000_000
        status, headers, body = await caller.ask(inside.request({"do": "echo", "pad": "y" * 65_000}))
        assert (status, headers["content-length"]) == (200, str(len(body)))
        assert len(body) > 65_000
        status, headers, body = await caller.ask(inside.request({"do": "die"}))
        assert (status, headers["x-amzn-errortype"]) == (424, "RuntimeClientError")
        assert "ended the connection" in json.loads(body)["message"]
        assert inside.app.asgi == 0
        assert json.loads((await caller.ask(inside.request({})))[2])["calls"] == 1  # a fresh session
        assert inside.runtime.metrics.requests == {
            ("InvokeAgentRuntime", 200): 5,
            ("InvokeAgentRuntime", 424): 2,
        }
        await asyncio.sleep(0)
        assert [s["inflight"] for s in inside.runtime.table.describe()] == [0]


async def test_the_agent_has_so_long_to_answer(start: Any) -> None:
    inside = await start(invoke_timeout_s=4.0)
    async with inside.caller() as caller, inside.caller() as other, inside.caller() as third:
        await inside.warm(caller)
        caller.writer.write(inside.request({"do": "hold", "name": "for ever"}))
        await asyncio.sleep(2)
        other.writer.write(inside.request({"do": "hold", "name": "for half as long"}))
        status, _, body = await caller.reply()
        assert (status, json.loads(body)["message"]) == (424, "The runtime did not answer within 4 s.")
        # The other's time is its own: two seconds are left of it.
        assert (await third.ask(inside.request({"do": "release", "name": "for half as long"})))[0] == 200
        status, _, body = await other.reply()
        assert (status, json.loads(body)) == (200, {"held": "for half as long"})
        assert inside.runtime.table.describe()[0]["inflight"] == 0


async def test_too_many_requests_are_429_and_counted_once(start: Any) -> None:
    inside = await start(quotas=profile("unlimited", tps=1))
    async with inside.caller() as caller:
        await inside.warm(caller)
        answers = [await caller.ask(inside.request({})) for _ in range(8)]
        assert 429 in [status for status, _, _ in answers]
        async with asyncio.timeout(30):
            while answers[-1][0] != 200:
                await asyncio.sleep(0.1)
                answers.append(await caller.ask(inside.request({})))
        refused = [headers["x-amzn-errortype"] for status, headers, _ in answers if status == 429]
        assert set(refused) == {"ThrottlingException"}
        assert inside.runtime.quotas.refused == {"ThrottlingException": len(refused)}
        assert json.loads(answers[-1][2])["calls"] == 1 + len(answers) - len(refused)


async def test_planned_faults_meet_warm_calls_too(start: Any) -> None:
    inside = await start()
    async with inside.caller() as caller:
        await inside.warm(caller)
        inside.runtime.faults = FaultPlan.parse([{"kind": "throttle", "first": 1}])
        assert [(await caller.ask(inside.request({})))[0] for _ in range(2)] == [429, 200]


async def test_signatures_are_verified_on_warm_calls(start: Any) -> None:
    inside = await start(credentials={"KEY": "secret"})

    def signed(secret: str) -> bytes:
        url = f"http://127.0.0.1:{inside.port}/runtimes/{quote(inside.arn, safe='')}/invocations?qualifier=DEFAULT"
        request = AWSRequest("POST", url, data=b"{}", headers={SESSION: inside.session_id})
        SigV4Auth(Credentials("KEY", secret), "bedrock-agentcore", "us-west-2").add_auth(request)
        lines = [f"POST {urlsplit(url).path}?qualifier=DEFAULT HTTP/1.1", f"host: 127.0.0.1:{inside.port}"]
        lines += [f"{k}: {v}" for k, v in request.headers.items()]
        return "\r\n".join([*lines, "content-length: 2"]).encode() + b"\r\n\r\n{}"

    async with inside.caller() as caller:
        assert (await caller.ask(signed("secret")))[0] == 200
        good = 1
        async with asyncio.timeout(60):
            while True:  # the agent's connection may be on its way back when the next call comes
                inside.app.asgi = 0
                assert (await caller.ask(signed("secret")))[0] == 200
                good += 1
                if inside.app.asgi == 0:
                    break
        for request in (signed("wrong"), signed("secret").replace(b"\r\n\r\n{}", b"\r\n\r\n[]"), inside.request({})):
            status, headers, _ = await caller.ask(request)
            assert (status, headers["x-amzn-errortype"]) == (403, "AccessDeniedException")
        assert inside.runtime.table.describe()[0]["invocations"] == good


async def test_a_caller_that_goes_away_does_not_stop_the_agent(start: Any) -> None:
    inside = await start()
    async with inside.caller() as other:
        await inside.warm(other)
        for payload in ({"do": "hold", "name": "a"}, {"do": "stream", "n": 3, "hold": "a"}):
            async with inside.caller() as caller:
                caller.writer.write(inside.request(payload))
                if payload["do"] == "stream":
                    await caller.reader.readuntil(b"data: ")
                else:
                    await until(lambda: inside.runtime.table.describe()[0]["inflight"] == 1)
                caller.writer.write(inside.request({"never": "read"}))
            assert inside.runtime.table.describe()[0]["state"] == "active"
            await other.ask(inside.request({"do": "release", "name": "a"}))
            await until(lambda: inside.runtime.table.describe()[0]["state"] == "idle")
        assert json.loads((await other.ask(inside.request({})))[2])["calls"] >= 4


async def test_connection_close_is_obeyed_and_an_idle_connection_ends(start: Any) -> None:
    inside = await start(keep_alive_s=3)
    async with inside.caller() as caller:
        await inside.warm(caller)
        status, headers, _ = await caller.ask(inside.request({}, "connection: close"))
        assert (status, headers["connection"], await caller.reader.read()) == (200, "close", b"")
    async with inside.caller() as caller:
        for _ in range(4):  # used, never idle for long
            assert (await caller.ask(inside.request({})))[0] == 200
            await asyncio.sleep(1)
        assert (await caller.ask(inside.request({"do": "sleep", "s": 4})))[0] == 200
        caller.writer.write(b"GET /_local/status HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await caller.reply())[0] == 200
        assert (await caller.ask(inside.request({})))[0] == 200
        async with asyncio.timeout(30):
            assert await caller.reader.read() == b""


async def test_a_call_under_way_is_answered_when_the_server_stops(start: Any) -> None:
    inside = await start()
    async with inside.caller() as caller:
        await inside.warm(caller)
        caller.writer.write(inside.request({"do": "hold", "name": "a"}))
        await until(lambda: inside.runtime.table.describe()[0]["inflight"] == 1)
        inside.server.should_exit = True
        await until(lambda: not inside.server.servers[0].is_serving())
        session = next(iter(inside.runtime.table.sessions.values()))  # the runtime takes no more callers
        release = await connect(session.socket_path)
        await release.send(b"POST", b"/invocations", [], [b'{"do": "release", "name": "a"}'])
        assert await release.head() == 200
        release.close()
        status, headers, _ = await caller.reply()
        assert (status, headers["connection"], await caller.reader.read()) == (200, "close", b"")


async def test_websockets_are_served_as_before(start: Any) -> None:
    inside = await start()
    address = f"ws://127.0.0.1:{inside.port}/runtimes/{quote(inside.arn, safe='')}/ws"
    async with connect_websocket(address, additional_headers={SESSION: inside.session_id}) as ws:
        await ws.send("hi")
        assert await ws.recv() == f"{inside.session_id}: hi"
    with pytest.raises(websockets.InvalidStatus):
        async with connect_websocket(address.replace("/ws", "/nothing")):
            raise AssertionError("it was accepted")


@pytest.mark.parametrize("late", [False, True])
async def test_an_agent_that_says_more_than_it_was_asked_loses_its_connection(tmp_path: Path, late: bool) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer if late else 2 * answer)
            if late:
                await first_read.wait()
                writer.write(answer)
            with contextlib.suppress(OSError):
                await reader.read()
        finally:  # also where the test failed: what is left to the collector would be another test's failure
            writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        gone.set()

    gone, first_read = asyncio.Event(), asyncio.Event()
    server = await asyncio.start_unix_server(serve, tmp_path / "s")
    async with server:
        connection = await connect(str(tmp_path / "s"))
        await connection.send(b"GET", b"/", [])
        assert (await connection.head(), await connection.read(100)) == (200, b"ok")
        assert connection.usable is late
        first_read.set()
        await until(lambda: not connection.usable)
        with pytest.raises(UpstreamLostError):
            await connection.send(b"GET", b"/", [])
        async with asyncio.timeout(30):
            await gone.wait()  # a loop that ends before would leave the socket to the collector
