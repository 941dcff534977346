"""Arithmetic word problems, any number of them: the task that the built-in policy is trained on.

A problem needs one or two operations. Its wording comes from one of the templates below, its names, things and numbers from
a seeded generator. Whether a problem belongs to the train or to the held-out split depends on its numbers only
(`split_of`), so no held-out problem, in any wording, is ever seen in training.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError

Split = Literal["train", "held_out"]

NAMES = (
    *("Tom", "Ann", "Bob", "Eve", "Sam", "Mia", "Leo", "Zoe", "Max", "Ida", "Ben", "Amy"),
    *("Kai", "Lea", "Jon", "Una", "Raj", "Ada", "Omar", "Nina", "Hugo", "Vera", "Paul", "Rosa"),
)
THINGS = (
    *("apples", "books", "coins", "pens", "cards", "eggs", "cups", "nuts"),
    *("stamps", "shells", "plums", "cakes", "keys", "roses", "bricks", "marbles"),
)

# Placeholders: {n} {m} two different names, {i} things, {a} {b} {c} numbers. Then the operations: names of numbers, or R for the
# result of the operation before.
_TEMPLATES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{n} has {a} {i} and buys {b} more. How many {i} does {n} have?", ("a + b",)),
    ("{n} finds {a} {i} on Monday and {b} on Tuesday. How many {i} in total?", ("a + b",)),
    ("A shop sells {a} {i} in the morning and {b} at night. How many {i} does it sell?", ("a + b",)),
    ("There are {a} {i} on a table. {n} puts {b} more there. How many {i} are there now?", ("a + b",)),
    ("{n} has {a} {i} and {m} has {b}. How many {i} do they have together?", ("a + b",)),
    ("{n} has {a} {i} and loses {b}. How many {i} are left?", ("a - b",)),
    ("{n} had {a} {i} and gave {b} to {m}. How many {i} does {n} still have?", ("a - b",)),
    ("There are {a} {i} in a box. {n} takes {b} out. How many {i} remain?", ("a - b",)),
    ("{n} needs {a} {i} and already has {b}. How many {i} are missing?", ("a - b",)),
    ("{n} sells {b} of {a} {i}. How many {i} are not sold?", ("a - b",)),
    ("{n} buys {c} boxes with {d} {i} each. How many {i} in total?", ("c * d",)),
    ("Each of {c} children gets {d} {i}. How many {i} is that?", ("c * d",)),
    ("{n} collects {c} {i} a day for {d} days. How many {i} does {n} collect?", ("c * d",)),
    ("There are {c} rows of {d} {i}. How many {i} are there?", ("c * d",)),
    ("One bag holds {c} {i}. How many {i} do {d} bags hold?", ("c * d",)),
    ("{n} has {a} {i} and buys {c} boxes with {d} {i} each. How many {i} in total?", ("c * d", "R + a")),
    ("{n} fills {c} bags with {d} {i} each and has {a} over. How many {i} were there?", ("c * d", "R + a")),
    ("{n} buys {c} boxes with {d} {i} each and gives {e} away. How many {i} are left?", ("c * d", "R - e")),
    ("There are {c} rows of {d} {i}. {n} takes {e}. How many {i} remain?", ("c * d", "R - e")),
    ("{n} has {a} {i}, loses {b} and buys {c} more. How many {i} does {n} have?", ("a - b", "R + c")),
    ("{n} had {a} {i}. {m} took {b} but brought {c} back. How many {i} does {n} have now?", ("a - b", "R + c")),
    ("{n} has {a} {i}, gets {c} from {m} and sells {d}. How many {i} are left?", ("a + c", "R - d")),
    ("A box holds {a} {i}. {n} adds {c} and {m} takes {d}. How many {i} are in the box?", ("a + c", "R - d")),
    ("{n} picks {a} {i}, {m} picks {c} and a friend picks {d}. How many {i} in total?", ("a + c", "R + d")),
    ("Each of {c} bags holds {d} red and {e} green {i}. How many {i} in total?", ("d + e", "R * c")),
    ("{n} and {m} get {d} and {e} {i} a day. How many {i} do they get in {c} days?", ("d + e", "R * c")),
)
_HELD_OUT_MODULUS = 5
_MAX_EXPRESSION = 80  # characters; the longest correct expression has 14
_ARITHMETIC = re.compile(r"[0-9+\-*() ]+")
_INTEGER = re.compile(r"-?\d+")
_REFERENCE = re.compile(r"[a-eR]")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A word problem.

    ``answer`` is the gold integer as text. ``steps`` are the calculator calls of a correct solution, in order, for example
    ``("12 * 7", "84 + 5")``.
    """

    prompt: str
    answer: str
    steps: tuple[str, ...]

    @property
    def expression(self) -> str:
        """The whole solution as a single expression."""
        if len(self.steps) == 1:
            return self.steps[0]
        first, rest = self.steps[0], self.steps[1].split(" ", 1)[1]
        return f"({first}) {rest}" if rest.startswith("*") and "*" not in first else f"{first} {rest}"


def split_of(numbers: tuple[int, ...]) -> Split:
    """Return the split of a problem with these numbers: a sum that is a multiple of five is held out."""
    return "held_out" if sum(numbers) % _HELD_OUT_MODULUS == 0 else "train"


def problems(split: Split, n: int, *, seed: int = 0) -> list[Problem]:
    """Return ``n`` different problems of a split. The same arguments give the same list.

    Raises: ConfigError for an unknown split or a negative ``n``.
    """
    if n < 0:
        raise ConfigError(f"n must not be negative, got {n}")
    found: dict[str, Problem] = {}
    stream = generate(split, seed=seed)
    while len(found) < n:
        problem = next(stream)
        found.setdefault(problem.prompt, problem)
    return list(found.values())


def generate(split: Split, *, seed: int = 0) -> Iterator[Problem]:
    """Yield problems of a split without end, half of them with one step and half with two.

    Every wording comes once before any repeats, so two seeds differ in numbers and order and not in their questions.

    Raises: ConfigError.
    """
    if split not in ("train", "held_out"):
        raise ConfigError(f"split must be 'train' or 'held_out', got {split!r}")
    rng = random.Random(f"{split}/{seed}")
    by_steps = ([k for k, (_, ops) in enumerate(_TEMPLATES) if len(ops) == n] for n in (1, 2))
    one_step, two_steps = (_in_turns(templates, rng) for templates in by_steps)
    while True:
        for template in rng.sample((next(one_step), next(two_steps)), 2):
            yield _of_split(split, template, rng)


def calculate(expression: str) -> str:
    """Evaluate integers with ``+ - *`` and parentheses; the calculator tool of the example agent.

    Anything else gives the text ``"error"``: a policy that writes nonsense must get an answer, not break its agent.
    """
    if len(expression) > _MAX_EXPRESSION or not _ARITHMETIC.fullmatch(expression):
        return "error"
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error"


def reward(text: str, answer: str) -> float:
    """Return 1.0 if the last integer in the text equals the gold answer, and 0.0 otherwise. Thousands separators are read."""
    found = _INTEGER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", text))
    # Text is compared with text: int() of what a policy wrote may have any number of digits.
    return float(bool(found) and _canonical(found[-1]) == _canonical(answer))


def _canonical(integer: str) -> str:
    digits = integer.lstrip("-").lstrip("0")
    return "0" if not digits else "-" * integer.startswith("-") + digits


_OPERATORS: dict[type, Callable[..., int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.USub: operator.neg, ast.UAdd: operator.pos},
}


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("not an arithmetic expression of integers")


def _in_turns(templates: Sequence[int], rng: random.Random) -> Iterator[int]:
    """Yield the templates without end, in another random order each time."""
    while True:
        yield from rng.sample(templates, len(templates))


def _of_split(split: Split, template: int, rng: random.Random) -> Problem:
    while True:
        problem, numbers = _fill(template, rng)
        if split_of(numbers) == split:
            return problem


def _fill(template: int, rng: random.Random) -> tuple[Problem, tuple[int, ...]]:
    text, operations = _TEMPLATES[template]
    high, low = sorted((rng.randint(2, 99), rng.randint(2, 99)), reverse=True)
    # a >= b and c * d >= d >= e keep every result positive; sums do not need the order but it is harmless there
    d, e = sorted((rng.randint(2, 20), rng.randint(2, 20)), reverse=True)
    values = {"a": high, "b": low, "c": rng.randint(2, 20), "d": d, "e": e}
    if operations[0] == "a + b" and rng.random() < 0.5:
        values["a"], values["b"] = low, high
    if operations == ("a + c", "R - d"):
        values["d"] = rng.randint(2, min(60, values["a"] + values["c"]))
    n, m = rng.sample(NAMES, 2)
    prompt = text.format(n=n, m=m, i=rng.choice(THINGS), **values)
    steps: list[str] = []
    result = "0"
    for operation in operations:
        known = {**{k: str(v) for k, v in values.items()}, "R": result}
        expression = _REFERENCE.sub(lambda match, known=known: known[match[0]], operation)  # type: ignore[misc]
        result = calculate(expression)
        steps.append(expression)
    used = tuple(values[k] for k in "abcde" if "{" + k + "}" in text)
    return Problem(prompt=prompt, answer=result, steps=tuple(steps)), used
