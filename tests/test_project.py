"""The files that a public project has: what they say exists, and they stay as short as they promise to be."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "most"), [("README.md", 200), ("CONTRIBUTING.md", 119), ("CHANGELOG.md", 60), ("AGENTS.md", 40)]
)
def test_pages_for_newcomers_are_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_make_targets_and_nothing_else(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        words = [word for word in command.split() if "=" not in word]
        assert words[0] == "make", command
        assert set(words[1:]) <= make_targets(), command


def test_workflows_test_every_python_that_the_package_names() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [
        c.rpartition(" ")[2] for c in project["classifiers"] if c.startswith("Programming Language :: Python :: 3.")
    ]
    assert set(named) <= set(matrix["python"])
    assert project["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize("form", [form for form in FORMS if form.stem != "config"], ids=lambda path: path.stem)
def test_issue_forms_have_what_a_form_needs(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(content)
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids)
    assert all("label" in field["attributes"] for field in fields)


def test_the_bug_form_asks_for_a_report_that_the_doctor_gives() -> None:
    from agentcore_rl_toolkit.cli.doctor.command import command

    form = (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
    assert "agentcore-rl doctor --json" in form
    options = {name for parameter in command.params for name in parameter.opts}
    assert {"--json", "--aws"} <= options


def test_hooks_before_a_commit_are_those_of_make_check() -> None:
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    makefile = (ROOT / "Makefile").read_text()
    for hook in repository["hooks"]:
        program, *words = hook["entry"].split()
        assert program.startswith(".venv/bin/")
        if program == ".venv/bin/python":
            assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))
        else:
            assert f"$(BIN)/{Path(program).name}" in makefile


def test_constraints_are_versions_and_no_addresses() -> None:
    lines = (ROOT / "constraints-dev.txt").read_text().splitlines()
    assert len(lines) > 100
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    torch = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(torch) <= set(lines)


def hunks(page: str) -> list[tuple[list[str], list[str]]]:
    """The diffs of a page: what each one shows of the file before, and of the file after."""
    blocks = re.findall(r"^ *```diff\n(.*?)^ *```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    found = []
    for block in blocks:
        indent = len(block) - len(block.lstrip(" ")) if block.lstrip(" ")[0] in "+-" else 0
        lines = [line[indent:] for line in block.splitlines()]
        before = [line[1:] for line in lines if line[:1] in ("-", " ") and line[1:].strip()]
        after = [line[1:] for line in lines if line[:1] in ("+", " ") and line[1:].strip()]
        found.append((before, after))
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_diffs_show_lines_of_the_examples_in_their_order(page: str) -> None:
    shown = hunks(page)
    assert len(shown) == 2
    for (before, after), agent in zip(shown, ("strands_math_agent", "langgraph_agent"), strict=True):
        for lines, name in ((before, "basic_app.py"), (after, "rl_app.py")):
            rest = iter((ROOT / "examples" / agent / name).read_text().splitlines())
            missing = [line for line in lines if line not in rest]  # consumes the file's lines: the order counts
            assert missing == [], f"{page}: not in {agent}/{name}, or in another order"


PICTURES = ("quickstart", "held-out", "how-it-works")


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_small_have_a_title_and_load_nothing(name: str) -> None:
    text = (ROOT / "docs" / "images" / f"{name}.svg").read_text()
    assert len(text) < 300_000
    picture = xml.etree.ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert (picture.findtext(f"{space}title") or "").strip()
    assert picture.find(f".//{space}text") is not None
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|@import|url\((?!#)", text)


def test_the_drawing_is_what_its_script_draws(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.svg"
    script = ROOT / "scripts" / "pictures" / "how_it_works.py"
    subprocess.run([sys.executable, str(script), str(drawn)], check=True, timeout=60)
    assert drawn.read_text() == (ROOT / "docs/images/how-it-works.svg").read_text(), "run: make pictures"


def test_each_picture_of_the_documents_is_used() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    unused = [p.name for p in (ROOT / "docs" / "images").iterdir() if f"images/{p.name})" not in text]
    assert unused == []
