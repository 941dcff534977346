"""The task: the price of several things. The tools, the questions, their score, and the replies of an expert."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from strands import tool

SYSTEM_PROMPT = "Use the tools."
NAMES = ["Anna", "Ben", "Carla", "David", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam"]
WORDINGS = (
    "{name} buys {count} {thing}. What is the total?",
    "How much are {count} {thing}?",
    "What does {name} pay for {count} {thing}?",
    "{name} needs {thing}, {count} of them. How much is that?",
)
THINGS = ["apples", "pears", "books", "pens", "cups", "lamps", "eggs", "keys", "coins", "stamps", "chairs", "plates"]


def price_list(prices: dict[str, int]) -> Any:
    """The tool that knows a rollout's prices."""

    @tool
    def price(item: str) -> str:
        """The price of one item.

        Args:
            item: Its name
        """
        return str(prices.get(item, "unknown"))

    return price


@tool
def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a: One
        b: The other
    """
    return str(a * b)


def question(rng: random.Random) -> dict[str, Any]:
    """Return a row with new prices, so that the answer cannot be known without the tools."""
    prices = {thing: rng.randint(11, 99) for thing in THINGS}
    count, thing = rng.randint(11, 99), rng.choice(THINGS)
    prompt = rng.choice(WORDINGS).format(name=rng.choice(NAMES), count=count, thing=thing)
    return {"prompt": prompt, "answer": count * prices[thing], "prices": prices, "thing": thing, "count": count}


def answered(text: str, answer: int) -> float:
    """Return 1.0 if the last number of the reply is the answer."""
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and numbers[-1] == str(answer))


def steps(row: dict[str, Any]) -> list[tuple[str, str]]:
    """An expert's replies, each with the result of its call; the last one calls nothing."""
    cost = row["prices"][row["thing"]]
    return [
        (call("price", item=row["thing"]), str(cost)),
        (call("multiply", a=row["count"], b=cost), str(row["answer"])),
        (f"The total is {row['answer']}.", ""),
    ]


def call(name: str, **arguments: Any) -> str:
    """Write the messages in the form of Hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
