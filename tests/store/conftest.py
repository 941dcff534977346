"""Stores under test: a directory, memory, a real S3 server (moto), and an S3 endpoint that misbehaves as told."""

from __future__ import annotations

import contextlib
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from moto.s3.responses import S3Response

from agentcore_rl_toolkit.store import ObjectStore, open_store
from serving import Asked, answering, moto_server


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """moto's server. It looks for a key and writes it in two steps, on many threads; S3 does so in one, and here it does too."""
    one_at_a_time, put = threading.Lock(), S3Response.put_object

    def put_object(self: S3Response) -> Any:
        with one_at_a_time:
            return put(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Response, "put_object", put_object)
        with moto_server() as url:
            yield url


@pytest.fixture
def aws_env(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture
def bucket(s3_endpoint: str, aws_env: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh bucket on the S3 server that the environment points at."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_endpoint)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    import urllib.request

    request = urllib.request.Request(f"{s3_endpoint}/{name}", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request")
    with urllib.request.urlopen(request, timeout=10) as response:
        assert response.status == 200
    return name


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """Each kind of store in turn, empty."""
    kind = request.param
    if kind == "file":
        return open_store(f"file://{tmp_path}/a folder/objects")
    if kind == "memory":
        return open_store(f"memory://{uuid.uuid4().hex}/some/where")
    return open_store(
        f"s3://{request.getfixturevalue('bucket')}/some/where"
    )  # other tests read buckets without a prefix


@dataclass
class Scripted:
    """An S3 endpoint that answers each request with what `answer` returns: (status, body), or None to hang up without a word."""

    url: str = ""
    requests: list[Asked] = field(default_factory=list)
    answer: Callable[[Asked, int], tuple[int, bytes] | None] = lambda _request, _n: (200, b"")

    def count(self, method: str) -> int:
        return sum(r.method == method for r in self.requests)


@contextlib.contextmanager
def answering_s3(answer: Callable[[Asked, int], tuple[int, bytes] | None]) -> Iterator[str]:
    """An S3 endpoint on a free port, whose requests `answer` answers, as in `Scripted`."""
    numbers = itertools.count(1)

    def whole(request: Asked) -> tuple[Any, ...] | None:
        said = answer(request, next(numbers))
        return said and (*said, {"ETag": '"0123"', "Last-Modified": "Fri, 20 Nov 2026 10:00:00 GMT"})

    with answering(whole) as url:
        yield url


@pytest.fixture
def scripted(aws_env: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    script = Scripted()

    def answer(request: Asked, number: int) -> tuple[int, bytes] | None:
        script.requests.append(request)
        return script.answer(request, number)

    with answering_s3(answer) as script.url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", script.url)
        yield script
