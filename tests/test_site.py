"""The documentation's site, built once: no warning, no dead link, nothing from elsewhere, and a search that works from disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
pytest.importorskip("mkdocs", reason="the site needs the extra `docs`")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if not line.startswith("INFO"))
    return folder


def test_the_site_builds_without_a_warning_and_needs_nothing_from_elsewhere(site: Path) -> None:
    assert "RolloutClient" in (site / "reference" / "python.html").read_text()
    for page in site.rglob("*.html"):
        assert not re.search(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)"', page.read_text()), page


def test_every_link_of_the_site_leads_to_a_file_and_an_anchor_of_it(site: Path) -> None:
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    dead = []
    for page, text in pages.items():
        if page.name == "404.html":  # its links begin at the address of a server
            continue
        for link in set(re.findall(r'(?:href|src)="([^":]+)"', text)):
            path, _, anchor = unquote(link).partition("#")
            file = (page.parent / path).resolve() if path else page
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file() or (anchor and file in anchors and anchor not in anchors[file] | {"__skip"}):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert not dead, "\n".join(sorted(dead))


@pytest.mark.system
def test_the_site_is_searched_from_disk(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.click("[name=query]")
    page.keyboard.type("staleness")
    page.wait_for_selector(".md-search-result__item", timeout=60_000)
    page.close()
