"""docs/production.md from end to end: traffic becomes rows, rows become a better model, and the deployed agent calls it.

AgentCore is the local runtime. S3, IAM and CloudWatch are moto's. SageMaker is on loopback, with the built-in engine behind it.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway.testing import ScriptedModel
from agentcore_rl_toolkit.policy import WEIGHTS_DIR, problems
from agentcore_rl_toolkit.policy.word_problems import reward
from serving import OURS, hosted, moto_server, serving

from ..traffic.test_harvest import ARN, GROUP, as_cloudwatch, conversations, exporter, put
from .loopback_aws import LoopbackAWS

AGENT = Path(__file__).parents[2] / "examples" / "strands_math_agent" / "arithmetic_app.py"
BUCKET = "models-of-the-guide"
KEYS = {"AWS_ACCESS_KEY_ID": "AKLOCAL", "AWS_SECRET_ACCESS_KEY": "secret"}
__all__ = ["exporter"]


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.nightly
@pytest.mark.system
@pytest.mark.timeout(2400)
def test_traffic_becomes_a_better_agent(
    tmp_path: Path, exporter: Any, started: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()

    def step(*words: str) -> str:
        done = subprocess.run([*OURS, *words], capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout + done.stderr
        print(f"{time.monotonic() - began:6.1f} s  {words[0]}")
        return done.stdout

    moto = started.enter_context(moto_server())
    for name, value in {
        "AWS_ENDPOINT_URL": moto,
        "AWS_REGION": "us-west-2",
        "AWS_DEFAULT_REGION": "us-west-2",
        **KEYS,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)

    # Production: an agent whose hosted model answers nothing useful, and its traces in CloudWatch.
    before = started.enter_context(ScriptedModel(lambda messages, _: "I do not know."))
    options = ("--callers", "any", "--agent", f"shop={AGENT}")
    credentials = {"AGENTCORE_RL_CREDENTIALS": "AKLOCAL:secret"}
    runtime = started.enter_context(serving(tmp_path, "runtime", "serve", *options, **credentials))["url"]
    account = LoopbackAWS(control_url=runtime)
    loopback = started.enter_context(hosted(account.app))
    for name in ("SAGEMAKER", "SAGEMAKER_RUNTIME", "PRICING", "BEDROCK_AGENTCORE_CONTROL"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{name}", loopback)
    monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", runtime)
    agent = deployed(f"{before.url}/v1")
    asked = problems("train", 120)
    answers = {problem.prompt: problem.answer for problem in asked}
    logs = boto3.client("logs")
    for group, stream in ((GROUP, "spans"), ("aws/spans", "default")):
        logs.create_log_group(logGroupName=group)
        logs.create_log_stream(logGroupName=group, logStreamName=stream)
    traffic = conversations(exporter, *((f"s{n}", f"u{n % 40}", p.prompt) for n, p in enumerate(asked)))
    put(logs, GROUP, [as_cloudwatch(span) for span in traffic])

    # Rows from traffic, and what a reward needs.
    words = ("--user-attribute", "user.id", "--out", "rows.jsonl", "--eval-out", "eval.jsonl")
    assert "of other users" in step("harvest", ARN, *words)
    for file in (tmp_path / "rows.jsonl", tmp_path / "eval.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [{**row, "answer": answers[row["prompt"]]} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = rows
    assert len(held_out) >= 12

    # A better model, and the proof that it is.
    settings = ("--steps", "8", "--groups", "12", "--rollouts", "4", "--set", "learning_rate=6e-4")
    data = ("--agent", str(AGENT), "--data", "rows.jsonl", "--eval-data", "eval.jsonl")
    step("train", *data, *settings, "--out", "runs/shop")
    compared = step("compare", str(WEIGHTS_DIR), "runs/shop", *data[:2], "--data", "eval.jsonl", "--at-least", "0")
    assert "B is better on" in compared

    # Into production.
    folder = json.loads(step("promote", "runs/shop", "--to", "folder", "--json"))["folder"]
    account.engine_url = started.enter_context(serving(tmp_path, "policy", "serve", "--model", folder))["url"]
    account.chat_url = started.enter_context(serving(tmp_path, "serve", folder))["url"]
    assert right(agent, held_out) == 0
    words = ("--bucket", BUCKET, "--agent", agent, "--rows", "eval.jsonl")
    promoted = json.loads(step("promote", "runs/shop", *words, "--json"))
    print("\n".join(promoted["steps"]))
    assert promoted["logprob_gap_mean"] < 0.1
    share = right(agent, held_out) / len(held_out)
    print(f"{share:.0%} of {len(held_out)} held-out questions are answered by the deployed agent")
    assert share > 0.5

    # And back.
    (line,) = [line for line in promoted["steps"] if line.startswith("Roll back with:")]
    step(*re.sub(r"^.*?promote", "promote", line).split())
    assert right(agent, held_out) == 0
    step("promote", "runs/shop", *words[:4], "--remove")
    assert account.has_nothing()
    assert account.wrong == []
    assert "Contents" not in boto3.client("s3").list_objects_v2(Bucket=BUCKET)
    print(f"{time.monotonic() - began:6.1f} s  the guide")


def deployed(model_url: str) -> str:
    """Give the agent a version that calls the hosted model. Returns its ARN."""
    control = boto3.client("bedrock-agentcore-control")
    (found,) = control.list_agent_runtimes()["agentRuntimes"]
    now = control.get_agent_runtime(agentRuntimeId=found["agentRuntimeId"])
    kept = {name: now[name] for name in ("agentRuntimeId", "agentRuntimeArtifact", "roleArn", "networkConfiguration")}
    control.update_agent_runtime(**kept, environmentVariables={"AGENTCORE_RL_MODEL_URL": model_url})
    boto3.client("iam").create_role(RoleName=now["roleArn"].rsplit("/", 1)[1], AssumeRolePolicyDocument="{}")
    return str(found["agentRuntimeArn"])


def right(agent: str, rows: list[dict[str, Any]]) -> float:
    """How many rows the deployed agent answers right, called as its users call it."""
    call: Callable[..., Any] = boto3.client("bedrock-agentcore").invoke_agent_runtime
    found = 0.0
    for row in rows:
        payload = json.dumps({"prompt": row["prompt"]}).encode()
        reply = call(agentRuntimeArn=agent, runtimeSessionId=new_session_id(), payload=payload)
        found += reward(json.loads(reply["response"].read())["answer"], row["answer"])
    return found
