"""Demonstrations for the warm start: conversations of a calculator-using agent, well solved or deliberately sloppy.

Half of them look exactly like the example agent's. The other half vary what a person may edit (system prompt, tool description,
names of tool and argument, text around the problem), so that such an edit does not throw the policy off.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentcore_rl_toolkit.policy.word_problems import Problem, calculate

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
    "What to compute",
    "An expression",
    "math expression",
    "",
)
# Wrong operators are the rarest: they have to be unlearnt wording by wording, the other habits only once.
_SLOPPY_STYLES = ("guess", "operator", "early")
_SLOPPY_SHARES = (0.45, 0.2, 0.35)
# Made-up sentences and names come from these, so that the policy learns to pass over text it has never seen, and to copy names.
_WORDS = [
    "the",
    "a",
    "to",
    "of",
    "and",
    "in",
    "is",
    "you",
    "that",
    "it",
    "for",
    "on",
    "with",
    "as",
    "this",
    "be",
    "at",
    "one",
    "or",
    "from",
    "not",
    "your",
    "all",
    "will",
    "each",
    "how",
    "their",
    "do",
    "if",
    "which",
    "then",
    "them",
    "make",
    "like",
    "time",
    "write",
    "see",
    "number",
    "no",
    "way",
    "people",
    "first",
    "word",
    "call",
    "who",
    "now",
    "find",
    "long",
    "day",
    "get",
    "come",
    "made",
    "part",
    "new",
    "sound",
    "take",
    "only",
    "little",
    "work",
    "place",
    "year",
    "live",
    "show",
    "every",
    "good",
    "name",
    "give",
    "most",
    "very",
    "after",
    "thing",
    "our",
    "just",
    "line",
    "right",
    "think",
    "say",
    "help",
    "low",
    "turn",
    "cause",
    "much",
    "mean",
    "before",
    "move",
    "old",
    "same",
    "tell",
    "want",
    "also",
    "around",
    "form",
    "three",
    "small",
    "set",
    "put",
    "end",
    "does",
    "another",
    "well",
    "large",
    "must",
    "big",
    "even",
    "such",
    "here",
    "why",
    "ask",
    "need",
    "house",
    "point",
    "step",
    "value",
    "result",
    "tool",
    "answer",
    "final",
    "question",
    "user",
    "check",
    "output",
    "text",
    "return",
    "function",
    "solve",
    "do",
    "eval",
    "run",
    "plus",
    "sum",
    "my",
    "math",
    "calc",
    "equation",
    "problem",
    "let's",
    "please",
    "don't",
]
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
    """Everything of a conversation but the problem: system prompt (None: no such message), tools, text around the problem."""

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
        sentences = [
            _made_up_sentence(rng) if rng.random() < 0.3 else s for s in rng.sample(_SENTENCES, rng.randint(1, 3))
        ]
        system = rng.choice((" ", " ", "\n")).join(sentences)
    tool = tool_spec(
        _varied(TOOL_NAME, _TOOL_NAMES, _made_up_name, 0.4, rng),
        _varied(TOOL_DESCRIPTION, _TOOL_DESCRIPTIONS, _made_up_sentence, 0.5, rng),
        _varied(ARGUMENT_NAME, _ARGUMENT_NAMES, _made_up_name, 0.4, rng),
        _varied(ARGUMENT_DESCRIPTION, _ARGUMENT_DESCRIPTIONS, _made_up_example, 0.5, rng),
    )
    if rng.random() < 0.1:
        tool["function"]["parameters"]["additionalProperties"] = False
    if rng.random() < 0.1:
        tool["function"]["strict"] = rng.random() < 0.5
    prefix = suffix = ""
    if rng.random() < 0.35:
        prefix = rng.choice(_PREFIXES) if rng.random() < 0.5 else _made_up_sentence(rng) + rng.choice((" ", "\n"))
    if rng.random() < 0.35:
        suffix = (
            rng.choice(_SUFFIXES) if rng.random() < 0.4 else rng.choice((" ", "\n", "\n\n")) + _made_up_sentence(rng)
        )
    return Surroundings(system_prompt=system, tools=[tool], prefix=prefix, suffix=suffix)


def _varied(
    usual: str, known: tuple[str, ...], make_up: Callable[[random.Random], str], chance: float, rng: random.Random
) -> str:
    """``usual``, or with a chance one of the known or a made-up one."""
    if rng.random() >= chance:
        return usual
    return make_up(rng) if rng.random() < 0.6 else rng.choice(known)


def _made_up_sentence(rng: random.Random) -> str:
    words = rng.choices(_WORDS, k=rng.randint(2, 9))
    if rng.random() < 0.15:
        words[-1] = str(rng.randint(1, 20))
    return " ".join(words).capitalize() + rng.choice((".", ".", ".", "!", ":", ""))


def _made_up_name(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return "_".join(w.replace("'", "") for w in rng.sample(_WORDS, rng.randint(1, 2)))
    if kind < 0.55:
        first, second = (w.replace("'", "") for w in rng.sample(_WORDS, 2))
        return first + second.capitalize()
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8)))


def _made_up_example(rng: random.Random) -> str:
    sign = rng.choice(("+", "-", "*"))
    blank = rng.choice((" ", ""))
    example = f"{rng.randint(1, 30)}{blank}{sign}{blank}{rng.randint(1, 30)}"
    lead = rng.choice(
        ("Like", "like", "For example", "e.g.", "An expression such as", "such as", _made_up_sentence(rng))
    )
    return f"{lead} {example}"


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
        style = rng.choices(_SLOPPY_STYLES, _SLOPPY_SHARES)[0]
    if style == "guess":
        return [*messages, _final(str(rng.randint(2, 400)))]
    steps: tuple[str, ...] = problem.steps
    if style != "early" and len(steps) == 2 and rng.random() < 0.15:
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
