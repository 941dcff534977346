"""No class holds more than a reader can keep in mind."""

from __future__ import annotations

import ast
from pathlib import Path

import agentcore_rl_toolkit

ROOT = Path(agentcore_rl_toolkit.__file__).parent
MOST = 20  # attributes of one class: what it assigns on self
# Those that have more, and how many: none may be added, and none may grow.
LARGER: dict[str, int] = {}


def attributes(node: ast.ClassDef) -> set[str]:
    """Attributes that the methods of a class assign on self."""
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }


def test_no_class_has_more_than_twenty_attributes_of_its_own() -> None:
    found = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and (count := len(attributes(node))) > MOST:
                found[f"{path.relative_to(ROOT).as_posix()} {node.name}"] = count
    assert found == LARGER, "split the class; one that is smaller now leaves the list"
