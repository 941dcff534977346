"""S3 when it misbehaves, over real sockets: what is retried, what is final, and what each fault is called."""

from __future__ import annotations

import asyncio
import datetime
import io
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import CredentialRetrievalError
from botocore.response import StreamingBody

from agentcore_rl_toolkit.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    StorePermissionError,
)
from agentcore_rl_toolkit.store import ObjectStore, base, open_store
from agentcore_rl_toolkit.store.boto import BotoStore
from serving import busy_credentials


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "backoff_s", lambda failures: min(0.05, 0.01 * failures))


def s3_error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode()


@pytest.fixture
def remote(scripted: Any) -> ObjectStore:
    return open_store("the-bucket")


@pytest.mark.parametrize(
    "fault",
    [
        (500, s3_error("InternalError")),
        (503, s3_error("SlowDown")),
        (503, b"not even xml"),
        (429, b""),
        (408, s3_error("RequestTimeout")),
        (409, s3_error("ConditionalRequestConflict")),
        (400, s3_error("ThrottlingException")),
        (403, s3_error("RequestTimeTooSkewed")),
        None,
    ],
    ids=["500", "slow-down", "503-plain", "429", "408", "409-conflict", "400-throttling", "clock", "hang-up"],
)
@pytest.mark.parametrize("create_only", [False, True])
async def test_a_passing_fault_is_retried(scripted: Any, remote: ObjectStore, fault: Any, create_only: bool) -> None:
    scripted.answer = lambda _request, n: fault if n <= 3 else (200, b"")
    await remote.put_async("a/k", b"body", create_only=create_only)
    assert scripted.count("PUT") == 4
    assert {r.body for r in scripted.requests} == {b"body"}
    assert all(("if-none-match" in r.headers) == create_only for r in scripted.requests)


async def test_reading_and_listing_are_retried_too(scripted: Any, remote: ObjectStore) -> None:
    listing = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    scripted.answer = lambda r, n: (503, b"") if n % 2 else (200, listing if "list-type" in r.path else b"content")
    assert await remote.get_async("k") == b"content"
    assert (await remote.head_async("k")).size == len(b"content")
    assert await remote.list_async("p/") == []
    assert len(scripted.requests) == 6


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (403, "AccessDenied", StorePermissionError),
        (403, "InvalidAccessKeyId", StorePermissionError),
        (401, "Unauthorized", StorePermissionError),
        (400, "EntityTooLarge", StoreError),
        (400, "AuthorizationHeaderMalformed", StoreError),
        (301, "PermanentRedirect", StoreError),
        (404, "NoSuchBucket", StoreError),
        (501, "NotImplemented", StoreError),
    ],
)
async def test_a_lasting_fault_is_told_at_once(
    scripted: Any, remote: ObjectStore, status: int, code: str, error: type[Exception]
) -> None:
    scripted.answer = lambda _request, _n: (status, s3_error(code))
    with pytest.raises(error) as caught:
        await remote.put_async("a/k", b"body")
    assert len(scripted.requests) == 1
    assert not isinstance(caught.value, ObjectNotFoundError)
    assert "Debug source" not in str(caught.value)
    assert caught.value.permanent


async def test_a_store_without_conditional_writes_is_reported_in_its_own_words(
    scripted: Any, remote: ObjectStore
) -> None:
    scripted.answer = lambda r, _n: (501, s3_error("NotImplemented")) if "if-none-match" in r.headers else (200, b"")
    with pytest.raises(StoreError, match=r"'a/k' in s3://the-bucket.*NotImplemented.*as told"):
        await remote.put_async("a/k", b"body", create_only=True)
    assert len(scripted.requests) == 1


FORKS = """
import os, sys
from agentcore_rl_toolkit.errors import ObjectExistsError, ObjectNotFoundError
from agentcore_rl_toolkit.store import open_store
store = open_store(sys.argv[1])
store.put("e/parent", b"1")
child = os.fork()
if child == 0:
    store.put("e/child", b"22", create_only=True)
    for again in (store, open_store(sys.argv[1])):
        try:
            again.put("e/child", b"3", create_only=True)
        except ObjectExistsError:
            print("exists", flush=True)
    try:
        store.head("e/none")
    except ObjectNotFoundError:
        print("missing", flush=True)
    print([item.key for item in store.list("e/")], store.get("e/child"), store.head("e/child").size, flush=True)
    store.delete("e/child")
    os._exit(0)
print(os.waitpid(child, 0)[1], [item.key for item in store.list("e/")])
"""


def test_a_child_of_a_process_that_used_s3_can_use_it(bucket: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS, f"s3://{bucket}/some/where"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "exists",
        "exists",
        "missing",
        "['e/child', 'e/parent'] b'22' 2",
        "0 ['e/parent']",
    ]


async def test_a_lost_answer_to_a_create_that_succeeded_is_a_success(scripted: Any, remote: ObjectStore) -> None:
    stored: list[bytes] = []

    def answer(request: Any, _n: int) -> tuple[int, bytes] | None:
        if request.method == "GET":
            return 200, stored[0]
        if stored:
            return 412, s3_error("PreconditionFailed")
        stored.append(request.body)
        return None  # stored, but nobody hears of it

    scripted.answer = answer
    await remote.put_async("k", b"mine", create_only=True)
    assert [r.method for r in scripted.requests] == ["PUT", "PUT", "GET"]


async def test_a_lost_answer_does_not_hide_somebody_elses_object(scripted: Any, remote: ObjectStore) -> None:
    def answer(request: Any, n: int) -> tuple[int, bytes] | None:
        if request.method == "GET":
            return 200, b"theirs"
        return None if n == 1 else (412, s3_error("PreconditionFailed"))

    scripted.answer = answer
    with pytest.raises(ObjectExistsError):
        await remote.put_async("k", b"mine", create_only=True)


async def test_a_refused_try_is_no_lost_answer(scripted: Any, remote: ObjectStore) -> None:
    scripted.answer = lambda r, n: (429, b"") if n == 1 else (412, s3_error("PreconditionFailed"))
    with pytest.raises(ObjectExistsError):
        await remote.put_async("k", b"mine", create_only=True)
    assert scripted.count("GET") == 0


async def test_retries_end_at_the_deadline_and_say_why(scripted: Any, remote: ObjectStore) -> None:
    scripted.answer = lambda _request, _n: (503, s3_error("SlowDown"))
    started = time.monotonic()
    with pytest.raises(
        StoreError, match=r"put of 'k' in s3://the-bucket did not succeed within .* attempts\); last fault.*503"
    ) as caught:
        await remote.put_async("k", b"", timeout_s=2)
    assert 0.3 <= time.monotonic() - started < 20
    attempts = int(re.findall(r" \((\d+) attempts\); ", str(caught.value))[0])
    assert attempts > 3
    with pytest.raises(StoreError):
        await remote.put_async("k", b"", timeout_s=0)
    assert len(scripted.requests) - attempts in (0, 1), (
        "the deadline may have ended the last attempt before it was read"
    )


async def test_a_server_that_never_answers_costs_one_try_and_not_the_operation(scripted: Any) -> None:
    store = open_store("the-bucket")
    store.attempt_s = 1.0

    done, statuses = threading.Event(), [None, 200]

    def answer(_request: Any, _n: int) -> tuple[int, bytes]:
        status = statuses.pop(0) if statuses else None
        if status is None:
            done.wait(60)
        return status or 200, b"content"

    scripted.answer = answer
    try:
        assert await store.get_async("k", timeout_s=50) == b"content"
        for statuses[:], last in (([], "no answer in time$"), ([500], ".*500"), ([500, 503], ".*503")):
            with pytest.raises(StoreError, match=f"last fault: {last}"):
                await store.get_async("k", timeout_s=1.4)
    finally:
        done.set()


@pytest.mark.parametrize("boto3", [False, True])
async def test_a_listing_of_many_pages_may_take_longer_than_an_attempt(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, boto3: bool
) -> None:
    monkeypatch.setattr("agentcore_rl_toolkit.store.remote._used_in", {-1} if boto3 else set())
    store = open_store("the-bucket")
    store.attempt_s, store.bytes_per_s = 1.0, 1e12

    def answer(request: Any, n: int) -> tuple[int, bytes]:
        time.sleep(0.3)
        more = f"<NextContinuationToken>{n}</NextContinuationToken>" if n < 6 else ""
        rest = "<LastModified>2026-01-01T00:00:00Z</LastModified><Size>1</Size>"
        found = "".join(f"<Contents><Key>e/{n}-{i:03}</Key>{rest}</Contents>" for i in range(1000))
        text = f"<ListBucketResult><IsTruncated>{str(n < 6).lower()}</IsTruncated>{more}{found}</ListBucketResult>"
        return 200, text.encode()

    scripted.answer = answer
    assert len(await store.list_async("e/")) == 6_000
    assert len(scripted.requests) == 6


async def test_an_endpoint_that_is_down_is_a_passing_fault(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    store = open_store("the-bucket")
    with pytest.raises(StoreError, match="did not succeed within"):
        await store.put_async("k", b"", timeout_s=0.3)
    assert scripted.requests == []


@pytest.mark.parametrize("used_in", [set(), {-1}])
@pytest.mark.parametrize("session", [lambda: None, boto3.Session])
async def test_expired_credentials_are_fetched_again(
    scripted: Any, remote: ObjectStore, monkeypatch: pytest.MonkeyPatch, session: Callable[[], Any], used_in: set[int]
) -> None:
    monkeypatch.setattr("agentcore_rl_toolkit.store.remote._used_in", used_in)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", session())

    def answer(request: Any, _n: int) -> tuple[int, bytes]:
        if "Credential=fresh/" in request.headers["authorization"]:
            return 200, b""
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "fresh")  # what a credential refresher does between two requests
        return 400, s3_error("ExpiredToken")

    scripted.answer = answer
    await remote.put_async("k", b"")
    assert len(scripted.requests) == 2


@pytest.mark.system
async def test_listing_follows_every_page(bucket: str) -> None:
    store = open_store(bucket)
    gate = asyncio.Semaphore(16)

    async def put(i: int) -> None:
        async with gate:
            await store.put_async(f"e/{i:05d}", b"")

    await asyncio.gather(*(put(i) for i in range(1100)))
    listed = [o.key for o in await store.list_async("e/")]
    assert listed == [f"e/{i:05d}" for i in range(1100)]


async def test_credentials_from_a_profile(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "creds").write_text("[work]\naws_access_key_id = testing\naws_secret_access_key = testing\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "creds"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    store = open_store(bucket)
    await store.put_async("k", b"1", create_only=True)
    assert await store.get_async("k") == b"1"


@pytest.mark.parametrize("boto3", [False, True])
async def test_a_source_of_credentials_that_is_busy_is_asked_again(
    scripted: Any, remote: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boto3: bool
) -> None:
    monkeypatch.setattr("agentcore_rl_toolkit.store.remote._used_in", {-1} if boto3 else set())
    busy_credentials(tmp_path, monkeypatch, busy=3)
    await remote.put_async("k", b"")
    assert [r.headers["authorization"].count("Credential=AKLATE/") for r in scripted.requests] == [1]


async def test_a_source_of_credentials_that_fails_between_two_requests_is_asked_again(
    scripted: Any, remote: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage: list[Exception] = []

    def credentials() -> dict[str, Any]:
        if outage:
            raise outage.pop()
        expires_at = datetime.datetime.now(datetime.UTC)
        return {"access_key_id": "a", "secret_access_key": "s", "token": None, "expires_at": expires_at}

    monkeypatch.setattr("agentcore_rl_toolkit.store.remote.find_provider", lambda **_: credentials)
    await remote.put_async("k", b"")
    outage += [CredentialRetrievalError(provider="sso", error_msg="busy"), OSError("no answer"), TimeoutError()]
    await remote.put_async("k", b"")
    outage += [OSError("no answer")] * 1000
    with pytest.raises(StoreError, match=r"credentials for the store.*no answer") as caught:
        await remote.get_async("k", timeout_s=0.2)
    assert not caught.value.permanent


@pytest.mark.parametrize("boto3", [False, True])
async def test_a_head_with_an_expired_token_has_no_body_and_is_repeated(
    scripted: Any, remote: ObjectStore, monkeypatch: pytest.MonkeyPatch, boto3: bool
) -> None:
    monkeypatch.setattr("agentcore_rl_toolkit.store.remote._used_in", {-1} if boto3 else set())
    scripted.answer = lambda _request, n: (400, b"") if n < 3 else (200, b"four")
    assert (await remote.head_async("k")).size == 4


class Breaking:
    """A boto3-like client whose first replies break off in the body."""

    def __init__(self, breaks: int) -> None:
        self.breaks = breaks

    def get_object(self, **_: Any) -> dict[str, Any]:
        self.breaks -= 1
        raw = io.BytesIO(b"who" if self.breaks >= 0 else b"whole")
        return {"Body": StreamingBody(raw, 5), "ContentLength": 5}


async def test_a_body_that_breaks_off_is_read_again_with_boto3_too() -> None:
    store = BotoStore("s3://b", Breaking(2), "b", "")
    assert await store.get_async("k") == b"whole"
    with pytest.raises(StoreError, match="3 read, but total bytes expected is 5"):
        await BotoStore("s3://b", Breaking(1), "b", "").get_async("k", timeout_s=0)


async def test_no_credentials_at_all_is_a_clear_error(
    scripted: Any, remote: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StorePermissionError, match="no credentials for the store: export AWS_ACCESS_KEY_ID"):
        await remote.put_async("k", b"", timeout_s=5)
    assert scripted.requests == []
