"""The loop against a scripted training client."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.groups import GroupRequest
from agentcore_rl_toolkit.backends.primitives.client import Passed
from agentcore_rl_toolkit.backends.primitives.config import PrimitivesConfig
from agentcore_rl_toolkit.backends.primitives.data import Datum
from agentcore_rl_toolkit.backends.primitives.loop import Evaluated, StepResult, train_async
from agentcore_rl_toolkit.errors import ConfigError, RolloutError

from ..recorded import Episode, Replay, recorded_episodes, requests_for


@dataclass
class ScriptedClient:
    """Remembers what it was asked, and when its answers were awaited."""

    service = "scripted"
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def forward_backward(self, data: Sequence[Datum], loss: str, config: Any) -> Awaitable[Passed]:
        self.calls.append(("forward_backward", data, loss, config))
        return self._answer(Passed(metrics={"loss:sum": 1.5}))

    def optim_step(self, adam: Any) -> Awaitable[Any]:
        self.calls.append(("optim_step", adam))
        return self._answer({"grad_norm:mean": 0.5})

    async def save_weights(self, name: str) -> str:
        self.calls.append(("save", name))
        return f"path/{name}"

    async def save_state(self, name: str) -> str:
        self.calls.append(("save_state", name))
        return f"state/{name}"

    async def _answer(self, answer: Any) -> Any:
        self.calls.append(("await",))
        return answer

    def names(self) -> list[str]:
        return [c[0] for c in self.calls]


def config(**more: Any) -> PrimitivesConfig:
    here = {"agent_runtime_arn": "a", "s3_bucket": "b", "base_model": "m"}
    return PrimitivesConfig(**{"exp_id": "e", **here, "model_dir": Path("m"), "data_path": Path("d"), **more})


async def run(
    episodes: Sequence[Episode],
    batches: list[list[GroupRequest]],
    *,
    first_version: int = 0,
    first_step: int = 0,
    held_out: Sequence[dict[str, Any]] = (),
    evaluated: list[Evaluated] | None = None,
    invoked: list[dict[str, Any]] | None = None,
    **more: Any,
) -> tuple[int, ScriptedClient, list[tuple[str, int]], list[StepResult]]:
    replay, training = Replay(episodes), ScriptedClient()
    replay.invoked = replay.invoked if invoked is None else invoked
    published: list[tuple[str, int]] = []
    steps: list[StepResult] = []

    async def publish(path: str, version: int) -> None:
        published.append((path, version))

    version = await train_async(
        batches,
        config=config(**more),
        training=training,  # type: ignore[arg-type]  # what the proof needs is not asked for here
        client=replay.client,
        gateway=replay.gateway,
        publish=publish,
        observe=lambda result, groups: (steps if isinstance(result, StepResult) else evaluated).append(result),  # type: ignore[union-attr]
        first_version=first_version,
        first_step=first_step,
        held_out=held_out,
    )
    return version, training, published, steps


async def test_each_step_updates_once_and_publishes_new_weights() -> None:
    episodes = recorded_episodes()
    requests = requests_for(episodes)
    version, client, published, steps = await run(
        episodes, [requests[:4], requests[4:]], loss="ppo", loss_config={"clip_high_threshold": 1.3}
    )
    assert version == 2
    path = "path/e-00000"
    assert published == [(f"{path}0", 0), (f"{path}1", 1), (f"{path}2", 2)]
    step = ["forward_backward", "optim_step", "await", "await", "save"]
    assert client.names() == ["save", *step, *step]  # both requests are sent before either is awaited
    assert [s.trained for s in steps] == [True, True]
    assert [s.sampler for s in steps] == [f"{path}1", f"{path}2"]
    assert steps[0].metrics["loss:sum"] == 1.5
    assert steps[0].metrics["grad_norm:mean"] == 0.5
    for call in client.calls:
        if call[0] == "forward_backward":
            assert call[2:] == ("ppo", {"clip_high_threshold": 1.3})


async def test_held_out_rows_are_run_before_between_and_after_with_the_weights_of_then() -> None:
    episodes = recorded_episodes()
    requests = requests_for(episodes)
    good = next(e for e in episodes if e.failure is None and e.record)
    held = [replace(good, input_id=f"{when}/0000") for when in ("before", "step-1", "after")]
    found: list[Evaluated] = []
    batches = [requests[:4], requests[4:]]
    invoked: list[dict[str, Any]] = []
    limits = {"sampling_params": {"max_tokens": 9, "stop": ["!"]}}
    await run(
        [*episodes, *held], batches, held_out=[{}], evaluated=found, invoked=invoked, steps=2, eval_every=1, **limits
    )
    assert [(e.when, e.weight_version) for e in found] == [("before", 0), ("step-1", 1), ("after", 2)]
    assert [e.stats.scored for e in found] == [1, 1, 1]
    sampled = {"before": [], "step-1": [], "after": [], "case": []}  # type: ignore[var-annotated]
    for payload in invoked:
        rollout = payload["_rollout"]
        sampled[re.split(r"/|-\d\d$", rollout["input_id"])[0]].append(rollout["sampling_params"])
    whole = {"temperature": 1.0, "top_p": 1.0, **limits["sampling_params"]}
    assert all(params == whole for params in sampled.pop("case"))
    assert all(params == [limits["sampling_params"]] for params in sampled.values())  # the agent's own otherwise


async def test_checkpoints_are_named_by_the_steps_done_and_a_resumed_run_counts_on() -> None:
    episodes = recorded_episodes()
    requests = requests_for(episodes)
    version, client, published, steps = await run(
        episodes, [requests[:4], requests[4:]], checkpoint_every=2, first_version=7, first_step=8
    )
    assert version == 9
    assert [v for _, v in published] == [7, 8, 9]
    assert [(s.step, s.weight_version) for s in steps] == [(8, 8), (9, 9)]
    assert [s.state for s in steps] == [None, "state/e-000010"]
    assert [c for c in client.calls if c[0] == "save_state"] == [("save_state", "e-000010")]


async def test_steps_without_usable_rollouts_end_the_run() -> None:
    bad = [e for e in recorded_episodes(640) if e.kind == "lost"][:3]
    lost = [Episode(input_id=f"i{k}", failure=e.failure) for k, e in enumerate(bad)]
    batches = [[GroupRequest(input_id=f"i{k}", payload={})] for k in range(3)]
    with pytest.raises(RolloutError, match=r"none of the first 1 rollouts can be used.*died without a record"):
        await run(lost, batches, max_empty_steps=2)
    good = recorded_episodes()[:8]
    with pytest.raises(RolloutError, match=r"no rollout of the last 2 steps can be used.*died without a record"):
        await run([*good, *lost], [requests_for(good), *batches], max_empty_steps=2)
    with pytest.raises(RolloutError, match="no rollout of the last 2 steps can be used"):  # its earlier steps had some
        await run(lost, batches, max_empty_steps=2, first_step=5)


@pytest.mark.parametrize(
    "bad",
    [
        {"learning_rate": 0.0},
        {"max_empty_steps": 0},
        {"checkpoint_every": -1},
        {"sampling_params": {"temperature": 0.7}},
        {"tps_limit": -1},
        {"gateway_port": 99999},
        {"gateway_context_tokens": 0},
        {"group_size": 1},
        {"rollout_timeout_s": 0.0},
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        config(**bad)
