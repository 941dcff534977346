"""Bodies that are longer than anybody needs: of agents, and of callers who may not call."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import psutil
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.contract import new_session_id

from ..conftest import AGENTS, Server, wait_for

MB = 2**20
WITHIN_S = 60.0


@pytest.fixture
def endless(start_server: Callable[..., Server]) -> Server:
    return start_server(agent=AGENTS / "endless.py")


@contextlib.contextmanager
def held_memory(server: Server) -> Iterator[Callable[[], int]]:
    """How much more the runtime's own process holds than at the start, at most so far. Units: bytes."""
    process = psutil.Process(server.process.pid)
    first = most = process.memory_info().rss

    def measured() -> int:
        nonlocal most
        most = max(most, process.memory_info().rss)
        return most - first

    yield measured


def refused(server: Server, payload: dict[str, Any], session_id: str) -> ClientError:
    with pytest.raises(ClientError) as error:
        server.invoke(payload, session_id)
    return error.value


@pytest.mark.parametrize("mb", [1500, None], ids=["1.5 GB", "endless"])
def test_an_agents_error_costs_the_runtime_no_memory(endless: Server, mb: int | None) -> None:
    session_id = new_session_id()
    endless.invoke({}, session_id)
    with held_memory(endless) as measured:
        started_s = time.monotonic()
        error = refused(endless, {"error": True, "mb": mb}, session_id)
        assert "Received error (500)" in str(error)
        assert time.monotonic() - started_s < WITHIN_S
        assert measured() < 64 * MB
    assert endless.invoke({}, session_id) == {"fine": True}


def test_headers_without_end_are_no_reply(endless: Server) -> None:
    error = refused(endless, {"headers": 40}, new_session_id())
    assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 424


def test_an_endless_ping_costs_the_runtime_no_memory(start_server: Callable[..., Server]) -> None:
    server = start_server("--idle-timeout", "2", agent=AGENTS / "endless.py")
    session_id = new_session_id()
    with held_memory(server) as measured:
        server.invoke({"ping": True}, session_id)
        wait_for(lambda: measured() > 64 * MB or server.ended(session_id), within_s=WITHIN_S)
        assert measured() < 64 * MB
    assert server.ended(session_id)  # it is not healthy and busy for ever


# -- who is not proven sends no body


def signed(server: Server, body: bytes, *, secret: str = "secret", key: str = "AKLOCAL", say: bool = True) -> list[str]:
    url = f"{server.url}/runtimes/{quote(server.arn, safe='')}/invocations"
    request = AWSRequest("POST", url, data=body)
    if say:
        request.headers["x-amz-content-sha256"] = hashlib.sha256(body).hexdigest()
    SigV4Auth(Credentials(key, secret), "bedrock-agentcore", "us-west-2").add_auth(request)
    lines = [f"POST {url.removeprefix(server.url)} HTTP/1.1", f"host: {urlsplit(url).netloc}"]
    return [*lines, *(f"{name}: {value}" for name, value in request.headers.items())]


def answered(server: Server, lines: list[str], body: bytes, *, length: int | None = None) -> tuple[int, str]:
    """Status and body of the response, after sending so much of the body and no more."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=WITHIN_S) as sock:
        kept = [line for line in lines if not line.lower().startswith("content-length")]
        kept += [f"content-length: {len(body) if length is None else length}", "", ""]
        sock.sendall("\r\n".join(kept).encode() + body)
        received = b""
        while b"\r\n\r\n" not in received:
            piece = sock.recv(65536)
            assert piece, "the connection ended without a response"
            received += piece
        head, _, rest = received.partition(b"\r\n\r\n")
        wanted = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(rest) < wanted:
            rest += sock.recv(65536)
        return int(head.split(b" ")[1]), rest.decode()


@pytest.fixture
def guarded(start_server: Callable[..., Server]) -> Server:
    return start_server(credential="AKLOCAL:secret")


def test_a_stranger_is_refused_before_sending_a_body(guarded: Server) -> None:
    body = json.dumps({"do": "echo"}).encode()
    old = signed(guarded, body)
    for lines in (
        signed(guarded, body, secret="guess"),
        signed(guarded, body, key="UNKNOWN"),
        signed(guarded, body, key="UNKNOWN", say=False),
        [line for line in old if not line.lower().startswith("authorization")],
        [line if not line.lower().startswith("x-amz-date") else "x-amz-date: 20200101T000000Z" for line in old],
    ):
        status, _ = answered(guarded, lines, b"", length=90_000_000)
        assert status == 403


def test_a_body_is_held_against_the_hash_that_was_signed(guarded: Server) -> None:
    body = json.dumps({"do": "echo"}).encode()
    assert answered(guarded, signed(guarded, body), body)[0] == 200
    assert answered(guarded, signed(guarded, body, say=False), body)[0] == 200
    for say in (True, False):
        other = body.replace(b"echo", b"exit")
        assert answered(guarded, signed(guarded, body, say=say), other)[0] == 403
