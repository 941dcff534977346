"""GSM8K as payloads: ``{"question", "answer": "... #### 42"}`` becomes ``{"id", "idx", "prompt", "answer", "data_source"}``.

    python prepare.py train.jsonl gsm8k/train.jsonl [--limit N] [--seed S]
    python prepare.py train.jsonl rllm:train      # into rLLM's registry, as gsm8k_agentcore

GSM8K (MIT) is at https://github.com/openai/grade-school-math. The script checks that the agent accepts
each payload, and that each published solution gets the full reward. With ``--limit``, the seed chooses the rows at random.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path
from typing import Any

from reward import AnswerReward
from word_problems import Problem

from agentcore_rl_toolkit.client.data import encode_payload, read_rows
from agentcore_rl_toolkit.errors import ConfigError

_SOLUTION = re.compile(r"####\s*(-?[0-9][0-9.,]*)")


def final_answer(solution: str) -> str:
    """The number after the last ``####``, without thousands separators. Raises: ConfigError when there is none."""
    found = _SOLUTION.findall(solution)
    if not found:
        raise ConfigError(f"no '#### number' in this solution: {solution[-80:]!r}")
    return str(found[-1]).replace(",", "").rstrip(".")


def payloads(source: Path) -> list[dict[str, Any]]:
    """All rows of a file of GSM8K as payloads, in order. Raises: ConfigError, ValueError that name the row."""
    solved, reward = read_rows(source), AnswerReward()
    rows = [
        {
            "id": f"gsm8k-{source.stem}-{i:05d}",
            "idx": i,
            "prompt": row["question"],
            "answer": final_answer(row["answer"]),
            "data_source": "gsm8k",
        }
        for i, row in enumerate(solved)
    ]
    for row, solution in zip(rows, solved, strict=True):
        Problem.of(row)
        if reward(response_text=solution["answer"], answer=row["answer"]) != 1.0:
            raise ConfigError(f"{source}, row {row['idx']}: the reward does not accept the published solution")
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("source", type=Path)
    options.add_argument("target", help="FILE.jsonl, rllm:train or rllm:test")
    options.add_argument("--limit", type=int, help="number of rows, chosen at random")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args(arguments)
    rows = payloads(given.source)
    if given.limit is not None:
        rows = random.Random(given.seed).sample(rows, min(given.limit, len(rows)))
    if given.target.startswith("rllm:"):
        from rllm.data.dataset import DatasetRegistry

        facts = {"source": "openai/gsm8k", "description": "GSM8K for the math agent", "category": "math"}
        DatasetRegistry.register_dataset("gsm8k_agentcore", rows, given.target.removeprefix("rllm:"), **facts)
    else:
        target = Path(given.target)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(encode_payload(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} rows written to {given.target}; the published solution of each gets reward 1")


if __name__ == "__main__":
    main()
