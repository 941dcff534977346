"""The page as one file that opens from disk: styles, scripts and the data of one run inside."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from ..runs import Query, RunReader
from ..runs.record import searched_text
from . import data

STATIC = Path(__file__).parent / "static"
# In the order of their imports.
MODULES = ["dom", "source", "charts", "runs", "run", "rollouts", "tokens", "rollout", "group", "evaluation", "compare"]
COMPARED = 12  # evaluations whose changes are computed for each pair
MOST_ROLLOUTS = 500  # the limit for training; a file has all rollouts of evaluations
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def script() -> str:
    """All modules as one: they import from each other only, by names that differ."""
    return "\n".join(
        _EXPORT.sub("", _IMPORT.sub("", (STATIC / f"{name}.js").read_text())) for name in (*MODULES, "app")
    )


def sample(run: RunReader, limit: int) -> tuple[list[int], str]:
    """Choose the rollouts of a file, and describe the choice in a sentence.

    The file has all rollouts of evaluations, and about ``limit`` of training: evenly spaced groups of each step, at least one.
    """
    steps: dict[int | None, dict[str, list[int]]] = {}  # the rollouts of each group of the training
    chosen = []
    every = run.ids(Query())
    for row in run.rows(every):
        if row["phase"] == "train":
            steps.setdefault(row["step"], {}).setdefault(row["grp"], []).append(row["id"])
        else:
            chosen.append(row["id"])
    evaluated, trained = len(chosen), len(every) - len(chosen)
    if trained <= limit:
        return every, f"This file holds all {len(every)} rollouts of the run."
    for groups in steps.values():
        each = list(groups.values())
        wanted = min(len(each), max(1, round(limit / trained * len(each))))
        places = {round(n * (len(each) - 1) / max(1, wanted - 1)) for n in range(wanted)}
        chosen += [rollout for place in places for rollout in each[place]]
    text = (
        f"This file holds {len(chosen)} of the {len(every)} rollouts of the run: all {evaluated} of evaluations, and "
        f"{len(chosen) - evaluated} of {trained} of the training, in groups that lie evenly in each step. Lists, "
        "groups and comparisons show these; charts and counts of steps are of all."
    )
    return sorted(chosen), text


def export(run: RunReader, target: Path, *, limit: int = MOST_ROLLOUTS) -> str:
    """Write a `sample` of a run with all its parts. Return a sentence about the content of the file."""
    ids, left_out = sample(run, limit)
    rows = run.rows(ids)
    texts: dict[str, str] = {}
    details: dict[int, Any] = {}
    histories: dict[str, Any] = {}
    for row in rows:
        found = details[row["id"]] = data.rollout(run, row["id"])
        texts |= found.pop("texts")
        row["searched"] = searched_text(found["dialogue"], found["detail"] or {}, row["error"]).lower()
        if row["input_key"] not in histories:
            histories[row["input_key"]] = run.history(row["input_key"])
    evaluated = [step for step in run.steps() if step["phase"] != "train"]
    places = [(s["phase"], s["step"]) for s in evaluated] + [(s["phase"], None) for s in evaluated]
    sides = {phase if step is None else f"{phase}:{step}": Query(phase=phase, step=step) for phase, step in places}
    compared = list(sides)[-COMPARED:]

    def change(one: Query, other: Query) -> Any:
        return data.compare((run, one), (run, other))["change"]

    held = {
        "name": run.name,
        "overview": {**data.overview(run.folder), "log": None},  # a log may say more than the run
        "inputs": {phase: data.inputs(run, Query(phase=phase)) for phase in {step["phase"] for step in run.steps()}},
        "evaluations": {
            f"{s['phase']}:{'' if s['number'] is None else s['number']}": data.evaluation(
                run, Query(phase=s["phase"], number=s["number"])
            )
            for s in evaluated
        },
        "changes": {f"{a} {b}": change(sides[a], sides[b]) for a in compared for b in compared},
        "rows": rows,
        "left_out": left_out,
        "rollouts": details,
        "histories": histories,
        "texts": texts,
    }
    # `<` would let a text end the element that holds it.
    text = json.dumps(held, separators=(",", ":")).replace("<", "\\u003c")
    style = "\n".join((STATIC / name).read_text() for name in ("vendor/uPlot.min.css", "style.css"))
    charts, code = (STATIC / "vendor" / "uPlot.iife.min.js").read_text(), script()
    scripts = " ".join(f"'{_hash(text)}'" for text in (charts, code))
    policy = f"default-src 'none'; script-src {scripts}; style-src '{_hash(style)}'; img-src data:"
    page = (STATIC / "index.html").read_text()
    page = re.sub(r'<link rel="stylesheet".*?>\n', "", page).replace("</head>", f"<style>{style}</style>\n</head>")
    head = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace('<meta charset="utf-8">', head)
    # Put in last and never searched again: nothing that an agent wrote can stand for a place in the page.
    before, _, after = page.partition('<script src="static/vendor/uPlot.iife.min.js"></script>')
    after = after.replace('<script type="module" src="static/app.js"></script>', "")
    held_data = f'<script type="application/json" id="held">{text}</script>'
    target.write_text(f'{before}<script>{charts}</script>{held_data}<script type="module">{code}</script>{after}')
    return left_out


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
