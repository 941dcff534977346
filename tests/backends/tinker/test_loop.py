"""The Tinker loop against a scripted training client with the SDK's method names and futures."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collect import GroupRequest
from agentcore_rl_toolkit.backends.recorded import recorded_episodes, requests_for
from agentcore_rl_toolkit.backends.replay import Episode, Replay
from agentcore_rl_toolkit.backends.tinker.loop import StepResult, TinkerConfig, sdk_adam, sdk_datum, train_async
from agentcore_rl_toolkit.errors import ConfigError, RolloutError


@dataclass
class ScriptedTrainingClient:
    """Remembers what it was asked; its futures answer in the order of the requests."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    async def forward_backward_async(self, data: list[Any], loss_fn: str) -> Any:
        self.calls.append(("forward_backward", data, loss_fn))
        return Answer(SimpleNamespace(metrics={"loss:sum": 1.5}), self)

    async def optim_step_async(self, adam_params: Any) -> Any:
        self.calls.append(("optim_step", adam_params))
        return Answer(SimpleNamespace(), self)

    async def save_weights_and_get_sampling_client_async(self, name: str) -> Any:
        self.calls.append(("save", name))
        return f"sampler of {name}"

    def names(self) -> list[str]:
        return [c[0] for c in self.calls]


@dataclass
class Answer:
    value: Any
    client: ScriptedTrainingClient

    async def result_async(self) -> Any:
        self.client.calls.append(("await",))
        return self.value


async def run(
    episodes: Sequence[Episode], batches: list[list[GroupRequest]], **more: Any
) -> tuple[int, ScriptedTrainingClient, list[tuple[Any, int]], list[StepResult]]:
    replay, client = Replay(episodes), ScriptedTrainingClient()
    published: list[tuple[Any, int]] = []
    steps: list[StepResult] = []

    async def publish(sampler: Any, version: int) -> None:
        published.append((sampler, version))

    version = await train_async(
        batches,
        config=TinkerConfig(exp_id="e", **more),
        training_client=client,
        client=replay.client,
        gateway=replay.gateway,
        publish=publish,
        on_step=lambda result, groups: steps.append(result),
        make_datum=dict,
        make_adam=lambda c: {"learning_rate": c.learning_rate},
    )
    return version, client, published, steps


async def test_each_step_updates_once_and_publishes_new_weights() -> None:
    episodes = recorded_episodes()
    requests = requests_for(episodes)
    version, client, published, steps = await run(episodes, [requests[:4], requests[4:]])
    assert version == 2
    assert published == [("sampler of e-000000", 0), ("sampler of e-000001", 1), ("sampler of e-000002", 2)]
    step = ["forward_backward", "optim_step", "await", "await", "save"]
    assert client.names() == ["save", *step, *step]  # both requests are sent before either is awaited
    assert [s.trained for s in steps] == [True, True]
    assert steps[0].metrics["loss:sum"] == 1.5
    for call in client.calls:
        if call[0] == "forward_backward":
            assert call[2] == "importance_sampling"
            assert all(set(d["loss_fn_inputs"]) == {"target_tokens", "logprobs", "advantages"} for d in call[1])


async def test_a_step_with_nothing_to_learn_keeps_the_weights() -> None:
    same = [e for e in recorded_episodes(640) if e.record == {"rewards": 1.0, "status_code": 200} and e.turns][:4]
    episodes = [Episode(input_id="a", turns=e.turns, record=e.record) for e in same]
    version, client, published, steps = await run(episodes, [[GroupRequest(input_id="a", payload={}, n=4)]])
    assert version == 0
    assert client.names() == ["save"]
    assert len(published) == 1
    assert not steps[0].trained
    assert steps[0].stats.usable == 4


async def test_steps_without_usable_rollouts_end_the_run() -> None:
    bad = [e for e in recorded_episodes(640) if e.kind == "lost"][:4]
    episodes = [Episode(input_id=f"i{k}", failure=e.failure) for k, e in enumerate(bad)]
    batches = [[GroupRequest(input_id=f"i{k}", payload={})] for k in range(4)]
    with pytest.raises(RolloutError, match=r"2 steps in a row.*died without a record"):
        await run(episodes, batches, max_empty_steps=2)


async def test_sequences_over_the_limit_are_counted_not_cut() -> None:
    episodes = recorded_episodes()
    _, client, _, steps = await run(episodes, [requests_for(episodes)], max_tokens=30)
    assert steps[0].too_long > 0
    data = next(c[1] for c in client.calls if c[0] == "forward_backward")
    assert max(len(d["tokens"]) + 1 for d in data) <= 30
    assert steps[0].samples == len(data)


@pytest.mark.parametrize("bad", [{"learning_rate": 0.0}, {"max_empty_steps": 0}])
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TinkerConfig(exp_id="e", **bad)


@pytest.mark.skipif(not importlib.util.find_spec("tinker"), reason="the Tinker SDK is not installed")
def test_the_sdk_takes_our_data() -> None:
    inputs = {"target_tokens": [2, 3], "logprobs": [0.0, -0.5], "advantages": [0.0, 1.0]}
    datum = sdk_datum({"tokens": [1, 2], "loss_fn_inputs": inputs})
    assert datum.model_input.to_ints() == [1, 2]
    assert sdk_adam(TinkerConfig(exp_id="e")).learning_rate == 2e-5
