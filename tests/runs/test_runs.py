"""A run's folder: appended as it happens, read one rollout at a time, bounded, whole after a crash."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.client import BatchItem
from agentcore_rl_toolkit.client.evaluation import summarize
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.runs import (
    Query,
    Rollout,
    RunReader,
    RunWriter,
    TokenSequence,
    TokenTexts,
    find_run,
    find_runs,
    locked,
    messages_df,
    rollouts_df,
    write_config,
    writer,
)
from agentcore_rl_toolkit.runs.demonstrations import write_rows
from agentcore_rl_toolkit.runs.folder import METRICS, ROLLOUTS, append_event, make_folder, read_metrics, status
from agentcore_rl_toolkit.runs.frames import message_rows, rollout_rows, step_rows
from agentcore_rl_toolkit.runs.schema import VERSION
from agentcore_rl_toolkit.runs.tables import Tables


def sequence(n: int = 6, **facts: Any) -> TokenSequence:
    values: list[float | None] = [None, None, *(-0.25 * i for i in range(n - 2))]
    facts = {"logprobs": values, "versions": [None, None, *[3] * (n - 2)], "prompt_length": 2, **facts}
    return TokenSequence(ids=list(range(10, 10 + n)), mask=[0, 0, *[1] * (n - 2)], **facts)


def rollout(n: int, **facts: Any) -> Rollout:
    dialogue = [
        {"role": "user", "content": f"question {n}"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "calculator", "arguments": "{}"}}]},
        {"role": "assistant", "content": f"100% of answer_{n}"},
    ]
    defaults = {"phase": "train", "step": n // 4, "group": f"g{n // 2}", "input_key": f"k{n % 4}", "place": n % 2}
    defaults |= {"outcome": "ok", "reward": float(n % 2), "score": float(n % 2), "dialogue": dialogue}
    defaults |= {"sequences": [sequence()], "fidelity": {"turns": 2, "sampled_tokens": 4, "trained_tokens": 4}}
    return Rollout(session_id=f"session-{n}", **{**defaults, **facts})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    with RunWriter(folder) as writer:
        for n in range(16):
            writer.rollout(rollout(n))
        failed = {"outcome": "agent_error", "cause": "agent", "mask_reason": "outcome", "reward": None, "score": 0.0}
        plain = {
            "dialogue": [],
            "sequences": None,
            "fidelity": None,
            "error": "ValueError: no lamp",
            "traceback": "Trace",
        }
        writer.rollout(rollout(16, **failed, **plain))
        writer.event("step", {"step": 0, "reward": 0.5})
    return folder


def test_a_rollout_comes_back_as_it_was_and_absent_is_not_zero(run: Path) -> None:
    with RunReader(run) as reader:
        found = reader.rollout(reader.find("session-3"))
        assert found is not None
        assert (found["step"], found["grp"], found["reward"], found["tools"]) == (0, "g1", 1.0, {"calculator": 1})
        assert found["dialogue"][0]["content"] == "question 3"
        [tokens] = map(TokenSequence.decoded, found["sequences"])
        assert tokens == sequence()
        assert (found["logprob_min"], found["logprob_mean"]) == (-0.75, -0.375)
        assert (found["gap_max"], found["entropy_mean"], found["advantage"], found["staleness"]) == (None,) * 4
        failed = reader.rollout(reader.find("session-16"))
        assert failed is not None
        assert (failed["reward"], failed["sampled_tokens"], failed["logprob_min"]) == (None, None, None)
        assert failed["sequences"] is None
        assert failed["detail"]["traceback"] == "Trace"
        assert reader.find("session-") is None


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (Query(step=1), [4, 5, 6, 7]),
        (Query(outcome="agent_error"), [16]),
        (Query(outcome="cause:agent"), [16]),
        (Query(usable=False), [16]),
        (Query(tool=""), [16]),
        (Query(tool="calculator", step=0), [0, 1, 2, 3]),
        (Query(text="QUESTION 1", step=0), [1]),
        (Query(text="0% OF answer_2"), [2]),  # % and _ are not patterns
        (Query(text="no lamp"), [16]),
        (Query(reward_from=0.5, step=0), [1, 3]),
        (Query(group="g3"), [6, 7]),
        (Query(step=0, sort="reward", descending=True), [3, 1, 2, 0]),
        (Query(step=4, sort="reward"), [16]),
        (Query(tokens_from=5), []),
        (Query(number=2), [4, 5, 6, 7]),  # as it is shown
        (Query(number_from=4, descending=True), [16, 15, 14, 13, 12]),
        (Query(input="k3", usable=True), [3, 7, 11, 15]),
        (Query(stop="agent_error"), [16]),
        (Query(error="ValueError: no lamp"), [16]),
        (Query(text="n 1", number=1), [1]),
        (Query(text="_2", number=1), [2]),  # two characters, at the end of a text
        (Query(text="zz"), []),
        (Query(text='"%'), []),
    ],
)
def test_filters_and_orders(run: Path, query: Query, expected: list[int]) -> None:
    with RunReader(run) as reader:
        rows = reader.rollouts(query)
        assert [int(r["session_id"].removeprefix("session-")) for r in rows] == expected
        assert reader.count(query) == len(expected)


def test_the_whole_text_is_searched_also_after_a_rollout_was_written_again(tmp_path: Path) -> None:
    long = [{"role": "user", "content": f"{'a lamp ' * 1000} 世界 needle-7 {'a shop ' * 1000}"}]
    with RunWriter(tmp_path) as writer:
        for n in range(3):
            writer.rollout(rollout(n, dialogue=long))
        writer.rollout(rollout(1, dialogue=[{"role": "user", "content": "nothing"}]))
    with RunReader(tmp_path) as reader:
        for text in ("NEEDLE-7", "世界", "世界 need", "edle"):
            assert reader.ids(Query(text=text)) == [1, 3], text
        assert reader.ids(Query(text="nothing")) == [2]
    with pytest.raises(ConfigError, match="at least 2 characters"):
        Query(text="x")


def test_a_tool_may_have_any_name_and_an_empty_text_is_no_filter(tmp_path: Path) -> None:
    def calling(*names: str) -> list[dict[str, Any]]:
        calls = [{"function": {"name": name, "arguments": "{}"}} for name in names]
        return [{"role": "assistant", "tool_calls": calls}]

    with RunWriter(tmp_path) as writer:
        for n, names in enumerate((("calls",), ('say "hi"', "世界"), ("search", "search"), ())):
            writer.rollout(rollout(n, step=0, dialogue=calling(*names)))
    with RunReader(tmp_path) as reader:
        for tool, expected in (
            ("calls", [1]),
            ('say "hi"', [2]),
            ("世界", [2]),
            ("search", [3]),
            ("sea", []),
            ("", [4]),
        ):
            assert reader.ids(Query(tool=tool)) == expected, tool
        assert reader.count(Query(text="")) == 4
        [step] = reader.steps()
        assert step["tools"]["search"] == {
            "calls": 2,
            "errors": 0,
            "seconds": 0.0,
            "rollouts": 1,
            "score": 0.0,
            "scored": 1,
        }


def test_a_step_is_summarized_when_it_has_ended_and_again_after_a_change(tmp_path: Path) -> None:
    def kept() -> list[int]:
        database = sqlite3.connect(tmp_path / ROLLOUTS)
        found = [step for (step,) in database.execute("SELECT step FROM steps ORDER BY step")]
        database.close()
        return found

    with RunWriter(tmp_path) as writer, RunReader(tmp_path) as reader:
        written = ((0, [], [1]), (1, [0], [1, 1]), (2, [0, 1], [1, 1, 1]), (0, [1, 2], [2, 1, 1]))
        for n, (step, summarized, rollouts) in enumerate(written):  # the last one changes step 0
            writer.rollout(rollout(n, step=step))
            assert writer.flush()
            assert kept() == summarized
            assert [s["rollouts"] for s in reader.steps()] == rollouts
        writer.annotate("session-1", advantage=0.5)
        assert writer.flush()
        assert kept() == [0, 2]
        assert [s["gradient_tokens"] for s in reader.steps()] == [None, 4, None]
        writer.forget(from_step=2)
    assert kept() == [0, 1]


def test_tokens_are_sampled_usable_and_with_gradient(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for n, (advantage, mask_reason) in enumerate(((1.0, None), (0.0, None), (1.0, "stale"), (None, "outcome"))):
            writer.rollout(rollout(n, mask_reason=mask_reason))
            if advantage is not None:
                writer.annotate(f"session-{n}", advantage=advantage)
        writer.rollout(rollout(9, phase="after", step=None))  # an evaluation trains nothing
        turns = [None, None, 0.5, 0.5, 0.0, -1.0]
        writer.rollout(rollout(4, step=0))
        writer.annotate("session-4", advantage=0.0, gradient_tokens=3, sequences={0: {"advantages": turns}})
    with RunReader(tmp_path) as reader:
        train, after = reader.steps()
        assert [train[f"{n}_tokens"] for n in ("sampled", "usable", "gradient")] == [20, 12, 7]
        assert [after[f"{n}_tokens"] for n in ("sampled", "usable", "gradient")] == [4, 4, None]
        found = reader.rollout(reader.find("session-4"))
        assert found is not None
        [tokens] = map(TokenSequence.decoded, found["sequences"])
        assert tokens.advantages == turns
        assert reader.ids(Query(gradient=True)) == [1, found["id"]]


def test_a_query_takes_columns_only() -> None:
    with pytest.raises(ConfigError, match="sorted"):
        Query(sort="id; DROP TABLE rollouts")


def test_steps_have_means_spreads_and_counts(run: Path) -> None:
    with RunReader(run) as reader:
        steps = {s["step"]: s for s in reader.steps()}
        assert (steps[0]["reward"], steps[0]["outcomes"]) == (0.5, {"ok": 4})
        assert (steps[4]["reward"], steps[4]["reward_ok"], steps[4]["causes"]) == (0.0, None, {"agent": 1})
        assert len(reader.group(reader.find("session-2"))) == 2
        assert reader.metrics() == [{"event": "step", "step": 0, "reward": 0.5}]


def test_rewards_of_a_step_are_means_over_inputs_as_in_an_evaluation(tmp_path: Path) -> None:
    items, folder = [], tmp_path / "run"
    with RunWriter(folder) as writer:
        for n, (name, reward) in enumerate((("a", 1.0), ("a", 1.0), ("a", 1.0), ("b", 0.0), ("b", None))):
            outcome = Outcome.LOST if reward is None else Outcome.OK
            facts = {"group": name, "outcome": outcome, "reward": reward, "score": reward}
            writer.rollout(Rollout(session_id=str(n), phase="eval", **facts))
            record = {"rewards": reward}
            items.append(BatchItem(success=reward is not None, index=n, input_id=name, result=record, outcome=outcome))
    with RunReader(folder) as reader:
        [step] = reader.steps()
    assert (step["reward"], step["reward_ok"], step["reward_spread"], step["scored"]) == (0.5, 0.5, 0.5, 4)
    assert summarize(items, 1.0).mean == 0.5


def test_what_the_trainer_finds_out_is_added(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.rollout(rollout(0, step=None))
        writer.annotate("session-0", advantage=-1.5, step=7)
        theirs = [None, None, -0.1, -0.25, -0.5, -0.75]
        writer.annotate("session-0", sequences={0: {"trainer_logprobs": theirs, "updates": 0}})
        writer.annotate("session-unknown", advantage=1.0)
        assert writer.flush()
        with RunReader(tmp_path / "run") as reader:  # while the run goes on
            found = reader.rollout(1)
    assert found is not None
    assert (found["advantage"], found["step"]) == (-1.5, 7)
    assert found["gap_max"] == pytest.approx(0.1)
    assert found["sequences"][0]["updates"] == 0


def test_a_resumed_run_appends_and_forgets_what_it_repeats(tmp_path: Path) -> None:
    for start in (0, 8):
        with RunWriter(tmp_path) as writer:
            writer.forget(from_step=2, phases=["after"])
            for n in range(start, start + 12):
                writer.rollout(rollout(n))
    with RunReader(tmp_path) as reader:
        assert [s["rollouts"] for s in reader.steps()] == [4, 4, 4, 4, 4]
        assert reader.count() == 20


def test_the_last_evaluation_of_a_continued_run_joins_the_evaluation_of_its_step(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for n, phase in enumerate(("eval", "after")):
            writer.rollout(rollout(n, phase=phase, step=2))
        assert writer.flush()
        writer.rollout(rollout(2, phase="train", step=1))  # the summaries of the steps before are kept now
        assert writer.flush()
        writer.forget(evaluations_from=3)
    with RunReader(tmp_path) as reader:
        assert [(s["phase"], s["rollouts"]) for s in reader.steps()] == [("eval", 2), ("train", 1)]


def test_a_killed_process_leaves_a_whole_run_that_is_gone_on_with(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\nfrom test_runs import *\n"
        "writer = RunWriter(Path(sys.argv[1]))\n"
        "for n in range(8): writer.rollout(rollout(n))\n"
        "writer.flush(); print('written', flush=True)\n"
        "while True: writer.rollout(rollout(9)); writer.flush()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        os.kill(process.pid, signal.SIGKILL)
    with RunReader(tmp_path) as reader:
        assert reader.count(Query(step=1)) == 4
    with RunWriter(tmp_path) as writer:
        writer.rollout(rollout(20))
    with sqlite3.connect(tmp_path / ROLLOUTS) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()
    with RunReader(tmp_path) as reader:
        assert reader.find("session-20") is not None


def test_a_full_queue_drops_and_says_so_and_never_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def slow() -> Rollout:
        assert go.wait(30)
        return rollout(0)

    monkeypatch.setattr(writer, "WAITING", 2)
    run = RunWriter(tmp_path)
    run.rollout(slow)
    for n in range(1, 20):
        run.rollout(rollout(n))
    go.set()
    run.close()
    assert run.lost >= 16
    assert f"{run.lost} rollouts were not kept" in caplog.text
    with RunReader(tmp_path) as reader:
        assert reader.count() + run.lost == 20
        assert reader.not_kept() == run.lost


def test_one_that_cannot_be_written_takes_no_other_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Rollout:
        raise ValueError("no such thing")

    with RunWriter(tmp_path) as writer:
        writer.rollout(rollout(0))
        writer.rollout(broken)
        writer.rollout(rollout(1, error="half a character \ud800", dialogue=[{"role": "user", "content": "\ud800"}]))
        writer.rollout(rollout(2, reward=math.nan))
    assert "no such thing" in caplog.text
    with RunReader(tmp_path) as reader:
        assert [r["reward"] for r in reader.rollouts()] == [0.0, 1.0, None]


def after(event: threading.Event, n: int) -> Rollout:
    assert event.wait(60)
    return rollout(n)


def test_odd_values_neither_end_the_writer_nor_cost_other_rollouts(tmp_path: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with RunWriter(tmp_path) as run:
        run.rollout(rollout(0, record=deep))
        assert run.flush()
        run.rollout(rollout(1, staleness=array("h", [3])[0], elapsed_s=math.inf, group="half \ud800", stage="x\0y"))
        odd: Any = [3]
        run.rollout(rollout(2, staleness=odd))  # SQLite takes no lists
        run.rollout(rollout(3))
        run.annotate("session-3", advantage=math.inf)
    with RunReader(tmp_path) as reader:
        assert [row["session_id"] for row in reader.rollouts()] == ["session-1", "session-3"]
        assert [row["elapsed_s"] for row in reader.rollouts()] == [None, None]
        assert [row["advantage"] for row in reader.rollouts()] == [None, None]
        assert [step["staleness"] for step in reader.steps()] == [3]
        assert reader.not_kept() == 2


def test_a_transaction_that_fails_costs_its_rollouts_and_nothing_later(tmp_path: Path) -> None:
    class Texts(TokenTexts):
        def of(self, ids: Iterable[int]) -> dict[int, str]:
            return {token: f"<{token}>" for token in ids}

    def full() -> Rollout:
        raise sqlite3.OperationalError("database or disk is full")

    began = threading.Event()
    with RunWriter(tmp_path, texts=Texts(tmp_path)) as run:
        run.rollout(functools.partial(after, began, 0))
        run.rollout(full)
        began.set()
        assert run.flush()
        run.rollout(rollout(1))
    with RunReader(tmp_path) as reader:
        assert [row["session_id"] for row in reader.rollouts()] == ["session-1"]
        assert reader.texts([10]) == {10: "<10>"}
        assert reader.not_kept() == 2


def test_a_slow_disk_gets_the_time_that_it_needs_at_the_end_and_a_hanging_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(n: int) -> Rollout:
        time.sleep(0.2)
        return rollout(n)

    run = RunWriter(tmp_path / "slow")
    for n in range(8):
        run.rollout(functools.partial(slow, n))
    run.close(0.6)
    with RunReader(tmp_path / "slow") as reader:
        assert reader.count() == 8
    go = threading.Event()
    run = RunWriter(tmp_path / "hanging")
    run.rollout(functools.partial(after, go, 0))
    run.rollout(rollout(1))
    run.close(0.1)
    assert "takes no writes" in caplog.text
    go.set()
    run._thread.join(30)


def test_an_event_after_a_line_that_was_cut_is_kept(tmp_path: Path) -> None:
    append_event(tmp_path, "first", {})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "cut", "lo')
    with RunWriter(tmp_path) as run:
        run.event("resumed", {"loss": math.nan})
        run.event("odd", {"what": {1, 2}})
    assert [event["event"] for event in read_metrics(tmp_path)] == ["first", "resumed", "odd"]


def test_reasoning_and_text_after_a_null_character_are_searched(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        run.rollout(rollout(0, dialogue=[{"role": "user", "content": "before\0after"}]))
        run.rollout(rollout(1, dialogue=[{"role": "assistant", "content": "", "reasoning_content": "so I looked"}]))
    with RunReader(tmp_path) as reader:
        assert reader.ids(Query(text="after")) == [1]
        assert reader.ids(Query(text="SO I LOOKED")) == [2]


def test_failures_have_the_numbers_of_steps_as_they_are_shown(tmp_path: Path) -> None:
    failed = {"outcome": "agent_error", "cause": "agent", "error": "no lamp", "reward": None, "score": 0.0}
    with RunWriter(tmp_path) as run:
        run.rollout(rollout(0))
        run.rollout(rollout(1, phase="eval", step=4, **failed))
    with RunReader(tmp_path) as reader:
        [failure] = reader.failures()
        assert (failure["first"], failure["last"]) == (4, 4)


def test_errors_that_differ_only_in_ids_and_times_are_counted_together(tmp_path: Path) -> None:
    failed = {"outcome": "infrastructure_error", "cause": "infrastructure", "reward": None, "score": None}
    with RunWriter(tmp_path) as run:
        for n in range(3):
            text = f"session rollout-{n}f8a0c61e7 was lost after {n + 10}.25 s"
            run.rollout(rollout(n, **failed, error=text))
        run.rollout(rollout(3, **failed, error="HTTP 503"))
        run.rollout(rollout(4, **failed, error="HTTP 429"))
    with RunReader(tmp_path) as reader:
        found = reader.failures()
        assert [(each["shape"], each["rollouts"]) for each in found] == [
            ("session # was lost after # s", 3),
            ("HTTP 429", 1),
            ("HTTP 503", 1),
        ]
        assert found[0]["error"].startswith("session rollout-")
        for name in ("shape", "error"):
            assert reader.ids(Query(error=found[0][name])) == [1, 2, 3]


def test_rows_have_a_column_for_every_number_also_of_later_rollouts(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    with RunWriter(tmp_path / "run") as run:
        for n in range(1200):
            run.rollout(rollout(n, metrics={} if n < 1100 else {"lamps": 2.0, "reward": 7.0}, sequences=None))
    with RunReader(tmp_path / "run") as reader:
        assert write_rows(rollout_rows(reader), tmp_path / "rows.parquet") == 1200
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert [table[name][1199].as_py() for name in ("reward", "number_reward", "lamps")] == [1.0, 7.0, 2.0]
    assert table["lamps"][0].as_py() is None


def test_a_lock_keeps_others_out_until_it_ends_and_waits_for_those_that_only_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.lock").write_text("7 on a machine that was switched off\n")
    with locked(tmp_path):
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on"), locked(tmp_path):
            pass
        monkeypatch.setenv("RANK", "1")
        with locked(tmp_path):  # another process of the same job
            pass
        monkeypatch.delenv("RANK")
    assert (tmp_path / "run.lock").read_text() == ""
    looking = (tmp_path / "run.lock").open()
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.02, looking.close).start()
    with locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("no rollout can be used\nits log"), "failed: no rollout can be used"),
        (OSError(28, "No space left on device"), "failed: OSError: [Errno 28] No space left on device"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
def test_the_status_of_a_failed_run_has_the_reason(tmp_path: Path, error: BaseException, said: str) -> None:
    with pytest.raises(type(error)), locked(tmp_path):
        raise error
    assert status(tmp_path) == said


def test_a_run_that_cannot_be_continued_stays_as_it_was(tmp_path: Path) -> None:
    append_event(tmp_path, "step", {"step": 0})
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError), locked(tmp_path):
        raise ConfigError("the run has done 1 step")
    assert status(tmp_path) == "finished"
    with pytest.raises(ConfigError), locked(tmp_path):  # noqa: PT012  the event is written under the lock
        append_event(tmp_path, "step", {"step": 1})
        raise ConfigError("the judge refuses its key")
    assert status(tmp_path) == "failed: the judge refuses its key"


@pytest.mark.parametrize(
    ("done", "planned", "said"),
    [(3, 3, "finished"), (2, 3, "stopped at 2 of 3"), (None, 3, "finished"), (2, None, "finished")],
)
def test_a_run_with_fewer_steps_than_planned_was_stopped(
    tmp_path: Path, done: int | None, planned: int | None, said: str
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"steps": done}))
    write_config(tmp_path, {"steps": planned})
    assert status(tmp_path) == said


def test_runs_are_found_newest_first(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, name in enumerate(("old", "new")):
        folder = tmp_path / "runs" / name
        RunWriter(folder).close()
        for file in folder.iterdir():
            os.utime(file, (1000 + age, 1000 + age))
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "runs" / "new", tmp_path / "runs" / "old"):
        RunReader(folder).close()  # to look at a run is not to write it
    assert [p.name for p in find_runs(tmp_path)] == ["new", "old"]
    (tmp_path / "runs" / "imitation").mkdir()
    (tmp_path / "runs" / "imitation" / METRICS).touch()  # a run without rollouts
    assert find_run(None).name == "new"
    assert find_run("old") == Path("runs/old")
    with pytest.raises(ConfigError, match="not a run"):
        find_run("other")


def test_a_folder_whose_name_is_taken_gets_a_number(tmp_path: Path) -> None:
    assert [make_folder(tmp_path, "name").name for _ in range(3)] == ["name", "name-2", "name-3"]


def test_another_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    RunWriter(tmp_path).close()
    for version, what in ((VERSION + 1, "update the toolkit"), (VERSION - 1, "from an earlier version")):
        with sqlite3.connect(tmp_path / ROLLOUTS) as database:
            database.execute(f"PRAGMA user_version={version}")
        database.close()
        for opened in (RunReader, RunWriter):
            with pytest.raises(ConfigError, match=what):
                opened(tmp_path)


def test_rollouts_that_are_not_kept_are_counted_once_by_all_writers(tmp_path: Path) -> None:
    def broken() -> Rollout:
        raise ValueError("no such thing")

    with RunWriter(tmp_path) as one, RunWriter(tmp_path) as other:
        for _ in range(5):
            one.rollout(broken)
        assert one.flush()
        other.rollout(broken)
        other.rollout(rollout(0))
        other.annotate("session-0", sequences={7: {"updates": 1}})  # the rollout itself is kept
    with RunWriter(tmp_path) as resumed:
        resumed.rollout(broken)
    with RunReader(tmp_path) as reader:
        assert reader.not_kept() == 7


def test_a_full_disk_costs_as_many_rollouts_as_the_run_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunWriter(tmp_path) as run:
        for n in range(20):
            run.rollout(rollout(n))
            run.annotate(f"session-{n}", advantage=0.5)
            if n == 9:
                assert run.flush()
                monkeypatch.setattr(Tables, "_summarize", full)
        assert run.flush()
        monkeypatch.undo()
    with RunReader(tmp_path) as reader:
        assert (reader.count(), reader.not_kept()) == (10, 10)


def full(_: Tables) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def test_two_letters_are_found_in_each_case(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        run.rollout(
            rollout(
                0, dialogue=[{"role": "user", "content": "Η ΟΔΟΣ ΤΟΥ ΣΟΦΟΥ, İstanbul, Hauptstraße, STRẞE 中文😀5€"}]
            )
        )
    with RunReader(tmp_path) as reader:
        for text in ("文😀", "😀5", "5€", "ος", "οσ", "ΟΣ", "οδος", "ΟΔΟΣ", "İs", "aß", "Aß", "ße", "ha", "ßE"):
            assert reader.count(Query(text=text)) == 1, text


def test_a_tool_is_not_found_by_the_end_of_its_name_and_an_input_without_a_key_by_its_group(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        for n, name in enumerate(('a"x', "x", "a x", 'x": 1, "y')):
            calls = [{"function": {"name": name, "arguments": "{}"}}]
            facts: dict[str, Any] = {"input_key": None, "group": f"g{n}"}
            run.rollout(rollout(n, dialogue=[{"role": "assistant", "tool_calls": calls}], **facts))
    with RunReader(tmp_path) as reader:
        assert reader.ids(Query(tool="x")) == [2]
        assert [reader.ids(Query(input=key)) for key in reader.inputs(Query())] == [[1], [2], [3], [4]]


def test_a_run_without_rollouts_has_tables_without_rows(tmp_path: Path) -> None:
    pandas, parquet = pytest.importorskip("pandas"), pytest.importorskip("pyarrow.parquet")
    RunWriter(tmp_path).close()
    assert list(pandas.concat([rollouts_df(tmp_path)]).reward) == list(messages_df(tmp_path).text) == []
    assert write_rows([], tmp_path / "rows.parquet") == 0
    assert parquet.read_table(tmp_path / "rows.parquet").num_rows == 0


def test_rows_are_written_as_lines_of_json_with_values_that_it_lacks_as_text(tmp_path: Path) -> None:
    assert write_rows([{"a": 1}, {"a": Path("x")}], tmp_path / "rows.jsonl") == 2
    assert (tmp_path / "rows.jsonl").read_text() == '{"a": 1}\n{"a": "x"}\n'


def test_messages_and_steps_are_rows(run: Path) -> None:
    with RunReader(run) as reader:
        rows = list(message_rows(reader, Query(step=0)))
        assert len(rows) == 12
        assert [(row["rollout"], row["message"], row["role"], row["text"]) for row in rows[:4]] == [
            (1, 0, "user", "question 0"),
            (1, 1, "assistant", "calculator({})"),
            (1, 2, "assistant", "100% of answer_0"),
            (2, 0, "user", "question 1"),
        ]
        assert [(row["step"], row.get("event")) for row in step_rows(reader)][:2] == [(0, "step"), (1, None)]
        assert len(list(message_rows(reader))) == 16 * 3


def test_a_writer_that_ended_before_it_kept_a_rollout_is_no_earlier_version(tmp_path: Path) -> None:
    (tmp_path / ROLLOUTS).touch()
    with pytest.raises(ConfigError, match="is empty: its writer ended before the first"):
        RunReader(tmp_path)


def test_a_file_system_without_locks_does_not_hide_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked(tmp_path), RunWriter(tmp_path) as run:
        run.rollout(rollout(0))

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    assert status(tmp_path) == "stopped"
