"""The prompt, the calculator and the reward of the quickstart's agent (`arithmetic_app.py`)."""

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from strands import tool

from agentcore_rl_toolkit import RewardFunction

SYSTEM_PROMPT = "Solve the problem. Use the calculator."

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def evaluate(expression: str) -> str:
    """Return the value of an expression of numbers, + - * / and parentheses, or "error: ...". It never runs code."""

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(operand))
        raise ValueError("only numbers, + - * / and parentheses are allowed")

    if len(expression) > 200:
        return "error: the expression is longer than 200 characters"
    try:
        result = value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as e:
        return f"error: {type(e).__name__}"
    return str(int(result)) if result == int(result) else str(result)


@tool
def calculator(expression: str) -> str:
    """Evaluate one arithmetic expression.

    Args:
        expression: Like 2 + 3
    """
    return evaluate(expression)


class AnswerReward(RewardFunction):
    """Return 1.0 if the last integer in the reply is the expected answer, otherwise 0.0."""

    def __call__(self, *, response_text: str, answer: str) -> float:
        numbers = re.findall(r"-?\d+", response_text.replace(",", ""))
        return float(bool(numbers) and int(numbers[-1][:30]) == int(answer))
