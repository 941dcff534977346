"""HTTP as hostile, broken and merely unusual clients speak it, over raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import zlib
from functools import partial

import brotli
import openai
import pytest
import uvloop
import zstandard

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, Limits, SessionHandle
from scripted_engine import Fault, ScriptedEngine

from ..asking import Start, until

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()


def post(session: SessionHandle, body: bytes = BODY, *more: str, route: str = "chat/completions", **head: str) -> bytes:
    lines = [
        f"{head.get('method', 'POST')} /sessions/{session.session_id}/v1/{route} HTTP/{head.get('version', '1.1')}"
    ]
    lines += ["host: localhost", f"authorization: Bearer {head.get('key', session.api_key)}", *more]
    if not any("transfer-encoding" in line for line in more):
        lines.append(f"content-length: {head.get('length', len(body))}")
    return "\r\n".join([*lines, "", ""]).encode() + body


class Line:
    """A connection that sends what it is told and reads until the gateway says no more for a while, or closes."""

    def __init__(self, gateway: Gateway) -> None:
        self._port = int(gateway.url.rsplit(":", 1)[1])

    async def __aenter__(self) -> Line:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.close()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer (not chunked)."""
        async with asyncio.timeout(30):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split()[1]), headers, body

    async def is_closed(self) -> bool:
        async with asyncio.timeout(30):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True


async def ask(gateway: Gateway, data: bytes) -> tuple[int, dict[str, str], bytes]:
    async with Line(gateway) as line:
        await line.send(data)
        return await line.answer()


async def test_a_gateway_that_is_stopped_at_once_listens_no_more() -> None:
    gateway = Gateway(GatewayConfig())
    await gateway.start()
    await gateway.stop(grace_s=0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))


def test_clients_that_wait_are_connected_in_one_pass_of_the_event_loop() -> None:
    async def connections(count: int) -> int:
        gateway = Gateway(GatewayConfig())
        await gateway.start()
        address = "127.0.0.1", int(gateway.url.rsplit(":", 1)[1])
        with contextlib.ExitStack() as clients:
            for _ in range(count):
                clients.enter_context(socket.create_connection(address))
            for _ in range(5):  # the socket is readable, accepted, and a connection
                await asyncio.sleep(0)
            taken = len(gateway.connections)
        await gateway.stop(grace_s=0)
        return taken

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(connections(40)) == 40


@pytest.mark.parametrize(
    "more", [("transfer-encoding: chunked", "content-length: 5"), ("content-length: 3",), ("content-length: -1",)]
)
async def test_a_body_whose_end_is_in_doubt_is_refused(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle, more: tuple[str, ...]
) -> None:
    async with Line(gateway) as line:
        await line.send(post(session, BODY, *more))
        assert (await line.answer())[0] == 400
        assert await line.is_closed()
    assert engine.calls == []


async def test_a_client_that_waits_for_100_continue_gets_it(gateway: Gateway, session: SessionHandle) -> None:
    async with Line(gateway) as line:
        await line.send(post(session, b"", "expect: 100-continue", length=str(len(BODY))))
        assert (await line.answer())[0] == 100
        await line.send(BODY)
        assert (await line.answer())[0] == 200


async def test_another_method_is_told_which_one_to_use(gateway: Gateway, session: SessionHandle) -> None:
    for method in ("GET", "OPTIONS", "PUT", "DELETE"):
        status, headers, _ = await ask(gateway, post(session, method=method))
        assert (status, headers["allow"]) == (405, "POST")


async def test_an_offer_to_speak_http2_is_declined_and_the_request_answered(
    gateway: Gateway, session: SessionHandle
) -> None:
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAA")
    for pieces in (1, 2):
        async with Line(gateway) as line:
            data = post(session, BODY, *offer)
            cut = len(data) - (0 if pieces == 1 else 20)
            for piece in (data[:cut], data[cut:]):
                await line.send(piece)
                await asyncio.sleep(0.01)
            assert (await line.answer())[0] == 200
            await line.send(post(session))
            assert (await line.answer())[0] == 200


async def test_what_is_no_http_is_refused_once(gateway: Gateway) -> None:
    for data in (b"hello\r\n\r\n", b"\x16\x03\x01\x00\xa5\x01\x00"):
        async with Line(gateway) as line:
            await line.send(data)
            assert (await line.answer())[0] in (400, 405)
            assert await line.is_closed()


COMPRESS = {
    **{"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes},
    **{"br": brotli.compress, "zstd": zstandard.compress},
}


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP", "deflate", "br", "zstd", "identity"])
async def test_a_compressed_body_is_decompressed(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle, encoding: str
) -> None:
    compress = COMPRESS.get(encoding, gzip.compress)
    status, _, reply = await ask(gateway, post(session, compress(BODY), f"content-encoding: {encoding}"))
    assert (status, engine.calls[0].body["messages"]) == (200, json.loads(BODY)["messages"]), reply


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd"])
async def test_a_body_that_is_too_large_when_decompressed_is_413(
    engine: ScriptedEngine, start_gateway: Start, encoding: str
) -> None:
    gateway = await start_gateway(engine, limits=Limits(body_bytes=100_000))
    session = (await GatewayClient(gateway.url).create_sessions_async([new_session_id()]))[0]
    bomb = b" " * 50_000_000
    compressed = {"gzip": partial(gzip.compress, compresslevel=1), "br": partial(brotli.compress, quality=1)}
    body = compressed.get(encoding, zstandard.compress)(bomb)
    status, _, reply = await ask(gateway, post(session, body[:90_000], f"content-encoding: {encoding}"))
    assert (status, b"100000 bytes" in reply) == (413, True), reply


async def test_a_damaged_body_is_400_and_an_unknown_encoding_415(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle
) -> None:
    whole, cut = gzip.compress(BODY), (brotli.compress(BODY)[:-3], zstandard.compress(BODY)[:-1])
    damaged = (("gzip", whole[:-9]), ("gzip", BODY), ("gzip", whole + b"more"), ("deflate", b"\x00"), ("zstd", whole))
    for encoding, body in (*damaged, ("br", whole), ("br", cut[0]), ("zstd", cut[1]), ("zstd", b"")):
        status, _, reply = await ask(gateway, post(session, body, f"content-encoding: {encoding}"))
        assert status == 400, (encoding, reply)
    for encoding in ("compress", "gzip, gzip", "aes128gcm"):
        status, _, reply = await ask(gateway, post(session, whole, f"content-encoding: {encoding}"))
        assert (status, b"gzip, deflate" in reply) == (415, True)
    assert engine.calls == []


async def test_http_1_0_is_answered_whole_and_never_in_chunks(gateway: Gateway, session: SessionHandle) -> None:
    async with Line(gateway) as line:
        await line.send(post(session, version="1.0"))
        assert (await line.answer())[0] == 200
        assert await line.is_closed()
    streamed = json.dumps({**json.loads(BODY), "stream": True}).encode()
    status, _, reply = await ask(gateway, post(session, streamed, version="1.0"))
    assert (status, json.loads(reply)["error"]["param"]) == (400, "stream")


async def test_a_slash_at_the_end_of_a_route_is_nothing(gateway: Gateway, session: SessionHandle) -> None:
    for route in ("chat/completions/", "models/"):
        method = "GET" if route == "models/" else "POST"
        assert (await ask(gateway, post(session, route=route, method=method)))[0] == 200


async def test_a_doubled_v1_is_explained_in_the_clients_dialect(gateway: Gateway, session: SessionHandle) -> None:
    status, _, reply = await ask(gateway, post(session, route="v1/messages"))
    error = json.loads(reply)
    assert (status, error["type"], error["error"]["type"]) == (404, "error", "not_found_error")
    assert "without its /v1" in error["error"]["message"]


async def test_a_request_sent_ahead_is_answered_after_the_first(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle
) -> None:
    engine.faults.append(Fault(delay_s=0.1))
    async with Line(gateway) as line:
        await line.send(post(session) * 2)
        for _ in range(2):
            assert b'"choices"' in (await line.answer())[2]
    assert len(engine.calls) == 2


@pytest.mark.parametrize("cut", [65_537, 1])
async def test_a_long_body_is_read_wherever_it_is_cut(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle, cut: int
) -> None:
    async with Line(gateway) as line:
        for letter in "ab":
            text = letter * 200_000
            data = post(session, json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode())
            await line.send(data[:cut])
            await asyncio.sleep(0.01)
            await line.send(data[cut:])
            assert (await line.answer())[0] == 200
            assert engine.calls[-1].body["messages"][0]["content"] == text


@pytest.mark.parametrize("flood", ["many", "one", "path"])
async def test_an_endless_head_is_cut_off(start_gateway: Start, engine: ScriptedEngine, flood: str) -> None:
    gateway = await start_gateway(engine, limits=Limits(header_bytes=10_000))
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    begin, more = {
        "many": (b"GET /healthz HTTP/1.1\r\n", b"x-%d: yyyyyyyyyyyyyyyy\r\n"),
        "one": (b"GET /healthz HTTP/1.1\r\nx: ", b"yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy%d"),
        "path": (b"GET /", b"yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy%d"),
    }[flood]
    async with Line(gateway) as line:
        with contextlib.suppress(ConnectionError):
            await line.send(begin + b"".join(more % i for i in range(400)))
            assert (await line.answer())[0] in (400, 431)
        await until(lambda: not gateway.connections)
    assert (await ask(gateway, post(session)))[0] == 200


async def test_a_body_that_is_too_large_is_said_in_the_clients_own_words(
    start_gateway: Start, engine: ScriptedEngine
) -> None:
    gateway = await start_gateway(engine, limits=Limits(body_bytes=100_000))
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        for _ in range(3):  # the client is still sending when it is refused: it must not see a reset connection
            with pytest.raises(openai.APIStatusError, match="larger than 100000 bytes") as caught:
                await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 3_000_000}])
            assert caught.value.status_code == 413
    status, _, reply = await ask(gateway, post(session, b"", route="messages", length="200000"))
    assert (status, json.loads(reply)["error"]["type"]) == (413, "request_too_large")
    for encoding in (None, "gzip", "deflate", "br", "zstd"):
        compress = COMPRESS.get(encoding or "", bytes)
        statuses = []
        for more in (0, 1):
            data = compress(BODY.ljust(100_000 + more))
            headers = [f"content-encoding: {encoding}"] if encoding else []
            statuses.append((await ask(gateway, post(session, data, *headers)))[0])
        assert statuses == [200, 413], encoding
    chunked = b"10000\r\n" + b" " * 65536 + b"\r\n"
    status, _, _ = await ask(gateway, post(session, chunked * 2, "transfer-encoding: chunked"))
    assert status == 413


async def test_strangers_are_refused_before_they_have_sent_a_large_body(
    start_gateway: Start, engine: ScriptedEngine
) -> None:
    gateway = await start_gateway(engine, admin_key="secret")
    [session] = await GatewayClient(gateway.url, admin_key="secret").create_sessions_async([new_session_id()])
    large = str(10_000_000)
    assert (await ask(gateway, post(session, b"", key="guess", length=large)))[0] == 401
    assert (await ask(gateway, post(session, b"1\r\n{\r\n", "transfer-encoding: chunked", key="guess")))[0] == 401
    nobody = SessionHandle(session_id="nobody", base_url="", api_key="x")
    assert (await ask(gateway, post(nobody, b"", length=large)))[0] == 404
    head = f"POST /admin/sessions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {large}\r\n\r\n"
    assert (await ask(gateway, head.encode()))[0] == 401


async def test_connections_that_send_nothing_or_drip_are_closed(start_gateway: Start, engine: ScriptedEngine) -> None:
    gateway = await start_gateway(engine, limits=Limits(idle_connection_s=0.3))
    async with Line(gateway) as silent, Line(gateway) as dripping:
        await dripping.send(b"GET /healthz HTTP/1.1\r\n")

        async def drip() -> None:
            while True:
                dripping.writer.write(b"x-y: z\r\n")
                await asyncio.sleep(0.02)

        dripper = asyncio.ensure_future(drip())
        assert await silent.is_closed()
        assert await dripping.is_closed()
        dripper.cancel()
    await until(lambda: not gateway.connections)


async def test_an_upload_may_take_long_as_long_as_it_makes_progress(
    start_gateway: Start, engine: ScriptedEngine
) -> None:
    gateway = await start_gateway(engine, limits=Limits(connect_s=60.0, idle_connection_s=1.0))
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 600}]}).encode()
    data = post(session, body)
    head = len(data) - len(body)
    async with Line(gateway) as slow, Line(gateway) as silent:
        await silent.send(data[: head + 10])
        await slow.send(data[:head])
        for at in range(head, len(data), 100):
            await asyncio.sleep(0.3)
            await slow.send(data[at : at + 100])
        assert (await slow.answer())[0] == 200
        assert (await silent.answer())[0] == 408


async def test_a_trailer_replaces_no_header(gateway: Gateway, session: SessionHandle) -> None:
    cut = b"%x\r\n%b\r\n0\r\nauthorization: Bearer another\r\nx-agentcore-rl-tag: judge\r\n\r\n" % (len(BODY), BODY)
    assert (await ask(gateway, post(session, cut, "transfer-encoding: chunked")))[0] == 200
    capture = (await GatewayClient(gateway.url).fetch_async([session.session_id]))[session.session_id]
    assert [turn.tag for turn in capture.turns] == [None]


async def test_a_client_that_goes_away_in_the_middle_leaves_nothing(gateway: Gateway, session: SessionHandle) -> None:
    for data in (post(session)[:30], post(session)[:-5], b"GET /admin/stats HTTP/1.1\r\nhost: localhost\r\n\r\n"):
        async with Line(gateway) as line:
            await line.send(data)
            line.writer.transport.abort()
    await until(lambda: not gateway.connections)
    assert not gateway.running.calls
    assert (await ask(gateway, post(session)))[0] == 200


BAD = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff",
    b'{"model":"\xff"}',
    b'{"messages":' + b"[" * 50_000,
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    b'{"max_tokens":' + b"1" * 5000 + b"}",
    b'{"temperature":NaN}',
]


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages", "messages/count_tokens"])
async def test_a_bad_body_is_a_400_in_the_routes_dialect(gateway: Gateway, session: SessionHandle, route: str) -> None:
    async with Line(gateway) as line:
        for body in BAD:
            await line.send(post(session, body, route=route))
            status, _, reply = await line.answer()
            assert status == 400, body[:40]
            error = json.loads(reply)
            assert (error.get("type") == "error") is route.startswith("messages")
            assert error["error"]["type"] == "invalid_request_error"
            assert error["error"]["message"]
