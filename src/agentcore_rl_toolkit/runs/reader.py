"""Reads a run: lists by columns, one rollout by its parts."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .folder import ROLLOUTS, read_metrics
from .record import DETAIL, DIALOGUE, TOKENS, unpack
from .schema import COLUMNS, open_to_read
from .steps import mean, summarize

LISTED = ("id", *(name for name in COLUMNS if name not in ("tools", "numbers")))
SORTED_BY = frozenset(LISTED) - {"error"}
# The difference between the shown number of a training step and the file's: some trainers' files count from 0, not 1.
_COUNTED_FROM = "(SELECT COALESCE(MIN(step) = 0, 0) FROM rollouts WHERE phase = 'train')"
_NUMBER = f"step + (phase = 'train') * {_COUNTED_FROM}"
_PLACE = f"{_NUMBER} AS number, phase || COALESCE(' ' || ({_NUMBER}), '') AS at"
MOST_FAILURES = 100  # different ones
SHORTEST = 2  # characters of a text to look for: a Chinese one begins 70,000 sequences of three in 1.5 million


def _where(condition: str) -> Any:
    """Return a filter with its condition, in which the value has the filter's name."""
    return field(default=None, metadata={"where": condition})


@dataclass(frozen=True, kw_only=True)
class Query:
    """A selection of rollouts and its order. None does not filter.

    ``number`` is the step as it is shown (``number_from``: from there on), ``step`` the file's. ``outcome`` is an outcome, or a
    cause as ``cause:agent``. ``tool`` is a name, or "" for no tool at all. ``cut`` and ``unparsed``: with a reply that was cut
    off, with a call that does not parse. ``gradient``: with a token that got a gradient. ``text`` is looked for in the dialogue
    and the error, without regard to case. ``sort`` is a column; rollouts that have no value there come last.
    Raises: ConfigError.
    """

    phase: str | None = _where("phase = :phase")
    step: int | None = _where("step = :step")
    number: int | None = _where(f"{_NUMBER} = :number")
    number_from: int | None = _where(f"{_NUMBER} >= :number_from")
    group: str | None = _where("grp = :group")
    input: str | None = _where("(input_key = :input OR input_key IS NULL AND grp = :input)")
    outcome: str | None = _where("(outcome = :outcome OR 'cause:' || cause = :outcome)")
    stop: str | None = _where("stop = :stop")
    error: str | None = _where("SHAPE(error) = SHAPE(:error)")
    tool: str | None = _where(
        "(CASE :tool WHEN ' \"\": ' THEN tool_calls = 0 ELSE INSTR(' ' || SUBSTR(tools, 2), :tool) END)"
    )
    text: str | None = _where(
        "id IN (SELECT rollout FROM search JOIN searched ON document = search.rowid WHERE search MATCH :text)"
    )
    reward_from: float | None = _where("COALESCE(reward, score) >= :reward_from")
    reward_to: float | None = _where("COALESCE(reward, score) <= :reward_to")
    tokens_from: int | None = _where("sampled_tokens >= :tokens_from")
    tokens_to: int | None = _where("sampled_tokens <= :tokens_to")
    usable: bool | None = _where("(mask_reason IS NULL) = :usable")
    gradient: bool | None = _where("(mask_reason IS NULL AND COALESCE(gradient_tokens, 0) > 0) = :gradient")
    failed: bool | None = _where("(outcome != 'ok' OR cause IS NOT NULL) = :failed")
    cut: bool | None = _where("(COALESCE(cut_calls, 0) > 0) = :cut")
    unparsed: bool | None = _where("(COALESCE(unparsed_calls, 0) > 0) = :unparsed")
    sort: str = "id"
    descending: bool = False

    def __post_init__(self) -> None:
        if self.sort not in SORTED_BY:
            raise ConfigError(f"rollouts cannot be sorted by {self.sort!r}; there are {', '.join(sorted(SORTED_BY))}")
        if self.text and len(self.text) < SHORTEST:
            raise ConfigError(f"a text to look for has at least {SHORTEST} characters, got {self.text!r}")

    def values(self) -> dict[str, Any]:
        """Return the filters that are set. An empty text is none."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata}
        return {name: value for name, value in given.items() if value is not None and (name, value) != ("text", "")}

    def order(self) -> str:
        direction = "DESC" if self.descending else "ASC"
        if self.sort == "id":
            return f"ORDER BY id {direction}"
        return f"ORDER BY {self.sort} IS NULL, {self.sort} {direction}, id {direction}"


class RunReader(contextlib.AbstractContextManager["RunReader"]):
    """Reads a run, also while it is written. Raises: ConfigError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._database = open_to_read(folder / ROLLOUTS)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def close(self) -> None:
        self._database.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _all(self, sql: str, values: Any = ()) -> list[sqlite3.Row]:
        try:
            return self._database.execute(sql, values).fetchall()
        except (sqlite3.Error, OverflowError) as e:  # a damaged file; a number that SQLite does not have
            raise ConfigError(f"{self.folder / ROLLOUTS} cannot be read: {e}") from e

    # -- lists

    def rollouts(self, query: Query | None = None, *, offset: int = 0, limit: int = 200) -> list[dict[str, Any]]:
        """Return the rows of the rollouts that match, without their parts."""
        return self.rows(self.ids(query or Query(), offset=offset, limit=limit))

    def ids(self, query: Query, *, offset: int = 0, limit: int = -1) -> list[int]:
        """Return the ids of the rollouts that match, in order."""
        tail = f"{query.order()} LIMIT :limit OFFSET :offset"
        return [row[0] for row in self._select("id", query, tail, limit=limit, offset=offset)]

    def count(self, query: Query | None = None) -> int:
        """Return the number of rollouts that match."""
        return int(self._select("COUNT(*)", query or Query())[0][0])

    def _select(self, columns: str, query: Query, tail: str = "", **more: int) -> list[sqlite3.Row]:
        """Select columns of the rollouts that match."""
        values = query.values()
        conditions = [Query.__dataclass_fields__[name].metadata["where"] for name in values]
        if "tool" in values:
            values["tool"] = f" {json.dumps(values['tool'])}: "
        if "text" in values:
            values["text"] = self._match(values["text"].replace("\0", " "))
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return self._all(f"SELECT {columns} FROM rollouts{where} {tail}", {**values, **more})

    def _match(self, text: str) -> str:
        """Convert a text for the index of texts, which has all sequences of three characters, each in its folded case."""
        found, low = [text], "".join(c.casefold() if len(c.casefold()) == 1 else c for c in text)
        if len(text) < 3:
            terms = "SELECT term FROM search_terms WHERE term >= ? AND term < ? || CHAR(1114111)"
            found = [row[0] for row in self._all(terms, (low, low))]
        return " OR ".join('"{}"'.format(term.replace('"', '""')) for term in found) or '""'

    def rows(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows by id, in the given order, each with its calls by tool and the numbers that came with its reward.

        ``number`` is that of the step as it is shown, ``at`` is for people: `train 1` is the first, `eval 4` is after step 4.
        """
        columns = f"{', '.join(LISTED)}, {_PLACE}, tools, numbers"
        found = {row["id"]: dict(row) for row in self._of(f"SELECT {columns} FROM rollouts WHERE id", ids)}
        for row in found.values():
            row["tools"] = {name: facts[0] for name, facts in json.loads(row["tools"] or "{}").items()}
            row["numbers"] = json.loads(row["numbers"] or "{}")
        return [found[i] for i in ids if i in found]

    def _of(self, select: str, ids: Sequence[int]) -> list[sqlite3.Row]:
        """Return the rows of a selection that ends in a column of ids, in parts that SQLite accepts."""
        parts = [ids[start : start + 500] for start in range(0, len(ids), 500)]
        return [row for part in parts for row in self._all(f"{select} IN ({','.join('?' * len(part))})", part)]

    # -- one rollout

    def find(self, name: str | int) -> int | None:
        """Return the id of a rollout by id or session id."""
        found = self._all("SELECT id FROM rollouts WHERE id = ? OR session_id = ?", (str(name), str(name)))
        return int(found[0][0]) if found else None

    def rollout(self, rollout: int) -> dict[str, Any] | None:
        """Return everything kept of one rollout: its row, ``detail``, ``dialogue`` and ``sequences`` (encoded).

        A part is None if it was not kept.
        """
        rows = self.rows([rollout])
        if not rows:
            return None
        found = self._all("SELECT name, data FROM parts WHERE rollout = ?", (rollout,))
        parts = {row["name"]: unpack(row["data"]) for row in found}
        named = {"detail": DETAIL, "dialogue": DIALOGUE, "sequences": TOKENS}
        return {**rows[0], **{name: parts.get(part) for name, part in named.items()}}

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the texts of tokens, if they are known."""
        return dict(map(tuple, self._of("SELECT id, text FROM token_texts WHERE id", sorted(set(ids)))))

    # -- the whole run

    def steps(self) -> list[dict[str, Any]]:
        """Return the `summarize`d steps and evaluations in the order of the run, each with its ``at`` and ``number``."""
        kept = {(phase, step): text for phase, step, text in self._all("SELECT phase, step, summary FROM steps")}
        every = self._all(f"SELECT phase, step, {_PLACE} FROM (SELECT DISTINCT phase, step FROM rollouts)")
        found = []
        for phase, step, *place in every:
            if summary := json.loads(kept.get((phase, step), "{}")) or summarize(self._all, phase, step):
                found.append(summary | dict(zip(("number", "at"), place, strict=True)))
        return sorted(found, key=lambda step: step["first"])

    def group(self, rollout: int) -> list[int]:
        """Return the ids of all rollouts that are compared with this one, including itself."""
        same = "SELECT b.id FROM rollouts a JOIN rollouts b ON a.phase = b.phase AND a.step IS b.step AND a.grp = b.grp"
        return [row[0] for row in self._all(f"{same} WHERE a.id = ? ORDER BY b.place, b.id LIMIT 512", (rollout,))]

    def history(self, input_key: str | None) -> list[dict[str, Any]]:
        """Return the rollouts and the mean reward of an input in each phase and step, in the order of the run."""
        sql = f"SELECT phase, step, {_PLACE}, COUNT(*) AS rollouts, AVG(score) AS reward, MIN(score) AS low, MAX(score) AS high, "
        sql += "MIN(id) AS first FROM rollouts WHERE input_key = ? GROUP BY phase, step ORDER BY MIN(id)"
        return [dict(row) for row in self._all(sql, (input_key,))]

    def inputs(self, query: Query) -> dict[str, dict[str, Any]]:
        """Return the inputs (or the groups) of the rollouts that match, by key.

        Each has `rollouts`, `scores`, the mean `reward`, the `rate` of rewards of 1 or more, the reward of each step in
        `rewards`, the mean of `tokens`, the id of the `first` rollout, and the beginning of its input as `text`.
        """
        columns = "COALESCE(input_key, grp), phase || step, id, score, sampled_tokens, input"
        found: dict[str, dict[str, Any]] = {}
        for key, step, rollout, score, tokens, text in self._select(columns, query, "ORDER BY id"):
            first = {"rollouts": 0, "scores": [], "steps": {}, "sampled": [], "first": rollout, "text": text}
            entry = found.setdefault(key, first)
            entry["rollouts"] += 1
            entry["sampled"] += [] if tokens is None else [tokens]
            if score is not None:
                entry["scores"].append(score)
                entry["steps"].setdefault(step, []).append(score)
        for entry in found.values():
            entry["reward"], entry["tokens"] = mean(entry["scores"]), mean(entry.pop("sampled"))
            entry["rate"] = mean([score >= 1 for score in entry["scores"]])
            entry["rewards"] = [mean(scores) for scores in entry.pop("steps").values()]
        return found

    def solved(self) -> dict[str, int]:
        """Count the inputs of the training that were never, sometimes and always solved (a reward of 1 or more)."""
        rates = "SELECT AVG(score >= 1) AS r FROM rollouts WHERE phase = 'train' AND score IS NOT NULL"
        sql = "SELECT TOTAL(r = 0), TOTAL(r > 0 AND r < 1), TOTAL(r = 1) "
        sql += f"FROM ({rates} GROUP BY COALESCE(input_key, grp))"
        return dict(zip(("never", "sometimes", "always"), map(int, self._all(sql)[0]), strict=True))

    def failures(self, query: Query | None = None) -> list[dict[str, Any]]:
        """Return failed rollouts by `shape_of` their error, the most frequent first, with their steps and an example."""
        columns = f"SHAPE(error) AS shape, outcome, cause, COUNT(*) AS rollouts, MIN({_NUMBER}) AS first, "
        columns += f"MAX({_NUMBER}) AS last, MAX(id) AS example, error"
        failed = replace(query or Query(), failed=True)
        tail = f"GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1 LIMIT {MOST_FAILURES}"
        return [dict(row) for row in self._select(columns, failed, tail)]

    def numbers(self, query: Query) -> dict[str, dict[int, float]]:
        """Return the numbers that came with the reward, and ``reward``, by name and rollout."""
        found: dict[str, dict[int, float]] = {"reward": {}}
        for rollout, reward, numbers in self._select("id, reward, numbers", query):
            for name, value in {**json.loads(numbers or "{}"), "reward": reward}.items():
                if value is not None:
                    found.setdefault(name, {})[rollout] = value
        return found

    def number_names(self) -> list[str]:
        """Return the names of all numbers that came with rewards."""
        return [row[0] for row in self._all("SELECT DISTINCT key FROM rollouts, JSON_EACH(numbers) ORDER BY key")]

    def not_kept(self) -> int:
        """Return the number of rollouts that the writer could not keep."""
        return int(self._all("SELECT TOTAL(value) FROM run")[0][0])

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder)
