"""Reads a run: lists by columns, one rollout by its parts."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .folder import METRICS, ROLLOUTS, read_config, read_metrics, read_object
from .record import DETAIL, DIALOGUE, TOKENS, unpack
from .schema import COLUMNS, open_to_read

LISTED = ("id", *(name for name in COLUMNS if name != "bytes"))
SORTED_BY = frozenset(LISTED) - {"dropped", "error"}
# Columns of each phase and step. A mean of nothing is NULL.
_OF_A_STEP = {
    "rollouts": "COUNT(*)",
    "scored": "COUNT(score)",
    "usable": "SUM(mask_reason IS NULL)",
    "sampled_tokens": "SUM(sampled_tokens)",
    "trained_tokens": "SUM(trained_tokens)",
    "score_mean": "AVG(score)",
    "score_squares": "AVG(score * score)",
    "reward_min": "MIN(reward)",
    "reward_max": "MAX(reward)",
    "tokens_max": "MAX(sampled_tokens)",
    "tokens_mean": "AVG(sampled_tokens)",
    "turns": "AVG(turns)",
    "tool_calls": "AVG(tool_calls)",
    "staleness": "AVG(staleness)",
    "staleness_max": "MAX(staleness)",
    "gap_mean": "AVG(gap_mean)",
    "gap_max": "MAX(gap_max)",
    "entropy": "AVG(entropy_mean)",
    "elapsed_s": "AVG(elapsed_s)",
    "elapsed_max_s": "MAX(elapsed_s)",
    "first_s": "MIN(ended_s)",
    "last_s": "MAX(ended_s)",
}
# Rewards are means over inputs, as in an evaluation: an input counts once, whichever of its rollouts were lost.
_OF_INPUTS = (
    "SELECT phase, step, AVG(score) AS reward, AVG(ok) AS reward_ok FROM (SELECT phase, step, AVG(score) AS score, "
    "AVG(CASE WHEN outcome = 'ok' THEN reward END) AS ok FROM rollouts GROUP BY phase, step, grp) GROUP BY 1, 2"
)


@dataclass(frozen=True, kw_only=True)
class Query:
    """Which rollouts, and in which order. None does not filter.

    ``outcome`` is an outcome, or a cause as ``cause:agent``; ``tool`` a name, "" for no tool at all; ``text`` is looked for in
    the dialogue, without regard to case. ``sort`` is a column; rollouts that have no value there come last.
    Raises: ConfigError.
    """

    phase: str | None = None
    step: int | None = None
    group: str | None = None
    outcome: str | None = None
    tool: str | None = None
    text: str | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    tokens_from: int | None = None
    tokens_to: int | None = None
    usable: bool | None = None
    sort: str = "id"
    descending: bool = False

    def __post_init__(self) -> None:
        if self.sort not in SORTED_BY:
            raise ConfigError(f"rollouts cannot be sorted by {self.sort!r}; there are {', '.join(sorted(SORTED_BY))}")

    def sql(self) -> tuple[str, list[Any]]:
        """Condition and its values."""
        kind, _, cause = (self.outcome or "").partition(":")
        escaped = (self.text or "").replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        ends = ("cause = ?", cause) if kind == "cause" and cause else ("outcome = ?", self.outcome)
        conditions: tuple[tuple[str, Any], ...] = (
            *(("phase = ?", self.phase), ("step = ?", self.step), ("grp = ?", self.group), ends),
            *(("reward >= ?", self.reward_from), ("reward <= ?", self.reward_to)),
            *(("sampled_tokens >= ?", self.tokens_from), ("sampled_tokens <= ?", self.tokens_to)),
            ("(mask_reason IS NULL) = ?", self.usable),
            ("id IN (SELECT rollout FROM tools WHERE name = ?)", self.tool or None),
            ("tool_calls = ?", 0 if self.tool == "" else None),
            ("id IN (SELECT rollout FROM texts WHERE text LIKE ? ESCAPE '\\')", f"%{escaped}%" if escaped else None),
        )
        given = [(condition, value) for condition, value in conditions if value is not None]
        where = " AND ".join(condition for condition, _ in given)
        return (f" WHERE {where}" if where else ""), [value for _, value in given]

    def order(self) -> str:
        direction = "DESC" if self.descending else "ASC"
        if self.sort == "id":
            return f"ORDER BY id {direction}"
        return f"ORDER BY {self.sort} IS NULL, {self.sort} {direction}, id {direction}"


class RunReader:
    """One run, read while it is written or afterwards. Threads may share it. Raises: ConfigError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._database = open_to_read(folder / ROLLOUTS)
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _all(self, sql: str, values: Iterable[Any] = ()) -> list[sqlite3.Row]:
        with self._lock:
            try:
                return self._database.execute(sql, tuple(values)).fetchall()
            except sqlite3.OperationalError as e:
                raise ConfigError(f"{self.folder / ROLLOUTS} cannot be read: {e}") from e

    def version(self) -> tuple[int, ...]:
        """Changes when the run does: SQLite's own counter of other connections' commits, and the size of the metrics."""
        metrics = self.folder / METRICS
        changed = self._all("PRAGMA data_version")[0][0]
        return int(changed), metrics.stat().st_size if metrics.exists() else 0

    # -- lists

    def count(self) -> int:
        return int(self._all("SELECT COUNT(*) FROM rollouts")[0][0])

    def rollouts(self, query: Query | None = None, *, offset: int = 0, limit: int = 200) -> list[dict[str, Any]]:
        """Rows of the rollouts that fit, without their parts."""
        query = query or Query()
        where, values = query.sql()
        sql = f"SELECT id FROM rollouts{where} {query.order()} LIMIT ? OFFSET ?"
        return self.rows([row[0] for row in self._all(sql, (*values, limit, offset))])

    def total(self, query: Query) -> int:
        """How many fit."""
        where, values = query.sql()
        return int(self._all(f"SELECT COUNT(*) FROM rollouts{where}", values)[0][0])

    def rows(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Rows by id, in the given order."""
        found = {row["id"]: dict(row) for row in self._of(f"SELECT {', '.join(LISTED)} FROM rollouts WHERE id", ids)}
        for row in self._of("SELECT rollout, name, calls FROM tools WHERE rollout", ids):
            found[row["rollout"]].setdefault("tools", {})[row["name"]] = row["calls"]
        counted_from = self.counted_from()
        for listed in found.values():
            listed["at"] = _place(listed, counted_from)
        return [found[i] for i in ids if i in found]

    def counted_from(self) -> int:
        """The difference between the shown number of a training step and the file's: some trainers' files count from 0, not 1."""
        return int(self._all("SELECT MIN(step) FROM rollouts WHERE phase = 'train'")[0][0] == 0)

    def _of(self, select: str, ids: Sequence[int]) -> list[sqlite3.Row]:
        """The rows of a selection that ends in a column of ids, in parts that SQLite takes."""
        parts = [ids[start : start + 500] for start in range(0, len(ids), 500)]
        return [row for part in parts for row in self._all(f"{select} IN ({','.join('?' * len(part))})", part)]

    # -- one rollout

    def find(self, name: str | int) -> int | None:
        """The id of a rollout by id, session id, or an unambiguous beginning of one."""
        if isinstance(name, int) or name.isdecimal():
            found = self._all("SELECT id FROM rollouts WHERE id = ?", (int(name),))
            if found:
                return int(found[0][0])
        like = str(name).replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        found = self._all("SELECT id FROM rollouts WHERE session_id LIKE ? ESCAPE '\\' LIMIT 2", (like,))
        return int(found[0][0]) if len(found) == 1 else None

    def rollout(self, rollout: int) -> dict[str, Any] | None:
        """Everything kept of one rollout: its row, ``detail``, ``dialogue``, ``sequences`` (encoded) and ``texts`` of their
        tokens. A part that was not kept, or was given up for its size, is None.
        """
        rows = self.rows([rollout])
        if not rows:
            return None
        found = self._all("SELECT name, data FROM parts WHERE rollout = ?", (rollout,))
        parts = {row["name"]: unpack(row["data"]) for row in found}
        named = {"detail": DETAIL, "dialogue": DIALOGUE, "sequences": TOKENS}
        return {**rows[0], **{name: parts.get(part) for name, part in named.items()}}

    def payloads(self, ids: Sequence[int]) -> dict[int, Any]:
        """Inputs of rollouts by id, without reading their dialogues and tokens."""
        rows = self._of(f"SELECT rollout, data FROM parts WHERE name = '{DETAIL}' AND rollout", ids)
        return {row["rollout"]: unpack(row["data"]).get("payload") for row in rows}

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """Texts of tokens, where they are known."""
        return dict(map(tuple, self._of("SELECT id, text FROM token_texts WHERE id", sorted(set(ids)))))

    # -- the whole run

    def _counts(self) -> list[sqlite3.Row]:
        """How many rollouts by phase, step, outcome and cause, in the order of the run."""
        sql = "SELECT phase, step, outcome, cause, COUNT(*) AS n FROM rollouts GROUP BY 1, 2, 3, 4 ORDER BY MIN(id)"
        return self._all(sql)

    def facets(self) -> dict[str, Any]:
        """The values to filter by, with counts."""
        counts = self._counts()
        found: dict[str, Any] = {}
        for name in ("phase", "outcome", "cause"):
            found[name] = dict(_counted(counts, name).most_common())
        rows = self._all("SELECT name, COUNT(*) FROM tools GROUP BY 1 ORDER BY 2 DESC LIMIT 200")
        found["tool"] = dict(map(tuple, rows))
        steps = _counted(counts, "phase", "step")
        found["steps"] = [{"phase": phase, "step": step, "n": n} for (phase, step), n in steps.items()]
        found["counted_from"] = self.counted_from()
        return found

    def steps(self) -> list[dict[str, Any]]:
        """One entry per phase and step, in the order of the run: counts, means and spreads. A mean of nothing is None."""
        columns = ", ".join(f"{sql} AS {name}" for name, sql in _OF_A_STEP.items())
        sql = f"SELECT phase, step, {columns} FROM rollouts GROUP BY 1, 2 ORDER BY MIN(id)"
        steps, counted_from = [dict(row) for row in self._all(sql)], self.counted_from()
        rewards = {(row["phase"], row["step"]): row for row in self._all(_OF_INPUTS)}
        counts: dict[tuple[Any, Any], list[sqlite3.Row]] = {}
        for row in self._counts():
            counts.setdefault((row["phase"], row["step"]), []).append(row)
        for step in steps:
            mean, square = step.pop("score_mean"), step.pop("score_squares")
            step["reward_spread"] = None if square is None else max(0.0, square - mean**2) ** 0.5
            here = counts.get((step["phase"], step["step"]), [])
            step |= dict(rewards[step["phase"], step["step"]])
            for name in ("outcome", "cause"):
                step[f"{name}s"] = dict(_counted(here, name))
            step["at"] = _place(step, counted_from)
        return steps

    def group(self, rollout: int) -> list[int]:
        """The ids of all rollouts that are compared with this one, itself among them."""
        same = "SELECT b.id FROM rollouts a JOIN rollouts b ON a.phase = b.phase AND a.step IS b.step AND a.grp = b.grp"
        return [row[0] for row in self._all(f"{same} WHERE a.id = ? ORDER BY b.place, b.id LIMIT 512", (rollout,))]

    def inputs(self, phase: str, step: int | None) -> dict[str, dict[str, Any]]:
        """Input key -> mean score and the id of the first rollout, of a step (None: of all that the phase has)."""
        where, values = ("", [phase]) if step is None else (" AND step = ?", [phase, step])
        sql = "SELECT input_key, AVG(score) AS reward, MIN(id) AS first, COUNT(*) AS rollouts, AVG(sampled_tokens) AS tokens "
        sql += f"FROM rollouts WHERE input_key IS NOT NULL AND phase = ?{where} GROUP BY input_key"
        return {row["input_key"]: dict(row) for row in self._all(sql, values)}

    def pass_rates(self) -> dict[str, float]:
        """Return the share of each input's scored rollouts that have a reward of 1 or more, by `Rollout.input_key`."""
        sql = "SELECT input_key, AVG(score >= 1) FROM rollouts WHERE input_key IS NOT NULL AND score IS NOT NULL GROUP BY 1"
        return dict(map(tuple, self._all(sql)))

    def counters(self) -> dict[str, Any]:
        """The writer's own report: how many rollouts it could not keep."""
        return dict(map(tuple, self._all("SELECT name, value FROM run")))

    def config(self) -> dict[str, Any]:
        return read_config(self.folder)

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder)

    def summary(self) -> Mapping[str, Any]:
        """`summary.json`, where the run has ended; empty before."""
        return read_object(self.folder / "summary.json")


def _place(row: Mapping[str, Any], counted_from: int) -> str:
    """Phase and step as people read them: `train 1` is the first step, `eval 4` the evaluation of what four steps made."""
    if row["step"] is None:
        return str(row["phase"])
    return f"{row['phase']} {row['step'] + (counted_from if row['phase'] == 'train' else 0)}"


def _counted(rows: Iterable[sqlite3.Row], *names: str) -> Counter[Any]:
    """How many rollouts by these members of a row of counts; where the first is NULL, none."""
    counts: Counter[Any] = Counter()
    for row in rows:
        key = tuple(row[name] for name in names)
        if key[0] is not None:
            counts[key if len(names) > 1 else key[0]] += row["n"]
    return counts
