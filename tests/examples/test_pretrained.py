"""The tasks of `examples/pretrained`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "pretrained"


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(FOLDER)
    import tasks

    yield tasks
    del sys.modules["tasks"]


def test_the_right_answer_scores_one_and_others_less(tasks) -> None:  # type: ignore[no-untyped-def]
    for make in tasks.TASKS.values():
        row = make(random.Random(3))
        assert tasks.score(json.dumps(row["answer"]), row["answer"]) == 1.0
        assert tasks.score("I do not know", row["answer"]) == 0.0
    order = {"name": "Anna", "cups": 3, "pens": 4}
    for text, reward in (
        ('{"name": "Anna", "cups": 3, "pens": 5}', 1 / 3 + 4 / 9),
        ('{"name": "Anna", "cups": "3", "pens": 4, "x": 1}', 1 / 3 + 1 / 3),
        ('Sure: {"name": "Anna", "cups": 3, "pens": 4}', 0.0),
        ("[]", 0.0),
    ):
        assert tasks.score(text, order) == pytest.approx(reward)
    assert tasks.score("The answer is 7", 7) == 0.0


def test_held_out_rows_are_not_trained_on(tmp_path: Path) -> None:
    subprocess.run([sys.executable, FOLDER / "prepare.py", tmp_path, "--train", "40", "--held-out", "20"], check=True)
    prompts = {
        name: {json.loads(line)["prompt"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()}
        for name in ("train", "held_out")
    }
    assert (len(prompts["train"]), len(prompts["held_out"])) == (40, 20)
    assert not prompts["train"] & prompts["held_out"]
