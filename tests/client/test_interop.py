"""Both directions with the published toolkit (0.2.0), over real HTTP, 50 rollouts each, records equal field by field."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.client import RolloutClient
from agentcore_rl_toolkit.client.testing import TEST_CREDENTIALS, ScriptedRuntime
from agentcore_rl_toolkit.store import open_store

from ..conftest import reserved_port

ROOT = Path(__file__).parents[2]
PUBLISHED = "agentcore-rl-toolkit[core]==0.2.0"
BUCKET = "interop-results"
N = 50

AGENT = """
import time
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()

@app.rollout_entrypoint
def run(payload, context):
    time.sleep(payload["run_s"])
    if payload["n"] % 10 == 7:
        raise ValueError(f"row {payload['n']} fails")
    return {"rewards": [0.0, payload["n"] / 50], "text": "äöü ✓", "nested": {"n": payload["n"], "list": [None, True, 1.5]}}

if __name__ == "__main__":
    import sys
    app.run(port=int(sys.argv[1]) if len(sys.argv) > 1 else 8080)
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
pytestmark = pytest.mark.slow


def wait_until(condition: Any, process: subprocess.Popen[Any], within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert process.poll() is None, f"{process.args} ended with {process.returncode}"
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.fixture(scope="module")
def published_python(make_environment: Callable[..., str]) -> Path:
    """Interpreter of an environment that holds the published package and nothing of ours."""
    return Path(make_environment("published-0.2.0", PUBLISHED, limit_s=110))


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("interop")
    ready = folder / "ready.json"
    command = [
        sys.executable,
        "-m",
        "agentcore_rl_toolkit.cli",
        "s3",
        "serve",
        "--dir",
        str(folder / "s3"),
        "--bucket",
        BUCKET,
    ]
    process = subprocess.Popen([*command, "--ready-file", str(ready), "--parent-pid", str(os.getpid())])
    wait_until(ready.exists, process)
    yield json.loads(ready.read_text())["url"]
    process.terminate()
    process.wait(30)


def environment(s3: str, **more: str) -> dict[str, str]:
    return {**os.environ, **TEST_CREDENTIALS, "AWS_DEFAULT_REGION": "us-west-2", "AWS_ENDPOINT_URL_S3": s3, **more}


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what must differ between two runs: ids, keys, times, our own additions."""
    kept = {
        k: v
        for k, v in record.items()
        if k not in ("_agent", "outcome", "error_type", "input_id", "result_key", "traceback")
    }
    rollout = {
        k: v
        for k, v in kept["payload"]["_rollout"].items()
        if k not in ("attempt", "heartbeat_s", "notify_url", "input_id", "exp_id")
    }
    return {**kept, "payload": {**kept["payload"], "_rollout": rollout}}


def published_records(
    published_python: Path, arn: str, endpoint: str, s3: str, tmp_path: Path
) -> dict[int, dict[str, Any]]:
    """What the published client gets from an agent."""
    done = subprocess.run(
        [str(published_python), "-W", "ignore", "-c", CLIENT, arn, BUCKET, f"theirs-{tmp_path.name}", json.dumps(ROWS)],
        env=environment(s3, AWS_ENDPOINT_URL_BEDROCK_AGENTCORE=endpoint),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    items = json.loads(done.stdout.strip().splitlines()[-1])
    assert all(success for success, *_ in items), [error for *_, error in items if error][:1]
    return {index: record for _, index, record, _ in items}


def our_records(arn: str, endpoint: str, s3: str, tmp_path: Path) -> dict[int, dict[str, Any]]:
    """What our client gets from an agent."""
    store = open_store(BUCKET, endpoint_url=s3, region="us-west-2")
    with RolloutClient(
        arn,
        BUCKET,
        f"ours-{tmp_path.name}",
        tps_limit=200,
        endpoint_url=endpoint,
        store=store,
        model_id="m",
        temperature=0.5,
    ) as client:
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


def test_published_client_drives_our_agent(published_python: Path, s3: str, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    ready = tmp_path / "ready.json"
    command = [
        sys.executable,
        "-m",
        "agentcore_rl_toolkit.cli",
        "runtime",
        "serve",
        "--agent",
        f"a={tmp_path / 'agent.py'}",
    ]
    command += ["--s3-endpoint", s3, "--ready-file", str(ready), "--parent-pid", str(os.getpid())]
    process = subprocess.Popen(command, env=environment(s3))
    try:
        wait_until(ready.exists, process)
        runtime = json.loads(ready.read_text())
        theirs = published_records(published_python, runtime["agents"]["a"], runtime["url"], s3, tmp_path)
        ours = our_records(runtime["agents"]["a"], runtime["url"], s3, tmp_path)
    finally:
        process.terminate()
        process.wait(30)
    check_equal(ours, theirs)


def test_our_client_drives_the_published_agent(published_python: Path, s3: str, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    with reserved_port() as port:
        drive_published_agent(published_python, s3, tmp_path, port)


def drive_published_agent(published_python: Path, s3: str, tmp_path: Path, port: int) -> None:
    process = subprocess.Popen(
        [str(published_python), "-W", "ignore", str(tmp_path / "agent.py"), str(port)], env=environment(s3)
    )

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_until(healthy, process)
        with ScriptedRuntime() as front:
            front.agent_url = f"http://127.0.0.1:{port}"
            ours = our_records(front.arn, front.url, s3, tmp_path)
            assert front.live == []
            theirs = published_records(published_python, front.arn, front.url, s3, tmp_path)
    finally:
        process.terminate()
        process.wait(30)
    check_equal(ours, theirs)
