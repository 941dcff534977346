"""The training client over the local service by real HTTP: order, resends, a session's life, and the same loss as Tinker's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import boto3
import pytest

pytest.importorskip("torch")

from agentcore_rl_toolkit.backends.collection.collect import collect
from agentcore_rl_toolkit.backends.collection.samples import to_samples
from agentcore_rl_toolkit.backends.sagemaker import adapter, session
from agentcore_rl_toolkit.backends.sagemaker.adapter import SageMakerTraining, chunks, combined
from agentcore_rl_toolkit.backends.sagemaker.local.service import ACCESS_KEY, SageMakerApp, running
from agentcore_rl_toolkit.backends.sagemaker.settings import SageMakerConfig
from agentcore_rl_toolkit.backends.training.batch import Datum, to_data
from agentcore_rl_toolkit.backends.training.client import Adam, Loss, Passed
from agentcore_rl_toolkit.backends.training.local import LocalModel
from agentcore_rl_toolkit.cli.doctor.aws import Account
from agentcore_rl_toolkit.errors import ConfigError, TrainingServiceError
from agentcore_rl_toolkit.runs import locked

from ..faulty_service import FaultyApp, ListingApp
from ..recorded import Replay, recorded_episodes, requests_for
from ..scripted_model import ScriptedModel

HUB = "arn:aws:sagemaker:us-west-2:aws:hub-content/SageMakerPublicHub/Model/m"
ADAM = Adam(learning_rate=1e-3, beta1=0.9, beta2=0.95, grad_clip_norm=0.0)


class Logged(ScriptedModel):
    """`done` are the training operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Any] = []

    def forward_backward(self, run: str, data: Sequence[Datum], loss: Loss, *, backward: bool = True) -> Passed:
        self.done.append([datum.tokens[0] for datum in data])
        return super().forward_backward(run, data, loss, backward=backward)

    def step(self, run: str, adam: Adam) -> Mapping[str, float]:
        self.done.append("step")
        return super().step(run, adam)


@pytest.fixture
def model() -> Logged:
    return Logged()


@pytest.fixture
def service(model: Logged, monkeypatch: pytest.MonkeyPatch) -> Iterator[SageMakerApp]:
    with running(model, app=FaultyApp) as service:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        yield service


def config_in(folder: Path, **more: Any) -> SageMakerConfig:
    return SageMakerConfig(
        exp_id="run",
        agent_runtime_arn="a",
        s3_bucket="b",
        base_model=HUB,
        model_dir=folder,
        data_path=folder / "rows.jsonl",
        output_dir=folder,
        role_arn="arn:aws:iam::123456789012:role/training",
        output_s3="s3://bucket/runs",
        **more,
    )


def some_data(n: int, length: int = 6) -> list[Datum]:
    return [
        Datum(
            tokens=[i + 1, *range(20, 20 + length)],
            target_tokens=list(range(20, 21 + length)),
            logprobs=[0.0, *([-1.5] * length)],
            advantages=[0.0, *([1.0 if i % 2 else -0.5] * length)],
            mask=[0, *([1] * length)],
            fresh=[False, *([True] * length)],
        )
        for i in range(n)
    ]


def sessions(folder: Path) -> dict[str, dict[str, int] | None]:
    """The sessions that the run's folder keeps: what each was billed for, None while it may run."""
    return dict(json.loads((folder / session.FILE).read_text()))


def status(name: str) -> str:
    detail = boto3.Session().client("sagemaker").describe_training_session(TrainingSessionName=name)
    return str(detail["TrainingSessionDetail"]["TrainingSessionStatus"])


async def test_each_operation_is_done_once_and_in_order_whatever_is_refused_or_lost(
    service: SageMakerApp, model: Logged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "CHUNK_DATA", 2)
    training = await SageMakerTraining.open(config_in(tmp_path, poll_s=0.1), None)
    FaultyApp.faults = {"throttle": 0.15, "error": 0.1, "lost": 0.2}
    for _ in range(2):
        forward, step = training.forward_backward(some_data(5), Loss(name="ppo"), 1.0), training.step(ADAM)
        await forward
        assert (await step)["billed_training_tokens"] > 0
    FaultyApp.faults = {}
    path = await training.save_weights("w")
    assert path in model.paths
    await training.close("success")
    assert model.done == [[1], [2, 3], [4, 5], "step"] * 2


async def test_the_session_is_named_on_disk_until_it_is_stopped_and_one_that_was_left_is_stopped_first(
    service: SageMakerApp, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_in(tmp_path)
    await SageMakerTraining.open(config, None)  # and its process is killed
    [left] = sessions(tmp_path)
    assert (status(left), sessions(tmp_path)[left]) == ("Running", None)
    second = await SageMakerTraining.open(config, None)
    assert left in caplog.text
    [_, name] = sessions(tmp_path)
    assert (status(left), status(name)) == ("Stopped", "Running")
    await second.close("success")
    assert status(name) == "Stopped"
    assert None not in sessions(tmp_path).values()


async def test_the_tokens_billed_are_those_of_all_sessions_of_a_run(service: SageMakerApp, tmp_path: Path) -> None:
    billed = []
    for _ in range(2):
        training = await SageMakerTraining.open(config_in(tmp_path), None)
        await training.forward_backward(some_data(2), Loss(name="ppo"), 1.0)
        billed.append((await training.step(ADAM))["billed_training_tokens"])
        await training.close("success")
    assert billed == [14, 28]


async def test_a_failed_operation_says_why_and_a_start_that_fails_leaves_no_session(
    service: SageMakerApp, tmp_path: Path
) -> None:
    with pytest.raises(TrainingServiceError, match="there are no weights"):
        await SageMakerTraining.open(
            config_in(tmp_path), "arn:aws:sagemaker:us-west-2:123456789012:model-package/none/1"
        )
    [name] = sessions(tmp_path)
    assert status(name) == "Failed"
    assert sessions(tmp_path)[name] is not None


async def test_a_session_is_found_in_its_region_whatever_the_default_is(
    service: SageMakerApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    made = boto3.Session.client

    def routed(self: boto3.Session, name: str, region_name: str = "", **more: Any) -> Any:
        """As AWS's DNS: nothing of the service is in other regions than its own."""
        here = {} if region_name == "us-west-2" else {"endpoint_url": empty.url, **credential}
        return made(self, name, region_name=region_name, **{**more, **here})

    with running(ScriptedModel(), app=ListingApp) as empty:
        credential = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": empty.secret}
        monkeypatch.setattr(boto3.Session, "client", routed)
        config = config_in(tmp_path)
        await SageMakerTraining.open(config, None)  # and its process is killed
        [name] = sessions(tmp_path)
        [finding] = Account(agent_arn=None, bucket=None, gateway_url=None, gateway_admin_key=None).training()
        assert name in finding.text
        assert await session.stop_named(name) in ("Stopping", "Stopped")
        with pytest.raises(ConfigError, match="no training session"):
            await session.stop_named("another")
        second = await SageMakerTraining.open(config, None)
        assert sessions(tmp_path)[name] is not None
        await second.close("success")


async def test_a_run_in_a_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ConfigError, match="in use"):
        await adapter.run_async(config_in(tmp_path))


def test_a_large_step_is_cut_into_even_operations_that_lose_nothing() -> None:
    data = some_data(2500)
    parts = chunks(data)
    assert [len(part) for part in parts] == [833, 833, 834]
    assert [d for part in parts for d in part] == data
    assert [len(part) for part in chunks(some_data(4, length=79_999))] == [2, 2]
    results = [{"metrics": {"a": 1.0, "loss:sum": 2.0}}, {"metrics": {"a": 4.0, "loss:sum": 3.0}}]
    assert combined(results, [2, 1]).metrics == {"a": 2.0, "loss:sum": 5.0}


async def test_the_loss_of_episodes_of_every_kind_is_the_one_that_tinker_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_equality` has the data of the same episodes."""
    episodes = recorded_episodes(20, per_group=10)
    replay = Replay(episodes)
    groups = collect(requests_for(episodes), client=replay.client, gateway=replay.gateway)
    data = [datum for datum, _ in to_data(to_samples(groups))]
    assert len(data) == 19
    model = LocalModel()
    model.create("tinker")
    with running(model) as service:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        training = await SageMakerTraining.open(config_in(tmp_path, poll_s=0.1), None)
        for loss in ("importance_sampling", "ppo", "cispo"):
            wanted = model.forward_backward("tinker", data, Loss(name=loss), backward=False).metrics["loss"]
            found = (await training.forward_backward(data, Loss(name=loss), 1.0)).metrics["actor/pg_loss"] * len(data)
            assert found == pytest.approx(wanted, abs=1e-4)
        await training.close("success")
    await asyncio.to_thread(model.close)
