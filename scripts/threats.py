"""The threat table of `docs/security.md`, made from the tests that try the threats.

A test that attacks carries ``@pytest.mark.threat(who=..., tries=..., stopped_by=..., leaves=...)``: who attacks, what they
try, what stops it, and what that does not stop (may be ""). All four are plain strings, so the table is read from the sources
without running them; the tests themselves run with the suite.

    python scripts/threats.py            # print the table
    python scripts/threats.py --write    # put it into docs/security.md
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "security.md"
BEGIN = "<!-- threats: made by scripts/threats.py from the tests -->"
END = "<!-- end of threats -->"
FIELDS = ("who", "tries", "stopped_by", "leaves")
WHO = (
    "a session",
    "another user of this machine",
    "a web page in the user's browser",
    "another machine",
    "an agent's model output",
    "a caller with a bad request",
    "whoever can write to the bucket",
    "a damaged or foreign file",
)


@dataclass(frozen=True, kw_only=True)
class Threat:
    """One marked test."""

    who: str
    tries: str
    stopped_by: str
    leaves: str
    file: str
    test: str


def threats(tests: Path = ROOT / "tests") -> list[Threat]:
    """All marked tests, by attacker, then by file. Raises: ValueError, naming the test, when a mark lacks something."""
    found: list[Threat] = []
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text()
        if "mark.threat" in text:
            found += _marked(ast.parse(text), path.relative_to(tests.parent).as_posix())
    return sorted(found, key=lambda t: (WHO.index(t.who), t.file))


def _marked(tree: ast.AST, file: str) -> Iterator[Threat]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.threat":
                    yield _threat(mark, file, node.name)


def _threat(mark: ast.Call, file: str, test: str) -> Threat:
    try:
        given = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
    except ValueError:
        given = {}
    texts = all(isinstance(value, str) for value in given.values())
    if mark.args or set(given) != set(FIELDS) or not texts or given["who"] not in WHO:
        raise ValueError(f"{file}::{test}: a threat has {', '.join(FIELDS)} as plain strings, and who is one of {WHO}")
    return Threat(**{name: str(given[name]) for name in FIELDS}, file=file, test=test)


def table(rows: list[Threat]) -> str:
    """Markdown: one table for each attacker."""
    lines: list[str] = []
    for who in WHO:
        mine = [row for row in rows if row.who == who]
        if mine:
            lines += ["", f"### {who[0].upper()}{who[1:]}", ""]
            lines += ["| tries to | is stopped by | what that leaves | test |", "|---|---|---|---|"]
            for row in mine:
                test = f"`{row.file}` {row.test.removeprefix('test_')}"
                cells = (row.tries, row.stopped_by, row.leaves or "-", test)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines).strip()


def page(text: str, made: str) -> str:
    """The page with its table replaced. Raises: ValueError when the place for it is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has no place for the table: {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


if __name__ == "__main__":
    made = table(threats())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(PAGE.read_text(), made))
    else:
        print(made)
