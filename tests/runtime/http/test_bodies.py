"""Who is not proven sends no body."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable
from urllib.parse import quote, urlsplit

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from ..conftest import Server

WITHIN_S = 60.0


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
