"""Write train.jsonl and eval.jsonl with `python rows.py`. One line is one input: the payload that the agent gets."""

import json
import random
from pathlib import Path

from tools import calculator

THINGS = (
    "lamps",
    "mugs",
    "plates",
    "bowls",
    "chairs",
    "candles",
    "towels",
    "vases",
    "baskets",
    "clocks",
    "pans",
    "rugs",
)
WORDINGS = (
    ("The shop has {a} {i} and sells {b}. How many {i} are left?", "{a} - {b}"),
    ("The shop has {a} {i} and gets {b} more. How many {i} does it have?", "{a} + {b}"),
    ("The shop orders {c} boxes with {d} {i} each. How many {i} is that?", "{c} * {d}"),
    ("The shop has {a} {i} and buys {c} boxes with {d} {i} each. How many {i} in total?", "{a} + {c} * {d}"),
    ("The shop gets {c} boxes with {d} {i} each and sells {e}. How many {i} are left?", "{c} * {d} - {e}"),
    ("The shop has {a} {i}, gets {b} more and sells {c}. How many {i} are left?", "{a} + {b} - {c}"),
)


def rows(wanted: int, *, held_out: bool, seed: int = 0) -> list[dict[str, str]]:
    """Return different rows. Held-out rows have other numbers than training rows, in any wording."""
    rng = random.Random(f"{held_out}/{seed}")
    found: dict[str, dict[str, str]] = {}
    while len(found) < wanted:
        numbers = {"a": rng.randint(21, 60), "b": rng.randint(2, 20), "c": rng.randint(2, 9), "d": rng.randint(3, 12)}
        wording, answer = rng.choice(WORDINGS)
        if (sum(number for name, number in numbers.items() if f"{{{name}}}" in wording) % 5 == 0) != held_out:
            continue
        given = {**numbers, "e": rng.randint(1, numbers["c"] * numbers["d"] - 1), "i": rng.choice(THINGS)}
        prompt = wording.format(**given)
        found[prompt] = {"prompt": prompt, "answer": calculator(answer.format(**given))}
    return list(found.values())


if __name__ == "__main__":
    for name, wanted, held_out in (("train", 400, False), ("eval", 128, True)):
        lines = [json.dumps({"id": f"{name}-{i:04d}", **row}) for i, row in enumerate(rows(wanted, held_out=held_out))]
        Path(__file__).with_name(f"{name}.jsonl").write_text("\n".join(lines) + "\n")
