"""A project in which every place that sessions must not read holds a secret."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .conftest import AGENTS

# What a runtime finds by itself.
ALONE = (
    ".git/config",
    ".env",
    ".env.local",
    "part/.env",
    "late.key",
    "part/prod.env",
    "part/id_rsa",
    "runs/old/ledger.jsonl",
    "kept/old/rollouts.sqlite",
    "runs/now/store/exp/i0/an-earlier-session.json",
)
# What it is told: data, and the file that scores.
TOLD = ("train.jsonl", "data/eval.jsonl", "rubric.md")


def plant(project: Path) -> list[str]:
    """Make the project. Returns the options of `runtime serve` that hide what it cannot know."""
    for name in (*ALONE, *TOLD):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(f"planted-secret-{name.replace('/', '-').replace('.', '-')}")
    shutil.copy(AGENTS / "search.py", project / "agent.py")
    (project / "lib").mkdir()
    (project / "lib" / "shop.txt").write_text("lamps")
    (project / "notes 12:30.txt").touch()
    (project / "own.json").write_text('{"price": 3}')
    (project / "data" / "prices.csv").write_text("lamp,3")
    (project / "data" / "train-link.jsonl").symlink_to(project / "train.jsonl")
    os.link(project / "train.jsonl", project / "part" / "copy.jsonl")
    return [word for name in TOLD for word in ("--hidden", str(project / name))]


def plant_later(project: Path) -> None:
    """What commands and editors write while the runtime serves: new files, and others in place of old ones."""
    for name in ("train.jsonl", ".env"):
        (project / "new").write_text("planted-secret-replaced")
        (project / "new").rename(project / name)
    (project / "notes 12:30.txt").unlink()
    shutil.rmtree(project / "kept" / "old")
    for name in (
        ".env.new",
        "ledger.jsonl.key",
        "runs/new/ledger.jsonl.key",
        ".agentcore-rl/up.json",
        "kept/old/ledger.jsonl",
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("planted-secret-later")
