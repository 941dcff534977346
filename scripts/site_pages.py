"""Put the files of the repository that pages link to into the site: a hook of MkDocs (mkdocs.yml).

A page may link to ``../examples/plain_agent/README.md`` or to a module. These files lie outside of ``docs``, so the site gets a
page for each of them, below ``repository/``, and the link leads there. A folder is its README.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BELOW = "repository"
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"


def target(link: str, page: Path) -> Path | None:
    """Return the file outside of the docs that a link of a page leads to."""
    if ":" in link or link.startswith("/"):
        return None
    file = (page.parent / link).resolve()
    file = file / "README.md" if file.is_dir() else file
    inside = file.is_relative_to(ROOT) and not file.is_relative_to(DOCS)
    return file if inside and file.is_file() else None


def place(file: Path) -> str:
    """Return the path of a file's page in the site."""
    path = f"{BELOW}/{file.relative_to(ROOT)}"
    return path if file.suffix == ".md" else f"{path}.md"


def text_of(file: Path) -> str:
    """Return the page of a file."""
    if file.suffix == ".md":
        return UNSEARCHED + file.read_text()
    if file.suffix == ".ipynb":
        return UNSEARCHED + "\n\n".join(map(cell_text, json.loads(file.read_text())["cells"]))
    kind = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".json": "json"}.get(file.suffix, "text")
    return f"{UNSEARCHED}# {file.relative_to(ROOT)}\n\n````{kind}\n{file.read_text().rstrip()}\n````\n"


def cell_text(cell: dict[str, Any]) -> str:
    """Return a cell of a notebook, with the text of its output, as Markdown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    outputs = [out.get("text") or out["data"]["text/plain"] for out in cell["outputs"]]
    shown = [f"```text\n{''.join(lines).rstrip()}\n```" for lines in outputs]
    return "\n\n".join([f"```python\n{source}\n```", *shown])


def rewritten(markdown: str, page: Path, at: str) -> str:
    """Return a page's text whose links to files of the repository lead to their pages; ``at`` is its place in the site."""

    def link(found: re.Match[str]) -> str:
        file = target(found[1], page)
        if file is not None:
            return os.path.relpath(place(file), os.path.dirname(at)) + (found[2] or "")
        if at.startswith(BELOW) and ":" not in found[1]:  # from the repository into the docs
            inside = (page.parent / found[1]).resolve()
            if inside.is_relative_to(DOCS):
                return os.path.relpath(inside.relative_to(DOCS), os.path.dirname(at)) + (found[2] or "")
        return found[0]

    return LINK.sub(link, markdown)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the files that pages link to, and of those that these link to. Called by MkDocs."""
    queue = [Path(str(file.abs_src_path)) for file in files.documentation_pages()]
    queue.append(ROOT / "examples" / "README.md")
    added: set[Path] = set()
    while queue:
        page = queue.pop()
        if page.suffix == ".md":
            found = (target(match[1], page) for match in LINK.finditer(page.read_text()))
            queue += [file for file in found if file is not None and file not in added]
        if not page.is_relative_to(DOCS) and page not in added:
            added.add(page)
            files.append(File.generated(config, place(page), content=rewritten(text_of(page), page, place(page))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a page. Called by MkDocs."""
    source = page.file.src_uri
    return markdown if source.startswith(f"{BELOW}/") else rewritten(markdown, DOCS / source, source)
