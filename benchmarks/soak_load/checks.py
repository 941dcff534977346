"""What must hold after a soak, from the files that it left: one row per promise."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.client.ledger import attempts_of, parse_lines
from agentcore_rl_toolkit.gateway.testing import END

from .stack import Measure
from .trainer import read_notes, task_of
from .words import reward_of, tokens_of, turns_of

RSS_TOLERANCE, RSS_SLACK_MB, FILES_SLACK = 1.25, 24.0, 48
Check = dict[str, Any]


def check(name: str, value: float | None, target: float, ok: bool | None = None, *, least: bool = False) -> Check:
    if ok is None:
        ok = value is not None and (value >= target if least else value <= target)
    return {"name": name, "value": value, "target": target, "ok": ok}


class Found:
    """The files of a run, read."""

    def __init__(self, folder: Path, rollouts: int, step: int) -> None:
        self.folder, self.rollouts, self.step = folder, rollouts, step
        self.ended: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
        self.captures: dict[str, list[tuple[list[int], bool]]] = {}
        self.opened: set[str] = set()
        for line in read_notes(folder / "outcomes.jsonl"):
            if line["kind"] == "ended":
                self.ended[line["task"], line["index"]].append(line)
            elif line["kind"] == "captured":
                self.captures[line["session"]] = [(ids, trainable) for ids, trainable in line["turns"]]
            elif line["kind"] == "opened":
                self.opened.update(line["sessions"])
        self.expected = {task_of(n // step, n % step) for n in range(rollouts)}
        self.seen = {path.name: _seen(path) for path in (folder / "seen").iterdir()}

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(lines[0]["outcome"] for lines in self.ended.values())

    def explain(self, title: str, items: Sequence[Any]) -> int:
        for item in items[:5]:
            print(f"  {title}: {item}")
        return len(items)


def _seen(path: Path) -> list[list[int]]:
    """The replies that the agent of a session read whole, as tokens."""
    found = []
    for raw in path.read_bytes().splitlines():
        try:
            _, text = json.loads(raw)
        except ValueError:
            continue
        found.append([*(int(word[1:]) for word in text.split()), END])
    return found


def outcomes(found: Found) -> list[Check]:
    missing = sorted(found.expected - found.ended.keys())
    foreign = sorted(found.ended.keys() - found.expected)
    endings = {
        key: {(line["outcome"], line["session"], line["reward"]) for line in lines}
        for key, lines in found.ended.items()
    }
    several = [(key, sorted(map(str, seen))) for key, seen in endings.items() if len(seen) > 1]
    wrong, counted = [], []
    for (task, _), lines in found.ended.items():
        for line in lines:
            if line["outcome"] == "ok" and line["reward"] != reward_of(task):
                wrong.append((line, reward_of(task)))
            if line["outcome"] != "ok" and (line["usable"] or line["reward"] is not None):
                counted.append(line)
    return [
        check("rollouts without an outcome", found.explain("without outcome", missing), 0),
        check("outcomes of rollouts that nobody asked for", found.explain("foreign", foreign), 0),
        check("rollouts with two outcomes", found.explain("two outcomes", several), 0),
        check("rollouts whose ledger has other than one last outcome", found.explain("ledger", _ledgers(found)), 0),
        check("ok with another reward than the input's", found.explain("wrong reward", wrong), 0),
        check("failures that have a reward or are trained on", found.explain("rewarded failure", counted), 0),
        check("share of rollouts that ended ok, %", 100 * found.outcomes["ok"] / found.rollouts, 75, least=True),
    ]


def _ledgers(found: Found) -> list[Any]:
    """Rows of the ledgers whose last attempt is not the one with the outcome that was handed out."""
    wrong: list[Any] = []
    for step in range(1, (found.rollouts + found.step - 1) // found.step, 2):
        path = found.folder / f"ledger-{step}.jsonl"
        by_row: dict[int, list[Any]] = defaultdict(list)
        for attempt in attempts_of(parse_lines(path.read_bytes() if path.exists() else b"")).values():
            if attempt.index is not None:
                by_row[attempt.index].append(attempt)
        for place in range(min(found.step, found.rollouts - step * found.step)):
            task, index = task_of(step, place)
            attempts = by_row.get(place, [])
            endings = found.ended.get((task, index))
            good = [a for a in attempts if a.outcome is not None and str(a.outcome) == "ok"]
            last = max(attempts, key=lambda a: a.attempt, default=None)
            if last is None or endings is None or str(last.outcome) != endings[-1]["outcome"] or len(good) > 1:
                wrong.append((task, [(a.attempt, str(a.outcome), a.session_id) for a in attempts], endings))
    return wrong


def turns(found: Found) -> list[Check]:
    ok_sessions = {
        line["session"]: key[0] for key, lines in found.ended.items() for line in lines if line["outcome"] == "ok"
    }
    lost, doubled, extra, different = [], [], [], []
    acknowledged = 0
    for session in found.opened:
        recorded = [ids for ids, trainable in found.captures.get(session, []) if trainable]
        seen = found.seen.get(session, [])
        acknowledged += len(seen)
        if any(ids not in recorded for ids in seen):
            lost.append((session, session in found.captures, seen, recorded))
        if len({tuple(ids) for ids in recorded}) != len(recorded):
            doubled.append((session, recorded))
        # One that was killed may have died between reading a reply and noting it.
        if len(recorded) - len(seen) > (0 if session in ok_sessions else 1):
            extra.append((session, seen, recorded))
        task = ok_sessions.get(session)
        if task is not None and recorded != [[*tokens_of(task, turn), END] for turn in range(turns_of(task))]:
            different.append((session, task, recorded))
    unread = sorted(set(found.seen) - found.opened)
    return [
        check("replies that agents read whole", acknowledged, found.rollouts, least=True),
        check("sessions with such a reply that is not in the record", found.explain("lost turn", lost), 0),
        check("sessions with a turn that is there twice", found.explain("doubled turn", doubled), 0),
        check("sessions with turns that no agent read", found.explain("turn nobody read", extra), 0),
        check("ok with other turns or tokens than the input's", found.explain("other turns", different), 0),
        check("agents that ran in sessions nobody opened", found.explain("unknown session", unread), 0),
    ]


def flat(measures: Mapping[str, Sequence[Measure]], whole_s: float) -> tuple[list[dict[str, Any]], list[Check]]:
    """Medians of the first and the last quarter of the run, and of the longest life of each process."""
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    for role, all_looks in measures.items():
        lives: dict[int, list[Measure]] = defaultdict(list)
        for look in all_looks:
            lives[look.pid].append(look)
        longest = max(lives.values(), key=len)
        # The first seconds of a life are its start: modules are loaded, connections made.
        settled = [
            look for life in lives.values() for look in life if look.at_s - life[0].at_s >= min(5.0, whole_s / 20)
        ]
        for span, looks in (("run", settled), ("longest life", longest[len(longest) // 10 :])):
            quarter = _quarters(looks)
            if quarter is None:
                continue
            first, last = quarter
            row: dict[str, Any] = {"process": role, "span": span, "seconds": looks[-1].at_s - looks[0].at_s}
            for what, slack in (("rss_mb", RSS_SLACK_MB), ("files", FILES_SLACK)):
                a, b = (statistics.median(getattr(look, what) for look in part) for part in (first, last))
                limit = max(RSS_TOLERANCE * a, a + slack)
                row |= {f"{what} first": a, f"{what} last": b}
                checks.append(check(f"{role}, {span}: {what.replace('_mb', ', MB')}, last quarter", b, round(limit, 1)))
            rows.append(row)
    return rows, checks


def _quarters(looks: Sequence[Measure]) -> tuple[list[Measure], list[Measure]] | None:
    if len(looks) < 8:
        return None
    begin, end = looks[0].at_s, looks[-1].at_s
    first = [look for look in looks if look.at_s <= begin + (end - begin) / 4]
    last = [look for look in looks if look.at_s >= end - (end - begin) / 4]
    return (first, last) if first and last else None
