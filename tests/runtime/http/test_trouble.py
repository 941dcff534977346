"""What callers get when something goes wrong that no rule of AWS's covers: bugs, slow senders, the end of the runtime."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import dataclasses
import json
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import LocalRuntimeError
from agentcore_rl_toolkit.runtime.config import RuntimeConfig
from agentcore_rl_toolkit.runtime.http import app as module
from agentcore_rl_toolkit.runtime.http.app import RuntimeApp
from agentcore_rl_toolkit.runtime.runtime import Runtime
from agentcore_rl_toolkit.runtime.wire import REQUEST_ID_HEADER

from ..conftest import AGENTS, Server, wait_for


class Buggy(RuntimeApp):
    """Divides by zero: before its reply, or within it."""

    async def respond(self, scope: Any, receive: Any, send: Any) -> None:
        scope["runtime.operation"] = "InvokeAgentRuntime"
        if b"late" in scope["runtime.body"]:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ZeroDivisionError("a bug")


@pytest.fixture
async def buggy(tmp_path: Path) -> AsyncIterator[tuple[Runtime, int]]:
    """A runtime in this process, and its port."""
    runtime = Runtime(RuntimeConfig(state_dir=tmp_path / "state"))
    app = Buggy(runtime)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical", port=0))
    await runtime.start([])
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn has a flag, no event
        await asyncio.sleep(0.01)
    yield runtime, server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving
    await runtime.close()


def post(path: str, body: bytes = b"{}", *, length: int | None = None) -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        "host: localhost",
        f"content-length: {len(body) if length is None else length}",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + body


async def answer(port: int, request: bytes) -> bytes:
    """All that comes until the server ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
    data = b""
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(60):
            while piece := await reader.read(65536):
                data += piece
    writer.close()
    return data


async def test_a_bug_is_an_internal_error_in_awss_form_and_counted_as_one(
    buggy: tuple[Runtime, int], caplog: pytest.LogCaptureFixture
) -> None:
    runtime, port = buggy
    head, _, body = (await answer(port, post("/runtimes/x/invocations"))).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"x-amzn-errortype: InternalServerException" in head
    assert json.loads(body)["message"] == "An internal error occurred."
    assert runtime.metrics.requests == {("InvokeAgentRuntime", 500): 1}
    assert "ZeroDivisionError: a bug" in caplog.text  # with its traceback, for who runs the server


async def test_a_bug_within_a_reply_breaks_it_off(buggy: tuple[Runtime, int]) -> None:
    runtime, port = buggy
    assert (await answer(port, post("/runtimes/x/invocations", b"late"))).endswith(b"\r\n\r\nhalf")
    async with asyncio.timeout(60):
        while not runtime.metrics.requests:  # noqa: ASYNC110  # counted when the connection has ended
            await asyncio.sleep(0.01)
    assert runtime.metrics.requests == {("InvokeAgentRuntime", 500): 1}


async def test_a_body_has_at_most_its_limit(buggy: tuple[Runtime, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAYLOAD_BYTES", 4)
    chunked = b"POST /x HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\nlate!\r\n0\r\n\r\n"
    for request, status, end in (
        (post("/x", b"late"), 200, b"half"),
        (chunked.replace(b"5\r\nlate!", b"4\r\nlate"), 200, b"half"),
        (post("/x", b"late!"), 400, b"}"),
        (post("/x", b"", length=5), 400, b"}"),  # its body is not waited for
        (chunked, 400, b"}"),
    ):
        reply = await answer(buggy[1], request)
        assert (reply[9:12], reply[-len(end) :]) == (b"%d" % status, end), request


async def test_a_request_needs_a_signature_or_the_password_and_keeps_its_id(buggy: tuple[Runtime, int]) -> None:
    buggy[0].config = dataclasses.replace(buggy[0].config, credentials={"key": "secret"})
    for given, status in ((b"key:secret", 500), (b"key:other", 403)):
        lines = b"authorization: Basic %s\r\n%s: the-id\r\nhost:" % (base64.b64encode(given), REQUEST_ID_HEADER)
        reply = await answer(buggy[1], post("/x").replace(b"host:", lines, 1))
        assert reply[9:12] == b"%d" % status
        assert b"\r\nx-amzn-requestid: the-id\r\n" in reply


def test_a_session_is_named_by_the_beginning_of_its_id(server: Server) -> None:
    base = f"{uuid.uuid4().hex}-"
    for end in ("", "1x", "2x", "3x"):
        server.invoke({"do": "print", "text": f"of {end}"}, base + end)
    for path, log in (("/log", b"of \n"), ("2/log?offset=3", b"2x\n")):  # the first one, although others begin like it
        assert server.view.call("GET", f"/_local/sessions/{base}{path}").startswith(log)
    few = f"{base}, {base}1x, {base}2x"
    for path, message in (
        (f"sessions/{base[:-1]}/log", f"4 sessions begin with {base[:-1]!r} ({few}...): give more characters"),
        (f"sessions/{base}4/log", f"Session {base}4 not found"),
        ("nodes", "GET /_local/nodes not found"),
    ):
        with pytest.raises(LocalRuntimeError, match=f": {re.escape(message)}$"):
            server.view.call("GET", f"/_local/{path}")
    server.view.stop(base)
    assert [server.session(base + end) is None for end in ("", "1x", "2x", "3x")] == [True, False, False, False]


def test_bad_values_of_local_requests_are_400(server: Server) -> None:
    session_id = new_session_id()
    server.invoke({}, session_id)
    for method, path, data in (
        ("PUT", "/faults", b"\xff"),
        ("PUT", "/faults", b'[{"kind": ["throttle"]}]'),
    ):
        request = f"{method} /_local{path} HTTP/1.1\r\nhost: localhost\r\n"
        with socket.create_connection(("127.0.0.1", urlsplit(server.url).port), timeout=10) as connection:
            connection.sendall(request.encode() + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(data) + data)
            reply = b"".join(iter(lambda c=connection: c.recv(65536), b""))  # type: ignore[misc]
        assert reply.startswith(b"HTTP/1.1 400 "), (path, reply)
        assert b"x-amzn-errortype: ValidationException" in reply
    assert server.session(session_id) is not None


def test_calls_under_way_at_a_shutdown_end_as_any_others(start_server: Callable[..., Server]) -> None:
    server = start_server("--set", "stop_grace=3", agent=AGENTS / "bare.py")
    client = server.client(read_timeout=30, max_pool_connections=5)
    ids = {name: new_session_id() for name in ("quick", "endless")}

    def endless() -> tuple[int, str]:
        with pytest.raises(ClientError) as error:
            server.invoke({"do": "sleep", "s": 60, "say": "begun"}, ids["endless"], client=client)
        response = error.value.response
        return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        last = pool.submit(endless)
        first = pool.submit(server.invoke, {"do": "sleep", "s": 1.0, "say": "begun"}, ids["quick"], client=client)
        wait_for(lambda: all(server.logged(ids[n], "begun") for n in ("quick", "endless")))
        began = time.monotonic()
        assert server.stop() == 0
        took_s = time.monotonic() - began
        assert first.result()["calls"] == 1  # sessions get their grace
        assert last.result() == (424, "RuntimeClientError")
    assert took_s < 25.0  # the grace of 3 s, not the callers'
    assert "Traceback" not in server.output.read_text()
