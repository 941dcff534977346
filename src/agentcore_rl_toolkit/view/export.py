"""The page as one file that opens from disk: styles, scripts and the data of one run inside."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from ..runs import Query, RunReader, TokenSequence
from . import data

STATIC = Path(__file__).parent / "static"
MODULES = [
    f"{name}.js" for name in ["dom", "source", "charts", "run", "rollouts", "rollout", "group", "compare", "app"]
]
MOST_ROLLOUTS = 500
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def script() -> str:
    """All modules as one: they import from each other only, by names that differ."""
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", (STATIC / name).read_text())) for name in MODULES)


def export(run: RunReader, target: Path, *, limit: int = MOST_ROLLOUTS) -> tuple[int, int]:
    """Write the last ``limit`` rollouts of a run with all their parts. Returns how many are in, and how many there are."""
    rows = data.with_inputs(run, run.rollouts(Query(sort="id", descending=True), limit=limit))
    texts: dict[str, str] = {}
    details: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for row in rows:
        found = data.rollout(run, row["id"])
        details[str(row["id"])] = found
        first = str(found["group"][0]["id"])
        if first not in groups:
            groups[first] = data.group(run, row["id"])
        ids = {token for s in found["sequences"] or () for token in TokenSequence.decoded(s).ids}
        texts |= data.token_texts(run, [token for token in ids if str(token) not in texts])
    total = run.count()
    held = {
        "name": run.name,
        "overview": data.overview(run),
        "rows": rows,
        "total": total,
        "rollouts": details,
        "groups": groups,
        "texts": texts,
    }
    # `<` would let a text end the element that holds it.
    text = json.dumps(held, separators=(",", ":")).replace("<", "\\u003c")
    style, code = (STATIC / "style.css").read_text(), script()
    policy = f"default-src 'none'; script-src '{_hash(code)}'; style-src '{_hash(style)}'; img-src data:"
    page = (STATIC / "index.html").read_text()
    page = page.replace('<link rel="stylesheet" href="static/style.css">', f"<style>{style}</style>")
    head = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace('<meta charset="utf-8">', head)
    # Put in last and never searched again: nothing that an agent wrote can stand for a place in the page.
    before, after = page.split('<script type="module" src="static/app.js"></script>')
    held_data = f'<script type="application/json" id="held">{text}</script>'
    target.write_text(f'{before}{held_data}<script type="module">{code}</script>{after}')
    return len(rows), total


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
