"""The application inside another one, under a path prefix, in the process of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from agentcore_rl_toolkit._servers.process import listen, url_of
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.s3 import S3App, S3Config

from .cases import fetch, keys_of, refused
from .conftest import ACCESS, SECRET, client_for


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[str]:
    """The address of a server whose paths under /objects belong to the S3 application."""
    inner = S3App(S3Config(root=tmp_path / "data", credentials={ACCESS: SECRET}, auto_create=True, mount="/objects"))

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].startswith("/objects/"):
            await inner(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 418, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    sock = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(outer, lifespan="off", ws="none", log_level="warning"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    yield url_of(sock)
    server.should_exit = True
    thread.join(timeout=20)
    sock.close()
    inner.close()


def test_signed_requests_under_a_prefix(mounted: str) -> None:
    client = client_for(f"{mounted}/objects")
    client.put_object(Bucket="first", Key="a b/é", Body=b"x")
    client.copy_object(Bucket="first", Key="copy", CopySource={"Bucket": "first", "Key": "a b/é"})
    assert keys_of(client.list_objects_v2(Bucket="first")) == ["a b/é", "copy"]
    assert fetch(client.generate_presigned_url("get_object", Params={"Bucket": "first", "Key": "copy"})) == (200, b"x")
    assert refused(lambda: client.get_object(Bucket="first", Key="no")) == ("NoSuchKey", 404)
    assert fetch(f"{mounted}/elsewhere")[0] == 418
    client.close()


def test_buckets_asked_for_must_have_names_that_s3_takes(tmp_path: Path) -> None:
    app = S3App(S3Config(root=tmp_path / "data"))
    app.ensure_buckets(["fine", "fine"])
    with pytest.raises(ConfigError, match="Not_Fine"):
        app.ensure_buckets(["Not_Fine"])
    app.close()
