"""The proof that an engine's weights move with the trainer's, also by less than the engine's rounding."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcore_rl_toolkit.backends.training.batch import Datum
from agentcore_rl_toolkit.backends.training.client import Adam, Loss
from agentcore_rl_toolkit.backends.training.torch_client import TorchClient, TorchSettings, load_model
from agentcore_rl_toolkit.errors import WeightsError
from agentcore_rl_toolkit.policy import Engine, create_app, load_policy
from agentcore_rl_toolkit.policy.sampling import SamplingParams
from agentcore_rl_toolkit.weights import EngineAddress
from agentcore_rl_toolkit.weights.engines import Sampled
from agentcore_rl_toolkit.weights.movement import Movement, logprobs_of
from agentcore_rl_toolkit.weights.publishing import gap
from serving import hosted

PROMPT = list(range(20, 84))


def changes(n: int, size: float, share: float, rounding: float) -> tuple[list[float], list[float]]:
    """Changes of a trainer's logprobs, and of an engine's that took this share of them, with rounding of its own."""
    r = random.Random(0)
    trainer = [r.gauss(0, size) for _ in range(n)]
    return trainer, [share * x + r.gauss(0, rounding) for x in trainer]


@pytest.mark.parametrize(
    ("size", "share", "rounding", "arrived"),
    [
        (0.1, 1.0, 0.03, True),
        (0.1, 0.0, 0.001, False),
        (0.005, 0.0, 0.0, False),  # an engine that does nothing is found long before its gap is large
        (0.0005, 0.0, 0.0, None),  # too small to tell
        (0.0005, 1.0, 0.03, None),
        (0.005, 0.0, 0.03, None),  # this may be rounding
        (0.0, 1.0, 0.0, None),  # such as the first publish of an adapter
    ],
)
def test_an_engine_is_judged_when_the_change_is_large_enough(
    size: float, share: float, rounding: float, arrived: bool | None
) -> None:
    movement = Movement.of(*changes(1000, size, share, rounding), noise=0.01)
    assert movement.arrived is arrived


class Announced:
    def set_weight_version(self, version: int) -> None: ...


@pytest.fixture
def engine() -> Iterator[Engine]:
    torch.set_num_threads(1)
    with Engine.from_directory(max_batch=16, dtype="bfloat16") as engine:
        yield engine


async def steps(engine: Engine, folder: Path, number: int) -> TorchClient:
    """Train on the engine's own samples at a learning rate of 1e-5, and publish after each step."""
    data = []
    for k, g in enumerate(engine.generate([PROMPT] * 8, SamplingParams(max_tokens=32, ignore_eos=True))):
        tokens, context = [*PROMPT, *g.token_ids], len(PROMPT) - 1
        n = len(tokens) - 1 - context
        data.append(
            Datum(
                tokens=tokens[:-1],
                target_tokens=tokens[1:],
                logprobs=[0.0] * context + g.logprobs,
                advantages=[0.0] * context + [1.0 if k % 2 else -1.0] * n,
                mask=[0] * context + [1] * n,
                fresh=[False] * (context + n),
            )
        )
    with hosted(create_app(engine)) as url:
        settings = TorchSettings(dtype="bfloat16", threads=1)
        client = TorchClient.open(settings, None, run_dir=folder, engine=EngineAddress(url=url))
        try:
            await client.publish(0, Announced(), None)
            assert client.proved is None, "equal weights before and after prove nothing"
            for step in range(number):
                await client.forward_backward(data, Loss(), 256.0)
                await client.step(Adam(learning_rate=1e-5, beta1=0.9, beta2=0.99, grad_clip_norm=1.0))
                await client.publish(step + 1, Announced(), PROMPT)
        finally:
            await client.close("success")
    return client


def test_an_engine_that_ignores_every_update_is_found_within_two_steps(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, old = engine.update_weights, load_policy()[0].state_dict()

    def ignore(state: Any, version: int | None = None) -> Any:
        future = update(old, version)
        future.result(60)
        engine.checksums = {}  # they would show it at once
        return future

    monkeypatch.setattr(engine, "update_weights", ignore)
    with pytest.raises(WeightsError, match=r"the weights did not arrive.*samples from old weights"):
        asyncio.run(steps(engine, tmp_path, 2))


def test_an_engine_that_rounds_the_updates_is_not_refused(engine: Engine, tmp_path: Path) -> None:
    asyncio.run(steps(engine, tmp_path, 2))  # raises WeightsError if it is
    assert engine.weight_version == 2


def test_a_proof_leaves_each_layer_in_its_mode() -> None:
    """Gradient checkpointing works in layers that are in training mode, inside a model that is not."""
    model, _ = load_model(TorchSettings(gradient_checkpointing=True))
    modes = [module.training for module in model.modules()]
    assert 0 < sum(modes) < len(modes)
    logprobs_of(model, [1, 2, 3], exact=True)
    gap(model, [1, 2, 3], [Sampled([4, 5], [-1.0, -1.0])])
    assert [module.training for module in model.modules()] == modes
