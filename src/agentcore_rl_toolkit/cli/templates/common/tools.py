"""The agent's instructions and tools. Plain functions: each framework wraps them in its own way."""

import ast
import operator

SYSTEM_PROMPT = "You keep the stock of a shop. Use the tool for every sum."

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculator(expression: str) -> str:
    """Work out a sum.

    Args:
        expression: Such as 2 + 15
    """

    def value(node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
        raise ValueError("only whole numbers, + - * and parentheses are allowed")

    # A model can write anything: it gets an answer, and the agent continues.
    if len(expression) > 80:
        return "error: the expression is too long"
    try:
        return str(value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError) as e:
        return f"error: {type(e).__name__}"


def call_tool(name: str, arguments: object) -> str:
    """Run a tool by name, for agents that write their own loop. A call that fits nothing is answered, not raised."""
    if name != "calculator" or not isinstance(arguments, dict) or not isinstance(arguments.get("expression"), str):
        return "error: there is one tool, calculator(expression)"
    return calculator(arguments["expression"])
