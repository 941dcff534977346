"""`agentcore-rl promote`: S3 and IAM of moto, SageMaker's hosting on loopback, and a real model behind the endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from click.testing import CliRunner, Result

from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.deploy import hosting
from agentcore_rl_toolkit.deploy.model import INSTANCES, ModelFacts, instance_for, read_model, refusals_of_import
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway.testing import ScriptedModel
from agentcore_rl_toolkit.policy import WEIGHTS_DIR, load_policy, save_policy
from serving import hosted

from .hosted_models import HostedModels

BUCKET = "models-of-a-test"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(load_policy()[0], tmp_path_factory.mktemp("run") / "refund")


@pytest.fixture
def sagemaker(account: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[HostedModels]:
    monkeypatch.setattr(hosting, "PAUSE_S", 0.01)
    with ScriptedModel(lambda messages, _: "It is 7.") as answering:
        service = HostedModels(answering.url)
        with hosted(service.app) as url:
            monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", url)
            monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", url)
            monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", url)
            yield service
        assert service.wrong == []


def promote(*words: str) -> Result:
    return CliRunner().invoke(cli, ["promote", *words], catch_exceptions=True)


def keys() -> list[str]:
    found = boto3.client("s3").list_objects_v2(Bucket=BUCKET)
    return [item["Key"] for item in found.get("Contents", [])]


def roles() -> list[str]:
    return [role["RoleName"] for role in boto3.client("iam").list_roles()["Roles"]]


def test_a_model_is_put_on_an_endpoint_updated_and_removed(model: Path, sagemaker: HostedModels) -> None:
    words = (str(model), "--bucket", BUCKET)
    first = promote(*words)
    assert first.exit_code == 0, first.output
    assert 'the model answered: "It is 7."' in first.output
    assert "on ml.g6.xlarge: $1.13 per hour" in first.output
    (created,) = sagemaker.models.values()
    container = created["PrimaryContainer"]
    assert container["Environment"]["SM_VLLM_TOOL_CALL_PARSER"] == "hermes"
    prefix = container["ModelDataSource"]["S3DataSource"]["S3Uri"].removeprefix(f"s3://{BUCKET}/")
    assert {key.removeprefix(prefix) for key in keys()} >= {"config.json", "model.safetensors", "chat_template.jinja"}
    assert sagemaker.endpoints["refund"]["EndpointStatus"] == "InService"

    changes = sagemaker.changes
    again = promote(*words)
    assert "endpoint refund: is up to date" in again.output
    assert sagemaker.changes == changes

    larger = promote(*words, "--instance", "ml.g6e.2xlarge")
    assert "endpoint refund: is updated" in larger.output
    assert "price per hour unknown" in larger.output
    assert len(sagemaker.configs) == 2

    removed = promote(*words, "--remove")
    assert removed.exit_code == 0, removed.output
    assert (sagemaker.endpoints, sagemaker.configs, sagemaker.models, keys()) == ({}, {}, {}, [])
    assert "agentcore-rl-model-refund" not in roles()


def test_what_was_begun_is_continued_and_removed_after_each_step(model: Path, sagemaker: HostedModels) -> None:
    words = (str(model), "--bucket", BUCKET)
    for step in (1, 2, 3):  # model, configuration, endpoint
        sagemaker.refuse, sagemaker.changes = step, 0
        stopped = promote(*words)
        assert "not allowed" in str(stopped.exception)
        sagemaker.refuse = None
        if step == 2:
            assert promote(*words).exit_code == 0
        assert promote(*words, "--remove").exit_code == 0
        assert (sagemaker.endpoints, sagemaker.configs, sagemaker.models, keys()) == ({}, {}, {}, [])


def test_an_endpoint_of_others_is_left_alone(model: Path, sagemaker: HostedModels) -> None:
    sagemaker.endpoints["refund"] = {"EndpointStatus": "InService", "EndpointConfigName": "theirs"}
    refused = promote(str(model), "--bucket", BUCKET)
    assert "was not made by" in str(refused.exception)
    assert "was not made by" in str(promote(str(model), "--bucket", BUCKET, "--remove").exception)
    assert sagemaker.endpoints["refund"]["EndpointConfigName"] == "theirs"


def test_a_dry_run_changes_nothing(model: Path, sagemaker: HostedModels) -> None:
    done = promote(str(model), "--bucket", BUCKET, "--dry-run", "--name", "dry")
    assert done.exit_code == 0, done.output
    for call in ("s3://", "iam:CreateRole", "sagemaker:CreateModel", "sagemaker:CreateEndpoint"):
        assert call in done.output
    assert (sagemaker.changes, "agentcore-rl-model-dry" in roles()) == (0, False)


def test_a_deployed_agent_is_led_to_the_model_and_back(
    model: Path, sagemaker: HostedModels, account: dict[str, str]
) -> None:
    control = boto3.client("bedrock-agentcore-control")
    boto3.client("iam").create_role(RoleName="agent-role", AssumeRolePolicyDocument="{}")
    (agent,) = [a for a in control.list_agent_runtimes()["agentRuntimes"] if a["agentRuntimeName"] == "other"]
    arn, runtime = agent["agentRuntimeArn"], agent["agentRuntimeId"]
    role = control.get_agent_runtime(agentRuntimeId=runtime)["roleArn"].rsplit("/", 1)[1]
    if role not in roles():
        boto3.client("iam").create_role(RoleName=role, AssumeRolePolicyDocument="{}")
    done = promote(str(model), "--bucket", BUCKET, "--agent", arn, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    now = control.get_agent_runtime(agentRuntimeId=runtime)
    assert now["environmentVariables"]["AGENTCORE_RL_MODEL_URL"] == facts["url"]
    assert facts["url"].endswith("/endpoints/refund/openai/v1")
    policy = boto3.client("iam").get_role_policy(RoleName=role, PolicyName="agentcore-rl-model")["PolicyDocument"]
    assert policy["Statement"][0]["Resource"].endswith(":endpoint/refund")
    back = promote(str(model), "--agent", arn, "--roll-back", facts["version_before"])
    assert back.exit_code == 0, back.output
    assert "AGENTCORE_RL_MODEL_URL" not in control.get_agent_runtime(agentRuntimeId=runtime).get(
        "environmentVariables", {}
    )
    assert promote(str(model), "--bucket", BUCKET, "--remove").exit_code == 0


def test_a_folder_comes_with_the_command_that_serves_it(model: Path, tmp_path: Path) -> None:
    done = promote(str(model), "--to", "folder", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert f"vllm serve {tmp_path / 'out'} --enable-auto-tool-choice --tool-call-parser hermes" in done.output
    assert read_model(tmp_path / "out").dtype == "bfloat16"


def facts(**changes: Any) -> ModelFacts:
    values: dict[str, Any] = {
        "folder": WEIGHTS_DIR,
        "architecture": "Qwen3ForCausalLM",
        "bytes": 8 * 10**9,
        "dtype": "bfloat16",
        "context": 40960,
        "takes_tools": False,
        "digest": "0" * 12,
    }
    return ModelFacts(**(values | changes))


def test_the_smallest_instance_that_fits_is_taken() -> None:
    assert instance_for(facts(), None) == ("ml.g6.xlarge", 1)
    assert instance_for(facts(bytes=61 * 10**9), None)[1] == 4
    with pytest.raises(ConfigError, match="choose a larger --instance"):
        instance_for(facts(bytes=61 * 10**9), "ml.g6.xlarge")
    with pytest.raises(ConfigError, match="--instance"):
        instance_for(facts(bytes=10**12), None)
    assert instance_for(facts(bytes=10**12), "ml.of.tomorrow") == ("ml.of.tomorrow", 1)
    assert all(gpus in (1, 4, 8) for gpus, _ in INSTANCES.values())


@pytest.mark.parametrize(
    ("changes", "region", "why"),
    [
        ({"architecture": "Gemma3ForCausalLM"}, "us-west-2", "does not import the architecture"),
        ({}, "eu-west-1", "in us-east-1, us-east-2"),
        ({"architecture": "GptOssForCausalLM"}, "us-west-2", "us-east-1 only"),
        ({"bytes": 200 * 10**9}, "us-west-2", "less than 200 GB"),
        ({"context": 131072}, "us-west-2", "max_position_embeddings"),
        ({"takes_tools": True}, "us-west-2", "--to sagemaker"),
    ],
)
def test_an_import_into_bedrock_is_refused_by_its_cause(changes: dict[str, Any], region: str, why: str) -> None:
    (reason,) = refusals_of_import(facts(**changes), region)
    assert why in reason
    assert refusals_of_import(facts(), "us-west-2") == []
