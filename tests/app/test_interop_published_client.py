"""The published client (0.2.0, in an environment of its own) drives our agent over real HTTP and a real S3 server.

The same client with the same inputs also drives the published agent; what the two agents store must be equal field by field, our
additions aside.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit.contract import INFO_FIELD, Cause, Outcome, cause_of, record_error, record_outcome
from scripted_runtime import ScriptedRuntime
from serving import moto_server

pytestmark = pytest.mark.system
ROLLOUTS = 20
OURS_ONLY = {INFO_FIELD, "outcome", "error_type"}

AGENT = """
class MaxTokensReachedException(Exception):  # known by its name, as Strands' own is
    __module__ = "strands.types.exceptions"

@app.rollout_entrypoint
async def run(payload, context):
    n = payload["n"]
    await asyncio.sleep(0.01 * (n % 7))
    config = payload["_rollout"]
    if n % 10 == 9:
        raise MaxTokensReachedException("cut")
    if n % 5 == 3:
        raise ValueError(f"no luck with {n}")
    if n % 10 == 4:
        return ["not", "a", "dict"]
    if n % 10 == 6:
        return {"rewards": 0.0, "status_code": 429, "stop_reason": "gave up"}
    return {
        "rewards": [0.25, n / ROLLOUTS] if n % 2 else n / ROLLOUTS,
        "metrics": {"n": n, "nested": [{"text": "é日 \\U0001f600", "none": None, "float": 1e-9, "big": 2**60}], 7: True},
        "model": [config["base_url"], config["model_id"], config["temperature"]],
        "session": context.session_id,
        "pair": (1, "two"),
    }
""".replace("ROLLOUTS", str(ROLLOUTS))

CLIENT = """
import json, sys
from agentcore_rl_toolkit import RolloutClient
arn, bucket, exp_id, n = sys.argv[1:]
client = RolloutClient(arn, bucket, exp_id, tps_limit=500, max_pool_connections=20, base_url="http://127.0.0.1:9/v1",
                       model_id="m", temperature=0.5)
def start(i):
    return client.invoke({"n": i, "prompt": f"p{i}"}, session_id=f"session-{i:032d}", input_id=f"input-{i}")
futures = [start(i) for i in range(int(n))]
results = [f.result(timeout=120) for f in futures]
batch = []
for item in client.run_batch([{"n": i} for i in range(8)], max_concurrent_sessions=4, timeout=120):
    batch.append({"success": item.success, "index": item.index, "error": item.error, "result": item.result})
print(json.dumps({"results": results, "batch": batch}))
"""


@pytest.fixture
def s3() -> Iterator[str]:
    with moto_server() as url:
        yield url


def comparable(result: dict[str, Any], exp_id: str) -> list[tuple[str, Any]]:
    """The fields in their order, with the experiment's name and the text of the traceback taken out."""
    text = json.dumps({k: v for k, v in result.items() if k not in OURS_ONLY}).replace(exp_id, "EXP")
    text = text.replace(" when S3 save is configured", "")  # ours says the same where there is no S3
    fields = json.loads(text)
    if result.get(INFO_FIELD, {}).get("cause") == "policy":
        fields.pop("rewards")
    if "traceback" in fields:
        assert fields["traceback"].startswith("Traceback (most recent call last):\n")
        fields["traceback"] = fields["traceback"].strip().splitlines()[-1].rpartition(": ")[2]
    return list(fields.items())


def test_the_published_client_reads_from_our_agent_what_it_reads_from_the_published_one(
    start_agent: Any, make_environment: Any, s3: str, tmp_path: Path
) -> None:
    published = make_environment("published-0.2.0", "agentcore-rl-toolkit[core]==0.2.0")
    aws = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": s3,
        "PYTHONWARNINGS": "ignore",
    }
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=s3, **keys).create_bucket(Bucket="results")
    ours = start_agent(AGENT, env=aws)
    theirs = start_agent(AGENT, env=aws, python=published)
    agents = {"ours": ours.port, "theirs": theirs.port}
    driver = tmp_path / "driver.py"
    driver.write_text(CLIENT)

    read: dict[str, Any] = {}
    for exp_id, port in agents.items():
        with ScriptedRuntime() as front:
            front.agent_url = f"http://127.0.0.1:{port}"
            done = subprocess.run(
                [published, str(driver), front.arn, "results", f"exp-{exp_id}", str(ROLLOUTS)],
                env={**os.environ, **aws, "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": front.url},
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stderr
            assert front.requests["stop"] == ROLLOUTS + 8
        read[exp_id] = json.loads(done.stdout)

    assert len(read["ours"]["results"]) == len(read["theirs"]["results"]) == ROLLOUTS
    for our_result, their_result in zip(read["ours"]["results"], read["theirs"]["results"], strict=True):
        assert comparable(our_result, "exp-ours") == comparable(their_result, "exp-theirs")
        policy = our_result[INFO_FIELD].get("cause") == "policy"
        assert set(our_result) - set(their_result) <= OURS_ONLY | ({"rewards"} if policy else set())
        assert not policy or our_result["rewards"] == 0.0
        assert INFO_FIELD in our_result
        assert INFO_FIELD not in their_result  # the published agent it was
    outcomes = [record_outcome(r) for r in read["ours"]["results"]]
    assert outcomes.count(Outcome.OK) == ROLLOUTS * 5 // 10
    causes = [cause_of(record_error(r)) for r in read["ours"]["results"]]
    assert causes.count(Cause.POLICY) == ROLLOUTS // 10
    assert outcomes.count(Outcome.INVALID) == ROLLOUTS // 10
    # what a client can tell from the published agent's records is a subset of that
    assert [o is Outcome.OK for o in outcomes] == [record_outcome(r) is Outcome.OK for r in read["theirs"]["results"]]

    for batch in (read["ours"]["batch"], read["theirs"]["batch"]):
        assert sorted(item["index"] for item in batch) == list(range(8))
        assert all(item["success"] and item["error"] is None for item in batch)


SURFACE = """
import importlib, inspect, json, pkgutil
import agentcore_rl_toolkit as package
from agentcore_rl_toolkit import RolloutClient, RolloutFuture
modules = [m.name for m in pkgutil.iter_modules(package.__path__)]
modules += ["backends." + m.name for m in pkgutil.iter_modules([package.__path__[0] + "/backends"])]
taken = {m: [*inspect.signature(getattr(RolloutClient, m)).parameters] for m in ("__init__", "invoke", "run_batch")}
methods = [name for name in vars(RolloutFuture) if not name.startswith("_")]
print(json.dumps({"names": package.__all__, "modules": modules, "taken": taken, "methods": methods}))
"""


def test_every_name_of_the_published_package_is_here_or_named_in_moving_here(
    make_environment: Callable[..., str],
) -> None:
    published = make_environment("published-0.2.0", "agentcore-rl-toolkit[core]==0.2.0")
    done = subprocess.run([published, "-c", SURFACE], capture_output=True, text=True, timeout=300, check=True)
    surface = json.loads(done.stdout)
    page = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
    package = importlib.import_module("agentcore_rl_toolkit")
    for name in surface["names"]:
        assert hasattr(package, name) or f"`{name}`" in page, name
    elsewhere = {"runtime", "sandbox"}  # of the same name, or of none, and another thing
    for module in surface["modules"]:
        here = importlib.util.find_spec(f"agentcore_rl_toolkit.{module}") is not None and module not in elsewhere
        assert here or f".{module}" in page, module
    client = importlib.import_module("agentcore_rl_toolkit.client")
    for method, parameters in surface["taken"].items():
        ours = inspect.signature(getattr(client.RolloutClient, method)).parameters
        assert [name for name in ours if name in parameters] == parameters, method
    assert {name for name in surface["methods"] if not hasattr(client.RolloutFuture, name)} == set()
