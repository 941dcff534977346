"""The page as one file that opens from disk: styles, scripts and the data of one run inside."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from pathlib import Path
from typing import Any

from ..runs import Query, RunReader
from ..runs.record import searched_text
from ..runs.schema import shape_of
from . import data

STATIC = Path(__file__).parent / "static"
# In the order of their imports.
MODULES = ["dom", "source", "charts", "runs", "run", "rollouts", "tokens", "rollout", "group", "evaluation", "compare"]
COMPARED = 12  # evaluations whose changes are computed for each pair
MOST_ROLLOUTS = 500  # the limit for training; a file has all rollouts of evaluations
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def script() -> str:
    """Join all modules to one: they import from each other only, by names that differ."""
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", _static(f"{name}.js"))) for name in (*MODULES, "app"))


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def sample(run: RunReader, limit: int) -> tuple[list[int], str]:
    """Choose the rollouts of a file, and describe the choice in a sentence.

    The file has all rollouts of evaluations, and evenly spaced groups of the training: about ``limit`` rollouts, or up to four
    times as many so that each step is in the file.
    """
    groups: dict[tuple[int | None, str], list[int]] = {}  # those of the training
    chosen = []
    every = run.ids(Query())
    for row in run.rows(every):
        if row["phase"] == "train":
            groups.setdefault((row["step"], row["grp"]), []).append(row["id"])
        else:
            chosen.append(row["id"])
    evaluated, trained = len(chosen), len(every) - len(chosen)
    if trained <= limit:
        return every, f"This file holds all {len(every)} rollouts of the run."
    stride, of_a_step = -(-trained // limit), len(groups) // len({step for step, _ in groups})
    if trained <= 4 * limit * of_a_step:  # each step is in the file, except in very long runs
        stride = min(stride, of_a_step)
    chosen += itertools.chain(*list(groups.values())[::stride])
    text = (
        f"This file holds {len(chosen)} of the {len(every)} rollouts of the run: all {evaluated} of evaluations, and "
        f"{len(chosen) - evaluated} of {trained} of the training, in evenly spaced groups. Lists, groups and comparisons "
        "show these; charts and counts of steps are of all."
    )
    return sorted(chosen), text


def answers(run: RunReader) -> dict[str, Any]:
    """Return the server's answers to all requests but those of rollouts, by the words of the request."""
    evaluated, sides = [step for step in run.steps() if step["phase"] != "train"], {"train": Query(phase="train")}
    for step in evaluated[-COMPARED:]:
        sides[step["phase"]] = Query(phase=step["phase"])
        sides[step["at"]] = Query(phase=step["phase"], step=step["step"])
    inputs = {side: run.inputs(query) for side, query in sides.items()}
    which = {step["at"]: Query(phase=step["phase"], number=step["number"]) for step in evaluated}
    return {
        "": {**data.overview(run.folder), "log": None},  # a log may say more than the run
        **{f"inputs {side}": data.inputs(run, query) for side, query in sides.items()},
        **{f"change {a} {b}": data.change(inputs[a], inputs[b]) for a in inputs for b in inputs},
        **{f"evaluation {at}": data.evaluation(run, query) for at, query in which.items()},
    }


def export(run: RunReader, target: Path, *, limit: int = MOST_ROLLOUTS) -> str:
    """Write a `sample` of a run with all its parts. Return a sentence about the content of the file."""
    ids, left_out = sample(run, limit)
    rows = run.rows(ids)
    texts: dict[str, str] = {}
    details: dict[int, Any] = {}
    for row in rows:
        found = details[row["id"]] = data.rollout(run, row["id"])
        texts |= found.pop("texts")
        row["shape"] = shape_of(row["error"])
        row["searched"] = searched_text(found["dialogue"], found["detail"] or {}, row["error"])
    held = {
        "name": run.name,
        "left_out": left_out,
        "answers": answers(run),
        "rows": rows,
        "rollouts": details,
        "histories": {key: run.history(key) for key in {row["input_key"] for row in rows}},
        "texts": texts,
    }
    # `<` would let a text end the element that holds it.
    text = data.as_json(held).replace("<", "\\u003c")
    style = "\n".join(map(_static, ("vendor/uPlot.min.css", "style.css")))
    charts, code = _static("vendor/uPlot.iife.min.js"), script()
    scripts = " ".join(f"'{_hash(text)}'" for text in (charts, code))
    policy = f"default-src 'none'; script-src {scripts}; style-src '{_hash(style)}'; img-src data:"
    page = _static("index.html")
    page = re.sub(r'<link rel="stylesheet".*?>\n', "", page).replace("</head>", f"<style>{style}</style>\n</head>")
    head = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace('<meta charset="utf-8">', head)
    # Put in last and never searched again: nothing that an agent wrote can stand for a place in the page.
    before, _, after = page.partition('<script src="static/vendor/uPlot.iife.min.js"></script>')
    after = after.replace('<script type="module" src="static/app.js"></script>', "")
    held_data = f'<script type="application/json" id="held">{text}</script>'
    page = f'{before}<script>{charts}</script>{held_data}<script type="module">{code}</script>{after}'
    target.write_text(page, encoding="utf-8")
    return left_out


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
