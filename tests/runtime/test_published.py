"""Agents written for the published package, unmodified, in an environment that has that package and not ours."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.errors import LocalRuntimeError
from agentcore_rl_toolkit.runtime.agents.environments import build, cache_dir
from serving import moto_server

from .conftest import Server, wait_for

AGENT = """
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@app.rollout_entrypoint
def rollout(payload):
    if payload.get("fail"):
        raise ValueError("wrong on purpose")
    return {"rewards": float(len(payload["prompt"])), "rollout_data": [payload["prompt"]]}


if __name__ == "__main__":
    app.run()
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    (folder / "requirements.txt").write_text("agentcore-rl-toolkit[server]==0.2.0\n")
    (folder / "agent.py").write_text(AGENT)
    try:
        build(folder / "agent.py", cache_dir())
    except LocalRuntimeError as e:
        pytest.skip(f"the published package cannot be installed here: {e}")
    return folder / "agent.py"


@pytest.fixture
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.mark.system
def test_published_agent_runs_and_stores_its_result(
    start_server: Callable[..., Server], agent: Path, moto: str
) -> None:
    server = start_server("--session-env", f"AWS_ENDPOINT_URL_S3={moto}", "--session-env", "AWS_ALLOW_HTTP=true")
    arn = server.view.deploy(agent, "published", {})
    s3 = boto3.client(
        "s3",
        endpoint_url=moto,
        region_name="us-west-2",
        aws_access_key_id="local",
        aws_secret_access_key="local",
    )
    bucket = f"results-{uuid.uuid4()}"  # moto's state is the process's: another file's tests may have made "results"
    s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    for name, payload, status in (("good", {"prompt": "four"}, 200), ("bad", {"prompt": "x", "fail": True}, 500)):
        session = str(uuid.uuid4())
        block = {"exp_id": "exp", "input_id": name, "s3_bucket": bucket, "session_id": session}
        reply = server.default_client.invoke_agent_runtime(
            agentRuntimeArn=arn,
            runtimeSessionId=session,
            payload=json.dumps({**payload, "_rollout": block}).encode(),
        )
        assert json.loads(reply["response"].read())["status"] == "processing"

        def stored(name: str = name, session: str = session) -> dict[str, object] | None:
            try:
                found = s3.get_object(Bucket=bucket, Key=f"exp/{name}/{session}.json")
            except ClientError:
                return None
            record: dict[str, object] = json.loads(found["Body"].read())
            return record

        record = wait_for(stored)
        assert record["status_code"] == status
        if status == 200:
            assert record["rewards"] in (4.0, [4.0])
        else:
            assert "wrong on purpose" in str(record["stop_reason"])
    states = {t["runtime_id"].partition("-")[0]: t["start"] for t in server.view.get("/_local/status")["templates"]}
    assert states["published"] in ("fork", "exec")
