"""Word problems: splits that never meet, answers that are right, rewards that read text."""

from __future__ import annotations

from itertools import islice

import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.policy.problems import calculate, generate, problems, reward


def test_same_arguments_give_the_same_problems() -> None:
    assert problems("train", 50, seed=4) == problems("train", 50, seed=4)
    assert problems("train", 50, seed=4) != problems("train", 50, seed=5)


def test_splits_share_no_problem() -> None:
    train = {p.prompt for seed in range(3) for p in problems("train", 600, seed=seed)}
    held_out = {p.prompt for seed in range(3) for p in problems("held_out", 200, seed=seed)}
    assert len(held_out) > 500
    assert not train & held_out


def test_there_are_at_least_twenty_wordings_of_one_and_two_steps() -> None:
    some = problems("train", 1000)
    assert len({p.template for p in some}) >= 20
    two_steps = sum(len(p.steps) == 2 for p in some) / len(some)
    assert 0.4 < two_steps < 0.6


@pytest.mark.parametrize("seed", range(5))
def test_every_wording_comes_once_before_any_comes_again(seed: int) -> None:
    for n in (1, 2):
        wordings = [p.template for p in islice(generate("train", seed=seed), 120) if len(p.steps) == n]
        known = len(set(wordings))
        assert len(wordings) == 60
        for begin in range(0, 60 - known, known):
            assert len(set(wordings[begin : begin + known])) == known


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_steps_lead_to_the_answer(split: str) -> None:
    for problem in problems(split, 400, seed=1):  # type: ignore[arg-type]
        assert calculate(problem.steps[-1]) == problem.answer
        assert calculate(problem.expression) == problem.answer
        assert int(problem.answer) >= 0
        if len(problem.steps) == 2:
            assert problem.steps[1].startswith(calculate(problem.steps[0]) + " ")


def test_a_numbers_of_the_first_step_stand_in_the_text() -> None:
    for problem in problems("held_out", 200, seed=2):
        first, _, second = problem.steps[0].split(" ")
        assert f" {first} " in f"{problem.prompt} " or f" {first}" in problem.prompt
        assert second in problem.prompt


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="split"):
        problems("test", 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="negative"):
        problems("train", -1)
    assert problems("train", 0) == []


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * 7 + 5", "89"),
        ("(11 + 2) * 17", "221"),
        ("3-10", "-7"),
        ("-4 * -(2)", "8"),
        (" 2 + 3 ", "5"),
        ("2 ** 9", "error"),
        ("7 / 2", "error"),
        ("1.5 + 1", "error"),
        ("__import__('os')", "error"),
        ("1 2", "error"),
        ("()", "error"),
        ("007 + 1", "error"),
        ("", "error"),
        ("1 +" * 40 + "1", "error"),
        ("(" * 40 + "1" + ")" * 40, "error"),
        ("1()", "error"),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("The answer is 89.", "89", 1.0),
        ("12 * 7 = 84, so 89", "89", 1.0),
        ("89 or 90", "89", 0.0),
        ("It is 1,289.", "1289", 1.0),
        ("It is 089.", "89", 1.0),
        ("-89", "89", 0.0),
        ("It is -7", "-7", 1.0),
        ("0", "0", 1.0),
        ("-0", "0", 1.0),
        ("none", "0", 0.0),
        ("", "5", 0.0),
        ("9" * 5000, "9", 0.0),
    ],
)
def test_reward_reads_the_last_integer(text: str, answer: str, expected: float) -> None:
    assert reward(text, answer) == expected
