"""The notification listener: HTTP parsing at every split, and what it believes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client

import psutil
import pytest

from agentcore_rl_toolkit.client.records.push import PushListener, read_request

REQUEST = b'POST /tok/s1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 12\r\n\r\n{"a": "b\xc3\xa4"}'


def test_request_is_complete_exactly_at_its_end() -> None:
    head_end = REQUEST.index(b"\r\n\r\n") + 4
    for cut in range(len(REQUEST)):
        parsed = read_request(REQUEST[:cut])
        assert (parsed is None) == (cut < head_end)
    whole = read_request(REQUEST)
    assert whole is not None
    assert whole[:2] == ("/tok/s1", len(REQUEST))


@pytest.mark.parametrize("data", [b"hello\r\n\r\n", b"GET /\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"])
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_request(data)


def post(url: str) -> int:
    host, path = url.removeprefix("http://").split("/", 1)
    connection = http.client.HTTPConnection(host, timeout=5)
    try:
        connection.request("POST", "/" + path, b'{"anything": 1}')
        return connection.getresponse().status
    finally:
        connection.close()


async def test_right_token_reaches_the_client_and_a_wrong_one_does_not() -> None:
    events: list[str] = []
    listener = PushListener(events.append)
    assert listener.url_for("s") == ""
    await listener.start()
    url = listener.url_for("session-1")
    assert url.startswith("http://127.0.0.1:")
    assert await asyncio.to_thread(post, url) == 204
    base = url.rsplit("/", 2)[0]
    assert await asyncio.to_thread(post, f"{base}/guess/session-2") == 404
    assert events == ["session-1"]
    assert listener.received == 1
    await listener.close()


async def test_split_request_is_put_together_and_rubbish_closes_the_connection() -> None:
    received: list[str] = []
    listener = PushListener(received.append)
    await listener.start()
    url = listener.url_for("s9")
    host, port = url.split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = f"POST /{url.split('/', 3)[3]} HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc".encode()
    for i in range(len(raw)):
        writer.write(raw[i : i + 1])
        await writer.drain()
    assert (await reader.read()).startswith(b"HTTP/1.1 204")
    writer.close()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
    try:
        answer = await asyncio.wait_for(reader.read(), 8)
    except ConnectionResetError:
        answer = b""
    assert answer == b""
    writer.close()
    assert received == ["s9"]
    await listener.close()


async def test_close_hangs_up_on_who_is_in_the_middle_of_a_request() -> None:
    listener = PushListener(lambda _: None)
    await listener.start()
    host, _, port = listener.url_for("s").split("/")[2].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(REQUEST[:20])
    await writer.drain()
    for _ in range(100):  # until it is accepted: what is still queued then is reset by the system
        await asyncio.sleep(0)
    await listener.close()
    async with asyncio.timeout(8):  # not the ten seconds after which a silent caller is let go
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()


async def test_a_start_that_is_cancelled_leaves_no_listening_socket() -> None:
    """A client that is closed while its first rollout starts cancels it wherever it is."""

    def listening() -> set[int]:
        own = psutil.Process().net_connections("tcp")
        return {found.laddr.port for found in own if found.status == psutil.CONN_LISTEN}

    before = listening()
    for steps in range(6):
        listener = PushListener(lambda _: None)
        starting = asyncio.create_task(listener.start())
        for _ in range(steps):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
        await listener.close()
        await asyncio.sleep(0)
        assert listening() <= before, f"cancelled after {steps} steps"
