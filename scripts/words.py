"""Count the phrases that plain English does not need, in the docs and in the texts of `src`.

python scripts/words.py                 # a table: occurrences of each pattern in the docs, the messages, and all of src
python scripts/words.py --show beside   # the places of one pattern
python scripts/words.py docs src/agentcore_rl_toolkit/gateway    # of these files and folders only

"docs" are the README, the pages, and the READMEs of the examples. "messages" are what users see of `src`: errors, log lines and
the help of the command line.
"src" are all comments, docstrings and texts.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "agentcore_rl_toolkit"
UNITS = r"(?:tokens?|seconds?|minutes?|bytes|requests?|rollouts?|dollars|[kKMG]?B|m?s)"

# What is wrong in every sentence, with what to write instead.
PATTERNS: dict[str, tuple[str, str]] = {
    "after this page": (r"\bafter this page\b", "say what the page is about"),
    "alone for only": (r"\b(?:by|from|of|in|to|with) \w+(?: \w+)? alone\b", "only"),
    "anew": (r"\banew\b", "again"),
    "at AWS": (r"\bat (?:AWS|AgentCore|SageMaker|Tinker)\b", "on AWS"),
    "be had": (r"\b(?:be|is|are) had\b", "available"),
    "beside": (r"\bbeside\b", "next to, with, besides"),
    "blame": (r"\bblame[sd]?\b", "cause"),
    "British spelling": (
        r"\b(?:behaviour\w*|colour\w*|honour\w*|favour\w*|licence[sd]?|centred|artefacts?|labelled|whilst|amongst|catalogue|"
        r"(?:token|serial|quant|initial|recogn|organ|normal|optim|summar|synchron|final|util|minim|maxim|author|general|"
        r"categor|custom)is(?:e[sdr]?|ing|ation|ations))\b",
        "American spelling",
    ),
    "by and by": (r"\bby and by\b|\bin the middle of\b", "a time or a place"),
    "comment that opens with a preposition": (
        r"(?-i:^# ?(?:of|for|in|by|until|after|to|with|from|on)\b)",
        "name the noun",
    ),
    "docstring that opens with a question word": (
        r'^"""(?:Whether|Why|How|What|Where|When|Who|Whom|Whose|Which|Those|These|Of|That|One|For|By|In|To)\b',
        "the imperative: Return ...",
    ),
    "else for otherwise": (r"[,;] else (?!if\b)", "otherwise"),
    "empty table header": (r"^\| *\|", "give the first column a name"),
    "everybody": (r"\b(?:some|every|any|no)body\b|\bwho(?:m|so)?ever\b", "name the reader or the program"),
    "gone": (r"\b(?:is|are|was|were|be) gone\b", "has ended, was deleted"),
    "go on": (r"\b(?:go|goes|going|gone|went) on\b", "continue"),
    "is made": (r"\b(?:is|are|was|were) made\b", "an active verb"),
    "mend": (r"\bmend(?:s|ed|ing)?\b", "repair, fix"),
    "need not": (r"\bneeds? not\b", "does not need"),
    "no X is": (r"\bno [a-z]+ (?:is|are|was|were)\b", "X is not"),
    "note without a verb": (r"^(?:None|True|False|Empty|0): ", "a sentence"),
    "of its own": (r"\bof (?:one's|its|their|your|our|his|her|my) own\b", "its own X"),
    "one that": (r"\b(?:the )?ones? (?:that|which|who)\b|\bthose (?:which|who|whose)\b", "the noun"),
    "per": (
        rf"\b{UNITS} an? (?:token|step|second|minute|hour|call|rollout|parameter|session|core|process|turn)\b",
        "per",
    ),
    "says which": (r"\bsays (?:both|what|how|why|which|who|whether|so)\b", "shows, states"),
    "see the module": (r"\bsee the (?:module|class)\b", "name the fact"),
    "stand still": (r"\b(?:stand|stands|stood|standing) still\b", "hang, stop"),
    "tries": (
        r"\b(?:one|two|three|four|five|all|its|more|further|\d+) tries\b|\b(?:another|a further) try\b",
        "attempts",
    ),
    "what it is": (r"\bwhat it (?:is|was|were)\b|\bwhat (?:is|was|are|were) \w+ed\b(?![^.|]*\?)", "the noun"),
    "whereof": (
        r"\b(?:there|where|here)(?:of|in|by|upon|with|from)\b|\bhence\b|\bwhence\b",
        "a plain word",
    ),
    "whom": (r"\bwhom\b", "the noun"),
}
_COMPILED = {name: re.compile(pattern, re.MULTILINE | re.IGNORECASE) for name, (pattern, _) in PATTERNS.items()}
_FENCE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`|\]\([^)\s]+\)|https?://\S+")


class Text(NamedTuple):
    """A text of a file: where it begins, and whether users of the command line or of the API see it."""

    file: Path
    line: int
    text: str
    seen: bool


def of_page(file: Path) -> Iterator[Text]:
    """The prose of a page, line by line; code is left out."""
    blank = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), file.read_text())
    for number, line in enumerate(blank.splitlines(), 1):
        yield Text(file, number, _CODE.sub(lambda found: "`x`" if found[0][0] == "`" else "", line), True)


def of_module(file: Path) -> Iterator[Text]:
    """The comments, docstrings and texts of a module. Users see the texts of calls, and the docstrings of commands."""
    source = file.read_text()
    tree = ast.parse(source)
    docstrings: dict[int, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                command = any("command(" in ast.unparse(d) or "group(" in ast.unparse(d) for d in _decorators(node))
                docstrings[id(first.value)] = command
    in_calls = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Call) for part in _texts_of(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            docstring = id(node) in docstrings
            seen = docstrings[id(node)] if docstring else id(node) in in_calls
            text = _CODE.sub("`x`", f'"""{node.value}' if docstring else node.value)
            yield Text(file, node.lineno, text, seen)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(file, token.start[0], _CODE.sub("`x`", token.string), False)


def _decorators(node: ast.AST) -> list[ast.expr]:
    return list(getattr(node, "decorator_list", ()))


def _texts_of(call: ast.Call) -> Iterator[ast.AST]:
    """The texts that are arguments of a call, parts of f-strings included."""
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        for part in ast.walk(argument):
            if isinstance(part, ast.Constant):
                yield part


def files(paths: Sequence[Path]) -> list[Path]:
    """The pages and modules in these files and folders."""
    found = [p for path in paths for p in ([path] if path.is_file() else sorted(path.rglob("*")))]
    return [p for p in found if p.suffix in (".md", ".py") and "_examples" not in p.parts]


def pages() -> list[Path]:
    """The README and the pages of the site. The texts of the generated command line reference are messages."""
    pages = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name != "cli.md")
    return [ROOT / "README.md", *pages]


def readmes() -> list[Path]:
    """The pages of the examples, which have no limit on their words."""
    return sorted(page for depth in ("", "*/", "*/*/") for page in (ROOT / "examples").glob(f"{depth}README.md"))


def texts(paths: Sequence[Path]) -> list[Text]:
    """The texts of these files."""
    return [text for file in paths for text in (of_page(file) if file.suffix == ".md" else of_module(file))]


def matches(found: Sequence[Text]) -> dict[str, list[str]]:
    """The places of each pattern, as ``file:line: the phrase``."""
    places: dict[str, list[str]] = {name: [] for name in PATTERNS}
    for file, line, text, _ in found:
        for name, pattern in _COMPILED.items():
            for match in pattern.finditer(text):
                at = line + text.count("\n", 0, match.start())
                place = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
                begin, end = max(0, match.start() - 30), match.end() + 30
                places[name].append(f"{place}:{at}: {' '.join(text[begin:end].split())}")
    return places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; by default the docs and src")
    parser.add_argument("--show", metavar="PATTERN", help="the places of a pattern, or of all")
    given = parser.parse_args()
    if given.paths:
        columns = {"count": texts(files([path.resolve() for path in given.paths]))}
    else:
        module_texts = texts(files([SRC]))
        columns = {
            "docs": texts([*pages(), *readmes()]),
            "messages": [t for t in module_texts if t.seen],
            "src": module_texts,
        }
    counted = {name: matches(found) for name, found in columns.items()}
    if given.show:
        places = [p for of in counted.values() for n, found in of.items() if given.show in (n, "all") for p in found]
        print("\n".join(dict.fromkeys(places)))
        return
    width = max(map(len, PATTERNS))
    print(f"{'pattern':<{width}}  {'  '.join(f'{name:>8}' for name in columns)}  instead")
    for name, (_, instead) in PATTERNS.items():
        print(f"{name:<{width}}  {'  '.join(f'{len(c[name]):>8}' for c in counted.values())}  {instead}")
    totals = [sum(map(len, of.values())) for of in counted.values()]
    print(f"{'all':<{width}}  {'  '.join(f'{total:>8}' for total in totals)}")


if __name__ == "__main__":
    main()
