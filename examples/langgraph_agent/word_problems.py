"""A word problem: the prompt, the tool, and the payload of the agent, for all frameworks."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SYSTEM_PROMPT = (
    "Solve the problem step by step. Use the calculator for every calculation. "
    "End with a line that holds only #### and the final number, such as: #### 42"
)
MAX_TOKENS = 1024  # limit of a reply
MAX_TURNS = 24  # model calls; the longest solutions of GSM8K take 8 calculations

# The description of the calculator, for agents without a framework.
TOOL = {
    "name": "calculator",
    "description": "Evaluate one arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "Such as (16 - 3 - 4) * 2"}},
        "required": ["expression"],
    },
}

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_LONGEST = 200  # characters of an expression
_DIGITS = 40  # the largest number of digits of a result


class Problem(BaseModel):
    """A payload. Only training and evaluation have an ``answer``. ``id``, ``idx`` and ``data_source`` are the origin of a row."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(min_length=1, max_length=20_000)
    answer: str | None = Field(default=None, min_length=1, max_length=100)
    id: str | None = None
    idx: int | None = None
    data_source: str | None = None

    @classmethod
    def of(cls, payload: Any) -> Problem:
        """Read a payload without the client's ``_rollout``. Raises: ValueError with the name of each wrong field."""
        if not isinstance(payload, Mapping):
            raise ValueError(f"the payload must be an object with a prompt, got {type(payload).__name__}")
        try:
            return cls.model_validate({name: value for name, value in payload.items() if name != "_rollout"})
        except ValidationError as e:
            wrong = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in e.errors())
            raise ValueError(f"not a word problem: {wrong}") from None


def calculator(expression: str) -> str:
    """Evaluate one arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses, such as (16 - 3 - 4) * 2
    """

    def value(node: ast.AST) -> Fraction:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return Fraction(str(number))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError("only numbers, + - * / and parentheses are allowed")

    # A model may write anything. An error is returned as a text, and the agent continues.
    if len(expression) > _LONGEST:
        return f"error: the expression is longer than {_LONGEST} characters"
    try:
        result = value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return "error: only numbers, + - * / and parentheses are allowed"
    if abs(result) >= 10**_DIGITS:
        return f"error: the value has more than {_DIGITS} digits"
    return str(result.numerator) if result.denominator == 1 else repr(float(result))


def parsed(arguments: str) -> object:
    """Parse the arguments of a call in OpenAI's API, which are a JSON text. None if they do not parse."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def call_tool(name: str, arguments: object) -> str:
    """Run a tool by name, for agents without a framework. For a wrong call, return an error as text."""
    if name != "calculator" or not isinstance(arguments, dict) or not isinstance(arguments.get("expression"), str):
        return "error: there is one tool, calculator(expression)"
    return calculator(arguments["expression"])
