"""The policy behind a training service's verbs; `tests/backends/tinker` trains it by the SDK's methods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentcore_rl_toolkit.backends.training.batch import Datum, datum_of
from agentcore_rl_toolkit.backends.training.client import Adam, Loss
from agentcore_rl_toolkit.backends.training.local import SAMPLERS, LocalModel
from agentcore_rl_toolkit.errors import ConfigError

PROMPT = [300, 301, 302]
LOSS = Loss(name="importance_sampling")
ADAM = Adam(learning_rate=1e-3, beta1=0.9, beta2=0.95, grad_clip_norm=0.0)


@pytest.fixture
def model() -> Iterator[LocalModel]:
    made = LocalModel()
    made.create("run")
    yield made
    made.close()


def datum(loss: str = "importance_sampling", **inputs: list[float]) -> Datum:
    given = {"target_tokens": [301, 302, 310], "logprobs": [0.0, 0.0, -2.0], "advantages": [0.0, 0.0, 1.0]}
    if loss == "cross_entropy":
        given = {"target_tokens": given["target_tokens"], "weights": [0.0, 0.0, 1.0]}
    return datum_of(PROMPT, {**given, **inputs})


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
def test_a_step_makes_a_praised_token_likelier(model: LocalModel, name: str) -> None:
    loss = Loss(name=name, options={"clip_high_threshold": 1e9})
    passed = model.forward_backward("run", [datum(name)], loss)
    assert passed.metrics["loss"] != 0.0
    assert model.step("run", ADAM)["grad_norm"] > 0
    after = model.forward_backward("run", [datum(name)], loss, backward=False)
    assert passed.logprobs is not None
    assert after.logprobs is not None
    assert after.logprobs[0][-1] > passed.logprobs[0][-1]


def test_logprobs_of_context_do_not_matter_however_far_off_they_are(model: LocalModel) -> None:
    far = datum(logprobs=[-1000.0, -1000.0, -2.0])
    metrics = [model.forward_backward("run", [each], LOSS, backward=False).metrics for each in (far, datum())]
    assert metrics[0] == metrics[1]


def test_sampler_and_trainer_agree_at_a_temperature(model: LocalModel) -> None:
    model.create("warm", temperature=0.7)
    [done] = model.sample(None, PROMPT, 1, {"temperature": 0.7, "max_tokens": 24, "seed": 1})
    ids = [*PROMPT, *done.token_ids]
    data = [datum_of(ids[:-1], {"target_tokens": ids[1:]})]
    passed = model.forward_backward("warm", data, Loss(name="cross_entropy"), backward=False)
    assert passed.logprobs is not None
    assert passed.logprobs[0][len(PROMPT) - 1 :] == pytest.approx(done.logprobs, abs=1e-4)


def test_a_saved_state_brings_weights_and_optimizer_back_in_another_process(tmp_path: Path) -> None:
    first = LocalModel(checkpoint_dir=tmp_path)
    first.create("a")
    for _ in range(2):
        first.forward_backward("a", [datum()], LOSS)
        first.step("a", ADAM)
    first.save("a", "tinker://a/weights/two", optimizer=True)
    first.save("a", "tinker://a/sampler_weights/two", optimizer=False)
    second = LocalModel(checkpoint_dir=tmp_path)
    assert set(second.paths) == {"tinker://a/weights/two", "tinker://a/sampler_weights/two"}
    second.create("b")
    second.load("b", "tinker://a/weights/two", optimizer=True)
    results = []
    for model, run in ((first, "a"), (second, "b")):
        model.forward_backward(run, [datum()], LOSS)
        model.step(run, ADAM)
        results.append(model.forward_backward(run, [datum()], LOSS, backward=False))
    assert results[0] == results[1]
    with pytest.raises(ConfigError, match="no optimizer state"):
        second.load("b", "tinker://a/sampler_weights/two", optimizer=True)


def test_only_the_last_few_samplers_stay_loaded_and_older_ones_come_back(model: LocalModel) -> None:
    params = {"max_tokens": 4, "seed": 1}
    paths = [f"tinker://run/sampler_weights/{k}" for k in range(SAMPLERS + 2)]
    made = []
    for path in paths:
        model.save("run", path, optimizer=False)
        made.append(model.sample(path, PROMPT, 1, params)[0].token_ids)
    assert len(model._engines) == SAMPLERS
    assert model.sample(paths[0], PROMPT, 1, params)[0].token_ids == made[0]


def test_a_sample_has_max_tokens_or_fills_the_context(model: LocalModel) -> None:
    context = json.loads((model.folder / "config.json").read_text())["max_position_embeddings"]
    long = (PROMPT * context)[: context - 20]

    def tokens(**params: object) -> int:
        return len(model.sample(None, long, 1, {"stop": [], "seed": 1, **params})[0].token_ids)

    [ended] = model.sample(None, PROMPT, 1, {"seed": 1})
    assert ended.finish_reason == "stop", "by the policy itself"
    assert tokens(max_tokens=2) == 2
    assert tokens() == tokens(max_tokens=10**6) == 20
    long = (PROMPT * context)[: context - 1]
    assert tokens() == 1
    long.append(300)
    with pytest.raises(ConfigError, match=f"maximum context length is {context}"):
        tokens()


def test_each_sample_of_a_seed_has_its_own(model: LocalModel) -> None:
    def samples(n: int, seed: int, **params: object) -> list[list[int]]:
        found = model.sample(None, PROMPT, n, {"seed": seed, "stop": [], "max_tokens": 8, **params})
        return [generation.token_ids for generation in found]

    first, second = samples(2, 1)
    assert first != second
    assert [second] == samples(1, 2)
    assert samples(1, 1, top_k=1) == samples(1, 2, top_k=1)


def test_later_steps_do_not_change_a_saved_state(model: LocalModel) -> None:
    def moments() -> list[float]:
        states = model._runs["run"].optimizer.state_dict()["state"].values()
        return [float(state["exp_avg"].double().sum()) for state in states]

    def step() -> None:
        model.forward_backward("run", [datum("cross_entropy")], Loss(name="cross_entropy"))
        model.step("run", ADAM)

    step()
    model.save("run", "tinker://state", optimizer=True)
    saved = moments()
    for _ in range(2):
        step()
        assert moments() != saved
        model.load("run", "tinker://state", optimizer=True)
        assert moments() == saved
