"""Word problems: splits that never meet, answers that are right, rewards that read text."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.policy.word_problems import calculate, problems, reward


def test_splits_share_no_problem() -> None:
    train = {p.prompt for seed in range(3) for p in problems("train", 300, seed=seed)}
    held_out = {p.prompt for seed in range(3) for p in problems("held_out", 200, seed=seed)}
    assert len(held_out) > 500
    assert not train & held_out


def test_a_seed_gives_the_same_problems_again() -> None:
    first, second, more = (problems("train", n, seed=3) for n in (30, 30, 300))
    assert first == second == more[:30] != problems("train", 30, seed=4)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_steps_lead_to_the_answer(split: str) -> None:
    for problem in problems(split, 400, seed=1):  # type: ignore[arg-type]
        assert calculate(problem.steps[-1]) == problem.answer
        assert calculate(problem.expression) == problem.answer
        assert int(problem.answer) >= 0
        if len(problem.steps) == 2:
            assert problem.steps[1].startswith(calculate(problem.steps[0]) + " ")


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
        ("1" + "+1" * 39 + " ", "40"),  # 80 characters
        ("1" + "+1" * 40, "error"),
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
