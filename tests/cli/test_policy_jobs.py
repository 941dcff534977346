"""One agent, unchanged, on one local runtime: our client, a multi-turn RL job and a training session drive it."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.backends.sagemaker.adapter import run_async
from agentcore_rl_toolkit.backends.sagemaker.job import JobConfig, Jobs
from agentcore_rl_toolkit.backends.sagemaker.local.jobs import ModelSampler
from agentcore_rl_toolkit.backends.sagemaker.local.service import running
from agentcore_rl_toolkit.backends.sagemaker.settings import SageMakerConfig
from agentcore_rl_toolkit.backends.training.local import LocalModel
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, UpstreamConfig
from agentcore_rl_toolkit.gateway.sampling_services.sagemaker import CONTROL, Caller, client_of
from agentcore_rl_toolkit.policy import WEIGHTS_DIR
from agentcore_rl_toolkit.runtime import LocalRuntime

HUB = "arn:aws:sagemaker:us-west-2:aws:hub-content/SageMakerPublicHub/Model/any"
ROLE = "arn:aws:iam::123456789012:role/any"


@pytest.mark.system
def test_one_agent_is_driven_by_our_client_a_job_and_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"What is {n} + 2?"}) + "\n" for n in range(32)))
    row = tmp_path / "row.jsonl"
    row.write_text(rows.read_text().splitlines()[0] + "\n")
    model, records = LocalModel(), tmp_path / "records"
    records.mkdir()
    with running(model) as service:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        options = ["--store", str(records)]
        options += [word for name in service.environment for word in ("--session-env", name)]
        with LocalRuntime({"one": Path(__file__).with_name("one_agent.py")}, options) as runtime:
            monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", runtime.url)
            agent = runtime.arns["one"]
            assert asyncio.run(by_our_client(model, agent, records.as_uri()))["rewards"] in (0, 1)

            package = asyncio.run(by_a_job(agent, rows, row, tmp_path / "job"))
            assert package in model.paths
            report = json.loads((tmp_path / "job" / "job.json").read_text())
            assert report["RolloutInfo"] == {"Completed": 64, "Total": 64}
            assert report["BillableTokenUsage"]["TrainTokenCount"] > 0
            control = Caller(client_of(CONTROL, "us-west-2"))
            evaluation = {"JobName": "one-after", "JobCategory": "AgentRFTEvaluation"}
            made = json.loads(asyncio.run(control.call("describe_job", **evaluation))["JobConfigDocument"])
            control.close()
            assert made["EvaluationConfig"]["HyperParameters"] == {"sampling_max_tokens": "512"}  # the training's limit

            config = SageMakerConfig(
                exp_id="session",
                agent_runtime_arn=agent,
                s3_bucket=records.as_uri(),
                base_model=HUB,
                role_arn=ROLE,
                output_s3="s3://bucket/session",
                model_dir=WEIGHTS_DIR,
                data_path=rows,
                output_dir=tmp_path / "session",
                gateway_host="127.0.0.1",
                steps=1,
                groups_per_step=2,
            )
            usable: list[int] = []
            observe = lambda event, facts: usable.append(facts["usable"]) if event == "step" else None  # noqa: E731
            asyncio.run(run_async(config, observe))
            assert usable == [16]
    model.close()


async def by_our_client(model: LocalModel, agent: str, store: str) -> dict[str, Any]:
    key, session_id = secrets.token_urlsafe(24), new_session_id()
    upstream = UpstreamConfig(url="http://in-process.invalid", engine="sagemaker")
    config = GatewayConfig(upstreams=(upstream,), model_dir=str(WEIGHTS_DIR), admin_key=key)
    gateway = Gateway(config, connect=lambda: ModelSampler(model))
    await gateway.start()
    async with GatewayClient(gateway.url, admin_key=key) as sessions, RolloutClient(agent, store, "client") as client:
        await sessions.set_weight_version_async(1, sampler="base")
        [session] = await sessions.create_sessions_async([session_id])
        model_of = {"base_url": session.base_url, "api_key": session.api_key, "model_id": "m"}
        future = await client.invoke_async({"prompt": "What is 2 + 2?"}, session_id=session_id, **model_of)
        record: dict[str, Any] = await future.result_async(60)
    await gateway.stop()
    return record


async def by_a_job(agent: str, rows: Path, row: Path, folder: Path) -> str:
    group = "arn:aws:sagemaker:us-west-2:123456789012:model-package-group"
    config = JobConfig(
        form="job",
        job_name="one",
        agent_runtime_arn=agent,
        base_model=HUB,
        role_arn=ROLE,
        mlflow_arn="arn:aws:sagemaker:us-west-2:123456789012:mlflow-app/any",
        output_s3=folder.as_uri(),
        model_package_group_arn=f"{group}/out",
        checkpoint_group_arn=f"{group}/steps",
        data_path=rows,
        eval_data_path=row,
        hyperparameters={"global_batch_size": 32, "group_size": 2, "max_steps": 1, "sampling_max_tokens": 512},
        output_dir=folder,
        poll_s=0.2,
    )
    return await Jobs(config, print).run_async()
