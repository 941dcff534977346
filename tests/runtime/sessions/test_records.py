"""Records of sessions in a directory: every session has its own, written once, and no other's."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.runtime.sessions.records import Records

from ..conftest import AGENTS, Server, wait_for

FORGER = AGENTS / "forger.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel has to say which session connects")


class Rollouts:
    """Calls an agent as a client would, with a store on this disk."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.url = f"file://{folder}"

    def key(self, session_id: str, input_id: str = "a") -> str:
        return f"exp/{input_id}/{session_id}.json"

    def start(self, session_id: str, input_id: str = "a", **payload: Any) -> Any:
        block = {"exp_id": "exp", "input_id": input_id, "s3_bucket": self.url, "heartbeat_s": 0.2}
        return self.server.invoke({**payload, "_rollout": block}, session_id)

    def record(self, session_id: str, input_id: str = "a") -> Any:
        file = self.folder / self.key(session_id, input_id)
        wait_for(file.exists)
        return json.loads(file.read_text())

    def run(self, session_id: str | None = None, **payload: Any) -> Any:
        session_id = session_id or new_session_id()
        assert self.start(session_id, **payload)["status"] == "processing"
        return self.record(session_id)


@pytest.fixture(scope="module", params=["namespaces", "landlock", "process"])
def tier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    server = Server(tmp_path_factory.mktemp("records"), "--isolation", request.param, agent=FORGER)
    yield server
    assert server.stop() == 0, server.output.read_text()


@pytest.fixture
def rollouts(tier: Server, tmp_path: Path) -> Rollouts:
    return Rollouts(tier, tmp_path / "store")


def test_sessions_keep_their_records_in_a_directory_without_a_word_about_it(rollouts: Rollouts) -> None:
    session_id = new_session_id()
    record = rollouts.run(session_id)
    assert record["rewards"] == 1.0
    assert record["result_key"] == rollouts.key(session_id)
    wait_for(lambda: os.listdir(rollouts.folder / "exp" / "a") == [f"{session_id}.json"])  # and no heartbeat any more


def test_a_large_record_arrives_whole(rollouts: Rollouts) -> None:
    assert len(rollouts.run(bytes=20_000_000)["text"]) == 20_000_000


def test_the_published_ids_arrive(rollouts: Rollouts) -> None:
    for input_id in ("7", "ü/ä", "a b", "100%", "x?y#z&"):
        session_id = new_session_id()
        rollouts.start(session_id, input_id)
        wait_for(lambda name=f"{session_id}.json": list(rollouts.folder.rglob(name)))


@pytest.mark.threat(
    who="a session",
    tries="write, replace or delete another session's record or heartbeat in a store on this disk",
    stopped_by="sessions cannot write to the store; the runtime takes from each the record that its own caller asked for, once",
    leaves="the process tier confines nothing; what --writable names, every session may write to",
)
def test_a_session_cannot_touch_anothers_record(rollouts: Rollouts) -> None:
    victim, later, me = new_session_id(), new_session_id(), new_session_id()
    rollouts.run(victim)
    theirs = rollouts.folder / rollouts.key(victim)
    before = theirs.read_bytes()
    put = {"op": "put", "store": rollouts.url}
    handed = {
        "replace": {**put, "key": rollouts.key(victim)},
        "come first": {**put, "key": rollouts.key(later)},
        "keep alive": {**put, "key": rollouts.key(victim).replace(".json", ".alive")},
        "read": {"op": "get", "store": rollouts.url, "key": rollouts.key(victim)},
        "look": {"op": "head", "store": rollouts.url, "key": rollouts.key(victim)},
        "delete": {"op": "delete", "store": rollouts.url, "key": rollouts.key(victim)},
        "by another way": {**put, "key": f"exp/a/../a/{victim}.json"},
        "another store": {**put, "store": f"file://{rollouts.folder}/exp", "key": f"a/{me}.json"},
        "outside": {**put, "store": "file:///etc", "key": rollouts.key(me)},
    }
    tried = rollouts.run(me, handed=handed)["tried"]
    assert tried == {name: ["done", "not yours"] for name in handed}
    assert theirs.read_bytes() == before
    assert not (rollouts.folder / rollouts.key(later)).exists()


@pytest.mark.threat(
    who="a session",
    tries="find other sessions' ids in the store",
    stopped_by="the store's directory is not there for a session, and the runtime lists nothing",
    leaves="a store below the agent's own folder can be read",
)
@pytest.mark.parametrize("confined", ["namespaces", "landlock"])
def test_a_session_cannot_look_into_the_store(
    start_server: Callable[..., Server], tmp_path: Path, confined: str
) -> None:
    rollouts = Rollouts(start_server("--isolation", confined, agent=FORGER), tmp_path / "store")
    victim = new_session_id()
    rollouts.run(victim)
    planted = f"exp/a/{new_session_id()}.json"
    tried = rollouts.run(
        listed={"store": str(rollouts.folder), "experiment": str(rollouts.folder / "exp" / "a")},
        paths={"record": str(rollouts.folder / rollouts.key(victim))},
        stores={"directly": (rollouts.url, planted)},
    )["tried"]
    assert victim not in str(tried)
    assert tried["record"][0] == "refused"
    assert not (rollouts.folder / planted).exists()  # where /tmp is the session's own, it went there


def test_a_session_cannot_replace_or_delete_its_own_record(rollouts: Rollouts) -> None:
    me = new_session_id()
    first = rollouts.run(me)
    request = {"store": rollouts.url, "key": rollouts.key(me)}
    handed = {
        "replace": {"op": "put", **request},
        "delete": {"op": "delete", **request},
        "read": {"op": "get", **request},
    }
    again = f"b-{me[:6]}"
    rollouts.start(me, again, handed=handed)
    tried = rollouts.record(me, again)["tried"]
    assert tried == {"replace": ["done", "exists"], "delete": ["done", "permission"], "read": ["done", "taken"]}
    assert json.loads((rollouts.folder / rollouts.key(me)).read_text()) == first


def test_a_session_cannot_write_what_only_another_session_asked_it_to(rollouts: Rollouts) -> None:
    """A session that calls itself is no caller that grants: its payload may name any place."""
    server = rollouts.server
    me = new_session_id()
    script = f"""
import json, os, urllib.request
block = dict(exp_id="exp", input_id="mine", s3_bucket={rollouts.url!r})
path = "{server.url}/runtimes/{server.arn.replace("/", "%2F").replace(":", "%3A")}/invocations"
headers = {{"X-Amzn-Bedrock-AgentCore-Runtime-Session-Id": {me!r}}}
body = json.dumps(dict(_rollout=block)).encode()
print(urllib.request.urlopen(urllib.request.Request(path, body, headers)).read().decode())
"""
    reply = server.default_client.invoke_agent_runtime_command(
        agentRuntimeArn=server.arn,
        runtimeSessionId=me,
        body={"command": f"{sys.executable} - <<'EOF'\n{script}\nEOF", "timeout": 20},
    )
    output = "".join(e["chunk"].get("contentDelta", {}).get("stdout", "") for e in reply["stream"])
    answer = json.loads(output)
    if server.info["isolation"] == "process":  # nothing confines it: it writes there by itself
        assert answer["status"] == "processing"
        rollouts.record(me, "mine")
    else:
        assert answer["status"] == "refused"
        assert "--writable" in answer["error"]
        assert not rollouts.folder.exists()


@pytest.mark.threat(
    who="a session",
    tries="lead the runtime out of a store by a link that lies there",
    stopped_by="steps below the store's directory follow no link",
    leaves="",
)
def test_a_link_in_the_store_is_not_followed(rollouts: Rollouts, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (rollouts.folder / "exp").mkdir(parents=True)
    (rollouts.folder / "exp" / "a").symlink_to(outside)
    me = new_session_id()
    rollouts.start(me)  # asks for a record behind the link
    request = {"op": "put", "store": rollouts.url, "key": rollouts.key(me)}
    rollouts.start(me, "b", handed={"put": request})
    how, answer = rollouts.record(me, "b")["tried"]["put"]
    assert (how, answer in ("permission", "other")) == ("done", True), answer
    if rollouts.server.info["isolation"] != "process":
        assert list(outside.iterdir()) == []


def test_a_session_may_not_fill_the_disk_through_its_record(rollouts: Rollouts) -> None:
    me = new_session_id()
    heartbeat = rollouts.key(me).replace(".json", ".alive")
    handed = {
        "large heartbeat": {"op": "put", "store": rollouts.url, "key": heartbeat, "size": 10**6},
        "endless record": {"op": "put", "store": rollouts.url, "key": rollouts.key(me), "size": 2**40},
        "no size": {"op": "put", "store": rollouts.url, "key": rollouts.key(me), "size": -1},
    }
    tried = rollouts.run(me, handed=handed)["tried"]
    assert tried == {name: ["done", "other"] for name in handed}


def test_many_sessions_at_once_each_keep_their_own(rollouts: Rollouts) -> None:
    ids = [new_session_id() for _ in range(12)]
    threads = [threading.Thread(target=rollouts.start, args=(session_id,)) for session_id in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session_id in ids:
        assert rollouts.record(session_id)["result_key"] == rollouts.key(session_id)


def test_nobody_but_sessions_is_served(rollouts: Rollouts) -> None:
    """This test runs as the same user, and is no session."""
    import socket

    root = Path(rollouts.server.view.get("/_local/status")["state_dir"]).parent
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as runtime:
        runtime.settimeout(20)
        runtime.connect(str(root / "records"))
        assert json.loads(runtime.makefile("rb").readline())["error"] == "no session"


NOBODY = """
import os, sys, urllib.request
os.setgid(65534)
os.setuid(65534)
url, session_id, body = sys.argv[1:]
headers = {"X-Amzn-Bedrock-AgentCore-Runtime-Session-Id": session_id}
print(urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)).status)
"""


@pytest.mark.threat(
    who="another user of this machine",
    tries="have the runtime write a record into a directory of its user",
    stopped_by="a directory is taken from this machine's user and from signed requests only, also with --callers any",
    leaves="",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_stranger_names_no_directory(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server("--callers", "any", "--isolation", "landlock", agent=FORGER)
    rollouts = Rollouts(server, tmp_path / "store")
    theirs = new_session_id()
    url = f"{server.url}/runtimes/{server.arn.replace('/', '%2F').replace(':', '%3A')}/invocations"
    body = json.dumps({"_rollout": {"exp_id": "exp", "input_id": "a", "s3_bucket": rollouts.url}})
    command = ["/usr/bin/python3", "-c", NOBODY, url, theirs, body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "200\n"
    rollouts.run()  # the user's own arrives, in the same directory
    assert list(rollouts.folder.rglob(f"{theirs}*")) == []


@pytest.mark.parametrize(
    "line", [b"[" * 60_000, b"[]", b"7", b'"\\ud800"', b'{"op": "put", "store": "\\ud800", "key": {}}']
)
async def test_what_is_no_request_ends_its_connection_and_nothing_else(tmp_path: Path, line: bytes) -> None:
    class Session:
        grants: ClassVar[list[Any]] = []
        own_directories = None

    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        records = Records(Path(short) / "r", lambda _: Session())
        await records.start()
        try:
            reader, writer = await asyncio.open_unix_connection(str(records.path))
            writer.write(line + b"\n")
            reply = await asyncio.wait_for(reader.read(), 30)
            assert reply == b"" or "error" in json.loads(reply)
            writer.close()
        finally:
            await records.aclose()
    assert complaints == []
