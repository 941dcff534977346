"""`scripts/examples.py`: every proof as a process of its own, with a deadline, in one table. And what every example has."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
REPORT = "import json, sys; report = sys.argv[sys.argv.index('--json') + 1]\n"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("examples_script", ROOT / "scripts" / "examples.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    before = sys.path[:]
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def example(folder: Path, name: str, proof: str, project: str = "") -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "proof.py").write_text(REPORT + proof)
    if project:
        (folder / name / "pyproject.toml").write_text(project)


def report(ok: bool, skipped: str | None = None, code: int = 0) -> str:
    rows = [] if skipped else [{"example": "x", "rollouts": 2, "oracle_reward": 1.0}]
    checks = [] if skipped else [{"name": "oracle", "value": 1, "target": 1, "ok": ok}]
    made = {"rows": rows, "checks": checks, **({"skipped": skipped} if skipped else {})}
    return f"open(report, 'w').write({json.dumps(made)!r}); print('said'); sys.exit({code})"


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
