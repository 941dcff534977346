"""What the documents say exists: links, anchors, make targets and commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    p
    for p in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in ("runs", "node_modules") for part in p.parts)
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_and_anchors_resolve(document: Path) -> None:
    for found in LINK.finditer(document.read_text()):
        target = found.group(1) or found.group(2)
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{target} does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target}: no such heading"


def listed_files() -> list[Path]:
    """The files of the repository, the documents only where this is no clone."""
    command = ["git", "-C", str(ROOT), "ls-files"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
    return [ROOT / name for name in listed if (ROOT / name).is_file()] or list(DOCUMENTS)


def test_sources_refer_only_to_pages_that_exist() -> None:
    """A message, a comment or a setting may name a page of the docs; `CHANGELOG.md` may name pages of the past."""
    kinds = (".py", ".toml", ".md", ".sh", ".yaml", ".yml", ".html", ".js", "")
    for file in listed_files():
        if file.suffix in kinds and file.name not in ("CHANGELOG.md", ".gitignore"):
            for page in re.findall(r"(?<![\w/.])docs/[\w/-]+\.md", file.read_text(errors="ignore")):
                assert (ROOT / page).is_file(), f"{file.relative_to(ROOT)} refers to {page}"


def test_contributing_lists_the_markers_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    markers = {marker.split(":")[0] for marker in project["tool"]["pytest"]["ini_options"]["markers"]}
    assert set(re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)) == markers


def code_lines(document: Path) -> list[str]:
    blocks = re.findall(r"```[a-z]*\n(.*?)```", document.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        for line in code_lines(document):
            for name in re.findall(r"^\s*(?:\$ )?make ((?:[a-z-]+ ?)+)", line):
                for target in name.split():
                    assert target in targets, f"{document}: make {target}"


def test_every_command_and_option_in_the_documents_exists() -> None:
    from agentcore_rl_toolkit.cli.main import cli

    for document in DOCUMENTS:
        text = "\n".join(code_lines(document)).replace("\\\n", " ")
        for line in re.findall(r"^\s*(?:\$ )?agentcore-rl (.+)$", text, re.MULTILINE):
            words = line.split("#")[0].split()
            command: click.Command = cli
            context = click.Context(cli)
            while words and isinstance(command, click.Group) and not words[0].startswith("-"):
                found = command.get_command(context, words[0])
                assert found is not None, f"{document.name}: agentcore-rl {line}"
                command, words = found, words[1:]
            known = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
            for word in words:
                name = word.split("=")[0]
                if re.fullmatch(r"--[a-z][a-z0-9-]*", name) and name != "--help":
                    assert name in known, f"{document.name}: agentcore-rl {line}: no option {name}"


INSTALLING = re.compile(
    r"(?:pip|uv) (?:add|install)[^\n`]*?(?<![\w./-])[\"']?agentcore-rl-toolkit(?![^\s\"']*\s*@)(?![-\w./])"
)


def test_nothing_installs_the_product_that_has_our_name_on_the_package_index() -> None:
    kinds = (".md", ".py", ".toml", ".sh", ".yaml", ".txt")
    for file in listed_files():
        if (file.suffix not in kinds and file.name != "Dockerfile") or file.parts[-2] == "tests":
            continue
        text = file.read_text()
        assert not INSTALLING.search(text), f"{file} installs the published package"
        if file.name == "pyproject.toml" and file.parent != ROOT:
            dependencies = tomllib.loads(text)["project"].get("dependencies", [])
            assert not [d for d in dependencies if d.startswith("agentcore-rl-toolkit")], file
        if file.name.startswith("requirements"):
            assert not re.search(r"^agentcore-rl-toolkit", text, re.MULTILINE), file


def test_the_page_of_metrics_is_the_one_that_the_code_makes() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from metrics_page import page  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    assert (ROOT / "docs" / "metrics.md").read_text() == page(), "run: python scripts/metrics_page.py"


def test_every_public_name_has_an_entry_in_the_reference() -> None:
    import agentcore_rl_toolkit

    pages = (ROOT / "docs" / "reference" / "python.md").read_text() + (ROOT / "docs" / "errors.md").read_text()
    for name in agentcore_rl_toolkit.__all__:
        assert name == "__version__" or re.search(rf"\b{name}\b", pages), f"{name} is on no page of the reference"


@pytest.mark.system
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs the extra `docs`")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "RolloutClient" in (tmp_path / "reference" / "python.html").read_text()
    # nothing that a reader's browser would fetch from elsewhere
    for page in tmp_path.rglob("*.html"):
        assert not re.search(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)"', page.read_text()), page


@pytest.mark.system
def test_the_site_is_searched_from_disk(tmp_path: Path, browser: Any) -> None:
    pytest.importorskip("mkdocs", reason="the site needs the extra `docs`")
    build = [sys.executable, "-m", "mkdocs", "build", "-q", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, timeout=300, check=True)
    page = browser.new_page()
    page.goto((tmp_path / "index.html").as_uri())
    page.click("[name=query]")
    page.keyboard.type("staleness")
    page.wait_for_selector(".md-search-result__item", timeout=60_000)
    page.close()
