"""Three small tasks without tools. A generator makes the questions, and a function scores the answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any


def words(text: str) -> list[str]:
    return text.split()


ONES = words("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen")
ONES += words("seventeen eighteen nineteen")
TENS = words("- - twenty thirty forty fifty sixty seventy eighty ninety")
NAMES = words("Anna Ben Carla David Elif Farid Grace Hugo Ines Jonas Kira Liam")
THINGS = words("apples pears books pens cups lamps eggs keys coins stamps chairs plates")
LETTERS_OF = words(
    "tree banana letter coffee river window garden pepper summer bottle kitchen balloon elephant committee"
)


def in_words(n: int) -> str:
    return ONES[n] if n < 20 else TENS[n // 10] + (f"-{ONES[n % 10]}" if n % 10 else "")


def sums(rng: random.Random) -> dict[str, Any]:
    a, b = rng.randint(2, 49), rng.randint(2, 49)
    return {"prompt": f"What is {in_words(a)} plus {in_words(b)}? Answer with the number only.", "answer": a + b}


def letters(rng: random.Random) -> dict[str, Any]:
    word = rng.choice(LETTERS_OF)
    letter = rng.choice(word)
    prompt = f'How many times does the letter "{letter}" occur in the word "{word}"? Answer with the number only.'
    return {"prompt": prompt, "answer": word.count(letter)}


def order(rng: random.Random) -> dict[str, Any]:
    """Read numbers from a sentence, and write them as the required JSON."""
    name, (first, second) = rng.choice(NAMES), rng.sample(THINGS, 2)
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    prompt = (
        f"{name} buys {a} {first} and {b} {second}. Write this as a JSON object with the keys name, {first} and {second}. "
        "Write the JSON object only."
    )
    return {"prompt": prompt, "answer": {"name": name, first: a, second: b}}


def score(text: str, answer: Any) -> float:
    """Return 0 to 1. A number must be the complete reply. An object gets a third, and its right fields get two thirds."""
    if not isinstance(answer, Mapping):
        return float(
            re.fullmatch(r"\s*(-?\d+)\.?\s*", text) is not None and int(re.findall(r"-?\d+", text)[0]) == answer
        )
    try:
        found = json.loads(text)
    except ValueError:
        return 0.0
    if not isinstance(found, dict):
        return 0.0
    right = sum(type(found.get(key)) is type(value) and found[key] == value for key, value in answer.items())
    return 1 / 3 + 2 / 3 * right / max(len(answer), len(found))


TASKS: dict[str, Callable[[random.Random], dict[str, Any]]] = {"sums": sums, "letters": letters, "order": order}
