"""A run as tables, for notebooks and for `runs export --rows`: its rollouts, messages and steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .._installation import require
from .folder import find_run
from .reader import LISTED, Query, RunReader
from .record import text_of

_PART = 500  # rollouts that are read at a time
_KNOWN = ("session_id", "phase", "step", "grp", "outcome", "reward")  # a message has these of its rollout


def rollout_rows(run: RunReader, query: Query | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row for each matching rollout: columns, place in the run, numbers (``number_NAME`` if a column is called NAME)."""
    ids, own = run.ids(query or Query()), {n: f"number_{n}" if n in ("at", *LISTED) else n for n in run.number_names()}
    for start in range(0, len(ids), _PART):
        for row in run.rows(ids[start : start + _PART]):
            yield {n: row[n] for n in ("at", *LISTED)} | {own[n]: row["numbers"].get(n) for n in own}


def message_rows(run: RunReader, query: Query | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row for each message of the rollouts that fit, with its place in the dialogue and its text with tool calls."""
    for rollout in run.ids(query or Query()):
        found = run.rollout(rollout) or {}
        known = {name: found.get(name) for name in _KNOWN}
        for place, message in enumerate(found.get("dialogue") or ()):
            yield {"rollout": rollout, **known, "message": place, "role": message.get("role"), "text": text_of(message)}


def step_rows(run: RunReader) -> Iterator[dict[str, Any]]:
    """Yield a row for each step and evaluation, with the numbers of its event in `metrics.jsonl`."""
    events = {event.get("step"): event for event in run.metrics() if event.get("event") == "step"}
    for step in run.steps():
        yield {**(events.get(step["step"], {}) if step["phase"] == "train" else {}), **step}


def rollouts_df(run: str | Path | None = None, query: Query | None = None) -> Any:
    """Return a pandas data frame of a run's rollouts. ``run`` is a folder, a name under `runs/`, or None for the newest.

    Raises: ConfigError, MissingExtraError without pandas.
    """
    return _frame(run, lambda reader: rollout_rows(reader, query), ("at", *LISTED))


def messages_df(run: str | Path | None = None, query: Query | None = None) -> Any:
    """Return a data frame of the messages of a run's rollouts, as `rollouts_df` does."""
    return _frame(run, lambda reader: message_rows(reader, query), ("rollout", *_KNOWN, "message", "role", "text"))


def steps_df(run: str | Path | None = None) -> Any:
    """Return a data frame of a run's steps and evaluations, as `rollouts_df` does."""
    return _frame(run, step_rows)


def _frame(run: str | Path | None, rows: Any, columns: Sequence[str] = ()) -> Any:
    pandas = require("pandas")
    with RunReader(find_run(run)) as reader:
        found = list(rows(reader))
        return pandas.DataFrame(found, columns=None if found else columns)
