"""Sessions of the local runtime that write each other's records through the store they share: no reward of theirs counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentcore_rl_toolkit.client import RolloutClient
from agentcore_rl_toolkit.client.testing import TEST_CREDENTIALS
from agentcore_rl_toolkit.contract import Outcome, extract_reward
from agentcore_rl_toolkit.store import open_store

BUCKET = "shared-records"
VICTIMS = 6
AGENT = """
import json, time
import boto3
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()

def keys(s3, rollout, suffix):
    listed = s3.list_objects_v2(Bucket=rollout["s3_bucket"], Prefix=rollout["exp_id"] + "/").get("Contents", [])
    return {item["Key"].removesuffix(suffix) for item in listed if item["Key"].endswith(suffix)}

@app.rollout_entrypoint
def run(payload, context):
    rollout, s3 = payload["_rollout"], boto3.client("s3")
    mine = f"{rollout['exp_id']}/{rollout['input_id']}/{context.session_id}"
    deadline_s = time.monotonic() + 60
    if payload["role"] == "victim":
        while (payload["works on"] or mine not in keys(s3, rollout, ".json")) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return {"rewards": 0.0}
    others = set()
    while len(others) < payload["victims"] and time.monotonic() < deadline_s:
        others = keys(s3, rollout, ".alive") - {mine}
        time.sleep(0.05)
    record = {"rewards": 100.0, "status_code": 200, "stop_reason": "end_turn", "_agent": {"outcome": "ok"}, "outcome": "ok"}
    for other in sorted(others):
        s3.put_object(Bucket=rollout["s3_bucket"], Key=other + ".json", Body=json.dumps(record))
    return {"rewards": 1.0, "forged": len(others)}

if __name__ == "__main__":
    app.run()
"""
pytestmark = pytest.mark.slow


def start(command: list[str], ready: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    options = ["--ready-file", str(ready), "--parent-pid", str(os.getpid())]
    process = subprocess.Popen([sys.executable, "-m", "agentcore_rl_toolkit.cli", *command, *options], env=env)
    deadline_s = time.monotonic() + 60
    while not ready.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return process


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[str, str, str]]:
    """S3's address, the agent's ARN, the runtime's address; every session has the same credential for the whole bucket."""
    (tmp_path / "agent.py").write_text(AGENT)
    env = {**os.environ, **TEST_CREDENTIALS, "AWS_DEFAULT_REGION": "us-west-2"}
    serve_s3 = ["s3", "serve", "--dir", str(tmp_path / "s3"), "--bucket", BUCKET]
    s3 = start(serve_s3, tmp_path / "s3.json", env)
    try:
        url = json.loads((tmp_path / "s3.json").read_text())["url"]
        env["AWS_ENDPOINT_URL_S3"] = url
        agent = ["--agent", f"a={tmp_path / 'agent.py'}", "--s3-endpoint", url]
        runtime = start(["runtime", "serve", *agent], tmp_path / "runtime.json", env)
        try:
            ready = json.loads((tmp_path / "runtime.json").read_text())
            yield url, ready["agents"]["a"], ready["url"]
        finally:
            runtime.terminate()
            runtime.wait(30)
    finally:
        s3.terminate()
        s3.wait(30)


@pytest.mark.threat(
    who="a session",
    tries="write a record with a high reward for each other session that it finds in the bucket",
    stopped_by="the record does not prove that it comes from that session",
    leaves="the other rollouts end as invalid, unless their agents replace the record in time",
)
def test_no_reward_that_a_session_wrote_for_another_counts(servers: tuple[str, str, str]) -> None:
    s3, arn, endpoint = servers
    store = open_store(BUCKET, endpoint_url=s3, region="us-west-2")
    # half of them are done as soon as they see the forged record, and put their own in its place
    rows = [{"role": "victim", "works on": n % 2 == 1} for n in range(VICTIMS)]
    rows.append({"role": "attacker", "victims": VICTIMS})
    with RolloutClient(arn, BUCKET, "exp", endpoint_url=endpoint, store=store) as client:
        items = client.map(rows, timeout=110)
        stats = client.stats
    attack = items.pop()
    assert attack.outcome is Outcome.OK, attack.error
    assert attack.result is not None
    assert attack.result["forged"] == VICTIMS  # the store let it
    for item, row in zip(items, rows, strict=False):
        assert item.outcome in ((Outcome.INVALID,) if row["works on"] else (Outcome.OK, Outcome.INVALID)), item.error
        assert (item.outcome is Outcome.OK) == (item.result is not None)
        assert item.result is None or extract_reward(item.result) == 0.0
    assert stats["forged"] == sum(item.outcome is Outcome.INVALID for item in items) >= VICTIMS // 2
    assert stats["proven"] == VICTIMS + 1 - stats["forged"]
