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


def test_one_table_of_all_and_code_1_when_any_fails(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples, out = tmp_path / "examples", tmp_path / "all.json"
    example(examples, "works", report(ok=True))
    example(examples, "fails", report(ok=False, code=1))
    example(examples, "dies", "raise SystemExit('no such luck')")
    example(examples, "lies", report(ok=True, code=3))
    example(examples, "silent", "")
    example(examples, "absent", report(ok=True, skipped="no Maven"))
    arguments = ["--json", str(out), "--logs", str(tmp_path / "logs"), "--examples", str(examples)]
    assert script.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "no such luck" in printed
    assert "skipped: no Maven" in printed
    written = json.loads(out.read_text())
    assert [row["note"] for row in written["rows"] if "note" in row] == ["skipped: no Maven", "failed", "failed"]
    failed = {check["name"].partition(":")[0] for check in written["checks"] if not check["ok"]}
    assert failed == {"fails", "dies", "lies", "silent"}
    assert script.main([*arguments, "works", "absent"]) == 0
    assert "1 of 1 checks passed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script.main([*arguments, "nowhere"])


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
