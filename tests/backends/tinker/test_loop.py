"""The Tinker loop against a scripted training client with the SDK's method names and futures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.collect import GroupRequest
from agentcore_rl_toolkit.backends.recorded import recorded_episodes, requests_for
from agentcore_rl_toolkit.backends.replay import Episode, Replay
from agentcore_rl_toolkit.backends.tinker.loop import StepResult, TinkerConfig, sdk_adam, sdk_datum, train_async
from agentcore_rl_toolkit.errors import ConfigError, RolloutError

pytest.importorskip("tinker")


@dataclass
class ScriptedTrainingClient:
    """Remembers what it was asked; its futures answer in the order of the requests."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def forward_backward(self, data: list[Any], loss_fn: str, loss_fn_config: Any = None) -> Any:
        self.calls.append(("forward_backward", data, loss_fn, loss_fn_config))
        return self._answer(metrics={"loss:sum": 1.5})

    def optim_step(self, optim_params: Any) -> Any:
        self.calls.append(("optim_step", optim_params))
        return self._answer(metrics={"grad_norm:mean": 0.5})

    def save_weights_for_sampler(self, name: str) -> Any:
        self.calls.append(("save", name))
        return self._answer(path=f"tinker://run/sampler_weights/{name}")

    def save_state(self, name: str, ttl_seconds: int | None = None, overwrite: bool = False) -> Any:
        self.calls.append(("save_state", name, overwrite))
        return self._answer(path=f"tinker://run/weights/{name}")

    async def _answer(self, **reply: Any) -> Any:
        self.calls.append(("await",))
        return SimpleNamespace(**reply)

    def names(self) -> list[str]:
        return [c[0] for c in self.calls]


class ScriptedGateway:
    """The replayed sessions, and the weights it was told to sample from."""

    def __init__(self, replay: Replay) -> None:
        self._gateway = replay.gateway
        self.published: list[tuple[str | None, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gateway, name)

    async def set_weight_version_async(self, version: int, *, sampler: str | None = None) -> None:
        self.published.append((sampler, version))


async def run(
    episodes: Sequence[Episode],
    batches: list[list[GroupRequest]],
    *,
    first_version: int = 0,
    first_step: int = 0,
    **more: Any,
) -> tuple[int, ScriptedTrainingClient, list[tuple[str | None, int]], list[StepResult]]:
    replay, client = Replay(episodes), ScriptedTrainingClient()
    gateway = ScriptedGateway(replay)
    steps: list[StepResult] = []
    version = await train_async(
        batches,
        config=TinkerConfig(exp_id="e", **more),
        training_client=client,
        client=replay.client,
        gateway=gateway,  # type: ignore[arg-type]  # the rest is the replay's
        on_step=lambda result, groups: steps.append(result),
        first_version=first_version,
        first_step=first_step,
    )
    return version, client, gateway.published, steps


async def test_each_step_updates_once_and_publishes_new_weights() -> None:
    episodes = recorded_episodes()
    requests = requests_for(episodes)
    version, client, published, steps = await run(
        episodes, [requests[:4], requests[4:]], loss="ppo", loss_config={"clip_high_threshold": 1.3}
    )
    assert version == 2
    path = "tinker://run/sampler_weights/e-00000"
    assert published == [(f"{path}0", 0), (f"{path}1", 1), (f"{path}2", 2)]
    step = ["forward_backward", "optim_step", "await", "await", "save", "await"]
    assert client.names() == ["save", "await", *step, *step]  # both requests are sent before either is awaited
    assert [s.trained for s in steps] == [True, True]
    assert [s.sampler for s in steps] == [f"{path}1", f"{path}2"]
    assert steps[0].metrics["loss:sum"] == 1.5
    assert steps[0].metrics["grad_norm:mean"] == 0.5
    for call in client.calls:
        if call[0] == "forward_backward":
            assert call[2:] == ("ppo", {"clip_high_threshold": 1.3})
            assert all(set(d.loss_fn_inputs) == {"target_tokens", "logprobs", "advantages"} for d in call[1])


async def test_checkpoints_are_named_by_the_steps_done_and_a_resumed_run_counts_on() -> None:
    episodes = recorded_episodes()
    requests = requests_for(episodes)
    version, client, published, steps = await run(
        episodes, [requests[:4], requests[4:]], checkpoint_every=2, first_version=7, first_step=8
    )
    assert version == 9
    assert [v for _, v in published] == [7, 8, 9]
    assert [(s.step, s.weight_version) for s in steps] == [(8, 8), (9, 9)]
    assert [s.state for s in steps] == [None, "tinker://run/weights/e-000010"]
    assert [c for c in client.calls if c[0] == "save_state"] == [("save_state", "e-000010", True)]


async def test_a_step_with_nothing_to_learn_keeps_the_weights() -> None:
    same = [e for e in recorded_episodes(640) if e.record == {"rewards": 1.0, "status_code": 200} and e.turns][:4]
    episodes = [Episode(input_id="a", turns=e.turns, record=e.record) for e in same]
    version, client, published, steps = await run(episodes, [[GroupRequest(input_id="a", payload={}, n=4)]])
    assert version == 0
    assert client.names() == ["save", "await"]
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
    assert max(d.model_input.length + 1 for d in data) <= 30
    assert steps[0].samples == len(data)


@pytest.mark.parametrize("bad", [{"learning_rate": 0.0}, {"max_empty_steps": 0}, {"checkpoint_every": -1}])
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TinkerConfig(exp_id="e", **bad)


def test_the_sdk_takes_our_data() -> None:
    inputs = {"target_tokens": [2, 3], "logprobs": [0.0, -0.5], "advantages": [0.0, 1.0]}
    datum = sdk_datum({"tokens": [1, 2], "loss_fn_inputs": inputs})
    assert datum.model_input.to_ints() == [1, 2]
    assert sdk_adam(TinkerConfig(exp_id="e")).learning_rate == 2e-5
