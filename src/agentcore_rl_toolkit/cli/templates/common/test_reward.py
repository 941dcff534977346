"""Tests of the reward (`python -m pytest`). A wrong reward trains the wrong behavior, without an error."""

import pytest
from reward import AnswerReward
from tools import calculator, call_tool

reward = AnswerReward()


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("There are 61 lamps.", "61", 1.0),
        ("5 * 4 = 20, so there are 61.", "61", 1.0),
        ("There are 1,061 lamps.", "1061", 1.0),
        ("61 lamps, or perhaps 62.", "61", 0.0),
        ("There are 161 lamps.", "61", 0.0),
        ("", "61", 0.0),
        ("I do not know.", "61", 0.0),
    ],
)
def test_reward(text: str, answer: str, expected: float) -> None:
    assert reward(response_text=text, answer=answer) == expected


def test_the_tool_answers_whatever_a_model_writes() -> None:
    assert calculator("2 + 3 * 4") == "14"
    for nonsense in ("", "2 +", "__import__('os')", "9" * 100, "(" * 70):
        assert calculator(nonsense).startswith("error")
    assert call_tool("calculator", {"expression": "2 + 3"}) == "5"
    assert call_tool("counter", {"expression": "2 + 3"}).startswith("error")
    assert call_tool("calculator", {"formula": 5}).startswith("error")
