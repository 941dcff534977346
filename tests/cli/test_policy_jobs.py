"""A whole multi-turn RL job on this machine: an unchanged agent on the local runtime, the gateway, the built-in policy."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit.cli.servers.job_surroundings import JobSurroundings
from agentcore_rl_toolkit.policy.model import check_directory
from agentcore_rl_toolkit.policy.training_service.model import PolicyModel
from agentcore_rl_toolkit.policy.training_service.sagemaker.service import running
from agentcore_rl_toolkit.policy.word_problems import problems
from agentcore_rl_toolkit.runtime import LocalRuntime

AGENT = Path(__file__).parents[2] / "examples" / "strands_math_agent" / "arithmetic_app.py"
GROUPS = "arn:aws:sagemaker:us-west-2:123456789012:model-package-group/"


@pytest.mark.system
def test_a_job_trains_the_policy_with_an_unchanged_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in problems("train", 32, seed=0)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    model = PolicyModel()
    with running(model, around=JobSurroundings(model, check_directory(None))) as service:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        options = [word for name in service.environment for word in ("--session-env", name)]
        with LocalRuntime({"math": AGENT}, options) as runtime:
            monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", runtime.url)
            found = whole_job(runtime.arns["math"], f"file://{tmp_path}/rows")
    model.close()
    output = json.loads(found["JobConfigDocument"])["ServiceOutput"]
    assert found["JobStatus"] == "Completed", found.get("FailureReason")
    assert output["RolloutInfo"] == {"Completed": 64, "Total": 64}
    assert output["BillableTokenUsage"]["TrainTokenCount"] > 0
    assert output["OutputModelPackageArn"] in model.paths


def whole_job(agent: str, uri: str) -> dict[str, Any]:
    document = {
        "AgentConfig": {"BedrockAgentCoreConfig": {"AgentRuntimeArn": agent}},
        "InputDataConfig": [
            {
                "ChannelName": "train",
                "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": uri}},
            }
        ],
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
        "ModelPackageConfig": {
            "OutputModelPackageGroupArn": f"{GROUPS}out",
            "IntermediateCheckpointModelPackageGroupArn": f"{GROUPS}steps",
        },
        "TrainingConfig": {
            "BaseModelArn": "arn:aws:sagemaker:us-west-2:aws:hub-content/SageMakerPublicHub/Model/builtin-policy/1.0.0",
            "MlflowConfig": {"MlflowResourceArn": "arn:aws:sagemaker:us-west-2:123456789012:mlflow-app/app"},
            "HyperParameters": {"global_batch_size": "32", "group_size": "2", "learning_rate": "3e-4"},
        },
    }
    control = boto3.client("sagemaker")
    named: dict[str, Any] = {"JobName": "sums", "JobCategory": "AgentRFT"}
    control.create_job(
        **named,
        RoleArn="arn:aws:iam::123456789012:role/job",
        JobConfigSchemaVersion="1.0.0",
        JobConfigDocument=json.dumps(document),
    )
    while (found := control.describe_job(**named))["JobStatus"] == "InProgress":
        time.sleep(0.2)
    return dict(found)
