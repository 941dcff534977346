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
from .schema import COLUMNS, open_to_read, searchable

LISTED = ("id", *(name for name in COLUMNS if name != "bytes"))
SORTED_BY = frozenset(LISTED) - {"dropped", "error"}
# Columns of each phase and step. A mean of nothing is NULL.
_OF_A_STEP = {
    "rollouts": "COUNT(*)",
    "scored": "COUNT(score)",
    "usable": "SUM(mask_reason IS NULL)",
    "sampled_tokens": "SUM(sampled_tokens)",
    "usable_tokens": "SUM(CASE WHEN mask_reason IS NULL THEN trained_tokens END)",
    "gradient_tokens": "SUM(CASE WHEN mask_reason IS NULL THEN gradient_tokens END)",
    "score_mean": "AVG(score)",
    "score_squares": "AVG(score * score)",
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
    "cut": "SUM(cut_calls > 0)",
    "unparsed": "SUM(unparsed_calls > 0)",
    "first_s": "MIN(ended_s)",
    "last_s": "MAX(ended_s)",
}
# Rewards are means over inputs, as in an evaluation: an input counts once, whichever of its rollouts were lost. Of groups with a
# scored rollout, those that failed have no reward above 0, and those that are solved none below 1.
_OF_GROUPS = (
    "SELECT phase, step, AVG(score) AS reward, AVG(ok) AS reward_ok, COUNT(score) AS groups, SUM(low < high) AS groups_differ, "
    "SUM(high <= 0) AS groups_failed, SUM(low >= 1) AS groups_solved FROM (SELECT phase, step, AVG(score) AS score, "
    "MIN(score) AS low, MAX(score) AS high, AVG(CASE WHEN outcome = 'ok' THEN reward END) AS ok FROM rollouts{where} "
    "GROUP BY phase, step, grp) GROUP BY 1, 2"
)
QUANTILES = (0.1, 0.5, 0.9)
# The difference between the shown number of a training step and the file's: some trainers' files count from 0, not 1.
_COUNTED_FROM = "(SELECT COALESCE(MIN(step) = 0, 0) FROM rollouts WHERE phase = 'train')"
SHORTEST = 2  # characters of a text to look for


@dataclass(frozen=True, kw_only=True)
class Query:
    """Which rollouts, and in which order. None does not filter.

    ``number`` is the step as it is shown (``number_from``: from there on), ``step`` the file's. ``outcome`` is an outcome, or a
    cause as ``cause:agent``. ``tool`` is a name, or "" for no tool at all. ``cut`` and ``unparsed``: with a reply that was cut
    off, with a call that does not parse. ``gradient``: with a token that got a gradient. ``text`` is looked for in the dialogue
    and the error, without regard to case. ``sort`` is a column; rollouts that have no value there come last.
    Raises: ConfigError.
    """

    phase: str | None = None
    step: int | None = None
    number: int | None = None
    number_from: int | None = None
    group: str | None = None
    input: str | None = None
    outcome: str | None = None
    stop: str | None = None
    error: str | None = None
    tool: str | None = None
    text: str | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    tokens_from: int | None = None
    tokens_to: int | None = None
    usable: bool | None = None
    gradient: bool | None = None
    cut: bool | None = None
    unparsed: bool | None = None
    sort: str = "id"
    descending: bool = False

    def __post_init__(self) -> None:
        if self.sort not in SORTED_BY:
            raise ConfigError(f"rollouts cannot be sorted by {self.sort!r}; there are {', '.join(sorted(SORTED_BY))}")
        if self.text and len(self.text) < SHORTEST:
            raise ConfigError(f"a text to look for has at least {SHORTEST} characters, got {self.text!r}")

    def sql(self) -> tuple[str, list[Any]]:
        """Condition and its values."""
        kind, _, cause = (self.outcome or "").partition(":")
        ends = ("cause = ?", cause) if kind == "cause" and cause else ("outcome = ?", self.outcome)
        conditions: tuple[tuple[str, Any], ...] = (
            *(("phase = ?", self.phase), ("step = ?", self.step), ("grp = ?", self.group), ends),
            (f"step + (phase = 'train') * {_COUNTED_FROM} = ?", self.number),
            (f"step + (phase = 'train') * {_COUNTED_FROM} >= ?", self.number_from),
            *(("input_key = ?", self.input), ("stop = ?", self.stop), ("error = ?", self.error)),
            *(("reward >= ?", self.reward_from), ("reward <= ?", self.reward_to)),
            *(("sampled_tokens >= ?", self.tokens_from), ("sampled_tokens <= ?", self.tokens_to)),
            ("(mask_reason IS NULL) = ?", self.usable),
            ("(mask_reason IS NULL AND COALESCE(gradient_tokens, 0) > 0) = ?", self.gradient),
            ("(COALESCE(cut_calls, 0) > 0) = ?", self.cut),
            ("(COALESCE(unparsed_calls, 0) > 0) = ?", self.unparsed),
            ("id IN (SELECT rollout FROM tools WHERE name = ?)", self.tool or None),
            ("tool_calls = ?", 0 if self.tool == "" else None),
            _search(self.text or ""),
        )
        given = [(condition, value) for condition, value in conditions if value is not None]
        where = " AND ".join(condition for condition, _ in given)
        return (f" WHERE {where}" if where else ""), [value for _, value in given]

    def order(self) -> str:
        direction = "DESC" if self.descending else "ASC"
        if self.sort == "id":
            return f"ORDER BY id {direction}"
        return f"ORDER BY {self.sort} IS NULL, {self.sort} {direction}, id {direction}"


def _search(text: str) -> tuple[str, str | None]:
    """Return the condition and the value of a search. The index has all sequences of three characters."""
    found = "id IN (SELECT rollout FROM search JOIN searched ON document = search.rowid WHERE search MATCH %s)"
    text = text.replace("\0", " ")
    if len(text) >= 3:
        return found % "?", '"{}"'.format(text.replace('"', '""'))
    any_of = "SELECT COALESCE(GROUP_CONCAT('\"' || REPLACE(term, '\"', '\"\"') || '\"', ' OR '), '\"\"') "
    any_of += "FROM search_terms, (SELECT ? AS start) WHERE term >= start AND term < start || CHAR(1114111)"
    return found % f"({any_of})", text.lower() or None


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
        return self.rows(self.ids(query or Query(), offset=offset, limit=limit))

    def ids(self, query: Query, *, offset: int = 0, limit: int = -1) -> list[int]:
        """The ids of the rollouts that fit, in order."""
        where, values = self._where(query)
        sql = f"SELECT id FROM rollouts{where} {query.order()} LIMIT ? OFFSET ?"
        return [row[0] for row in self._all(sql, (*values, limit, offset))]

    def total(self, query: Query) -> int:
        """How many fit."""
        where, values = self._where(query)
        return int(self._all(f"SELECT COUNT(*) FROM rollouts{where}", values)[0][0])

    def _where(self, query: Query) -> tuple[str, list[Any]]:
        if query.text and not searchable(self._database):
            raise ConfigError(
                f"the texts of {self.name} cannot be searched: an older version, or one of SQLite, wrote the run"
            )
        return query.sql()

    def rows(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Rows by id, in the given order."""
        found = {row["id"]: dict(row) for row in self._of(f"SELECT {', '.join(LISTED)} FROM rollouts WHERE id", ids)}
        for row in self._of("SELECT rollout, name, calls FROM tools WHERE rollout", ids):
            found[row["rollout"]].setdefault("tools", {})[row["name"]] = row["calls"]
        counted_from = self.counted_from()
        for listed in found.values():
            listed["at"], listed["number"] = _place(listed, counted_from)
        return [found[i] for i in ids if i in found]

    def counted_from(self) -> int:
        """The difference between the shown number of a training step and the file's."""
        return int(self._all(f"SELECT {_COUNTED_FROM}")[0][0])

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

    def _counts(self, where: str = "") -> list[sqlite3.Row]:
        """How many rollouts by phase, step, outcome, cause and stop, in the order of the run."""
        columns = "phase, step, outcome, cause, stop"
        sql = f"SELECT {columns}, COUNT(*) AS n FROM rollouts{where} GROUP BY {columns} ORDER BY MIN(id)"
        return self._all(sql)

    def facets(self) -> dict[str, Any]:
        """The values to filter by, with counts."""
        counts = self._counts()
        found: dict[str, Any] = {}
        for name in ("phase", "outcome", "cause", "stop"):
            found[name] = dict(_counted(counts, name).most_common())
        rows = self._all("SELECT name, COUNT(*) FROM tools GROUP BY 1 ORDER BY 2 DESC LIMIT 200")
        found["tool"] = dict(map(tuple, rows))
        steps = _counted(counts, "phase", "step")
        found["steps"] = [{"phase": phase, "step": step, "n": n} for (phase, step), n in steps.items()]
        found["counted_from"] = self.counted_from()
        return found

    def steps(self, *, last: int | None = None) -> list[dict[str, Any]]:
        """One entry per phase and step, in the order of the run: counts, means and spreads. A mean of nothing is None.

        ``last`` limits them to that many training steps, if the run has any.
        """
        where = ""
        if last is not None:
            which = "SELECT MAX(step) FROM rollouts WHERE phase = 'train'"
            if (newest := self._all(which)[0][0]) is not None:
                where = f" WHERE phase = 'train' AND step > {int(newest) - last}"
        columns = ", ".join(f"{sql} AS {name}" for name, sql in _OF_A_STEP.items())
        sql = f"SELECT phase, step, {columns} FROM rollouts{where} GROUP BY 1, 2 ORDER BY MIN(id)"
        steps, counted_from = [dict(row) for row in self._all(sql)], self.counted_from()
        groups = {(row["phase"], row["step"]): row for row in self._all(_OF_GROUPS.replace("{where}", where))}
        counts: dict[tuple[Any, Any], list[sqlite3.Row]] = {}
        for row in self._counts(where):
            counts.setdefault((row["phase"], row["step"]), []).append(row)
        scores: dict[tuple[Any, Any], list[float]] = {}
        for phase, number, score in self._all(f"SELECT phase, step, score FROM rollouts{where}"):
            if score is None:
                continue
            scores.setdefault((phase, number), []).append(score)
        for step in steps:
            mean, square = step.pop("score_mean"), step.pop("score_squares")
            place = (step["phase"], step["step"])
            step["reward_spread"] = None if square is None else max(0.0, square - mean**2) ** 0.5
            known = sorted(scores.get(place, ()))
            step["quantiles"] = [known[int(q * (len(known) - 1) + 0.5)] for q in QUANTILES] if known else None
            step |= dict(groups[place])
            for name in ("outcome", "cause", "stop"):
                step[f"{name}s"] = dict(_counted(counts.get(place, []), name))
            step["at"], step["number"] = _place(step, counted_from)
        return steps

    def group(self, rollout: int) -> list[int]:
        """The ids of all rollouts that are compared with this one, itself among them."""
        same = "SELECT b.id FROM rollouts a JOIN rollouts b ON a.phase = b.phase AND a.step IS b.step AND a.grp = b.grp"
        return [row[0] for row in self._all(f"{same} WHERE a.id = ? ORDER BY b.place, b.id LIMIT 512", (rollout,))]

    def places(self) -> list[tuple[int, str, int | None, str]]:
        """The id, phase, step and group of each rollout, in order."""
        return list(map(tuple, self._all("SELECT id, phase, step, grp FROM rollouts ORDER BY id")))

    def history(self, input_key: str | None) -> list[dict[str, Any]]:
        """The rollouts and the mean reward of an input in each phase and step, in the order of the run."""
        sql = "SELECT phase, step, COUNT(*) AS rollouts, AVG(score) AS reward, MIN(score) AS low, MAX(score) AS high, "
        sql += "MIN(id) AS first FROM rollouts WHERE input_key = ? GROUP BY 1, 2 ORDER BY MIN(id)"
        found, counted_from = [dict(row) for row in self._all(sql, (input_key,))], self.counted_from()
        for entry in found:
            entry["at"], entry["number"] = _place(entry, counted_from)
        return found

    def inputs(self, query: Query) -> dict[str, dict[str, Any]]:
        """The inputs (else the groups) of the rollouts that fit, by key: `rollouts`, `scores`, the mean `reward`, the `rate` of
        rewards of 1 or more, the reward of each step in `rewards`, the mean of `tokens`, and the id of the `first` rollout.
        """
        where, values = self._where(query)
        sql = f"SELECT COALESCE(input_key, grp), phase || step, id, score, sampled_tokens FROM rollouts{where} ORDER BY id"
        found: dict[str, dict[str, Any]] = {}
        for key, step, rollout, score, tokens in self._all(sql, values):
            entry = found.setdefault(key, {"rollouts": 0, "scores": [], "steps": {}, "sampled": [], "first": rollout})
            entry["rollouts"] += 1
            entry["sampled"] += [] if tokens is None else [tokens]
            if score is not None:
                entry["scores"].append(score)
                entry["steps"].setdefault(step, []).append(score)
        for entry in found.values():
            entry["reward"], entry["tokens"] = _mean(entry["scores"]), _mean(entry.pop("sampled"))
            entry["rate"] = _mean([score >= 1 for score in entry["scores"]])
            entry["rewards"] = [_mean(scores) for scores in entry.pop("steps").values()]
        return found

    def solved(self) -> dict[str, int]:
        """How many inputs of the training were never, sometimes and always solved, with a reward of 1 or more."""
        rates = (
            "SELECT AVG(score >= 1) AS r FROM rollouts WHERE phase = 'train' AND score IS NOT NULL GROUP BY input_key"
        )
        sql = f"SELECT TOTAL(r = 0), TOTAL(r > 0 AND r < 1), TOTAL(r = 1) FROM ({rates})"
        return dict(zip(("never", "sometimes", "always"), map(int, self._all(sql)[0]), strict=True))

    def failures(self, query: Query | None = None) -> list[dict[str, Any]]:
        """Failed rollouts by error, the most frequent first, with the first and last step and one rollout as an example."""
        where, values = self._where(query or Query())
        sql = "SELECT error, outcome, cause, COUNT(*) AS rollouts, MIN(step) AS first, MAX(step) AS last, MAX(id) AS example "
        sql += (
            f"FROM rollouts{where}{' AND' if where else ' WHERE'} outcome != 'ok' GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1"
        )
        return [dict(row) for row in self._all(f"{sql} LIMIT 100", values)]

    def tools(self) -> list[dict[str, Any]]:
        """Tools by name, the most used first: calls, errors, seconds, and the mean reward of rollouts with and without it."""
        sql = "SELECT name, SUM(calls) AS calls, COUNT(*) AS rollouts, SUM(errors) AS errors, SUM(seconds) AS seconds, "
        sql += "SUM(score) AS total, COUNT(score) AS scored FROM tools JOIN rollouts ON id = rollout GROUP BY 1 ORDER BY 2 DESC"
        [every] = self._all("SELECT SUM(score), COUNT(score) FROM rollouts")
        found = []
        for row in map(dict, self._all(f"{sql} LIMIT 200")):
            total, scored = row.pop("total"), row.pop("scored")
            others = every[1] - scored
            row["reward_with"] = total / scored if scored else None
            row["reward_without"] = (every[0] - (total or 0.0)) / others if others else None
            found.append(row)
        return found

    def numbers(self, query: Query) -> dict[str, dict[int, float]]:
        """The numbers that came with the reward, and ``reward``, by name and rollout."""
        where, values = self._where(query)
        chosen = f"SELECT id, reward FROM rollouts{where}"
        found: dict[str, dict[int, float]] = {"reward": {i: r for i, r in self._all(chosen, values) if r is not None}}
        for name, rollout, value in self._all(
            f"SELECT name, rollout, value FROM numbers JOIN ({chosen}) ON id = rollout", values
        ):
            found.setdefault(name, {})[rollout] = value
        return found

    def numbers_by(self, ids: Sequence[int]) -> dict[int, dict[str, float]]:
        """The numbers that came with the reward, by rollout."""
        found: dict[int, dict[str, float]] = {}
        for rollout, name, value in self._of("SELECT rollout, name, value FROM numbers WHERE rollout", ids):
            found.setdefault(rollout, {})[name] = value
        return found

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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _place(row: Mapping[str, Any], counted_from: int) -> tuple[str, int | None]:
    """Phase and step as people read them, and the step's number: `train 1` is the first, `eval 4` comes after four of them."""
    if row["step"] is None:
        return str(row["phase"]), None
    number = row["step"] + (counted_from if row["phase"] == "train" else 0)
    return f"{row['phase']} {number}", number


def _counted(rows: Iterable[sqlite3.Row], *names: str) -> Counter[Any]:
    """How many rollouts by these members of a row of counts; where the first is NULL, none."""
    counts: Counter[Any] = Counter()
    for row in rows:
        key = tuple(row[name] for name in names)
        if key[0] is not None:
            counts[key if len(names) > 1 else key[0]] += row["n"]
    return counts
