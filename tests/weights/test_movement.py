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
from agentcore_rl_toolkit.weights.movement import Movement, UpdateProof, logprobs_of
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


@pytest.mark.parametrize(
    ("slope", "error", "size", "arrived"),
    [
        (0.875, 0.125, 1.0, None),  # three standard errors above 0.5
        (0.876, 0.125, 1.0, True),
        (0.125, 0.125, 0.25, None),
        (0.124, 0.125, 0.25, False),
        (0.124, 0.125, 0.5, None),  # it moved, if not with the trainer
    ],
)
def test_three_standard_errors_from_the_middle_are_a_proof(
    slope: float, error: float, size: float, arrived: bool | None
) -> None:
    assert Movement(slope=slope, error=error, size=size).arrived is arrived


def test_a_movement_has_the_slope_of_least_squares_and_at_least_the_error_of_the_noise() -> None:
    movement = Movement.of([1.0, 1.0, 2.0], [1.0, 0.0, 2.0], noise=0.0)
    assert (movement.slope, movement.size**2) == (pytest.approx(5 / 6), pytest.approx(5 / 6))
    assert movement.error**2 == pytest.approx((1 / 36 + 25 / 36 + 1 / 9) / 3 / 6)
    assert Movement.of([1.0, 1.0, 2.0], [1.0, 1.0, 2.0], noise=0.6).error ** 2 == pytest.approx(0.06)


class Fixed:
    """An engine with these logprobs at any version."""

    engine, url = "fixed", "http://fixed"

    def __init__(self, model: Any, dtype: str | None = None) -> None:
        self.model, self._dtype = model, dtype
        self.sampled: list[tuple[int, int]] = []  # first token of the prompt, and seed
        self.tokens = 0  # the most that were asked for

    def connect(self) -> Fixed:
        return self

    def dtype(self) -> str | None:
        return self._dtype

    def sample(self, prompt: list[int], *, n: int, max_tokens: int, seed: int) -> list[Sampled]:
        self.sampled.append((prompt[0], seed))
        self.tokens += n * max_tokens
        return [Sampled([], []), Sampled([7, 8], [-1.0, -1.0]), Sampled([9, 10], [-1.0, -1.0])]

    def logprobs(self, ids: list[int]) -> list[float]:
        return logprobs_of(self.model, ids, exact=True)


def test_a_proof_follows_the_first_prompt_of_the_policys_own_dialogues() -> None:
    model, _ = load_policy()
    engine = Fixed(model)
    proof = UpdateProof(engine)  # type: ignore[arg-type]
    found = []
    for version, (first, own) in enumerate(((20, False), (30, False), (40, True), (50, True))):
        found.append(proof.check(model, [first, 21, 22], version, own=own))
        with torch.no_grad():
            model.lm_head.weight.add_(0.1 * torch.randn_like(model.lm_head.weight))
    assert engine.sampled == [(20, 1), (40, 3)]
    assert (found, proof.proved) == ([None, True, True, True], 3)
    assert len(proof._logprobs(model)[0]) == (2 + 2) + 2, "those of the prompt are compared once"
    rounding = Fixed(load_policy()[0], "bfloat16")
    proof = UpdateProof(rounding)  # type: ignore[arg-type]
    assert proof.check(model, [60, 21], 4, own=True) is None
    assert rounding.tokens > engine.tokens, "rounding needs more tokens"
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with pytest.raises(WeightsError, match=r"changed by .* of the trainer's change"):
        proof.check(model, [60, 21], 5, own=True)


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
