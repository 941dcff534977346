"""A whole run by the SDK's methods: our gateway and the built-in policy in this process, real agents on the local runtime.

The policy really samples and really trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker")

from agentcore_rl_toolkit.backends.collection.groups import Group
from agentcore_rl_toolkit.backends.tinker.adapter import TinkerTraining
from agentcore_rl_toolkit.backends.tinker.settings import TinkerConfig
from agentcore_rl_toolkit.backends.training.client import Adam
from agentcore_rl_toolkit.backends.training.publishing import gap, publish
from agentcore_rl_toolkit.backends.training.settings import STATE_FILE
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.errors import WeightsError
from agentcore_rl_toolkit.policy import WEIGHTS_DIR, load_policy
from agentcore_rl_toolkit.runs import Query, RunReader, TokenSequence
from agentcore_rl_toolkit.runs.folder import read_metrics

from ..service_runs import RecordingModel, agents, check_tokens
from .local_service import BASE_MODEL, LocalService, run_over


@dataclass(frozen=True)
class Place:
    model: RecordingModel
    service: LocalService
    config: TinkerConfig


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "local")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "local")
    model = RecordingModel()
    with contextlib.closing(model), agents(tmp_path) as settings:
        yield Place(model, LocalService(model), TinkerConfig(base_model=BASE_MODEL, **settings))


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_service_trains_exactly_what_it_sampled_and_a_second_run_goes_on(
    place: Place, is_what_the_docs_say: Callable[[Path, str], None]
) -> None:
    model, service, config = place.model, place.service, place.config
    steps: list[dict[str, Any]] = []
    batches: list[list[Group]] = []

    def keep(event: str, facts: dict[str, Any]) -> None:
        if event == "collected":
            batches.append(facts["groups"])
        elif event == "step":
            steps.append(facts)

    assert asyncio.run(run_over(service, config, keep)) == 1
    [groups] = batches
    outcomes = Counter(r.outcome for g in groups for r in g.rollouts)
    assert outcomes == {Outcome.OK: 31, Outcome.AGENT_ERROR: 1}
    assert steps[0]["gradient_tokens"] > 0
    check_tokens(model, groups)
    state = json.loads((config.output_dir / STATE_FILE).read_text())
    assert state["steps"] == 1
    assert state["state"] in model.paths

    sampled, trained = len(model.sampled), len(model.trained)
    assert asyncio.run(run_over(service, config.replace(steps=2), keep)) >= 1
    groups = batches[1]
    assert steps[1]["step"] == 1
    # Its first rollouts come from the restored weights, under the version they had.
    versions = {
        t.weight_version_first for g in groups for r in g.usable if r.capture is not None for t in r.capture.turns
    }
    assert versions == {1}
    by_rollouts = {path for path, _ in model.sampled[sampled:] if path is not None and "run-000002" not in path}
    [_, restored] = [p for p in model.paths if "sampler_weights/run-000001" in p]
    assert by_rollouts == {restored}
    check_tokens(model, groups, sampled_from=sampled, trained_from=trained)
    assert [entry["step"] for entry in read_metrics(config.output_dir)] == [0, 1]
    is_what_the_docs_say(config.output_dir, "Tinker")
    with RunReader(config.output_dir) as run:
        steps_of = run.steps()
        assert [(s["phase"], s["step"]) for s in steps_of] == [("train", 0), ("train", 1)]
        assert 0 < steps_of[0]["gap_max"] < 1e-3  # the service's own logprobs beside the sampler's
        for row in run.rollouts(Query(phase="train", step=0)):
            if row["advantage"]:
                [sequence] = [TokenSequence.decoded(s) for s in (run.rollout(row["id"]) or {})["sequences"]]
                assert sequence.trainer_logprobs is not None
                known = [lp is not None for lp in sequence.trainer_logprobs]
                assert known == [bool(mask) for mask in sequence.mask]
    assert service.finished == ["success"] * 4  # the trainer's session and the gateway's, of both runs


class GatewayOfPaths:
    """The paths that it was to sample from."""

    def __init__(self) -> None:
        self.sent: list[tuple[str | None, int]] = []

    async def set_weight_version_async(self, version: int, *, sampler: str | None = None) -> None:
        self.sent.append((sampler, version))


@contextlib.asynccontextmanager
async def one_step(model: RecordingModel, config: TinkerConfig) -> AsyncIterator[tuple[TinkerTraining, str]]:
    """A training client after a step, and the path of its weights before it."""
    service = LocalService(model)
    training = await TinkerTraining.open(service, config, None)
    path = await training.save_weights("before")
    assert await gap(training, path) < 1e-4
    ids = list(range(1, 60))
    datum = training._datum(ids[:-1], {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)})
    forward = training._training.forward_backward([datum], "cross_entropy")
    step = training.step(Adam(learning_rate=1e-2, beta1=0.9, beta2=0.95, grad_clip_norm=0.0))
    await forward, await step
    yield training, path
    model.close()


@pytest.mark.parametrize(
    "tensors",
    [pytest.param(1, marks=pytest.mark.system), pytest.param(None, marks=pytest.mark.nightly)],
    ids=["one", "each"],
)
async def test_sampling_weights_of_another_step_or_with_any_one_old_tensor_are_noticed(
    tmp_path: Path, tensors: int | None
) -> None:
    """The default limit is for a service that computes in bfloat16, and finds fewer (docs/engines.md)."""
    model, gateway = RecordingModel(), GatewayOfPaths()
    config = TinkerConfig(
        exp_id="e",
        agent_runtime_arn="a",
        s3_bucket="b",
        base_model=BASE_MODEL,
        model_dir=WEIGHTS_DIR,
        data_path=tmp_path,
    )
    lost = "the weights did not arrive: after version 1 was published to Tinker"
    async with one_step(model, config) as (training, before):
        save_weights, training.save_weights = training.save_weights, lambda name: asyncio.sleep(0, before)  # type: ignore[method-assign]
        with pytest.raises(WeightsError, match=lost):
            await publish(training, "before", 1, gateway)  # agents would sample from the step before
        training.save_weights = save_weights  # type: ignore[method-assign]
        await publish(training, "after", 1, gateway)
        assert [version for _, version in gateway.sent] == [1, 1]
        for number, (name, _) in enumerate(list(load_policy()[0].named_parameters())[:tensors]):
            model.keeps = name
            with pytest.raises(WeightsError, match=lost):
                await publish(training, f"without-{number}", 1, gateway, max_gap=1e-3)
        model.keeps = None
        await publish(training, "complete", 1, gateway, max_gap=1e-3)
