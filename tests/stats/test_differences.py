"""Paired differences, against tests that enumerate everything."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest

from agentcore_rl_toolkit.stats.differences import (
    change_of,
    difference,
    inputs_needed,
    sign_flip_p,
)


def enumerated(changes: list[float]) -> float:
    """The sign-flip test by all choices of signs."""
    sums = [
        abs(math.fsum(sign * change for sign, change in zip(signs, changes, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(changes))
    ]
    return sum(each >= abs(math.fsum(changes)) - 1e-9 for each in sums) / len(sums)


@pytest.mark.parametrize("rollouts", [1, 3, 4])
def test_p_values_are_exact(rollouts: int) -> None:
    r = random.Random(rollouts)
    for _ in range(20):
        changes = [r.randint(-rollouts, rollouts) / rollouts for _ in range(9)]
        assert sign_flip_p(changes) == pytest.approx(enumerated(changes))


def test_means_of_up_to_64_rollouts_are_exact() -> None:
    changes = [1 / 63, 1 / 64, -1 / 64, 2 / 63, -3 / 64, 5 / 64]
    assert sign_flip_p(changes) == pytest.approx(enumerated(changes))
    near = [1 / 63 - 1 / 64, 1 / 64 - 1 / 63]  # one unit of 1 / 4032
    assert sign_flip_p([0.5, 0.5 - 1 / 4032, *near]) == pytest.approx(enumerated([0.5, 0.5 - 1 / 4032, *near]))


def test_rewards_of_0_and_1_get_the_p_value_of_mcnemar() -> None:
    both = sum(math.comb(10, k) for k in (0, 1, 2, 8, 9, 10)) / 2**10  # 8 of 10 changed inputs are better
    assert sign_flip_p([1.0] * 8 + [-1.0] * 2 + [0.0] * 30) == pytest.approx(both)


def test_other_rewards_are_rounded() -> None:
    r = random.Random(0)
    changes = [r.gauss(0.2, 0.5) for _ in range(12)]
    assert sign_flip_p(changes) == pytest.approx(enumerated(changes), abs=0.01)
    assert sign_flip_p(changes) == sign_flip_p(changes)


@pytest.mark.parametrize(
    "changes",
    [
        [200.1, 201.3, 199.7, 198.37, 200.9, -3.123],
        [1500.123, 20.17, 18.31, 25.77, 30.91, 22.43],
        [0.0003 * (1 + i / 50) for i in range(12)],
    ],
)
def test_rewards_of_any_size_are_tested(changes: list[float]) -> None:
    assert sign_flip_p(changes) == pytest.approx(enumerated(changes), abs=0.005)


@pytest.mark.parametrize("rollouts", [1, 8, 1000])
def test_large_evaluations_are_tested_in_about_a_second(rollouts: int) -> None:
    r = random.Random(1)
    changes = [r.randint(-rollouts, rollouts) / rollouts + 0.03 * (rollouts == 1000) for _ in range(5000)]
    began = time.process_time()
    p = sign_flip_p(changes)
    assert time.process_time() - began < 10  # it took a minute
    z = abs(sum(changes)) / math.sqrt(sum(change**2 for change in changes))
    assert p == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.02)


def test_a_difference_is_over_the_inputs_of_both() -> None:
    change = difference({"a": 0.0, "b": 1.0, "c": 0.5, "x": 1.0}, {"a": 1.0, "b": 0.5, "c": 0.5, "y": 0.0})
    assert (change["inputs"], change["better"], change["worse"]) == (3, 1, 1)
    assert change["mean"] == pytest.approx(0.5 / 3)
    assert change["p"] == pytest.approx(1.0)
    assert -1 <= change["low"] < 0 < change["high"] <= 1


def test_nothing_in_common_has_no_numbers() -> None:
    change = difference({"a": 1.0}, {"b": 1.0})
    assert change["inputs"] == 0
    assert [change[name] for name in ("mean", "low", "high", "p", "needed")] == [None] * 5


def test_equal_rewards_are_no_difference_with_an_interval() -> None:
    change = difference(dict.fromkeys("abcdef", 1.0), dict.fromkeys("abcdef", 1.0))
    assert (change["mean"], change["p"], change["needed"]) == (0.0, 1.0, None)
    assert change["low"] < 0 < change["high"]


def test_so_many_inputs_find_the_difference_with_a_power_of_80_percent() -> None:
    changes = [1.0] * 30 + [-1.0] * 10 + [0.0] * 60
    needed = inputs_needed(changes)
    assert needed is not None
    assert inputs_needed([1.0, 0.0]) == 16  # (2.8016 / 0.5) ** 2 * 0.5
    assert [inputs_needed([1.0]), inputs_needed([0.5, 0.5]), inputs_needed([1.0, -1.0])] == [None, 1, None]
    r = random.Random(0)
    found = sum(sign_flip_p(r.choices(changes, k=needed)) <= 0.05 for _ in range(300)) / 300
    assert 0.7 <= found <= 0.9


@pytest.mark.parametrize(
    ("pairs", "better", "worse", "verdict"),
    [
        ([(0.0, 1.0)] * 20 + [(1.0, 1.0)] * 70 + [(1.0, 0.0)] * 2, 20, 2, "learned"),
        ([(0.0, 1.0)] * 6, 6, 0, "learned"),
        ([(0.0, 1.0)] * 5, 5, 0, "cannot tell"),  # could be chance
        ([(0.2, 0.3)] * 5, 5, 0, "cannot tell"),
        ([(0.0, 1.0)] + [(0.0, 0.0)] * 95, 1, 0, "cannot tell"),  # 2 % became 1 %, or the other way round
        ([(0.0, 1.0)] * 9 + [(1.0, 0.0)] * 8 + [(0.0, 0.0)] * 50, 9, 8, "cannot tell"),
        ([(0.0, 0.0)] * 96, 0, 0, "cannot tell"),  # perhaps rewards that are too coarse
        ([(1.0, 0.0)] + [(0.0, 0.0)] * 95, 0, 1, "cannot tell"),
        ([(1.0, 0.0)] * 30 + [(0.0, 0.0)] * 10, 0, 30, "not learned"),
        ([], 0, 0, "cannot tell"),
    ],
)
def test_a_verdict_claims_no_more_than_the_same_inputs_show(
    pairs: list[tuple[float, float]], better: int, worse: int, verdict: str
) -> None:
    change = change_of(pairs)
    assert [change[name] for name in ("inputs", "better", "worse", "verdict")] == [len(pairs), better, worse, verdict]
    assert change["text"].startswith(f"{verdict}: ")
    if pairs:
        assert change["low"] <= change["mean"] + 1e-9 <= change["high"] + 2e-9
