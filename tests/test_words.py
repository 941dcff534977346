"""The phrases that plain English does not need, counted by `scripts/words.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What is left of each pattern together: lower a number when the texts have fewer.
LIMITS = {"docs": 311, "messages": 88, "src": 1027}

_spec = importlib.util.spec_from_file_location("words", ROOT / "scripts" / "words.py")
assert _spec is not None
assert _spec.loader is not None
words = sys.modules["words"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(words)


def test_the_texts_contain_no_more_of_the_phrases_than_before() -> None:
    module_texts = words.texts(words.files([words.SRC]))
    groups = {
        "docs": words.texts(words.pages()),
        "messages": [text for text in module_texts if text.seen],
        "src": module_texts,
    }
    for group, texts in groups.items():
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
