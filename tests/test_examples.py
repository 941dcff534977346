"""What every example has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", sorted(path.parent.name for path in (ROOT / "examples").glob("*/proof.py")))
def test_an_example_has_what_examples_have(name: str) -> None:
    folder = ROOT / "examples" / name
    files = {path.name for path in folder.iterdir()}
    assert files >= {"basic_app.py", "rl_app.py", "reward.py", "pyproject.toml", "Dockerfile", "README.md"}
    assert "on_policy_failure" in (folder / "rl_app.py").read_text()
    headings = (folder / "README.md").read_text().splitlines()
    assert {"## The diff", "## Run it here", "## Run it on AWS"} <= set(headings)
    docker = (folder / "Dockerfile").read_text()
    assert all(needed in docker for needed in ("USER ", "HEALTHCHECK ", "/ping", ".whl"))
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    bounds = [re.search(r"[>=<~]=|@", dependency) for dependency in project["dependencies"]]
    assert all(bounds), "dependencies have lower bounds"
