"""The page's data, as JSON values. The server and the exported file give the same."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from ..runs import Query, RunReader, TokenSequence, diagnose, find_runs, read_config
from ..runs.folder import SUMMARY, read_object, stamp, status, written_s
from ..runs.in_flight import IN_FLIGHT, read_in_flight
from ..runs.spans import spans_of
from ..stats.differences import change_of
from ..stats.intervals import pass_rates

PAGE = 1000  # rollouts of one answer at most
BINS = 12  # a histogram's
FOLDERS_S = 1.0  # the list of folders is read again after this time
LOG_BYTES = 4000
MOST_TOOLS = 200

Steps = Sequence[Mapping[str, Any]]


class Runs:
    """The runs that are shown: those given, and those of ``folder``, which may come while the server runs."""

    def __init__(self, given: list[Path], folder: Path | None) -> None:
        self._given, self._folder = given, folder
        self._folders: tuple[float, dict[str, Path]] = (-FOLDERS_S, {})
        self._names: dict[Path, str] = {}  # an address leads to the same run as long as the server runs
        self._kept: dict[tuple[str, Path], tuple[Any, Any]] = {}  # a run's stamp, and the result for that stamp

    def folders(self, *, fresh: bool = False) -> dict[str, Path]:
        """Return the folder of each name. A number distinguishes runs of one name. ``fresh`` reads the folders again now."""
        if fresh or time.monotonic() - self._folders[0] >= FOLDERS_S:
            paths = [*self._given, *(find_runs(self._folder) if self._folder is not None else ())]
            for path in paths:
                name = path.resolve().name
                names = itertools.chain([name], (f"{name}~{number}" for number in itertools.count(2)))
                taken = self._names.values()
                self._names[path] = self._names.get(path) or next(name for name in names if name not in taken)
            self._folders = (time.monotonic(), {self._names[path]: path for path in paths})
        return self._folders[1]

    def folder(self, name: str) -> Path:
        """Return a run's folder. Raises: ConfigError for a run that is not shown."""
        found = self.folders().get(name) or self.folders(fresh=True).get(name)  # a new run
        if found is None:
            raise ConfigError(f"there is no run {name!r} here")
        return found

    def kept(self, kind: str, path: Path, make: Callable[[Path], Any]) -> Any:
        """Return the result of ``make`` for the run, computed when the run was last written."""
        now = stamp(path)
        if self._kept.get((kind, path), (None, None))[0] != now:
            self._kept[kind, path] = now, make(path)
        return self._kept[kind, path][1]

    def heads(self) -> list[dict[str, Any]]:
        """Return the runs as a list shows them. A run that cannot be read has the reason."""
        return [{**self.kept("head", path, head), "name": name} for name, path in self.folders(fresh=True).items()]

    def overview(self, name: str) -> dict[str, Any]:
        """Return the facts of a run, with the settings of the run before it."""
        path = self.folder(name)
        found = {**self.kept("overview", path, overview), "name": name}
        if found["status"] == "running":  # a process that was killed leaves its file
            found["in_flight"] = read_in_flight(path)
        earlier = {at: other for other, folder in self.folders().items() if (at := written_s(folder)) < written_s(path)}
        if earlier:
            before = earlier[max(earlier)]
            found["before"] = {"name": before, "config": read_config(self.folder(before))}
        return found

    def change(self, asked: Mapping[str, str]) -> Any:
        """Return the change from ``first`` to ``second``: RUN@PHASE or RUN@PHASE:STEP each. Raises: ConfigError."""
        sides = []
        for run, _, place in (asked.get(side, "").rpartition("@") for side in ("first", "second")):
            phase, _, step = place.partition(":")
            with RunReader(self.folder(run)) as reader:
                sides.append(reader.inputs(query_of({"phase": phase, "step": step})))
        return change(*sides)

    def version(self, name: str) -> Any:
        """Return the status of a run, and a value that changes when it grows or ends. Without a name, when any run does."""
        paths = [self.folder(name)] if name else self.folders().values()
        now = [(path, stamp(path, IN_FLIGHT)) for path in paths]
        return {"status": now[0][1][0] if name else "", "version": zlib.crc32(repr(now).encode("utf-8", "replace"))}


def head(folder: Path) -> dict[str, Any]:
    """Return a run's entry in a list of runs. ``problem`` is the reason why a run cannot be read.

    It has the `reward` of the last training step (or of the last evaluation), its 95 % `interval` over inputs, and the
    `rewards` of all such steps.
    """
    config, path, problem = read_config(folder), folder.resolve(), None
    try:
        with RunReader(folder) as run:
            steps = run.steps()
    except ConfigError as e:
        steps, problem = [], str(e)
    trained = [step for step in steps if step["phase"] == "train" and step["step"] is not None]
    last = (trained or steps or [{}])[-1]
    return {
        "name": path.name,
        "path": str(path),
        "status": status(folder),
        **{name: Path(str(config.get(name) or "")).name or None for name in ("model", "data")},
        "rollouts": None if problem else sum(step["rollouts"] for step in steps),
        "steps": None if problem else len(trained),
        "rewards": [step["reward"] for step in trained or steps],
        **{name: last.get(name) for name in ("reward", "interval")},
        "first_s": min((step["first_s"] for step in steps if step["first_s"] is not None), default=None),
        "last_s": max((step["last_s"] for step in steps if step["last_s"] is not None), default=None),
        "problem": problem,
    }


def overview(folder: Path) -> dict[str, Any]:
    """Return the facts of a run."""
    with RunReader(folder) as run:
        steps = run.steps()
        trained = [step for step in steps if step["phase"] == "train"]
        return {
            "name": run.name,
            "status": status(folder),
            "config": read_config(folder),
            "summary": read_object(folder / SUMMARY),
            "steps": steps,
            "metrics": run.metrics(),
            "diagnosis": [vars(finding) for finding in diagnose(run, steps)],
            "tokens": {n: _sum(step[f"{n}_tokens"] for step in trained) for n in ("sampled", "usable", "gradient")},
            "failures": run.failures(),
            "tools": tools(steps),
            "inputs": run.solved(),
            "facets": facets(steps),
            "not_kept": run.not_kept(),
            "log": log_tail(folder),
            "before": None,
            "in_flight": None,
        }


def facets(steps: Steps) -> dict[str, dict[str, int]]:
    """Count the rollouts of each value to filter by, the most frequent first."""
    found: dict[str, Counter[str]] = {name: Counter() for name in ("phase", "outcome", "cause", "stop", "tool")}
    for step in steps:
        found["phase"][step["phase"]] += step["rollouts"]
        found["tool"].update({tool: facts["rollouts"] for tool, facts in step["tools"].items()})
        for name in ("outcome", "cause", "stop"):
            found[name].update(step[f"{name}s"])
    return {name: dict(counts.most_common(MOST_TOOLS)) for name, counts in found.items()}


def tools(steps: Steps) -> list[dict[str, Any]]:
    """Sum up each tool, the most used first, with the mean reward of rollouts that called it and of those that did not."""
    found = []
    for tool in {tool for step in steps for tool in step["tools"]}:
        of = [step["tools"][tool] for step in steps if tool in step["tools"]]
        facts = {name: _sum(each[name] for each in of) for name in of[0]}
        total, scored = facts.pop("score"), facts.pop("scored")
        others = sum(step["scored"] for step in steps) - scored
        rest = sum(step["score"] or 0.0 for step in steps) - (total or 0.0)
        means = {"reward_with": total / scored if scored else None, "reward_without": rest / others if others else None}
        found.append({"name": tool, **facts, **means})
    return sorted(found, key=lambda each: (-each["calls"], each["name"]))[:MOST_TOOLS]


def _sum(values: Iterable[Any]) -> Any:
    """Return the sum of the known values, or None."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def log_tail(folder: Path) -> dict[str, str] | None:
    """Return the end of the log that was written last."""
    logs = sorted([*folder.glob("*.log"), *folder.glob("*/*.log")], key=lambda path: path.stat().st_mtime)
    if not logs:
        return None
    with logs[-1].open("rb") as file:
        file.seek(max(0, logs[-1].stat().st_size - LOG_BYTES))
        return {"name": logs[-1].name, "text": file.read().decode(errors="replace")}


def inputs(run: RunReader, query: Query) -> list[dict[str, Any]]:
    """Return the inputs of rollouts and how often they were solved, the least first."""
    found = [{"input_key": key, **entry} for key, entry in run.inputs(query).items()]
    return sorted(found, key=lambda entry: (not entry["scores"], entry["rate"], entry["reward"]))


def evaluation(run: RunReader, query: Query) -> dict[str, Any]:
    """Return an evaluation: its reward with the interval over inputs, pass@k, the rewards' histogram, failures, inputs."""
    step = next((s for s in run.steps() if (s["phase"], s["number"]) == (query.phase, query.number)), None)
    if step is None:
        raise ConfigError(f"{run.name} has no evaluation {query.phase} {query.number or ''}".rstrip())
    scores = [entry["scores"] for entry in run.inputs(query).values() if entry["scores"]]
    pass_at, pass_all = pass_rates(scores)
    kept = ("phase", "number", "at", "rollouts", "scored", "reward", "reward_ok", "interval")
    return {
        **{name: step[name] for name in kept},
        "pass_at": pass_at,
        "pass_all": pass_all,
        "histogram": histogram([score for each in scores for score in each]),
        "failures": run.failures(query),
        "inputs": inputs(run, query),
    }


def histogram(values: list[float]) -> list[dict[str, float]]:
    """Count values in `BINS` equal parts of their range, or each value if only a few differ."""
    few, low, parts = len(set(values)) <= BINS, min(values, default=0.0), dict[float, list[float]]()
    wide = (max(values, default=0.0) - low) / BINS
    for value in values:
        at = value if few else low + wide * min(BINS - 1, int((value - low) / wide))
        parts.setdefault(at, []).append(value)
    return [{"at": at, "from": min(parts[at]), "to": max(parts[at]), "n": len(parts[at])} for at in sorted(parts)]


def query_of(given: Mapping[str, str]) -> Query:
    """Read a query from an address. Raises: ConfigError, msgspec.ValidationError."""
    asked = {k: v for k, v in given.items() if k not in ("offset", "limit", "key") and (v != "" or k == "tool")}
    for name in asked.keys() - Query.__dataclass_fields__:
        raise ConfigError(f"there is no filter {name!r}")
    texts: dict[str, Any] = {
        k: v for k, v in asked.items() if str(Query.__dataclass_fields__[k].type).startswith("str")
    }
    # A text stays as it is: "null" is a word.
    found = msgspec.convert({k: v for k, v in asked.items() if k not in texts}, Query, strict=False)
    return dataclasses.replace(found, **texts)


def rows(run: RunReader, given: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of a list."""
    query, page = query_of(given), (given.get("offset", 0), given.get("limit", 200))
    offset, limit = (max(0, number) for number in msgspec.convert(page, tuple[int, int], strict=False))
    return {"total": run.count(query), "rows": run.rollouts(query, offset=offset, limit=min(limit, PAGE))}


def rollout(run: RunReader, number: int) -> dict[str, Any]:
    """Return everything of one rollout, with the texts of its tokens. Raises: ConfigError when there is none."""
    found = run.rollout(number)
    if found is None:
        raise ConfigError(f"there is no rollout {number}")
    texts = run.texts(token for s in found["sequences"] or () for token in TokenSequence.decoded(s).ids)
    facts = {"group": run.rows(run.group(number)), "spans": [vars(span) for span in spans_of(found)]}
    return {**found, **facts, "texts": {str(token): text for token, text in texts.items()}}


def group(run: RunReader, number: int) -> dict[str, Any]:
    """Return all rollouts that are compared with one, without their tokens, and the history of their input."""
    members = [{**(run.rollout(each) or {}), "sequences": None} for each in run.group(number)]
    if not members:
        raise ConfigError(f"there is no rollout {number}")
    return {"members": members, "history": run.history(members[0]["input_key"])}


def change(one: Mapping[str, Any], other: Mapping[str, Any]) -> Any:
    """Return the change of the mean reward over inputs that both sides have, with its interval."""
    pairs = [(one[key]["reward"], other[key]["reward"]) for key in one.keys() & other.keys()]
    return change_of(sorted(pair for pair in pairs if None not in pair))


def as_json(value: Any) -> str:
    """Encode a value as JSON in ASCII. Numbers that JSON does not have, such as a loss of NaN, are null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), separators=(",", ":"))
