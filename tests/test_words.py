"""The texts: phrases that plain English does not need, titles in links, the size of the docs, the length of code lines."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What is left of each pattern together: lower a number when the texts have fewer.
LIMITS = {"docs": 0, "src": 1}  # one message is AWS's own

_spec = importlib.util.spec_from_file_location("words", ROOT / "scripts" / "words.py")
assert _spec is not None
assert _spec.loader is not None
words = sys.modules["words"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(words)


def test_the_texts_contain_no_more_of_the_phrases_than_before() -> None:
    groups = {"docs": [*words.pages(), *words.readmes()], "src": words.files([words.SRC])}
    for group, files in groups.items():
        texts = words.texts(files)
        places = [f"{name}: {place}" for name, found in words.matches(texts).items() for place in found]
        assert len(places) <= LIMITS[group], f"{group}: {len(places)} > {LIMITS[group]}\n" + "\n".join(places)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The folder is made anew.", ["anew", "is made"]),
        ("Runs go on. `go on` in code is left out.", ["go on"]),
        (
            "It takes 40 MB a session, else it stops, else it waits.",
            ["else for otherwise", "else for otherwise", "per"],
        ),
        ("```text\nanew\n```\n", []),
        ("A run continues when its sessions have ended.", []),
    ],
)
def test_a_page_is_searched_outside_of_its_code(tmp_path: Path, text: str, found: list[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert sorted(n for n, places in words.matches(words.texts([page])).items() for _ in places) == found


def test_a_module_is_searched_in_its_texts_and_errors_are_messages(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""Whether it works."""\n\n# of one file\nbeside = 1\nraise ValueError(f"nobody knows {beside}")\n'
        'HINT = "it is gone"\n'
    )
    texts = words.texts([module])
    found = {name: [place.split(":")[1] for place in places] for name, places in words.matches(texts).items() if places}
    assert found == {
        "docstring that opens with a question word": ["1"],
        "comment that opens with a preposition": ["3"],
        "everybody": ["5"],
        "gone": ["6"],
    }
    assert [text.line for text in texts if text.seen] == [5]


GENERATED = ("settings.md", "metrics.md", "environment.md", "python.md")
COLUMN = 87  # characters of code in the column of the site


def prose(page: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_the_pages_have_at_most_45_000_words_besides_the_generated_ones() -> None:
    texts = [prose(page) for page in words.pages() if page.name not in GENERATED]
    written = [re.sub(r"<!-- made by .*?<!-- end -->", "", text, flags=re.DOTALL) for text in texts]
    assert sum(len(re.findall(r"\S*\w\S*", text)) for text in written) <= 45_000


def test_a_link_to_a_page_has_the_title_of_the_page() -> None:
    """A link text that begins with a capital is a title. Others are words of their sentence, or of a table on a start page."""
    wrong = []
    for page in (page for page in words.pages() if page.name not in ("README.md", "index.md", "status.md")):
        for text, link in re.findall(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+\.md)\)", prose(page)):
            target = (page.parent / link).resolve()
            if target.is_relative_to(ROOT / "docs") and target.name != "index.md" and text[0].isupper():
                title = re.search(r"^# (.+)$", target.read_text(), re.MULTILINE)
                if title is None or title[1] != text:
                    wrong.append(f"{page.name}: [{text}]({link})")
    assert not wrong, "\n".join(wrong)


def test_no_line_of_code_is_longer_than_the_column_of_the_site() -> None:
    """A longer line is broken where the column ends. Output of programs may be longer."""
    block = re.compile(r"^ *```(?:bash|python|yaml|toml)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    long = [
        f"{page.name}: {line}"
        for page in words.pages()[1:]  # without the README, which is no page of the site
        for code in block.findall(page.read_text())
        for line in code.splitlines()
        if len(line) > COLUMN
    ]
    assert not long, "\n".join(long)
