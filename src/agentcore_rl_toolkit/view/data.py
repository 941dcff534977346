"""The page's data, as JSON values. The server and the exported file give the same."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from ..client.evaluation import pass_rates
from ..errors import ConfigError
from ..runs import Query, RunReader, diagnose, find_runs, read_config, read_in_flight, stamp, status
from ..runs.spans import spans_of
from ..stats.differences import change_of
from ..stats.intervals import interval
from .listing import head

PAGE = 1000  # rows of one answer at most
INPUT_CHARACTERS = 300
BINS = 12  # of a histogram
OPEN = 16  # runs whose files stay open
FOLDERS_S = 1.0  # for how long the list of folders is not read again
LOG_BYTES = 4000


class Runs:
    """The runs that are shown: those given, and those of ``folder``, which may come while the server runs."""

    def __init__(self, given: list[Path], folder: Path | None) -> None:
        self._given, self._folder = given, folder
        self._open: OrderedDict[Path, RunReader] = OrderedDict()
        self._lock = threading.Lock()
        self._folders: tuple[float, dict[str, Path]] = (-FOLDERS_S, {})
        self._kept: dict[
            tuple[str, Path], tuple[Any, Any]
        ] = {}  # what was computed of a run, with the run's stamp then

    def folders(self, *, anew: bool = False) -> dict[str, Path]:
        """Name -> folder; a number tells runs of the same name apart. Reads the folders if that was long ago, or ``anew``."""
        if not anew and time.monotonic() - self._folders[0] < FOLDERS_S:
            return self._folders[1]
        found: dict[str, Path] = {}
        for path in [*self._given, *(find_runs(self._folder) if self._folder is not None else ())]:
            name, number = path.resolve().name, 2
            while name in found:
                name, number = f"{path.resolve().name}~{number}", number + 1
            found[name] = path
        self._folders = (time.monotonic(), found)
        return found

    def folder(self, name: str) -> Path:
        """Raises: ConfigError for a run that is not shown."""
        found = self.folders()
        if name not in found:  # it may have begun since the folders were read
            found = self.folders(anew=True)
        if name not in found:
            raise ConfigError(f"there is no run {name!r} here")
        return found[name]

    def reader(self, name: str) -> RunReader:
        """Raises: ConfigError for a run that is not shown, or cannot be read."""
        path = self.folder(name)
        with self._lock:  # each request has a thread
            found = self._open.pop(path, None) or RunReader(path)
            self._open[path] = found
            if len(self._open) > OPEN:
                self._open.popitem(last=False)  # closed when nobody reads it any more
        return found

    def kept(self, kind: str, path: Path, make: Callable[[Path], Any]) -> Any:
        """What ``make`` returned for the run when it was last written."""
        now = stamp(path)
        known, value = self._kept.get((kind, path), (None, None))
        if known != now:
            value = make(path)
            self._kept[kind, path] = now, value
        return value

    def heads(self) -> list[dict[str, Any]]:
        """The runs as a list shows them; one that cannot be read says why."""
        return [{**self.kept("head", path, head), "name": name} for name, path in self.folders().items()]

    def overview(self, name: str) -> dict[str, Any]:
        """A run as a whole, with the settings of the run before it."""
        path, names = self.folder(name), list(self.folders())
        before = names[names.index(name) + 1 :][:1]
        found = self.kept("overview", path, lambda _: overview(self.reader(name)))
        if before:
            found = {**found, "before": {"name": before[0], "config": read_config(self.folder(before[0]))}}
        return {**found, "in_flight": read_in_flight(path)}

    def version(self, name: str) -> Any:
        """The status, and what changes when a run grows or ends, or with no name when any of them does."""
        if name:
            return *stamp(self.folder(name)), (read_in_flight(self.folder(name)) or {}).get("at_s")
        return "", [(name, stamp(path)) for name, path in self.folders().items()]

    def close(self) -> None:
        for reader in self._open.values():
            reader.close()


def overview(run: RunReader) -> dict[str, Any]:
    """A run as a whole."""
    steps = run.steps()
    trained = [step for step in steps if step["phase"] == "train"]
    tokens = {n: [s[f"{n}_tokens"] for s in trained] for n in ("sampled", "usable", "gradient")}
    return {
        "name": run.name,
        "status": status(run.folder),
        "config": run.config(),
        "summary": run.summary(),
        "steps": steps,
        "metrics": run.metrics(),
        "diagnosis": [vars(finding) for finding in diagnose(run, steps)],
        "tokens": {
            n: sum(v or 0 for v in each) if any(v is not None for v in each) else None for n, each in tokens.items()
        },
        "failures": run.failures(),
        "tools": run.tools(),
        "inputs": run.solved(),
        "facets": run.facets(),
        "not_kept": run.counters(),
        "counted_from": run.counted_from(),
        "log": log_tail(run.folder),
        "before": None,
        "in_flight": None,
    }


def log_tail(folder: Path) -> dict[str, str] | None:
    """The end of the log that was written last."""
    logs = sorted([*folder.glob("*.log"), *folder.glob("*/*.log")], key=lambda path: path.stat().st_mtime)
    if not logs:
        return None
    with logs[-1].open("rb") as file:
        file.seek(max(0, logs[-1].stat().st_size - LOG_BYTES))
        return {"name": logs[-1].name, "text": file.read().decode(errors="replace")}


def inputs(run: RunReader, query: Query) -> list[dict[str, Any]]:
    """The inputs of rollouts with how often they were solved, the least first."""
    every = [{"input_key": key, **entry} for key, entry in run.inputs(query).items()]
    found = sorted(every, key=lambda entry: (not entry["scores"], entry["rate"], entry["reward"]))[:PAGE]
    payloads = run.payloads([entry["first"] for entry in found])
    return [{**entry, "text": input_text(payloads.get(entry["first"]))} for entry in found]


def place_of(given: Mapping[str, str]) -> tuple[str, int | None]:
    """Phase and number of an evaluation, out of the words of an address. Raises: ConfigError."""
    query = query_of({name: value for name, value in given.items() if name in ("phase", "number")})
    return query.phase or "eval", query.number


def evaluation(run: RunReader, phase: str, number: int | None) -> dict[str, Any]:
    """One evaluation: its reward with the interval over inputs, pass@k, the histogram of rewards, failures and inputs."""
    query = Query(phase=phase, number=number)
    step = next((s for s in run.steps() if (s["phase"], s["number"]) == (phase, number)), None)
    if step is None:
        raise ConfigError(f"{run.name} has no evaluation {phase} {number or ''}".rstrip())
    scores = [entry["scores"] for entry in run.inputs(query).values() if entry["scores"]]
    pass_at, pass_all = pass_rates(scores)
    return {
        **{name: step[name] for name in ("phase", "number", "at", "rollouts", "scored", "reward", "reward_ok")},
        "interval": interval([fmean(each) for each in scores]) if scores else None,
        "pass_at": pass_at,
        "pass_all": pass_all,
        "histogram": histogram([score for each in scores for score in each]),
        "failures": run.failures(query),
        "inputs": inputs(run, query),
    }


def histogram(values: list[float]) -> list[dict[str, float]]:
    """Values counted in `BINS` equal parts of their range, or each by itself if there are few different ones."""
    counts = Counter(values)
    if len(counts) <= BINS:
        return [{"from": value, "to": value, "n": counts[value]} for value in sorted(counts)]
    low, wide = min(values), (max(values) - min(values)) / BINS
    found = Counter(min(BINS - 1, int((value - low) / wide)) for value in values)
    return [{"from": low + n * wide, "to": low + (n + 1) * wide, "n": found[n]} for n in range(BINS)]


def query_of(given: Mapping[str, str]) -> Query:
    """A query out of the words of an address. Raises: ConfigError."""
    asked = {k: v for k, v in given.items() if k not in ("offset", "limit", "at") and (v != "" or k == "tool")}
    for name in asked.keys() - Query.__dataclass_fields__:
        raise ConfigError(f"there is no filter {name!r}")
    try:
        return msgspec.convert(asked, Query, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(str(e)) from e


def rows(run: RunReader, given: Mapping[str, str]) -> dict[str, Any]:
    """A page of a list."""
    query = query_of(given)
    try:
        offset, limit = int(given.get("offset", 0)), int(given.get("limit", 200))
    except ValueError:
        raise ConfigError("offset and limit are numbers") from None
    found: dict[str, Any] = {"total": run.total(query), "offset": max(0, offset)}
    found["rows"] = with_inputs(run, run.rollouts(query, offset=max(0, offset), limit=max(0, min(limit, PAGE))))
    return found


def with_inputs(run: RunReader, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with what stands for their input."""
    payloads = run.payloads([row["id"] for row in rows])
    return [{**row, "input": input_text(payloads.get(row["id"]))} for row in rows]


def rollout(run: RunReader, number: int) -> dict[str, Any]:
    """Everything of one rollout. Raises: ConfigError when there is none."""
    found = run.rollout(number)
    if found is None:
        raise ConfigError(f"there is no rollout {number}")
    return {**found, "group": run.rows(run.group(number)), "spans": [vars(span) for span in spans_of(found)]}


def token_texts(run: RunReader, ids: list[int]) -> dict[str, str]:
    return {str(token): text for token, text in run.texts(ids).items()}


def group(run: RunReader, number: int) -> dict[str, Any]:
    """All rollouts that are compared with one, with their dialogues."""
    found = [run.rollout(each) for each in run.group(number)]
    if not found:
        raise ConfigError(f"there is no rollout {number}")
    kept = (
        "id",
        "place",
        "outcome",
        "cause",
        "mask_reason",
        "reward",
        "score",
        "advantage",
        "turns",
        "sampled_tokens",
        "stop",
    )
    members = [
        {
            **{k: r[k] for k in kept},
            "error": r["error"],
            "dialogue": r["dialogue"],
            "parts": (r["detail"] or {}).get("reward_parts"),
            "numbers": (r["detail"] or {}).get("metrics") or {},
        }
        for r in found
        if r is not None
    ]
    first = next(r for r in found if r is not None)
    payload = (first["detail"] or {}).get("payload")
    place = {name: first[name] for name in ("phase", "step", "number", "grp", "at", "input_key")}
    return {**place, "payload": payload, "members": members, "history": run.history(first["input_key"])}


def input_text(payload: Any) -> str | None:
    """An input as a list shows it: its prompt, else the whole payload."""
    if not isinstance(payload, Mapping) or not payload:
        return None
    prompt = payload.get("prompt")
    return (prompt if isinstance(prompt, str) else json.dumps(payload, default=str))[:INPUT_CHARACTERS]


Side = tuple[str, int | None]


def compare(first: RunReader, second: RunReader, one: Side, other: Side) -> dict[str, Any]:
    """Inputs that both sides (phase and step of a run) have, the ones that changed most first."""
    a, b = (run.inputs(Query(phase=phase, step=step)) for run, (phase, step) in ((first, one), (second, other)))
    found: list[dict[str, Any]] = []
    for key in a.keys() & b.keys():
        before, after = a[key]["reward"], b[key]["reward"]
        change = None if before is None or after is None else after - before
        found.append({"input_key": key, "change": change, "first": a[key], "second": b[key]})
    found.sort(key=lambda row: (-abs(row["change"] or 0.0), row["input_key"]))
    payloads = first.payloads([row["first"]["first"] for row in found[:PAGE]])
    for row in found[:PAGE]:
        row["text"] = input_text(payloads.get(row["first"]["first"]))
    pairs = [(r["first"]["reward"], r["second"]["reward"]) for r in found if r["change"] is not None]
    return {
        "rows": found[:PAGE],
        "change": change_of(pairs),
        "inputs": len(found),
        "only_first": len(a) - len(found),
        "only_second": len(b) - len(found),
    }
