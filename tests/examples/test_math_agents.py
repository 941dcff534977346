"""The math agents of five frameworks: their reward against GSM8K and against tricky replies, their tool and their payload."""

from __future__ import annotations

import importlib.util
import json
import subprocess
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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 18.", 18),
        ("The final answer: $1,234.50", Fraction("1234.5")),
        ("\\boxed{18}", 18),
        ("So she makes 9 * 2 = $18 every day.", 18),
        ("10 - 3 = 7 apples", 7),
        ("#### Answer: 18", 18),
        ("#### x = 18", 18),
        ("#### 18 (3 x 6)", 18),
        ("#### 18 apples in 3 boxes", 18),
        ("####\n18", 18),
        ("18 ####", 18),
        ("#### 18\nNo, I was wrong.\n#### 19", 19),
        ("#### 18 or 20", None),
        ("#### 18-20", None),
        ("#### 18 20", None),
        ("I do not know.", None),
        ("", None),
    ],
)
def test_the_lenient_reading_believes_other_announcements_but_no_hedge(text: str, value: int | None) -> None:
    assert reward.lenient_answer(text) == value


def test_a_repeated_question_is_no_answer_to_it() -> None:
    question = "A box holds 6 eggs. How many eggs are in 18 boxes, if the answer is not 18?"
    lenient = reward.AnswerReward(strict=False)
    assert lenient(response_text=question, answer="18") == 1.0  # without the question there is no telling
    assert lenient(response_text=question, answer="18", prompt=question) == 0.0
    assert lenient(response_text=f"{question}\n6 * 18 = 108", answer="108", prompt=question) == 1.0


def test_an_expected_answer_that_is_no_number_is_an_error_and_not_a_reward() -> None:
    with pytest.raises(ValueError, match="must be a number"):
        reward.AnswerReward()(response_text="#### 18", answer="eighteen")


def test_long_replies_are_read_in_time_that_grows_with_their_length() -> None:
    for unit in ("9", "1,", "####", "#### 1 ", "\\boxed{", "(", "1/", "$", "answer is ", " ", "\\frac{1}{"):
        text = unit * (200_000 // len(unit))
        reward.strict_answer(text), reward.lenient_answer(text, text[:100])  # the test's timeout is the limit


def test_every_answer_of_gsm8k_is_extracted_and_every_change_of_it_is_refused() -> None:
    if not GSM8K.is_file():
        pytest.skip("the data set is not beside this clone")
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    strict, lenient = reward.AnswerReward(), reward.AnswerReward(strict=False)
    assert len(rows) == 1319
    for row in rows:
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


# -- the tool


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(16 - 3 - 4) * 2", "18"),
        ("48/2", "24"),
        ("0.1 + 0.2", "0.3"),
        ("-5 + 2", "-3"),
        (".5*10", "5"),
        ("1/3", "0.3333333333333333"),
        ("1/0", "error: division by zero"),
    ],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert word_problems.calculator(expression) == value


def test_a_call_that_fits_nothing_is_answered() -> None:
    assert word_problems.call_tool("calculator", word_problems.parsed('{"expression": "2 + 3"}')) == "5"
    for name, arguments in (
        ("calculate", '{"expression": "1"}'),
        ("calculator", '{"formula": 5}'),
        ("calculator", "{"),
        ("calculator", "[" * 9999),
    ):
        assert word_problems.call_tool(name, word_problems.parsed(arguments)).startswith("error: there is one tool")


# -- the payload


def test_a_payload_is_read_with_what_the_client_adds() -> None:
    row = {"id": "r", "idx": 3, "prompt": "How many?", "answer": "42", "data_source": "gsm8k"}
    problem = word_problems.Problem.of({**row, "_rollout": {"exp_id": "e"}})
    assert problem.model_dump() == row
    assert word_problems.Problem.of({"prompt": "How many?"}).answer is None


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


# -- the data


def test_rows_of_gsm8k_become_payloads_that_the_agent_takes(tmp_path: Path) -> None:
    source, target = tmp_path / "small.jsonl", tmp_path / "made" / "rows.jsonl"
    rows = [
        {"question": f"What is 999 + {i}?", "answer": f"It is <<999+{i}={999 + i}>>.\n#### {999 + i:,}"}
        for i in range(1, 9)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = EXAMPLES / "strands_math_agent" / "prepare.py"
    command = [sys.executable, "-W", "ignore", str(script), str(source), str(target), "--limit", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in target.read_text().splitlines()]
    assert len({row["id"] for row in made}) == 3
    for row in made:
        assert word_problems.Problem.of(row).prompt == f"What is 999 + {int(row['answer']) - 999}?"
    source.write_text(json.dumps({"question": "What?", "answer": "#### 12-34"}) + "\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "row 0: the reward does not accept the published solution" in done.stderr


# -- all of it


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_agent_is_scored_end_to_end_evaluated_by_both_scripts_and_trained(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    proof = EXAMPLES / "strands_math_agent" / "proof.py"
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(proof),
        "--quick",
        "--here",
        "--rollouts",
        "3",
        "--json",
        str(report),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(report.read_text())
    row, trained = written["rows"]
    assert (row["oracle_reward"], row["noop_reward"]) == (1.0, 0.0)
    assert row["tool_calls"] > 0
    assert trained["policy_before"] is not None
    assert trained["policy_after"] is not None
    assert len(written["checks"]) == 15
