"""Without a credential the endpoint belongs to the user who started it: the kernel says who asks."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from ..conftest import Server as Runtime
from .conftest import Server, client_for

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")


def as_nobody(url: str, *requests: str) -> list[int]:
    """The statuses that another user of this machine gets, each on a connection of its own."""
    parts = urlsplit(url)
    "localhost".encode("idna")  # loaded now: the other user cannot read this interpreter's files
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            statuses = []
            for request in requests:
                with socket.create_connection((parts.hostname, parts.port), timeout=20) as sock:
                    head = (
                        f"{request} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: 3\r\nConnection: close\r\n\r\n"
                    )
                    sock.sendall(head.encode() + b"abc")
                    statuses.append(sock.recv(4096).split(b" ")[1].decode())
            os.write(write, ",".join(statuses).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with open(read) as pipe:
        answer = pipe.read()
    assert status == 0
    return [int(word) for word in answer.split(",")]


ATTACKS = (
    "PUT /keep/k",
    "DELETE /keep/k",
    "POST /keep?delete",
    "DELETE /keep",
    "GET /keep/k",
    "GET /",
    "PUT /new",
    "POST /keep/k?uploads",
)


@needs_root
@pytest.mark.threat(
    who="another user of this machine",
    tries="read, overwrite or delete objects of an S3 endpoint that was started without a credential",
    stopped_by="the kernel says whose a connection is: only the user who started the endpoint, and root, need no signature",
    leaves="--open takes everybody; elsewhere than on Linux every program of this machine counts as the user's",
)
def test_another_user_of_this_machine_is_refused(start_server: Callable[..., Server]) -> None:
    server = start_server("--bucket", "keep", "--auto-create")
    client = client_for(server.url, "any", "any")
    client.put_object(Bucket="keep", Key="k", Body=b"mine")
    assert as_nobody(server.url, *ATTACKS) == [403] * len(ATTACKS)
    assert client.get_object(Bucket="keep", Key="k")["Body"].read() == b"mine"
    assert [b["Name"] for b in client.list_buckets()["Buckets"]] == ["keep"]
    client.close()


@needs_root
def test_everybody_may_where_that_is_asked_for(start_server: Callable[..., Server]) -> None:
    server = start_server("--bucket", "keep", "--open")
    assert as_nobody(server.url, "PUT /keep/k", "DELETE /keep/k") == [200, 204]


@needs_root
def test_a_signature_is_asked_for_of_everybody_where_there_is_a_credential(start_server: Callable[..., Server]) -> None:
    server = start_server("--bucket", "keep", credential="one:two")
    assert as_nobody(server.url, *ATTACKS) == [403] * len(ATTACKS)
    stranger = client_for(server.url, "any", "any")
    with pytest.raises(ClientError, match="InvalidAccessKeyId"):
        stranger.list_buckets()
    stranger.close()


@needs_root
def test_the_endpoint_of_a_runtime_is_its_users_and_its_sessions(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("runtime")
    runtime = Runtime(folder, "--s3-dir", str(folder / "s3"))
    try:
        client = client_for(runtime.info["s3_url"], "any", "any")
        client.create_bucket(Bucket="keep")
        client.put_object(Bucket="keep", Key="k", Body=b"mine")
        assert as_nobody(runtime.info["s3_url"], *ATTACKS) == [403] * len(ATTACKS)
        assert client.get_object(Bucket="keep", Key="k")["Body"].read() == b"mine"
        environment = runtime.invoke({"do": "where"})["env"]
        session = client_for(
            runtime.info["s3_url"], environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
        )
        assert session.get_object(Bucket="keep", Key="k")["Body"].read() == b"mine"
        session.close()
        client.close()
    finally:
        assert runtime.stop() == 0
