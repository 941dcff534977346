"""Multi-turn RL jobs by unmodified boto3 clients over HTTP; the agents of these tests call the job runtime themselves."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from click.testing import CliRunner

from agentcore_rl_toolkit.backends.sagemaker.job import JobConfig, Jobs
from agentcore_rl_toolkit.backends.sagemaker.local import jobs as jobs_module
from agentcore_rl_toolkit.backends.sagemaker.local import service as service_module
from agentcore_rl_toolkit.backends.sagemaker.local.service import ACCESS_KEY, SageMakerApp, running
from agentcore_rl_toolkit.cli.runs import show
from agentcore_rl_toolkit.cli.train import command as train_command
from agentcore_rl_toolkit.errors import TrainingServiceError
from serving import wait_for

from ..scripted_model import ScriptedModel
from .test_local_sessions import BASE, ROLE, check_response

ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/sums-0123456789"
GROUPS = "arn:aws:sagemaker:us-west-2:123456789012:model-package-group/"
PARAMETERS = {"global_batch_size": "32", "group_size": "2", "max_steps": "1", "learning_rate": "1e-3"}
ASK = {"messages": [{"role": "user", "content": "2+2"}]}


class ScriptedAgents:
    """The agents of a job, and the transport to them: ``agent(payload)`` answers an invocation, in a thread."""

    def __init__(self) -> None:
        self.agent: Callable[[dict[str, Any]], Any] = lambda payload: {}
        self.payloads: list[Mapping[str, Any]] = []
        self.sessions: set[str] = set()
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    def at(self, arn: str, *, qualifier: str, region: str, **_: Any) -> ScriptedAgents:
        assert (arn, qualifier, region) == (ARN, "DEFAULT", "us-west-2")
        return self

    def invoke(self, session_id: str, body: bytes) -> bytes:
        self.sessions.add(session_id)
        payload = json.loads(body)
        self.payloads.append(payload)
        return json.dumps(self.agent(payload)).encode()

    def stop(self, session_id: str) -> None:
        self.sessions.remove(session_id)


class Service:
    def __init__(self, here: SageMakerApp, agents: ScriptedAgents, model: ScriptedModel, folder: Path) -> None:
        self.url, self.secret, self.agents, self.model, self.folder = here.url, here.secret, agents, model, folder
        self.control, self.runtime = self.client("sagemaker"), self.client("sagemakerjobruntime")

    def client(self, name: str) -> Any:
        made = boto3.client(
            name,
            endpoint_url=self.url,
            region_name="us-west-2",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=self.secret,
            config=Config(retries={"total_max_attempts": 1}, max_pool_connections=40),
        )
        if name == "sagemaker":
            made.meta.events.register("after-call", check_response)
        return made

    def create(self, name: str = "sums", category: str = "AgentRFT", **parameters: str) -> str:
        training = category == "AgentRFT"
        channel = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": f"file://{self.folder}/rows.jsonl"}}
        config = {
            "BaseModelArn": BASE,
            "MlflowConfig": {"MlflowResourceArn": "arn:aws:sagemaker:us-west-2:123456789012:mlflow-app/app"},
            "HyperParameters": {**(PARAMETERS if training else {}), **parameters},
        }
        document = {
            "AgentConfig": {"BedrockAgentCoreConfig": {"AgentRuntimeArn": ARN}},
            "InputDataConfig": [{"ChannelName": "train" if training else "evaluation", "DataSource": channel}],
            "OutputDataConfig": {"S3OutputPath": "s3://data/out"},
            "ModelPackageConfig": {
                "OutputModelPackageGroupArn": f"{GROUPS}out",
                "IntermediateCheckpointModelPackageGroupArn": f"{GROUPS}steps",
            },
            "TrainingConfig" if training else "EvaluationConfig": config,
        }
        made = self.control.create_job(
            JobName=name,
            RoleArn=ROLE,
            JobCategory=category,
            JobConfigSchemaVersion="1.0.0",
            JobConfigDocument=json.dumps(document),
        )
        return str(made["JobArn"])

    def described(self, name: str = "sums", category: str = "AgentRFT") -> dict[str, Any]:
        return dict(self.control.describe_job(JobName=name, JobCategory=category))

    def ended(self, name: str = "sums", category: str = "AgentRFT") -> tuple[dict[str, Any], dict[str, Any]]:
        """The description of a job that is over, and its output."""
        wait_for(lambda: self.described(name, category)["JobStatus"] not in ("InProgress", "Stopping"))
        found = self.described(name, category)
        return found, json.loads(found["JobConfigDocument"])["ServiceOutput"]

    def ids(self, payload: Mapping[str, Any]) -> dict[str, str]:
        return {"JobArn": payload["metadata"]["jobArn"], "TrajectoryId": payload["metadata"]["rolloutId"]}

    def roll(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """A whole rollout, by boto3. Its reward is 1 for every other rollout of a row."""
        ids = self.ids(payload)
        body = self.runtime.sample(**ids, Body=json.dumps(ASK).encode())["Body"].read()
        assert json.loads(body)["choices"]
        self.runtime.complete_rollout(**ids, Status="ready")
        group = [p["metadata"]["rolloutId"] for p in list(self.agents.payloads) if p["prompt"] == payload["prompt"]]
        self.runtime.update_reward(**ids, Rewards=[float(group.index(ids["TrajectoryId"]) % 2)])
        return {"status": "completed"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}"}) + "\n" for i in range(32)))
    agents, model = ScriptedAgents(), ScriptedModel()
    model.last_id = 500
    with running(model) as here:
        here.agent_at = agents.at
        made = Service(here, agents, model, tmp_path)
        agents.agent = made.roll
        yield made


def test_a_job_trains_takes_reports_once_and_leaves_a_model_package(service: Service) -> None:
    answers: list[str] = []

    def refused(call: Callable[..., Any], **arguments: Any) -> None:
        with pytest.raises(ClientError) as e:
            call(**arguments)
        answers.append(f"{e.value.response['Error']['Code']}: {e.value.response['Error']['Message']}")

    def agent(payload: dict[str, Any]) -> Any:
        ids, runtime = service.ids(payload), service.runtime
        if payload["metadata"]["rolloutId"] != service.agents.payloads[0]["metadata"]["rolloutId"]:
            return service.roll(payload)
        refused(runtime.update_reward, **ids, Rewards=[1.0])
        runtime.sample(**ids, Body=json.dumps(ASK).encode())
        for _ in range(2):
            runtime.complete_rollout(**ids, Status="ready", ClientToken="same")
        refused(runtime.complete_rollout, **ids, Status="failed")
        refused(runtime.sample, **ids, Body=b"{}")
        for _ in range(2):
            runtime.update_reward(**ids, Rewards=[1.0], ClientToken="same")
        refused(runtime.update_reward, **ids, Rewards=[0.0])
        refused(runtime.complete_rollout, JobArn=ids["JobArn"], TrajectoryId="unknown", Status="ready")
        refused(runtime.sample, JobArn=ids["JobArn"], TrajectoryId="unknown", Body=b"{}")
        return {}

    service.agents.agent = agent
    arn = service.create(loss_fn="importance_sampling")
    found, output = service.ended()
    assert (found["JobStatus"], found["SecondaryStatus"]) == ("Completed", "Completed"), found
    assert found["JobArn"] == arn == "arn:aws:sagemaker:us-west-2:123456789012:job/AgentRFT/sums"
    assert [t["Status"] for t in found["SecondaryStatusTransitions"]] == [
        "Starting",
        "Downloading",
        "Training",
        "Completed",
    ]
    assert output["OutputModelPackageArn"].endswith("model-package/out/1")
    assert output["RolloutInfo"] == {"Completed": 64, "Total": 64}
    assert not service.agents.sessions
    assert output["ProgressInfo"]["CurrentStep"] == output["ProgressInfo"]["MaxSteps"] == 1
    assert service.model.saved[output["OutputModelPackageArn"]] == 1
    payload = service.agents.payloads[0]
    assert payload["inferenceParams"] == {"temperature": 1.0, "topP": 1.0, "maxTokens": 4096}
    assert payload["metadata"]["endpoint"] == service.url
    wait_for(lambda: service.agents.closed == 1)
    assert [answer.partition(":")[0] for answer in answers] == [
        "ConflictException",
        "ConflictException",
        "ValidationException",
        "ConflictException",
        "ResourceNotFoundException",
        "ValidationException",
    ]
    assert "not in valid status" in answers[2]
    assert "Cannot transition trajectory" in answers[1]


def test_an_evaluation_reports_its_mean(service: Service) -> None:
    (service.folder / "rows.jsonl").write_text('{"prompt": "1+1"}\n{"prompt": "2+2"}\n')
    service.create(category="AgentRFTEvaluation", eval_group_size="2")
    found, output = service.ended(category="AgentRFTEvaluation")
    assert (found["JobStatus"], output["EvaluationMetrics"]) == ("Completed", {"eval/reward/mean": 0.5})
    assert service.agents.payloads[0]["inferenceParams"]["temperature"] == 0


def test_a_job_is_stopped_and_keeps_its_weights(service: Service) -> None:
    service.agents.agent = lambda payload: {"status": "in_progress"}  # and no rollout ends
    service.create()
    with pytest.raises(ClientError, match="ResourceInUse"):
        service.create()
    service.control.stop_job(JobName="sums", JobCategory="AgentRFT")
    found, output = service.ended()
    assert found["JobStatus"] == "Stopped"
    assert "OutputModelPackageArn" in output or found["SecondaryStatusTransitions"][-3]["Status"] != "Training"


def test_parameters_that_the_api_refuses_or_that_mean_nothing_here(service: Service) -> None:
    for name, value in (("temperature", "0"), ("advantage_method", "group_based_per_turn"), ("loss_fn", "dpo")):
        with pytest.raises(ClientError, match=r"ValidationException.*HyperParameters"):
            service.create(**{name: value})


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("silent", "No sampling requests were received for this rollout"),
        ("error", "The agent signaled that the trajectory failed"),
        ("no reward", "The rollout completed but no reward was received in time"),
    ],
)
def test_what_ended_jobs_at_aws_ends_this_one(
    service: Service, monkeypatch: pytest.MonkeyPatch, case: str, reason: str
) -> None:
    monkeypatch.setattr(jobs_module, "REWARD_S", 0.1)

    def agent(payload: dict[str, Any]) -> Any:
        if payload["prompt"] != "7+7":
            return {"status": "in_progress"}
        if case == "error":
            return {"status": "error"}
        if case == "no reward":
            service.runtime.sample(**service.ids(payload), Body=json.dumps(ASK).encode())
        service.runtime.complete_rollout(**service.ids(payload), Status="ready")
        return {}

    service.agents.agent = agent
    service.create()
    found, _ = service.ended()
    assert (found["JobStatus"], found["FailureReason"]) == ("Failed", reason)


def test_a_batch_without_any_reward_ends_the_job(service: Service) -> None:
    def agent(payload: dict[str, Any]) -> Any:
        service.runtime.complete_rollout(**service.ids(payload), Status="failed")
        return {}

    service.agents.agent = agent
    service.create()
    found, _ = service.ended()
    assert "CompleteRollout said failed" in found["FailureReason"]


@pytest.fixture
def settings(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A configuration of `train --backend sagemaker`, and the environment that leads it to the service."""
    for name, value in (("ENDPOINT_URL_SAGEMAKER", service.url), ("SECRET_ACCESS_KEY", service.secret)):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    return {
        "form": "job",
        "job_name": "sums",
        "agent_runtime_arn": ARN,
        "base_model": BASE,
        "role_arn": ROLE,
        "mlflow_arn": "arn:aws:sagemaker:us-west-2:123456789012:mlflow-app/app",
        "output_s3": f"file://{tmp_path}/s3",
        "model_package_group_arn": f"{GROUPS}out",
        "checkpoint_group_arn": f"{GROUPS}steps",
        "data_path": str(tmp_path / "rows.jsonl"),
        "hyperparameters": {"global_batch_size": 32, "group_size": 2},
        "output_dir": str(tmp_path / "run"),
        "poll_s": 0.05,
    }


def test_the_command_evaluates_trains_and_evaluates(service: Service, settings: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    (tmp_path / "held-out.jsonl").write_text("".join((tmp_path / "rows.jsonl").read_text().splitlines(True)[:2]))
    file.write_text(json.dumps(settings | {"eval_data_path": str(tmp_path / "held-out.jsonl")}))
    done = CliRunner().invoke(train_command, ["--backend", "sagemaker", "--config", str(file)])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "run" / "job.json").read_text())
    assert done.output.splitlines()[-1] == f"model package: {report['model_package']}"
    # Of each row, the second and the fourth rollout have the reward 1. Two are trained in between.
    assert (report["before"], report["after"]) == ({"eval/reward/mean": 0.0}, {"eval/reward/mean": 1.0})
    assert [p["inferenceParams"]["temperature"] for p in service.agents.payloads] == [0, 0, *[1] * 64, 0, 0]
    shown = CliRunner().invoke(show, [str(tmp_path / "run")], catch_exceptions=False).output
    assert shown.startswith("run   finished")
    assert 'sums  Completed  {"ProgressInfo": {"CurrentStep": 1' in shown
    assert 'sums-after  Completed  {"RolloutInfo": {"Completed": 2, "Total": 2}}  {"EvaluationMetrics":' in shown
    last = service.control.describe_job(JobName="sums-after", JobCategory="AgentRFTEvaluation")
    assert last["JobStatus"] == "Completed"
    assert service.agents.payloads[0]["prompt"] == '{"prompt":"0+0"}'


async def test_an_interrupted_command_stops_its_job_and_the_next_one_finds_it(
    service: Service, settings: dict[str, Any]
) -> None:
    service.agents.agent = lambda payload: {"status": "in_progress"}
    config = JobConfig.from_values(settings, where="settings")
    rolling = asyncio.Event()
    command = asyncio.create_task(
        Jobs(config, lambda line: rolling.set() if "RolloutInfo" in line else None).run_async()
    )
    await rolling.wait()
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command
    with pytest.raises(TrainingServiceError, match=r"sums is Stopped.*Model package: arn:.*model-package/out/1"):
        await Jobs(config, lambda line: None).run_async()


async def test_a_command_that_is_interrupted_while_its_job_is_made_stops_it(
    service: Service, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.agents.agent = lambda payload: {"status": "in_progress"}
    asked, go_on = asyncio.Event(), threading.Event()

    def held(*given: Any) -> jobs_module.Job:
        loop.call_soon_threadsafe(asked.set)
        go_on.wait(30)
        return jobs_module.Job(*given)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(service_module, "Job", held)
    command = asyncio.create_task(Jobs(JobConfig.from_values(settings, where="settings"), print).run_async())
    await asked.wait()
    command.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await command
    assert (await asyncio.to_thread(service.ended))[0]["JobStatus"] == "Stopped"


async def test_a_command_that_finds_its_job_leaves_the_rows_that_the_job_reads(
    service: Service, settings: dict[str, Any], tmp_path: Path
) -> None:
    service.agents.agent = lambda payload: {"status": "error"}  # which ends the job at once
    config = JobConfig.from_values(settings, where="settings")
    with pytest.raises(TrainingServiceError, match="signaled"):
        await Jobs(config, lambda line: None).run_async()
    [rows] = (tmp_path / "s3" / "data").iterdir()
    before = rows.read_bytes()
    config.data_path.write_text("".join(json.dumps({"prompt": f"{i}*{i}"}) + "\n" for i in range(32)))
    with pytest.raises(TrainingServiceError, match="signaled"):
        await Jobs(config, lambda line: None).run_async()
    assert rows.read_bytes() == before
