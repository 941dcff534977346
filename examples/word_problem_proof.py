"""The proof that the math agents of five frameworks give the same rewards.

The task is the test split of GSM8K (``--data FILE``), or the problems at the end of this file. The oracle makes a calculator call
for each calculation of the published solution, and then writes this solution. The expected tool calls and rewards are counted in
the data, so all frameworks must have the same numbers.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.client.data import read_rows
from agentcore_rl_toolkit.gateway.testing import Cut, ToolCall
from harness import Proof, Result, mean, parser, tool_calls

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k" / "test.jsonl"
ROLLOUTS, QUICK = 40, 5
MAX_TURNS = 24  # as in `word_problems.py`
_CALCULATION = re.compile(r"<<([^<>=]+)=")


def options(description: str | None = None) -> argparse.Namespace:
    """The options of these proofs."""
    made = parser(description)
    made.add_argument("--data", type=Path, metavar="FILE", help="the test split of GSM8K, as JSON lines")
    made.add_argument("--rollouts", type=int, metavar="N", help=f"problems for the oracle [{ROLLOUTS}, quick {QUICK}]")
    return made.parse_args()


class Task:
    """Problems with their solutions, and solvers that know them."""

    def __init__(self, data: Path | None, count: int) -> None:
        source = data or (GSM8K if GSM8K.is_file() else None)
        solved = read_rows(source) if source is not None else [dict(row) for row in PROBLEMS]
        self.name = source.stem if source is not None else "our own problems"
        self.note = "GSM8K test" if source is not None else self.name
        solved = solved[:count]
        answers = [str(row["answer"]).rpartition("####")[2].strip().replace(",", "") for row in solved]
        self.payloads = [{"prompt": row["question"], "answer": a} for row, a in zip(solved, answers, strict=True)]
        self.solutions = {row["question"]: str(row["answer"]) for row in solved}

    def calculations(self, question: str) -> list[str]:
        return _CALCULATION.findall(self.solutions[question])

    def oracle(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | list[ToolCall]:
        """The next calculation of the solution, and after the last one the solution."""
        question = next(m["content"] for m in messages if m["role"] == "user")
        done = sum(message["role"] == "tool" for message in messages)
        steps = self.calculations(question)
        if done < len(steps):
            return [ToolCall("calculator", {"expression": steps[done]})]
        return re.sub(r"<<[^<>]*>>", "", self.solutions[question])

    def wrong(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """The published solution with another number at its end."""
        question = next(m["content"] for m in messages if m["role"] == "user")
        return f"{self.solutions[question].partition('####')[0]}#### {self._answer(question)}1"

    def _answer(self, question: str) -> str:
        return self.solutions[question].rpartition("####")[2].strip()


def do_nothing(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """Repeats the question: its numbers are no answer."""
    return str(next(m["content"] for m in messages if m["role"] == "user"))


def ramble(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Cut:
    """Runs out of tokens before it comes to an answer."""
    return Cut("First I think about the problem. Then I think about it once more. Then")


def never_end(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[ToolCall]:
    """Runs out of turns: it repeats one calculation."""
    return [ToolCall("calculator", {"expression": "1 + 1"})]


def prove(
    example: Path,
    framework: str,
    *,
    given: argparse.Namespace | None = None,
    more: Callable[[Proof, Task], None] | None = None,
) -> None:
    """Run the oracle, doing nothing, and a wrong solver. ``more`` checks what only this example has."""
    given = given or options()
    task = Task(given.data, given.rollouts or (QUICK if given.quick else ROLLOUTS))
    few = task.payloads[: QUICK if given.quick else 10]
    planned = sum(len(task.calculations(payload["prompt"])) for payload in task.payloads)
    with Proof(example=example, framework=framework, options=given) as proof:
        solved = proof.run(task.payloads, task.oracle)
        nothing = proof.run(few, do_nothing)
        wrong = proof.run(few, task.wrong)
        cut = proof.run(few[:2], ramble)
        endless = proof.run(few[:1], never_end)
        # What AgentCore's console or a careless caller sends: a content block in place of a text.
        block = {"toolUse": {"toolUseId": "t", "name": "calculator", "input": {}}}
        refused = proof.run([{"prompt": block, "answer": "1"}], do_nothing)
        proof.check_all_ok([*solved, *nothing, *wrong])
        proof.row(
            rollouts=len(solved) + len(nothing),
            oracle_reward=mean(solved),
            noop_reward=mean(nothing),
            tool_calls=tool_calls(solved, nothing),
            note=task.note,
        )
        _same(proof, "the oracle solves every problem", mean(solved), 1.0)
        _same(proof, "doing nothing solves none", mean(nothing), 0.0)
        _same(proof, "a wrong number solves none", mean(wrong), 0.0)
        _same(proof, "the calculator is called once per calculation", tool_calls(solved), planned)
        _same(proof, "every model call is recorded", sum(r.turns for r in solved), planned + len(solved))
        # The policy's failures teach it something, so they score 0 and are trained.
        _same(proof, "running out of tokens scores 0", sum(r.reward == 0.0 for r in cut), len(cut))
        _same(proof, "running out of turns scores 0", sum(r.reward == 0.0 for r in endless), len(endless))
        _same(proof, "and ends after so many model calls", endless[0].turns, MAX_TURNS)
        blame = {r.failure for r in endless if r.cause == "policy"}
        proof.check("and is the policy's failure", value=sorted(blame), target=["turns"], ok=blame == {"turns"})
        _same(proof, "a content block in place of a text is refused", _refusals(refused), 1)
        if more is not None:
            more(proof, task)


def _same(proof: Proof, name: str, value: float, target: float) -> None:
    proof.check(name, value=value, target=target, ok=value == target)


def _refusals(results: Sequence[Result]) -> int:
    return sum(
        r.outcome == "agent_error" and "prompt: Input should be a valid string" in (r.error or "") for r in results
    )


# In GSM8K's form, written for this file: the proof uses them if the data set is missing.
PROBLEMS = (
    {
        "question": "A bakery fills 14 trays with 12 rolls each and sells 95 rolls before noon. How many rolls are left?",
        "answer": "It bakes 14 * 12 = <<14*12=168>>168 rolls.\n168 - 95 = <<168-95=73>>73 rolls are left.\n#### 73",
    },
    {
        "question": "Ines saves $45 a week. A bicycle costs $1,260. How many weeks does she need?",
        "answer": "She needs 1260 / 45 = <<1260/45=28>>28 weeks.\n#### 28",
    },
    {
        "question": "A tank holds 2,400 litres. It is a quarter full. A pump adds 75 litres a minute. When is it full?",
        "answer": "There are 2400 / 4 = <<2400/4=600>>600 litres in it.\n2400 - 600 = <<2400-600=1800>>1800 litres are missing.\n"
        "That takes 1800 / 75 = <<1800/75=24>>24 minutes.\n#### 24",
    },
    {
        "question": "In the morning it is 6 degrees. By night it is 15 degrees colder. How cold is it at night?",
        "answer": "It is 6 - 15 = <<6-15=-9>>-9 degrees.\n#### -9",
    },
    {
        "question": "A printer makes 35 pages a minute, and costs 4 cents a page. What do 90 minutes cost, in dollars?",
        "answer": "It prints 35 * 90 = <<35*90=3150>>3150 pages.\nThey cost 3150 * 4 = <<3150*4=12600>>12600 cents.\n"
        "That is 12600 / 100 = <<12600/100=126>>126 dollars.\n#### 126",
    },
    {
        "question": "A town of 18,400 people grows by 5 percent in a year, and then by 2,000 people. How many live there then?",
        "answer": "It grows by 18400 * 5 / 100 = <<18400*5/100=920>>920 people.\n"
        "Then 18400 + 920 + 2000 = <<18400+920+2000=21320>>21,320 live there.\n#### 21,320",
    },
)
