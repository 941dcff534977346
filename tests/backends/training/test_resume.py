"""A run that was interrupted after two steps ends with the weights of a run that was not, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcore_rl_toolkit.backends.training.loop import train
from agentcore_rl_toolkit.backends.training.run import run_async
from agentcore_rl_toolkit.backends.training.service_settings import ServiceTrainingConfig
from agentcore_rl_toolkit.backends.training.settings import LoopSettings, Services, State
from agentcore_rl_toolkit.backends.training.torch_client import TorchClient, TorchSettings
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.runs.folder import read_metrics

from ..recorded import Episode, Replay, recorded_episodes

STEPS, GROUPS, ROLLOUTS = 3, 2, 5


class Unpublished(TorchClient):
    """The torch client without an engine. No model sampled the recorded episodes, so nothing can be compared."""

    async def publish(self, version: int, gateway: Any, probe: Any) -> None: ...


def episodes_of(steps: range) -> list[Episode]:
    """The episodes that these steps get, by the names of their inputs."""
    every = recorded_episodes(STEPS * GROUPS * ROLLOUTS)
    named = [replace(e, input_id=f"train/{k // ROLLOUTS:05d}") for k, e in enumerate(every)]
    return named[steps.start * GROUPS * ROLLOUTS : steps.stop * GROUPS * ROLLOUTS]


async def trained(folder: Path, steps: range) -> dict[str, torch.Tensor]:
    """Train these steps in the folder and return the weights."""
    replay = Replay(episodes_of(steps))
    services: Any = Services(client=replay.client, gateway=replay.gateway, run_dir=folder)  # type: ignore[arg-type]
    how = LoopSettings(
        steps=steps.stop,
        groups=GROUPS,
        rollouts=ROLLOUTS,
        learning_rate=1e-3,
        beta2=0.99,
        max_grad_norm=1.0,
        minibatches=2,
        checkpoint_every=1,
        seed=3,
    )
    resumed = State.read(folder)
    client = Unpublished.open(TorchSettings(seed=3, threads=1), resumed.state if resumed else None, run_dir=folder)
    client.max_logprob_gap = None
    rows: Sequence[dict[str, Any]] = [{"prompt": str(k)} for k in range(3)]
    assert await train(services, client, how, rows, [], lambda *_: None, resumed=resumed) == steps.stop
    await client.close("success")
    return {name: parameter.detach().clone() for name, parameter in client.model.named_parameters()}


async def test_a_run_over_a_service_that_cannot_be_continued_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "step", "step": 0}\n')
    config = ServiceTrainingConfig(
        exp_id="e", agent_runtime_arn="a", s3_bucket="b", base_model="m", model_dir=tmp_path, data_path=tmp_path / "none",
        output_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="none"):
        await run_async(config, Unpublished.open)  # type: ignore[arg-type]
    assert [event["event"] for event in read_metrics(tmp_path)] == ["step"]


async def test_three_steps_equal_two_and_one_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = await trained(tmp_path / "whole", range(STEPS))
    half = await trained(tmp_path / "parts", range(2))
    parts = await trained(tmp_path / "parts", range(2, STEPS))
    assert any(not torch.equal(half[name], whole[name]) for name in whole), "the last step changed something"
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
