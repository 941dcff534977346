"""The math agents of five frameworks: their reward against GSM8K and against tricky replies, and their payload."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from scripted_runtime import TEST_CREDENTIALS, ScriptedRuntime

from .loading import EXAMPLES, load

AGENTS = ("strands_math_agent", "langgraph_agent", "openai_agents_agent", "anthropic_agent", "plain_agent")


reward = load(EXAMPLES / "strands_math_agent" / "reward.py")


@pytest.mark.parametrize("agent", AGENTS[1:])
@pytest.mark.parametrize("module", ["reward.py", "word_problems.py"])
def test_the_task_is_the_same_in_every_framework(agent: str, module: str) -> None:
    """An agent is deployed with its own folder only, so each has a copy."""
    assert (EXAMPLES / agent / module).read_bytes() == (EXAMPLES / "strands_math_agent" / module).read_bytes()


# -- the reward

STRICT = [
    ("#### 18", 18),
    ("####18", 18),
    ("She has 9 * 2 = 18.\n#### 18\n", 18),
    ("#### 18\n\nI hope this helps with your 3 questions.", 18),
    ("#### $1,000.00", 1000),
    ("#### -10", -10),
    ("#### \u221210", -10),
    ("#### -$5", -5),
    ("#### $-5", -5),
    ("#### €18", 18),
    ("#### 18 €", 18),
    ("#### -0", 0),
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
    "The answer is 18.",
    "####",
    "####\n18",
    "#### eighteen",
    "#### 18\n#### 19",
    "#### 18 #### 19",
    "#### 18, 20",
    "#### 18 and not 20",
    "#### 3 * 6 = 18",
    "#### Answer: 18",
    "##### 18",
    "#### 10,00",
    "#### 3:30",
    "#### 1_000",
    "#### 0x12",
    "#### 1/0",
    "#### nan",
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


# -- the evaluation


def test_the_evaluation_scores_the_rows_it_is_asked_for(tmp_path: Path) -> None:
    data, store = tmp_path / "rows.jsonl", f"file://{tmp_path}/store"
    data.write_text("\n".join(json.dumps({"script": {"result": {"rewards": float(n)}}}) for n in range(4)))
    script = EXAMPLES / "strands_math_agent" / "evaluate_async.py"  # takes its options from `evaluate.py`
    with ScriptedRuntime() as runtime:
        words = ["--agent", runtime.arn, "--bucket", store, "--endpoint-url", runtime.url, "--exp-id", "e"]
        words += ["--base-url", "http://model/v1", "--model-id", "m", "--limit", "2", "--out", str(tmp_path)]
        command = [sys.executable, str(script), str(data), *words]
        done = subprocess.run(command, env={**os.environ, **TEST_CREDENTIALS}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "reward 0.5000" in done.stdout
    assert len((tmp_path / "e" / "results.jsonl").read_text().splitlines()) == 2
