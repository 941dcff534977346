"""The bounds of connections, on a real server in this process with short times."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from agentcore_rl_toolkit._servers.bounded_http import HEADER_BYTES, BoundedProtocol, Bounds
from agentcore_rl_toolkit._servers.host_check import HostCheck

WITHIN_S = 30.0
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo:
    """Answers with the length of the body once it is whole; ``/early`` is answered before."""

    def __init__(self) -> None:
        self.gone = 0
        self.held = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone += 1
                return
            size, more = size + len(message["body"]), message["more_body"]
        if scope["path"] == "/held":
            await self.held.wait()
        body = b"%d" % size
        head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]}
        await send(head)
        await send({"type": "http.response.body", "body": body})


class Running:
    def __init__(self, app: Echo, server: uvicorn.Server) -> None:
        self.app = app
        self.server = server
        self.port = server.servers[0].sockets[0].getsockname()[1]
        self.lines: list[Line] = []

    async def line(self) -> Line:
        self.lines.append(await asyncio.open_connection("127.0.0.1", self.port))
        return self.lines[-1]

    async def hang_up(self) -> None:
        for _, writer in self.lines:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(**bounds: Any) -> AsyncIterator[Running]:
    app = Echo()
    protocol: Any = functools.partial(BoundedProtocol, bounds=Bounds(hosts=HostCheck(), **bounds))
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_level="error", port=0)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # as above
        assert not task.done()
        await asyncio.sleep(0.005)
    running = Running(app, server)
    try:
        yield running
    finally:
        app.held.set()
        await running.hang_up()
        server.should_exit = True
        await asyncio.wait_for(task, WITHIN_S)


async def response(line: Line) -> tuple[int, bytes]:
    """Status and body of the next response; status 0 when the connection ends instead."""
    try:
        async with asyncio.timeout(WITHIN_S):
            head = await line[0].readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            return int(head.split(b" ")[1]), await line[0].readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0, b""


async def ended(line: Line) -> bool:
    async with asyncio.timeout(WITHIN_S):
        with contextlib.suppress(ConnectionError):
            return await line[0].read() == b""
        return True


GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def test_a_head_of_64_kilobytes_passes_and_a_larger_one_is_431() -> None:
    async with serving() as running:
        for size, status in ((HEADER_BYTES - 1000, 200), (HEADER_BYTES + 3000, 431), (20 * HEADER_BYTES, 431)):
            line = await running.line()
            fields = b"".join(b"x-%d: %s\r\n" % (n, b"v" * 1000) for n in range(size // 1010))
            line[1].write(b"GET / HTTP/1.1\r\nhost: localhost\r\n" + fields + b"\r\n")
            assert (await response(line))[0] == status, size
            line[1].close()


@pytest.mark.parametrize(
    "begun",
    [
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ",
        b"GET /",
        b"\r\n",
        b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ",
        b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1;",
    ],
    ids=["header", "path", "blank", "trailer", "extension"],
)
async def test_what_never_ends_is_cut(begun: bytes) -> None:
    async with serving() as running:
        line = await running.line()
        line[1].write(begun)
        piece = b"\r\n" * 2048 if begun == b"\r\n" else b"v" * 4096

        async def pour() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    line[1].write(piece)
                    await line[1].drain()
                    await asyncio.sleep(0)

        pouring = asyncio.create_task(pour())
        assert (await response(line))[0] in (0, 431)
        pouring.cancel()
        await asyncio.gather(pouring, return_exceptions=True)


async def test_many_trailers_are_not_kept() -> None:
    async with serving() as running:
        line = await running.line()
        trailers = b"".join(b"x-%d: v\r\n" % n for n in range(20_000))
        line[1].write(
            b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n" + trailers
        )
        assert (await response(line))[0] in (0, 431)


async def test_a_head_that_trickles_in_has_a_deadline() -> None:
    async with serving(head_s=0.5) as running:
        line = await running.line()

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                line[1].write(GET[:-2] + b"x: ")
                while True:
                    line[1].write(b"v")
                    await line[1].drain()
                    await asyncio.sleep(0.05)

        sending = asyncio.create_task(trickle())
        assert (await response(line))[0] == 408
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_a_connection_that_says_nothing_is_closed_and_one_that_is_used_is_not() -> None:
    async with serving(fresh_s=0.3, head_s=0.3) as running:
        used, silent = await running.line(), await running.line()
        used[1].write(GET)
        assert (await response(used))[0] == 200
        assert await ended(silent)
        used[1].write(GET)
        assert (await response(used))[0] == 200


async def test_a_body_that_stops_coming_ends_its_request() -> None:
    async with serving(body_s=0.3) as running:
        line = await running.line()
        line[1].write(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\nabc")
        assert await ended(line)
        async with asyncio.timeout(WITHIN_S):
            while not running.app.gone:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_request_that_takes_long_is_no_idle_connection() -> None:
    async with serving(head_s=0.1, fresh_s=0.1, body_s=0.1) as running:
        line, other = await running.line(), await running.line()
        line[1].write(GET.replace(b"/ ", b"/held "))
        assert await ended(other)  # the deadlines were looked at
        await asyncio.sleep(1.5)  # and once more
        running.app.held.set()
        assert (await response(line))[0] == 200


async def test_an_error_does_not_come_in_the_middle_of_a_response() -> None:
    async with serving() as running:
        line = await running.line()
        line[1].write(GET.replace(b"/ ", b"/held ") + GET.replace(b"localhost", b"evil.example"))
        await asyncio.sleep(0.05)
        running.app.held.set()
        assert await response(line) == (200, b"0")
        assert await ended(line)


async def test_what_follows_a_refused_request_is_not_answered() -> None:
    async with serving() as running:
        line = await running.line()
        bad = b"POST / HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 40\r\n\r\n"
        line[1].write(bad + GET + GET + GET)
        status, body = await response(line)
        assert status == 421
        assert b"--allowed-host evil.example" in body
        assert await ended(line)


async def test_two_hosts_are_none() -> None:
    async with serving() as running:
        line = await running.line()
        line[1].write(b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n")
        assert (await response(line))[0] == 421


async def test_idle_connections_make_room_and_a_used_one_stays() -> None:
    async with serving(connections=64) as running:
        kept = await running.line()
        kept[1].write(GET)
        assert (await response(kept))[0] == 200
        lines = []
        for _ in range(400):
            lines.append(await running.line())
            if len(lines) % 20 == 0:
                newcomer = await running.line()
                newcomer[1].write(GET)
                assert (await response(newcomer))[0] == 200
                newcomer[1].close()
        assert len(running.server.server_state.connections) <= 112
        kept[1].write(GET)
        assert (await response(kept))[0] == 200


async def test_a_connection_that_is_gone_gives_its_place_back() -> None:
    async with serving(connections=64) as running:
        for _ in range(200):
            line = await running.line()
            line[1].write(GET)
            assert (await response(line))[0] == 200
            line[1].close()
            await line[1].wait_closed()
        async with asyncio.timeout(WITHIN_S):
            while running.server.server_state.connections:  # noqa: ASYNC110  # uvicorn has no event for it
                await asyncio.sleep(0.01)
