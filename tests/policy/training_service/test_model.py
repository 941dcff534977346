"""The policy behind a training service's verbs; `tests/backends/tinker` trains it by the SDK's methods."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.policy.training_service.interface import Example
from agentcore_rl_toolkit.policy.training_service.model import SAMPLERS, PolicyModel, _loss

PROMPT = [300, 301, 302]


@pytest.fixture
def model() -> Iterator[PolicyModel]:
    made = PolicyModel()
    made.create("run")
    yield made
    made.close()


def example(loss_fn: str = "importance_sampling") -> Example:
    inputs = {"target_tokens": [301, 302, 310], "logprobs": [0.0, 0.0, -2.0], "advantages": [0.0, 0.0, 1.0]}
    if loss_fn == "cross_entropy":
        inputs = {"target_tokens": inputs["target_tokens"], "weights": [0.0, 0.0, 1.0]}
    return Example(tokens=PROMPT, inputs=inputs)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
def test_a_step_makes_a_praised_token_likelier(model: PolicyModel, loss_fn: str) -> None:
    (before,), metrics = model.forward_backward("run", [example(loss_fn)], loss_fn, {"clip_high_threshold": 1e9}, False)
    assert metrics["loss:sum"] != 0.0
    assert model.optim_step("run", {"learning_rate": 1e-3})["grad_norm:mean"] > 0
    (after,), _ = model.forward_backward("run", [example(loss_fn)], loss_fn, {}, True)
    assert after[-1] > before[-1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("importance_sampling", -(2.0 * 1.0 + 0.5 * -1.0)),
        ("ppo", -(1.2 * 1.0 + 0.8 * -1.0)),
        ("cispo", -(1.2 * 1.0 * -1.0 + 0.8 * -1.0 * -3.0)),
    ],
)
def test_losses_are_the_formulas(name: str, expected: float) -> None:
    inputs = {"logprobs": [-1.0 - math.log(2), -3.0 + math.log(2)], "advantages": [1.0, -1.0]}
    logprobs = torch.tensor([-1.0, -3.0])
    assert _loss(name, logprobs, inputs, {}).item() == pytest.approx(expected)
    weighed = _loss(name, logprobs, {**inputs, "weights": [0.5, 0.5]}, {})
    assert weighed.item() == pytest.approx(expected / 2)


def test_logprobs_of_context_do_not_matter_however_far_off_they_are(model: PolicyModel) -> None:
    far = Example(tokens=PROMPT, inputs={**example().inputs, "logprobs": [-1000.0, -1000.0, -2.0]})
    _, metrics = model.forward_backward("run", [far], "importance_sampling", {}, True)
    _, expected = model.forward_backward("run", [example()], "importance_sampling", {}, True)
    assert metrics == expected


def test_sampler_and_trainer_agree_at_a_temperature(model: PolicyModel) -> None:
    [done] = model.sample(None, PROMPT, 1, {"temperature": 0.7, "max_tokens": 24, "seed": 1})
    ids = [*PROMPT, *done.ids]
    data = [Example(tokens=ids[:-1], inputs={"target_tokens": ids[1:]})]
    [logprobs], _ = model.forward_backward("run", data, "cross_entropy", {"temperature": 0.7}, True)
    assert logprobs[len(PROMPT) - 1 :] == pytest.approx(done.logprobs, abs=1e-4)


def test_a_saved_state_brings_weights_and_optimizer_back_in_another_process(tmp_path: Path) -> None:
    first = PolicyModel(checkpoint_dir=tmp_path)
    first.create("a")
    for _ in range(2):
        first.forward_backward("a", [example()], "importance_sampling", {}, False)
        first.optim_step("a", {"learning_rate": 1e-3})
    first.save("a", "tinker://a/weights/two")
    first.publish("a", "tinker://a/sampler_weights/two")
    second = PolicyModel(checkpoint_dir=tmp_path)
    assert set(second.paths) == {"tinker://a/weights/two", "tinker://a/sampler_weights/two"}
    second.create("b")
    second.load("b", "tinker://a/weights/two", optimizer=True)
    results = []
    for model, run in ((first, "a"), (second, "b")):
        model.forward_backward(run, [example()], "importance_sampling", {}, False)
        model.optim_step(run, {"learning_rate": 1e-3})
        results.append(model.forward_backward(run, [example()], "importance_sampling", {}, True))
    assert results[0] == results[1]
    with pytest.raises(ConfigError, match="no optimizer state"):
        second.load("b", "tinker://a/sampler_weights/two", optimizer=True)


def test_only_the_last_few_samplers_stay_loaded_and_older_ones_come_back(model: PolicyModel) -> None:
    params = {"max_tokens": 4, "seed": 1}
    paths = [f"tinker://run/sampler_weights/{k}" for k in range(SAMPLERS + 2)]
    made = []
    for path in paths:
        model.publish("run", path)
        made.append(model.sample(path, PROMPT, 1, params)[0].ids)
    assert len(model._engines) == SAMPLERS
    assert model.sample(paths[0], PROMPT, 1, params)[0].ids == made[0]
