"""`lambda x: x in ['1', '2']` as a function, without `eval`: only what compares a cell is understood."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from .errors import TaskError

MAX_CHARACTERS = 500
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "len": len, "abs": abs}
_METHODS = frozenset(("isdigit", "isalpha", "isnumeric", "strip", "lower", "upper", "startswith", "endswith"))


class Comparator:
    """A function of one cell's text, written as a Python lambda.

    Understood: comparisons, `in`, `and`/`or`/`not`, numbers, text, lists, + - * / % of numbers, `int float str len abs`, and the
    string methods that test or trim. Calling it gives a bool; a value that the expression cannot take (`int('abc')`) gives False.

    Raises: TaskError for anything else. The expression belongs to the task, never to the policy.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_CHARACTERS:
            raise TaskError(f"a comparator of more than {MAX_CHARACTERS} characters")
        try:
            body = ast.parse(source.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            raise TaskError(f"the comparator {source!r} is not Python: {e}") from e
        if not isinstance(body, ast.Lambda) or len(body.args.args) != 1:
            raise TaskError(f"the comparator {source!r} is not a lambda of one argument")
        self._name = body.args.args[0].arg
        self._body = body.body
        self._check(self._body)

    def __call__(self, cell: str) -> bool:
        try:
            return bool(self._value(self._body, cell))
        except (ValueError, TypeError, ZeroDivisionError, OverflowError):
            return False

    def _check(self, node: ast.expr) -> None:
        """Refuse what `_value` does not compute, before any cell is seen."""
        match node:
            case ast.Constant(value=str() | int() | float() | None) | ast.Name(id=self._name):
                return
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts) | ast.BoolOp(values=parts):
                pass
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
                parts = [left, *others]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                parts = [left, right]
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                parts = [operand]
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
                parts = [argument]
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=parts, keywords=[]) if name in _METHODS:
                parts = [owner, *parts]
            case _:
                raise TaskError(f"a comparator may not use {ast.unparse(node)!r}")
        for part in parts:
            self._check(part)

    def _value(self, node: ast.expr, cell: str) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name():
                return cell
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return [self._value(part, cell) for part in parts]
            case ast.BoolOp(op=op, values=parts):
                values = (bool(self._value(part, cell)) for part in parts)
                return all(values) if isinstance(op, ast.And) else any(values)
            case ast.Compare(left=left, ops=ops, comparators=others):
                value = self._value(left, cell)
                for comparison, other in zip(ops, others, strict=True):
                    against = self._value(other, cell)
                    if not _COMPARISONS[type(comparison)](value, against):
                        return False
                    value = against
                return True
            case ast.BinOp(left=left, op=op, right=right):
                first, second = self._value(left, cell), self._value(right, cell)
                if not all(isinstance(number, int | float) for number in (first, second)):
                    raise TypeError("arithmetic is for numbers")  # text times a number could fill the memory
                return _ARITHMETIC[type(op)](first, second)
            case ast.UnaryOp(op=op, operand=operand):
                value = self._value(operand, cell)
                return not value if isinstance(op, ast.Not) else -value
            case ast.Call(func=ast.Name(id=name), args=[argument]):
                return _FUNCTIONS[name](self._value(argument, cell))
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=arguments):
                text = self._value(owner, cell)
                if not isinstance(text, str):
                    raise TypeError("methods are for text")
                return getattr(text, name)(*(self._value(argument, cell) for argument in arguments))
        raise AssertionError(ast.dump(node))  # `_check` lets nothing else through
