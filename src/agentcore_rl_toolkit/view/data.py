"""The page's data, as JSON values. The server and the exported file give the same."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from ..runs import Query, RunReader, find_runs, status

PAGE = 1000  # rows of one answer at most
INPUT_CHARACTERS = 300


class Runs:
    """The runs that are shown: those given, and those of ``folder``, which may come while the server runs."""

    def __init__(self, given: list[Path], folder: Path | None) -> None:
        self._given, self._folder = given, folder
        self._open: dict[Path, RunReader] = {}

    def folders(self) -> dict[str, Path]:
        """Name -> folder; a number tells runs of the same name apart."""
        found: dict[str, Path] = {}
        for path in [*self._given, *(find_runs(self._folder) if self._folder is not None else ())]:
            name, number = path.resolve().name, 2
            while name in found:
                name, number = f"{path.resolve().name}~{number}", number + 1
            found[name] = path
        return found

    def reader(self, name: str) -> RunReader:
        """Raises: ConfigError for a run that is not shown, or cannot be read."""
        path = self.folders().get(name)
        if path is None:
            raise ConfigError(f"there is no run {name!r} here")
        if path not in self._open:
            self._open[path] = RunReader(path)
        return self._open[path]

    def versions(self) -> dict[str, tuple[int, ...]]:
        """Of each run that can be read, what changes when it grows."""
        found = {}
        for name in self.folders():
            with contextlib.suppress(ConfigError):
                found[name] = self.reader(name).version()
        return found

    def close(self) -> None:
        for reader in self._open.values():
            reader.close()


def list_of_runs(runs: Runs) -> list[dict[str, Any]]:
    """The runs with how many rollouts they have and the reward of each step; one that cannot be read says why."""
    found = []
    for name, path in runs.folders().items():
        entry: dict[str, Any] = {"name": name, "path": str(path), "rollouts": None, "problem": None}
        try:
            steps = runs.reader(name).steps()
            trained = [step for step in steps if step["phase"] == "train" and step["step"] is not None] or steps
            entry["rollouts"] = sum(step["rollouts"] for step in steps)
            entry["steps"] = sum(step["phase"] == "train" and step["step"] is not None for step in steps)
            entry["rewards"] = [step["reward"] for step in trained]
            entry["status"] = status(path)
            entry["last_s"] = max((s["last_s"] for s in steps if s["last_s"] is not None), default=None)
        except ConfigError as e:
            entry["problem"] = str(e)
        found.append(entry)
    return found


def overview(run: RunReader) -> dict[str, Any]:
    """A run as a whole."""
    return {
        "name": run.name,
        "config": run.config(),
        "summary": run.summary(),
        "steps": run.steps(),
        "metrics": run.metrics(),
        "facets": run.facets(),
        "not_kept": run.counters(),
        "counted_from": run.counted_from(),
    }


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
    return {**found, "group": run.rows(run.group(number))}


def token_texts(run: RunReader, ids: list[int]) -> dict[str, str]:
    return {str(token): text for token, text in run.texts(ids).items()}


def group(run: RunReader, number: int) -> dict[str, Any]:
    """All rollouts that are compared with one, with their dialogues."""
    found = [run.rollout(each) for each in run.group(number)]
    if not found:
        raise ConfigError(f"there is no rollout {number}")
    kept = ("id", "place", "outcome", "cause", "mask_reason", "reward", "score", "advantage", "turns", "sampled_tokens")
    members = [
        {
            **{k: r[k] for k in kept},
            "error": r["error"],
            "dialogue": r["dialogue"],
            "parts": (r["detail"] or {}).get("reward_parts"),
        }
        for r in found
        if r is not None
    ]
    first = next(r for r in found if r is not None)
    payload = (first["detail"] or {}).get("payload")
    place = {name: first[name] for name in ("phase", "step", "grp", "at")}
    return {**place, "payload": payload, "members": members}


def input_text(payload: Any) -> str | None:
    """An input as a list shows it: its prompt, else the whole payload."""
    if not isinstance(payload, Mapping) or not payload:
        return None
    prompt = payload.get("prompt")
    return (prompt if isinstance(prompt, str) else json.dumps(payload, default=str))[:INPUT_CHARACTERS]


Side = tuple[str, int | None]


def compare(first: RunReader, second: RunReader, one: Side, other: Side) -> dict[str, Any]:
    """Inputs that both sides (phase and step of a run) have, the ones that changed most first."""
    a, b = first.inputs(*one), second.inputs(*other)
    found: list[dict[str, Any]] = []
    for key in a.keys() & b.keys():
        before, after = a[key]["reward"], b[key]["reward"]
        change = None if before is None or after is None else after - before
        found.append({"input_key": key, "change": change, "first": a[key], "second": b[key]})
    found.sort(key=lambda row: (-abs(row["change"] or 0.0), row["input_key"]))
    payloads = first.payloads([row["first"]["first"] for row in found[:PAGE]])
    for row in found[:PAGE]:
        row["text"] = input_text(payloads.get(row["first"]["first"]))
    return {
        "rows": found[:PAGE],
        "inputs": len(found),
        "only_first": len(a) - len(found),
        "only_second": len(b) - len(found),
    }
