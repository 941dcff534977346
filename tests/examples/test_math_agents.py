"""The math agents of five frameworks: their reward against GSM8K and against tricky replies, and their payload."""

from __future__ import annotations

import importlib.util
import json
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
AGENTS = ("strands_math_agent", "langgraph_agent", "openai_agents_agent", "anthropic_agent", "plain_agent")
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reward = load(EXAMPLES / "strands_math_agent" / "reward.py")
word_problems = load(EXAMPLES / "strands_math_agent" / "word_problems.py")


@pytest.mark.parametrize("agent", AGENTS[1:])
@pytest.mark.parametrize("module", ["reward.py", "word_problems.py"])
def test_the_task_is_the_same_in_every_framework(agent: str, module: str) -> None:
    """An agent is deployed with its own folder only, so each has a copy."""
    assert (EXAMPLES / agent / module).read_bytes() == (EXAMPLES / "strands_math_agent" / module).read_bytes()


# -- the reward

STRICT = [
    ("#### 18", 18),
    ("####18", 18),
    ("####\t18", 18),
    ("She has 9 * 2 = 18.\n#### 18\n", 18),
    ("#### 18\n\nI hope this helps with your 3 questions.", 18),
    ("#### $1,000.00", 1000),
    ("#### 1,450,000", 1450000),
    ("#### -10", -10),
    ("#### \u221210", -10),
    ("#### \u201310", -10),
    ("#### -$5", -5),
    ("#### $-5", -5),
    ("#### €18", 18),
    ("#### 18 €", 18),
    ("#### -0", 0),
    ("#### 18.0", 18),
    ("#### 18.", 18),
    ("#### .5", Fraction(1, 2)),
    ("#### 1/2", Fraction(1, 2)),
    ("#### 3 1/2", Fraction(7, 2)),
    ("#### ½", Fraction(1, 2)),
    ("#### 3½", Fraction(7, 2)),
    ("#### \\frac{1}{2}", Fraction(1, 2)),
    ("#### 25%", 25),
    ("#### 1e3", 1000),
    ("#### 1.5 million", 1500000),
    ("#### 18 dollars", 18),
    ("#### 18 km/h", 18),
    ("#### 10 m2", 10),
    ("#### 10 m²", 10),
    ("#### **18**", 18),
    ("#### $18$", 18),
    ("#### \\boxed{18}", 18),
    ("#### 1{,}000", 1000),
    ("#### 1\u202f000", 1000),
    ("#### \uff11\uff18", 18),
    ("#### 18\n#### 18.0", 18),
]
NO_ANSWER = [
    "",
    "18",
    "The answer is 18.",
    "####",
    "#### ",
    "####\n18",
    "#### eighteen",
    "#### 18\n#### 19",
    "#### 18 #### 19",
    "#### 18 or 20",
    "#### 18-20",
    "#### 18, 20",
    "#### 18 and not 20",
    "#### 3 * 6 = 18",
    "#### Answer: 18",
    "##### 18",
    "### 18",
    "#### 10,00",
    "#### 1.2.3",
    "#### 3:30",
    "#### 1_000",
    "#### 0x12",
    "#### 1/0",
    "#### nan",
    "#### inf",
    "#### " + "9" * 5000,
    "#### 1e999999999",
]


@pytest.mark.parametrize(("text", "value"), STRICT, ids=[text[:30] for text, _ in STRICT])
def test_a_marked_number_is_understood_however_it_is_written(text: str, value: int) -> None:
    assert reward.strict_answer(text) == value
    assert reward.AnswerReward()(response_text=text, answer=str(value)) == 1.0
    assert reward.AnswerReward()(response_text=text, answer=str(value + 1)) == 0.0


@pytest.mark.parametrize("text", NO_ANSWER, ids=[text[:30] or "nothing" for text in NO_ANSWER])
def test_what_is_not_one_marked_number_is_no_answer(text: str) -> None:
    assert reward.strict_answer(text) is None
    assert reward.AnswerReward()(response_text=text, answer="18") == 0.0


def test_long_replies_are_read_in_time_that_grows_with_their_length() -> None:
    for unit in ("9", "1,", "####", "#### 1 ", "\\boxed{", "(", "1/", "$", "answer is ", " ", "\\frac{1}{"):
        text = unit * (200_000 // len(unit))
        reward.strict_answer(text), reward.lenient_answer(text, text[:100])  # the test's timeout is the limit


def test_answers_of_gsm8k_are_extracted_and_every_change_of_them_is_refused() -> None:
    if not GSM8K.is_file():
        pytest.skip("the data set is not beside this clone")
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    strict, lenient = reward.AnswerReward(), reward.AnswerReward(strict=False)
    assert len(rows) == 1319
    for row in rows[::8]:
        answer, solution = row["answer"].rpartition("####")[2].strip(), row["answer"]
        body = solution.partition("####")[0]
        assert reward.parse_number(answer) == int(answer.replace(",", ""))
        assert strict(response_text=solution, answer=answer) == 1.0
        assert lenient(response_text=solution, answer=answer, prompt=row["question"]) == 1.0
        for written in (
            f"${answer}",
            f"**{answer}**.",
            f"{answer}.00",
            f"{answer} dollars",
            answer.replace("-", "\u2212"),
        ):
            assert strict(response_text=f"{body}#### {written}", answer=answer) == 1.0, written
        for written in (f"{answer}1", f"-1{answer}", f"{answer}.5", f"{answer} or 7", f"{answer}/3", ""):
            assert strict(response_text=f"{body}#### {written}", answer=answer) == 0.0, written
        assert strict(response_text=row["question"], answer=answer) == 0.0
        assert lenient(response_text=row["question"], answer=answer, prompt=row["question"]) == 0.0


# -- the payload


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (
            {"prompt": {"toolUse": {"toolUseId": "t", "name": "x", "input": {}}}, "answer": "1"},
            "prompt: Input should be a valid string",
        ),
        ({"prompt": [{"text": "How many?"}]}, "prompt: Input should be a valid string"),
        ({"prompt": "How many?", "answer": 42}, "answer: Input should be a valid string"),
        ({"prompt": "", "answer": "1"}, "prompt: String should have at least 1 character"),
        ({"question": "How many?"}, "prompt: Field required; question: Extra inputs are not permitted"),
        (["How many?"], "must be an object"),
    ],
)
def test_a_payload_that_is_none_is_refused_by_field(payload: Any, named: str) -> None:
    with pytest.raises(ValueError, match=r"payload|word problem") as refused:
        word_problems.Problem.of(payload)
    assert named in str(refused.value)
