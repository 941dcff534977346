"""Sessions at the runtime's own S3 endpoint: each reaches the record that its caller asked for, and no other object."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.contract import new_session_id

from ..conftest import AGENTS, Server

AGENT = AGENTS / "s3_forger.py"
BUCKET = "results"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux who holds a connection")


class Store:
    """The user's view of the endpoint, and of a session's attempts."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = boto3.client(
            "s3",
            endpoint_url=server.info["s3_url"],
            region_name="us-west-2",
            aws_access_key_id="AKLOCAL",
            aws_secret_access_key="secret",
            config=Config(retries={"total_max_attempts": 1}),
        )

    def key(self, session_id: str, end: str = "json") -> str:
        return f"exp/a/{session_id}.{end}"

    def ask(self, session_id: str, **payload: Any) -> Any:
        block = {"exp_id": "exp", "input_id": "a", "s3_bucket": BUCKET}
        return self.server.invoke({**payload, "_rollout": block}, session_id)

    def body(self, key: str) -> str | None:
        try:
            return str(self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read().decode())
        except ClientError as e:
            if e.response["Error"]["Code"] in ("NoSuchKey", "NoSuchBucket"):
                return None
            raise


@pytest.fixture(scope="module", params=["namespaces", "relay", "landlock", "signed"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("s3-sessions")
    tier = "landlock" if request.param == "landlock" else "namespaces"
    options = ["--isolation", tier, "--s3-dir", str(folder / "s3")]
    if request.param == "relay":
        options += ["--network", "loopback"]
    credential = "AKLOCAL:secret" if request.param == "signed" else None
    server = Server(folder, *options, agent=AGENT, credential=credential)
    yield Store(server)
    assert server.stop() == 0, server.output.read_text()


def put(key: str, body: str = "forged", client: str = "own") -> list[Any]:
    return [client, "put_object", {"Bucket": BUCKET, "Key": key, "Body": body}]


@pytest.mark.parametrize("client", ["own", "at load", "placeholder"])
def test_a_session_writes_its_record_and_heartbeat(store: Store, client: str) -> None:
    """With its own key, and with clients that were made before it had one."""
    me = new_session_id()
    record, heartbeat = store.key(me), store.key(me, "alive")
    reply = store.ask(
        me,
        calls={
            "beat": put(heartbeat, "1", client),
            "beat again": put(heartbeat, "2", client),
            "look": [client, "head_object", {"Bucket": BUCKET, "Key": heartbeat}],
            "store": put(record, "mine", client),
            "read": [client, "get_object", {"Bucket": BUCKET, "Key": record}],
            "end": [client, "delete_object", {"Bucket": BUCKET, "Key": heartbeat}],
        },
    )
    assert reply == {
        "beat": "done",
        "beat again": "done",
        "look": "done",
        "store": "done",
        "read": "mine",
        "end": "done",
    }
    assert store.body(record) == "mine"
    assert store.body(heartbeat) is None


@pytest.mark.threat(
    who="a session",
    tries="read, write, copy, delete or list other sessions' objects at the runtime's S3 endpoint",
    stopped_by="each session has a key of its own, the kernel names those that use another; its own record alone is open to it",
    leaves="what --session-store names, every session may use",
)
@pytest.mark.parametrize("client", ["own", "at load", "placeholder"])
def test_a_session_cannot_touch_anothers_objects(store: Store, client: str) -> None:
    victim, later, me = new_session_id(), new_session_id(), new_session_id()
    store.ask(victim, calls={"store": put(store.key(victim), "theirs")})
    at = {"Bucket": BUCKET, "Key": store.key(victim)}
    refused = {
        "replace": put(store.key(victim), client=client),
        "come first": put(store.key(later), client=client),
        "keep alive": put(store.key(victim, "alive"), client=client),
        "elsewhere": put(f"other/a/{me}.json", client=client),
        "another bucket": [client, "put_object", {"Bucket": "other", "Key": store.key(me), "Body": "x"}],
        "read": [client, "get_object", at],
        "delete": [client, "delete_object", at],
        "delete many": [client, "delete_objects", {"Bucket": BUCKET, "Delete": {"Objects": [{"Key": at["Key"]}]}}],
        "copy from": [client, "copy_object", {"Bucket": BUCKET, "Key": store.key(me), "CopySource": at}],
        "copy to": [client, "copy_object", {**at, "CopySource": {"Bucket": BUCKET, "Key": store.key(me)}}],
        "in parts": [client, "create_multipart_upload", at],
        "list": [client, "list_objects_v2", {"Bucket": BUCKET}],
        "list the experiment": [client, "list_objects_v2", {"Bucket": BUCKET, "Prefix": "exp/a/"}],
        "list uploads": [client, "list_multipart_uploads", {"Bucket": BUCKET}],
        "buckets": [client, "list_buckets", {}],
        "make a bucket": [client, "create_bucket", {"Bucket": "mine"}],
        "remove the bucket": [client, "delete_bucket", {"Bucket": BUCKET}],
    }
    reply = store.ask(me, calls=refused)
    assert reply == dict.fromkeys(refused, "AccessDenied")
    heads = store.ask(
        me, calls={"look": [client, "head_object", at]}, unsigned={"bare": ("GET", f"/{BUCKET}?list-type=2")}
    )
    assert heads == {"look": "403", "bare": 403}
    assert store.body(store.key(victim)) == "theirs"
    assert store.body(store.key(later)) is None


def test_a_session_writes_its_record_once(store: Store) -> None:
    me = new_session_id()
    key = store.key(me)
    parts = {"Bucket": BUCKET, "Key": key}
    reply = store.ask(
        me,
        calls={
            "first": put(key, "first"),
            "second": put(key, "second"),
            "delete": ["own", "delete_object", parts],
            "by match": ["own", "put_object", {**parts, "Body": "x", "IfMatch": '"x"'}],
        },
    )
    assert reply == {
        "first": "done",
        "second": "PreconditionFailed",
        "delete": "AccessDenied",
        "by match": "AccessDenied",
    }
    assert store.body(key) == "first"


def test_keys_are_each_sessions_own(store: Store) -> None:
    one, other = (store.ask(new_session_id(), key=True) for _ in range(2))
    assert one["key"] != other["key"]
    for entries in one, other:
        assert entries["key"].startswith("SESSION")
        assert entries["key"] in entries["signed at load"]  # also by a client that was made before there was a session


def test_the_user_may_do_everything(store: Store) -> None:
    store.client.put_object(Bucket="mine", Key="any", Body=b"x")
    assert [o["Key"] for o in store.client.list_objects_v2(Bucket="mine")["Contents"]] == ["any"]
    store.client.delete_object(Bucket="mine", Key="any")
    store.client.delete_bucket(Bucket="mine")


def test_sessions_get_more_where_that_is_said(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server(
        "--s3-dir", str(tmp_path / "s3"), "--session-store", "data", "--session-store", f"{BUCKET}/shared", agent=AGENT
    )
    reply = Store(server).ask(
        new_session_id(),
        calls={
            "all of a bucket": ["own", "put_object", {"Bucket": "data", "Key": "x/y", "Body": "x"}],
            "list it": ["own", "list_objects_v2", {"Bucket": "data"}],
            "below a prefix": put("shared/x"),
            "list the prefix": ["own", "list_objects_v2", {"Bucket": BUCKET, "Prefix": "shared/"}],
            "copy inside": [
                "own",
                "copy_object",
                {"Bucket": BUCKET, "Key": "shared/y", "CopySource": f"{BUCKET}/shared/x"},
            ],
            "beside the prefix": put("sharedx"),
            "list the bucket": ["own", "list_objects_v2", {"Bucket": BUCKET}],
            "copy in": ["own", "copy_object", {"Bucket": BUCKET, "Key": "shared/z", "CopySource": f"{BUCKET}/exp/a/b"}],
        },
    )
    opened = {name for name, answer in reply.items() if answer != "AccessDenied"}
    assert opened == {"all of a bucket", "list it", "below a prefix", "list the prefix", "copy inside"}
