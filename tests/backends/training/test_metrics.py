"""The numbers of a step against values that were computed by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentcore_rl_toolkit.backends.training.batch import Datum
from agentcore_rl_toolkit.backends.training.client import Loss, Passed
from agentcore_rl_toolkit.backends.training.metrics import Sums, ages_of

LOSS = Loss(name="ppo", options={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
# Ratios to the sampler, and advantages. The clip keeps the first and the last from moving further; the third is not trained.
TOKENS = [(1.5, 1.0, 1), (1.5, -1.0, 1), (9.0, 1.0, 0), (1.0, 1.0, 1), (0.5, -1.0, 1)]


def datum(fresh: list[bool]) -> Datum:
    ids = list(range(len(TOKENS)))
    advantages, mask = [a for _, a, _ in TOKENS], [m for _, _, m in TOKENS]
    return Datum(
        tokens=ids, target_tokens=ids, logprobs=[-1.0] * len(ids), advantages=advantages, mask=mask, fresh=fresh
    )


def passed(loss: float, kl_start: float = 0.0) -> Passed:
    logprobs = [[-1.0 + math.log(ratio) for ratio, _, _ in TOKENS]]
    return Passed(
        metrics={"loss": loss, "kl_start": kl_start}, logprobs=logprobs, entropies=[[2.0, 4.0, 99.0, 3.0, 3.0]]
    )


def test_clip_divergence_ratio_and_entropy_are_over_the_trained_tokens() -> None:
    sums = Sums(LOSS)
    assert sums.add([datum([False] * 5)], passed(0.5), {"grad_norm": 2.0}, 1, check_gap=True) is None, "no fresh token"
    found = sums.metrics()
    assert found["clip_fraction"] == 0.5
    assert found["ratio_max"] == pytest.approx(1.5)
    assert found["entropy"] == 3.0
    divergence = 2 * (0.5 - math.log(1.5)) + (-0.5 - math.log(0.5))
    assert found["kl_sampler"] == pytest.approx(divergence / 4)
    assert (found["loss"], found["grad_norm"], found["logprob_gap"]) == (0.5, 2.0, None)


def test_the_clip_fraction_counts_the_tokens_that_the_dual_clip_limits() -> None:
    """A token with a negative advantage is not limited by the clip, however large its ratio is."""
    sums = Sums(Loss(name="ppo", options={**LOSS.options, "dual_clip": 1.4}))
    sums.add([datum([False] * 5)], passed(0.5), {}, 1, check_gap=True)
    assert sums.metrics()["clip_fraction"] == 0.75


def test_the_clip_fraction_of_cispo_counts_the_tokens_whose_ratio_is_clipped() -> None:
    sums = Sums(Loss(name="cispo", options=LOSS.options))
    sums.add([datum([False] * 5)], passed(0.5), {}, 1, check_gap=True)
    assert sums.metrics()["clip_fraction"] == 0.75


def test_the_gap_is_that_of_fresh_tokens_of_the_first_minibatch() -> None:
    sums = Sums(LOSS)
    fresh = [True, False, True, True, False]
    assert sums.add([datum(fresh)], passed(0.5, 1.0), {}, 2, check_gap=True) == pytest.approx(math.log(1.5))
    assert sums.add([datum([True] * 5)] * 1, passed(0.1, 3.0), {}, 2, check_gap=False) is None
    found = sums.metrics()
    assert found["logprob_gap"] == pytest.approx(math.log(1.5))
    assert (found["loss"], found["kl_start"]) == (pytest.approx(0.3), 2.0)


def test_numbers_of_the_run_so_far_are_those_of_the_last_minibatch_and_sums_are_added() -> None:
    sums = Sums(LOSS)
    for part, memory in enumerate((2.0, 6.0)):
        numbers = {"peak_memory_gb": memory, "billed_training_tokens": 10.0 * memory, "grad_norm": 1.0 + part}
        service = Passed(metrics={"loss:sum": 3.0})
        sums.add([datum([False] * 5)], service, numbers, 2, check_gap=part == 0)
    found = sums.metrics()
    assert (found["peak_memory_gb"], found["billed_training_tokens"]) == (6.0, 60.0)
    assert (found["loss:sum"], found["grad_norm"]) == (6.0, 1.5)


def test_a_sample_is_as_old_as_its_oldest_token() -> None:
    assert ages_of(cast(Any, SimpleNamespace(version_range=(3, 5))), 7) == 4
    assert ages_of(cast(Any, SimpleNamespace(version_range=None)), 7) == 0
