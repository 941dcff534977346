"""Demonstrations for the warm start: conversations of a calculator-using agent, well solved or deliberately sloppy.

Half of them look exactly like the example agent's. The other half vary what a person may edit (system prompt, tool description,
names of tool and argument, text around the problem), so that such an edit does not throw the policy off.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from .arithmetic import Problem, calculate

SYSTEM_PROMPT = "Solve the problem. Use the calculator."
TOOL_NAME = "calculator"
TOOL_DESCRIPTION = "Evaluate one arithmetic expression."
ARGUMENT_NAME = "expression"
ARGUMENT_DESCRIPTION = "Like 2 + 3"

_SENTENCES = (
    "Solve the problem.",
    "Use the calculator.",
    "You are a helpful assistant.",
    "You are a careful math tutor.",
    "Answer the question.",
    "Use the tool for every calculation.",
    "Do not guess.",
    "Give the final answer as a number.",
    "Think step by step.",
    "Be brief.",
    "Call the calculator before you answer.",
    "Work out the result with the tools you have.",
    "You solve word problems.",
    "Always check the numbers.",
    "Please help the user.",
    "Your task is to find the answer.",
    "Reply with one sentence.",
    "You can compute with the given function.",
)
_TOOL_NAMES = ("calc", "calculate", "compute", "math", "evaluate", "arithmetic", "eval_math", "math_tool")
_TOOL_DESCRIPTIONS = (
    "Calculate the value of an expression.",
    "A calculator.",
    "Compute a sum, a difference or a product.",
    "Evaluates simple math.",
    "Run the calculator on a formula and return the result.",
    "Evaluate one arithmetic operation.",
    "Use this tool for arithmetic.",
    "",
)
_ARGUMENT_NAMES = ("expr", "formula", "input", "query", "text", "operation")
_ARGUMENT_DESCRIPTIONS = (
    "The expression",
    "For example 4 * 5",
    "What to compute",
    "An expression such as 7 - 2",
    "math expression",
    "",
)
_PREFIXES = ("Question: ", "Problem: ", "Q: ", " ", "\n", "Please solve this: ", "Here is a problem.\n", "Hello! ")
_SUFFIXES = (
    " ",
    "\n",
    " Use the calculator.",
    " Answer with a number.",
    "\nShow the result.",
    " Think first.",
    " Thank you!",
    "\n\nGive only the final answer.",
)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Everything of a conversation that is not the problem: system prompt (None: no such message), tools, text around the problem."""

    system_prompt: str | None
    tools: list[dict[str, Any]]
    prefix: str = ""
    suffix: str = ""

    @property
    def tool_name(self) -> str:
        return str(self.tools[0]["function"]["name"])

    @property
    def argument_name(self) -> str:
        return str(self.tools[0]["function"]["parameters"]["required"][0])

    def opening(self, problem: Problem) -> list[dict[str, Any]]:
        """The messages that an agent sends first."""
        user = {"role": "user", "content": self.prefix + problem.prompt + self.suffix}
        if self.system_prompt is None:
            return [user]
        return [{"role": "system", "content": self.system_prompt}, user]


def tool_spec(
    name: str = TOOL_NAME,
    description: str = TOOL_DESCRIPTION,
    argument: str = ARGUMENT_NAME,
    argument_description: str = ARGUMENT_DESCRIPTION,
) -> dict[str, Any]:
    """A calculator as an OpenAI tool; the defaults are what Strands sends for the example agent's."""
    about = {"description": argument_description, "type": "string"} if argument_description else {"type": "string"}
    parameters = {"properties": {argument: about}, "required": [argument], "type": "object"}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


EXAMPLE_AGENT = Surroundings(system_prompt=SYSTEM_PROMPT, tools=[tool_spec()])


def varied_surroundings(rng: random.Random) -> Surroundings:
    """Surroundings in which each part differs from the example agent's with its own chance."""
    system: str | None = SYSTEM_PROMPT
    kind = rng.random()
    if kind < 0.08:
        system = None
    elif kind < 0.16:
        system = ""
    elif kind < 0.75:
        system = rng.choice((" ", " ", "\n")).join(rng.sample(_SENTENCES, rng.randint(1, 3)))
    tool = tool_spec(
        rng.choice(_TOOL_NAMES) if rng.random() < 0.35 else TOOL_NAME,
        rng.choice(_TOOL_DESCRIPTIONS) if rng.random() < 0.5 else TOOL_DESCRIPTION,
        rng.choice(_ARGUMENT_NAMES) if rng.random() < 0.3 else ARGUMENT_NAME,
        rng.choice(_ARGUMENT_DESCRIPTIONS) if rng.random() < 0.5 else ARGUMENT_DESCRIPTION,
    )
    if rng.random() < 0.1:
        tool["function"]["parameters"]["additionalProperties"] = False
    if rng.random() < 0.1:
        tool["function"]["strict"] = rng.random() < 0.5
    return Surroundings(
        system_prompt=system,
        tools=[tool],
        prefix=rng.choice(_PREFIXES) if rng.random() < 0.3 else "",
        suffix=rng.choice(_SUFFIXES) if rng.random() < 0.3 else "",
    )


def demonstrate(
    problem: Problem, surroundings: Surroundings, rng: random.Random, *, expert_share: float = 1.0
) -> list[dict[str, Any]]:
    """A whole conversation that solves the problem, right with probability ``expert_share``.

    A sloppy one guesses without the calculator, takes a wrong operator, stops after the first of two steps, or misreads the
    result. All of these keep the form and copy numbers rightly, so what reinforcement learning has to find is what to do, not how
    to write it.
    """
    messages = surroundings.opening(problem)
    style = "expert"
    if rng.random() >= expert_share:
        style = rng.choices(("guess", "operator", "early"), (0.4, 0.4, 0.2))[0]
    if style == "guess":
        return [*messages, _final(str(rng.randint(2, 400)))]
    steps: tuple[str, ...] = problem.steps
    if len(steps) == 2 and rng.random() < 0.15:
        steps = (problem.expression,)
    if style == "early" and len(steps) > 1:
        steps = steps[:1]
    result = ""
    for k, expression in enumerate(steps):
        if style == "operator":
            expression = _other_operator(expression, rng)
            if k:  # goes on from its own wrong result
                expression = f"{result} {expression.split(' ', 1)[1]}"
        result = calculate(expression)
        arguments = json.dumps({surroundings.argument_name: expression})
        call = {
            "id": f"call_{k}",
            "type": "function",
            "function": {"name": surroundings.tool_name, "arguments": arguments},
        }
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{k}", "content": result})
    if style == "early" and len(problem.steps) == 1:
        result = problem.steps[0].split(" ")[rng.choice((0, 2))]
    return [*messages, _final(result)]


def _final(answer: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"The answer is {answer}."}


def _other_operator(expression: str, rng: random.Random) -> str:
    """The expression with its first operator replaced by one of the other two."""
    parts = expression.split(" ")
    parts[1] = rng.choice([o for o in "+-*" if o != parts[1]])
    return " ".join(parts)
