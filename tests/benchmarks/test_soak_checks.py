"""The checks of `benchmarks/soak.py` find what they are there for, in the files of a small run made up for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway.testing import END

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from soak_load import checks
from soak_load.stack import Measure
from soak_load.trainer import task_of
from soak_load.words import reward_of, text_of, tokens_of, turns_of

ROLLOUTS, STEP = 8, 4  # one step through the collection core, one with a ledger


class Run:
    """What a run leaves: the trainer's notes, ledgers, and what agents read. All is well until something is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[dict[str, Any]] = []
        self.seen: dict[str, list[str]] = {}
        self.ledger: list[dict[str, Any]] = []
        for n in range(ROLLOUTS):
            task, index = task_of(n // STEP, n % STEP)
            session = f"session-{n}"
            texts = [text_of(task, turn) for turn in range(turns_of(task))]
            ids = [[*tokens_of(task, turn), END] for turn in range(turns_of(task))]
            self.seen[session] = [json.dumps([turn, text]) for turn, text in enumerate(texts)]
            self.notes += [
                {"kind": "opened", "step": n // STEP, "sessions": [session]},
                {"kind": "captured", "session": session, "turns": [[t, True] for t in ids], "errors": 0},
                {"kind": "ended", "task": task, "index": index, "session": session, "outcome": "ok", "usable": True}
                | {"reward": reward_of(task)},
            ]
            if n >= STEP:
                where = {"session_id": session, "index": n - STEP, "input_id": task, "key": "k", "bucket": "b"}
                self.ledger += [{"event": "intent", **where}, {"event": "done", "outcome": "ok", **where}]

    def of(self, kind: str, n: int) -> dict[str, Any]:
        return [line for line in self.notes if line["kind"] == kind][n]

    def failed(self) -> list[str]:
        """Names of the checks that do not hold."""
        (self.folder / "seen").mkdir()
        for session, lines in self.seen.items():
            (self.folder / "seen" / session).write_text("".join(line + "\n" for line in lines))
        (self.folder / "outcomes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.notes))
        (self.folder / "ledger-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.ledger))
        found = checks.Found(self.folder, ROLLOUTS, STEP)
        return [one["name"] for one in (*checks.outcomes(found), *checks.turns(found)) if not one["ok"]]


def no_outcome(run: Run) -> None:
    run.notes.remove(run.of("ended", 1))


def two_outcomes(run: Run) -> None:
    run.notes.append(run.of("ended", 1) | {"session": "another", "outcome": "lost", "reward": None, "usable": False})


def another_outcome_in_the_ledger(run: Run) -> None:
    run.ledger[-1]["outcome"] = "lost"


def two_attempts_that_ended_ok(run: Run) -> None:
    run.ledger += [{**line, "session_id": "another", "attempt": 2} for line in run.ledger[-2:]]


def wrong_reward(run: Run) -> None:
    run.of("ended", 2)["reward"] += 1


def failure_of_reward_0(run: Run) -> None:
    run.of("ended", 2).update(outcome="lost", usable=False, reward=0.0)


def lost_turn(run: Run) -> None:
    run.of("ended", 2).update(outcome="lost", usable=False, reward=None)
    del run.of("captured", 2)["turns"][0]


def doubled_turn(run: Run) -> None:
    turns = run.of("captured", 2)["turns"]
    turns.append(turns[0])


def lost_record(run: Run) -> None:
    run.of("ended", 2).update(outcome="lost", usable=False, reward=None)
    run.notes.remove(run.of("captured", 2))


def other_tokens(run: Run) -> None:
    session = run.of("ended", 2)["session"]
    ids = run.of("captured", 2)["turns"][0][0]
    ids[0] += 1
    turn, _ = json.loads(run.seen[session][0])
    run.seen[session][0] = json.dumps([turn, " ".join(f"w{n}" for n in ids[:-1])])


FAULTS: list[tuple[Callable[[Run], None], str]] = [
    (no_outcome, "rollouts without an outcome"),
    (two_outcomes, "rollouts with two outcomes"),
    (another_outcome_in_the_ledger, "rollouts whose ledger has other than one last outcome"),
    (two_attempts_that_ended_ok, "rollouts whose ledger has other than one last outcome"),
    (wrong_reward, "ok with another reward than the input's"),
    (failure_of_reward_0, "failures that have a reward or are trained on"),
    (lost_turn, "sessions with such a reply that is not in the record"),
    (doubled_turn, "sessions with a turn that is there twice"),
    (lost_record, "sessions with such a reply that is not in the record"),
    (other_tokens, "ok with other turns or tokens than the input's"),
]


def test_a_run_in_which_all_is_well_passes(tmp_path: Path) -> None:
    assert Run(tmp_path).failed() == []


@pytest.mark.parametrize(("fault", "name"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_each_fault_fails_its_check(tmp_path: Path, fault: Callable[[Run], None], name: str) -> None:
    run = Run(tmp_path)
    fault(run)
    assert name in run.failed()


@pytest.mark.parametrize(("rss_mb", "files", "failing"), [(0.0, 0.0, 0), (0.5, 0.0, 2), (0.0, 0.4, 2)])
def test_what_grows_over_the_run_or_a_life_is_not_flat(rss_mb: float, files: float, failing: int) -> None:
    looks = [Measure(float(s), 1, 40 + rss_mb * s, round(20 + files * s)) for s in range(200)]
    rows, found = checks.flat({"gateway": looks}, 200.0)
    assert [row["span"] for row in rows] == ["run", "longest life"]
    assert sum(not one["ok"] for one in found) == failing
