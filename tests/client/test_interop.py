"""Both directions with the published toolkit (0.2.0), over real HTTP, many rollouts each, records equal field by field."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import boto3
import pytest

from agentcore_rl_toolkit.client import RolloutClient
from scripted_runtime import TEST_CREDENTIALS, ScriptedRuntime
from serving import moto_server, serving, wait_for

from ..app.conftest import POSTLUDE, PRELUDE, agents_in
from ..conftest import NIGHTLY

PUBLISHED = "agentcore-rl-toolkit[core]==0.2.0"
BUCKET = "interop-results"
N = 50 if NIGHTLY else 20
KEYS = {
    "aws_access_key_id": TEST_CREDENTIALS["AWS_ACCESS_KEY_ID"],
    "aws_secret_access_key": TEST_CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
}


def at_s3(url: str) -> contextlib.AbstractContextManager[object]:
    """The environment of a client whose bucket is in this S3."""
    return mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL_S3": url, "AWS_REGION": "us-west-2"})


class OurAgent(NamedTuple):
    """Where an agent of ours is reached, and the directory that its sessions may write to."""

    arn: str
    url: str
    store: str


AGENT = """
@app.rollout_entrypoint
def run(payload, context):
    if payload.get("mark"):
        with open(payload["mark"], "a") as file:
            file.write("ran\\n")
    time.sleep(payload["run_s"])
    if payload["n"] % 10 == 7:
        raise ValueError(f"row {payload['n']} fails")
    return {"rewards": [0.0, payload["n"] / 50], "text": "äöü ✓", "nested": {"n": payload["n"], "list": [None, True, 1.5]}}
"""

CLIENT = """
import json, sys
from agentcore_rl_toolkit import RolloutClient

arn, bucket, exp_id, rows = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
client = RolloutClient(arn, bucket, exp_id, tps_limit=200, max_pool_connections=50, model_id="m", temperature=0.5)
items = list(client.run_batch(rows, max_concurrent_sessions=16, timeout=60))
print(json.dumps([[item.success, item.index, item.result, item.error] for item in items]))
"""
ROWS = [{"n": n, "run_s": 0.05 * (n % 5), "prompt": "ü" * (n % 3)} for n in range(N)]
pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def published_python(make_environment: Callable[..., str]) -> Path:
    """Interpreter of an environment that holds the published package and nothing of ours."""
    return Path(make_environment("published-0.2.0", PUBLISHED, limit_s=110))


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with moto_server() as url:
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **KEYS)
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield url


def environment(s3: str, **more: str) -> dict[str, str]:
    return {**os.environ, **TEST_CREDENTIALS, "AWS_DEFAULT_REGION": "us-west-2", "AWS_ENDPOINT_URL_S3": s3, **more}


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what must differ between two runs: ids, keys, times, our own additions."""
    kept = {
        k: v
        for k, v in record.items()
        if k not in ("_agent", "_proof", "outcome", "error_type", "input_id", "result_key", "traceback")
    }
    rollout = {
        k: v
        for k, v in kept["payload"]["_rollout"].items()
        if k not in ("attempt", "heartbeat_s", "proof_key", "s3_region", "input_id", "exp_id")
    }
    return {**kept, "payload": {**kept["payload"], "_rollout": rollout}}


def printed(python: Path, code: str, arn: str, endpoint: str, s3: str, *more: Any) -> str:
    """What a program with the published client prints, which drives that agent."""
    done = subprocess.run(
        [str(python), "-W", "ignore", "-c", code, arn, BUCKET, *more],
        env=environment(s3, AWS_ENDPOINT_URL_BEDROCK_AGENTCORE=endpoint),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def published_records(
    published_python: Path, arn: str, endpoint: str, s3: str, tmp_path: Path
) -> dict[int, dict[str, Any]]:
    """What the published client gets from an agent."""
    said = printed(published_python, CLIENT, arn, endpoint, s3, f"theirs-{tmp_path.name}", json.dumps(ROWS))
    items = json.loads(said.strip().splitlines()[-1])
    assert all(success for success, *_ in items), [error for *_, error in items if error][:1]
    return {index: record for _, index, record, _ in items}


def our_records(arn: str, endpoint: str, s3: str, tmp_path: Path) -> dict[int, dict[str, Any]]:
    """What our client gets from an agent."""
    with (
        at_s3(s3),
        RolloutClient(
            arn,
            BUCKET,
            f"ours-{tmp_path.name}",
            tps_limit=200,
            endpoint_url=endpoint,
            model_id="m",
            temperature=0.5,
        ) as client,
    ):
        items = client.map(ROWS, 16, timeout=60)
    for item in items:
        assert item.result is not None, item.error
        assert item.success == (item.index % 10 != 7 if item.index is not None else False)
    return {item.index or 0: item.result for item in items if item.result is not None}


def check_equal(ours: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]]) -> None:
    assert sorted(ours) == sorted(theirs) == list(range(N))
    for n in range(N):
        assert comparable(ours[n]) == comparable(theirs[n])
        if n % 10 == 7:
            assert ours[n]["status_code"] == theirs[n]["status_code"] == 500
            assert ours[n]["stop_reason"] == theirs[n]["stop_reason"] == f"row {n} fails"
            assert "ValueError" in ours[n]["traceback"]
            assert "ValueError" in theirs[n]["traceback"]
        else:
            assert ours[n]["rewards"] == theirs[n]["rewards"] == [0.0, n / 50]
            assert ours[n]["text"] == "äöü ✓"


@pytest.fixture(scope="module")
def our_agent(s3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OurAgent]:
    """An agent of ours at the local runtime. An idle session ends after a second."""
    folder = tmp_path_factory.mktemp("ours")
    (folder / "agent.py").write_text(PRELUDE + AGENT + POSTLUDE)
    words = ["--callers", "any", "--agent", f"a={folder / 'agent.py'}", "--store", f"file://{folder}/store"]
    for name, value in {**TEST_CREDENTIALS, "AWS_ENDPOINT_URL_S3": s3}.items():
        words += ["--session-env", f"{name}={value}"]
    with serving(folder, "runtime", "serve", *words, "--set", "idle_timeout=1", **environment(s3)) as runtime:
        yield OurAgent(runtime["agents"]["a"], runtime["url"], f"file://{folder}/store")


@pytest.fixture(scope="module")
def published_agent(
    published_python: Path, s3: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScriptedRuntime]:
    """A data plane in front of an agent of the published package."""
    with agents_in(tmp_path_factory.mktemp("theirs")) as start, ScriptedRuntime() as front:
        agent = start(AGENT, env=environment(s3), python=str(published_python))
        front.agent_url = f"http://127.0.0.1:{agent.port}"
        yield front


def test_our_client_drives_the_published_agent(
    published_python: Path, published_agent: ScriptedRuntime, s3: str, tmp_path: Path
) -> None:
    ours = our_records(published_agent.arn, published_agent.url, s3, tmp_path)
    assert published_agent.live == []
    theirs = published_records(published_python, published_agent.arn, published_agent.url, s3, tmp_path)
    check_equal(ours, theirs)


# ---- ids

IDS: list[Any] = [
    7,
    -1.5,
    "",
    "é日😀",
    "\"double\" and 'single'",
    "100%",
    "a%2Fb%00",
    "a?b=c",
    "a#b",
    "a&b",
    "back\\slash",
    "team/run-7",
    " blanks ",
    "x" * 300,
]
SESSIONS = [f"{n:03d}" + "s" * (253 if n % 2 else 33) for n in range(len(IDS))]  # 36 and 256 characters

CLIENT_OF_IDS = """
import json, sys
from agentcore_rl_toolkit import RolloutClient

arn, bucket, exp_id, ids, sessions = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), json.loads(sys.argv[5])
client = RolloutClient(arn, bucket, exp_id, tps_limit=200)
futures = [client.invoke({"n": 1, "run_s": 0}, session_id=s, input_id=i) for i, s in zip(ids, sessions)]
records = [f.result(timeout=60) for f in futures]
print(json.dumps([[f.result_key, f.input_id, r["input_id"], r["result_key"], r["rewards"]] for f, r in zip(futures, records)]))
"""
Seen = list[list[Any]]


def seen_by_the_published_client(python: Path, arn: str, endpoint: str, s3: str, exp_id: str) -> Seen:
    said = printed(python, CLIENT_OF_IDS, arn, endpoint, s3, exp_id, json.dumps(IDS), json.dumps(SESSIONS))
    seen: Seen = json.loads(said.strip().splitlines()[-1])
    return seen


def check_ids(seen: Seen, exp_id: str, s3: str) -> None:
    objects = boto3.client("s3", endpoint_url=s3, region_name="us-west-2", **KEYS)
    for (key, future_id, record_id, record_key, rewards), asked, session in zip(seen, IDS, SESSIONS, strict=True):
        assert future_id == record_id
        assert type(future_id) is type(record_id)
        assert (asked == "" and len(future_id) == 36) or future_id == asked
        assert key == record_key == f"{exp_id}/{future_id}/{session}.json"
        assert rewards == [0.0, 1 / 50]
        assert objects.head_object(Bucket=BUCKET, Key=key)["ContentType"] == "application/json"
    objects.close()


def test_ids_of_the_published_client_at_our_agent_and_at_its_own(
    published_python: Path, our_agent: OurAgent, published_agent: ScriptedRuntime, s3: str
) -> None:
    """The published package decides what an id is and which key it has; ours does the same."""
    at_theirs = published_agent.arn, published_agent.url
    check_ids(
        seen_by_the_published_client(published_python, *at_theirs, s3, "ids/theirs-theirs"), "ids/theirs-theirs", s3
    )
    check_ids(
        seen_by_the_published_client(published_python, our_agent.arn, our_agent.url, s3, "ids/theirs-ours"),
        "ids/theirs-ours",
        s3,
    )


REFUSED_CALLS = """
import json, sys
from agentcore_rl_toolkit import RolloutClient

client = RolloutClient(sys.argv[1], sys.argv[2], "refused", max_retry_attempts=1)
for number, input_id in enumerate(["../other/x", "a/./b", "/x", "nul\\0"]):
    try:
        client.invoke({"n": 1, "run_s": 0}, session_id=f"refused-{number}-" + "s" * 40, input_id=input_id)
    except Exception as e:
        print(type(e).__name__)
"""


def test_a_call_of_the_published_client_that_is_refused_ends_its_session(
    published_python: Path, our_agent: OurAgent, s3: str
) -> None:
    """That client stops no session whose invoke failed, so the session must be idle, and the runtime ends it."""
    arn, endpoint, _ = our_agent

    def status() -> dict[str, Any]:
        with urllib.request.urlopen(f"{endpoint}/_local/status", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    before = status()
    said = printed(published_python, REFUSED_CALLS, arn, endpoint, s3)
    assert said.split() == ["RuntimeClientError"] * 4
    assert status()["started"] == before["started"] + 4
    wait_for(lambda: not status()["sessions"])
    assert status()["ended"].get("idle", 0) >= before["ended"].get("idle", 0) + 4


# ---- what else lies in the bucket
