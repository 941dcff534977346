"""The tasks of `examples/pretrained`, and its demonstrations of tool use."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.policy import WEIGHTS_DIR

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


def test_demonstrations_of_tool_use_train_what_the_expert_said_alone(tmp_path: Path) -> None:
    model = tmp_path / "given"  # a ChatML model whose template knows no tools
    shutil.copytree(WEIGHTS_DIR, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    words = [model, tmp_path / "out", "--demonstrations", "3", "--train", "40", "--held-out", "20"]
    subprocess.run([sys.executable, FOLDER / "tools" / "prepare.py", *words], check=True)
    prompts = {
        json.loads(line)["prompt"]
        for name in ("train", "held_out")
        for line in (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()
    }
    assert len(prompts) == 60
    assert not Renderer.from_path(model).facts.tools_shown
    renderer = Renderer.from_path(tmp_path / "out" / "model")
    lines = (tmp_path / "out" / "demonstrations.jsonl").read_text().splitlines()
    assert len(lines) == 3
    for line in lines:
        shown = json.loads(line)
        ids, mask = shown["input_ids"], shown["assistant_masks"]
        assert len(ids) == len(mask)
        said = renderer.decode([token for token, trained in zip(ids, mask, strict=True) if trained])
        first, second, last, rest = said.split("<|im_end|>")
        whole = renderer.decode(ids)
        price, total = re.findall(r"<tool_response>\n(\d+)\n", whole)
        question = re.search(r"user\n(.*)<", whole)[1]  # type: ignore[index]
        assert question not in prompts
        item, a, b = json.loads(first[11:-12])["arguments"]["item"], *json.loads(second[11:-12])["arguments"].values()
        assert item in question
        assert str(a) in question
        assert (b, a * b) == (int(price), int(total))
        assert (last, rest) == (f"The total is {total}.", "")
