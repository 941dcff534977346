"""Messages, docstrings and comments name no file of this project that does not exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A page, a benchmark, an example or a script, as messages and comments name it.
NAMED = re.compile(
    r"(?<![\w./-])((?:docs|benchmarks|examples|scripts|deploy|tests)/[\w./-]*\.(?:md|py|json|toml|sh|yaml))"
)


def texts(path: Path) -> list[str]:
    """The string constants of a module, joined where they are written side by side, and its comments."""
    source = path.read_text()
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    comments = [line.partition("#")[2] for line in source.splitlines()]
    return [*(value for value in constants if isinstance(value, str)), *comments]


def test_every_file_of_this_project_that_a_text_names_exists() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / "src").rglob("*.py")
        for text in texts(path)
        for name in NAMED.findall(text)
    }
    assert len(found) > 5
    assert {(path, name) for path, name in found if not (ROOT / name).exists()} == set()
