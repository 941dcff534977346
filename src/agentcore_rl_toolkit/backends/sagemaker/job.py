"""A multi-turn RL job from the trainer's side: SageMaker runs the loop. This module creates, follows, and stops the job.

An existing job of the configured name is followed and not created again. So the same command continues after this process
ended. Source: the SDK `sagemaker-train` (`multi_turn_rl_trainer`, `multi_turn_rl_evaluator`) for the job's document.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ...client.data import encode_payload, read_rows
from ...errors import TrainingServiceError
from ...gateway.sampling_services.sagemaker import CONTROL, Caller, client_of
from ...runs import locked
from ...runs.folder import SUMMARY
from ...store import open_store
from ..collection.credit import refuse
from ..collection.recording import Recording, open_recording
from ..llm_judge import JudgeSettings
from ..settings import Count, Plan, Positive, Settings
from .settings import needs_of_botocore

Show = Callable[[str], None]
ACTIVE = ("InProgress", "Stopping")
SHOWN = ("ProgressInfo", "RolloutInfo", "BillableTokenUsage", "EvaluationMetrics")
SAMPLING = ("temperature", "sampling_top_p", "sampling_max_tokens")  # hyperparameters of training and of evaluation
BATCH = 128  # the default of global_batch_size


class JobConfig(Settings):
    """The settings of a job. Rows of ``data_path`` are the agent's payloads; they go below ``output_s3``.

    ``eval_data_path``: rows for evaluations before training, with the base model or ``start_from``, and after it.
    ``hyperparameters`` and ``eval_hyperparameters`` have AWS's names. Sampling applies to evaluations, too. Units: seconds.
    """

    form: Literal["job"]
    job_name: str
    agent_runtime_arn: Annotated[str, Field(pattern="^arn:[^:]+:bedrock-agentcore:[^:]+:")]
    qualifier: str = "DEFAULT"
    base_model: str
    accept_eula: bool = False
    role_arn: str
    mlflow_arn: str
    output_s3: str
    model_package_group_arn: str
    checkpoint_group_arn: str
    start_from: str | None = None
    data_path: Path
    eval_data_path: Path | None = None
    hyperparameters: Mapping[str, str | int | float] = Field(default_factory=dict)
    eval_hyperparameters: Mapping[str, str | int | float] = Field(default_factory=dict)
    output_dir: Path = Path("runs/sagemaker-job")
    max_runtime_s: Count = 86_400
    poll_s: Positive = 30.0

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, where: str) -> JobConfig:
        """Make the settings. Raises: ConfigError on a setting that is unknown, or that jobs cannot honor."""
        job = "a multi-turn RL job"
        refuse(values, job, "SageMaker computes the advantages; with `form: session`, this package does")
        refuse(values, job, "SageMaker uses the agent's reward; `form: session` can use a judge", JudgeSettings)
        # A job keeps no records.
        return super().from_values({k: v for k, v in values.items() if k != "s3_bucket"}, where=where)

    def plan(self, *, rehearse: bool = False) -> Plan:
        """Return the plan of the job. Raises: ConfigError when the data cannot be read."""
        rows, batch = len(read_rows(self.data_path)), int(self.hyperparameters.get("global_batch_size", BATCH))
        needs = needs_of_botocore()
        if rows < batch:
            needs.append(f"{self.data_path} has {rows} rows, a step takes {batch} (global_batch_size)")
        if self.model_package_group_arn == self.checkpoint_group_arn:
            needs.append("model_package_group_arn and checkpoint_group_arn must be different groups")
        form = f"{'a rehearsal of ' if rehearse else ''}a multi-turn RL job"
        facts = [("form", form), ("job", self.job_name), ("agent", self.agent_runtime_arn)]
        facts += [("model", self.base_model), ("output", self.output_s3), ("rows", f"{rows} in {self.data_path}")]
        facts += [(name, str(value)) for name, value in self.hyperparameters.items()]
        return Plan(backend="sagemaker", facts=facts, needs=needs)


class Jobs:
    """The jobs of one configuration: a training job, and evaluations before and after it.

    ``output_dir`` is a run's folder. It has the API's data (states, progress, billed tokens), the evaluations' rewards,
    and ``job.json`` at the end.
    """

    def __init__(self, config: JobConfig, show: Show) -> None:
        self._config, self._show = config, show
        self._control = Caller(client_of(CONTROL, config.agent_runtime_arn.split(":")[3]))
        self._recording: Recording

    async def run_async(self) -> str:
        """Evaluate, train, evaluate, and return the ARN of the model package. If cancelled, stop the running job.

        Raises: TrainingServiceError when a job fails.
        """
        config = self._config
        with locked(config.output_dir):
            self._recording = open_recording(config.output_dir, config.shown())
            try:
                before = await self._evaluate("before", config.start_from)
                groups = {
                    "OutputModelPackageGroupArn": config.model_package_group_arn,
                    "IntermediateCheckpointModelPackageGroupArn": config.checkpoint_group_arn,
                }
                if config.start_from is not None:
                    groups["InputModelPackageArn"] = config.start_from
                parts: dict[str, Any] = {"ModelPackageConfig": groups}
                parts["StoppingCondition"] = {"MaxRuntimeInSeconds": config.max_runtime_s}
                made = await self._job("AgentRFT", config.job_name, config.data_path, config.hyperparameters, parts)
                package = str(made["OutputModelPackageArn"])
                after = await self._evaluate("after", package)
            finally:
                self._recording.run.close()
                self._control.close()
            report = {"job": config.job_name, "model_package": package, "before": before, "after": after, **made}
            (config.output_dir / "job.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
            self._recording.finished(model_package=package)
            return package

    async def _evaluate(self, when: str, package: str | None) -> Any:
        config = self._config
        if config.eval_data_path is None:
            return None
        parts = {"ModelPackageConfig": {} if package is None else {"InputModelPackageArn": package}}
        name = f"{config.job_name}-{when}"
        values = {k: v for k, v in config.hyperparameters.items() if k in SAMPLING} | dict(config.eval_hyperparameters)
        output = await self._job("AgentRFTEvaluation", name, config.eval_data_path, values, parts)
        return output.get("EvaluationMetrics")

    async def _job(
        self, category: str, name: str, data: Path, values: Mapping[str, Any], parts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Create or find a job, follow it to its end, and return its output."""
        config, training = self._config, category == "AgentRFT"
        rows = "".join(json.dumps({"prompt": encode_payload(row)}) + "\n" for row in read_rows(data)).encode()
        # The name depends on the content: a running job of the same name may read other rows.
        folder, file = f"{config.output_s3.rstrip('/')}/data", f"{hashlib.sha256(rows).hexdigest()[:32]}.jsonl"
        await open_store(folder, default_region=config.agent_runtime_arn.split(":")[3]).put_async(file, rows)
        source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": f"{folder}/{file}"}}
        mlflow = {"MlflowResourceArn": config.mlflow_arn}
        parameters = {k: str(v) for k, v in values.items()}
        model: dict[str, Any] = {"BaseModelArn": config.base_model, "HyperParameters": parameters}
        model |= {"AcceptEula": True} if config.accept_eula else {}
        runtime = {"AgentRuntimeArn": config.agent_runtime_arn, "Qualifier": config.qualifier}
        document = {
            "AgentConfig": {"BedrockAgentCoreConfig": runtime},
            "InputDataConfig": [{"ChannelName": "train" if training else "evaluation", "DataSource": source}],
            "OutputDataConfig": {"S3OutputPath": config.output_s3, **({} if training else {"MlflowConfig": mlflow})},
            "TrainingConfig" if training else "EvaluationConfig": model
            | ({"MlflowConfig": mlflow} if training else {}),
            **parts,
        }
        named = {"JobName": name, "JobCategory": category}
        fixed = {
            "RoleArn": config.role_arn,
            "JobConfigSchemaVersion": "1.0.0",
            "JobConfigDocument": json.dumps(document),
        }
        (config.output_dir / SUMMARY).unlink(missing_ok=True)
        try:
            if not await self._control.create("create_job", **named, **fixed):
                self._show(f"{name} exists already, and is followed")
            return await self._follow(named)
        except asyncio.CancelledError:
            await self._stop(named)
            raise

    async def _stop(self, named: Mapping[str, str]) -> None:
        try:
            await self._control.call("stop_job", **named)
        except TrainingServiceError as e:
            self._show(
                f"{named['JobName']} was not stopped: {e}. While it runs, it costs money; the same command follows it again"
            )
        else:
            self._show(f"{named['JobName']} is stopping")

    async def _follow(self, named: Mapping[str, str]) -> dict[str, Any]:
        """Wait for the end of a job, and show its progress. Raises: TrainingServiceError unless it is completed."""
        shown: dict[str, Any] = {}
        while True:
            found = await self._control.call("describe_job", **named)
            output = json.loads(found.get("JobConfigDocument", "{}")).get("ServiceOutput", {})
            progress = {name: output[name] for name in SHOWN if name in output}
            state = {"job": named["JobName"], "status": found["SecondaryStatus"], **progress}
            if state != shown:
                said = f"{named['JobName']}: {found['SecondaryStatus']} {json.dumps(progress) if progress else ''}"
                self._show(said.rstrip())
                self._recording.run.event("job", state)
                shown = state
            if found["JobStatus"] not in ACTIVE:
                break
            await asyncio.sleep(self._config.poll_s)
        if found["JobStatus"] != "Completed":
            why = found.get("FailureReason", "SageMaker gave no reason")
            package = output.get("OutputModelPackageArn", "none")
            raise TrainingServiceError(
                f"job {named['JobName']} is {found['JobStatus']}: {why}. Model package: {package}",
                code=found["JobStatus"],
            )
        return dict(output)
