"""Scorers: what they get, what they may return, and whose failure theirs is."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentcore_rl_toolkit import ScorerError, answer_text
from agentcore_rl_toolkit.backends.collection.groups import CollectedRollout, Reward
from agentcore_rl_toolkit.backends.collection.scored import with_score
from agentcore_rl_toolkit.backends.collection.settings import CollectConfig
from agentcore_rl_toolkit.backends.scorer import Scorer, checked_spec, scorer_at, scorer_files
from agentcore_rl_toolkit.contract import Cause, Outcome
from agentcore_rl_toolkit.errors import ConfigError

ROW = {"prompt": "x", "_reference": "42"}
RECORD = {"_answer": "it is 42", "_calls": {"gateway": 1, "elsewhere": {}}, "status_code": 200}
MESSAGES = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "it is 42"}]


def scorer(function: Any, **more: Any) -> Scorer:
    return Scorer(function=function, name="score.py:score", **more)


async def test_a_scorer_gets_row_answer_reference_and_trajectory() -> None:
    seen: list[Any] = []
    await scorer(lambda *given: seen.append(given) or 1).score(ROW, RECORD, MESSAGES)
    assert seen == [({"prompt": "x"}, "it is 42", "42", MESSAGES)]


async def test_the_answer_of_an_adapted_agent_is_what_it_returned_without_rewards() -> None:
    record = {"answer": "42", "tool_calls": 2, "rewards": 0.5, "metrics": {}, "status_code": 200, "_agent": {}}
    assert await scorer(lambda p, answer, r, t: float(answer == {"answer": "42", "tool_calls": 2})).score(
        ROW, record, []
    ) == {"reward": 1.0}


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (1, {"reward": 1.0}),
        (True, {"reward": 1.0}),
        (np.float32(0.5), {"reward": 0.5}),
        ({"reward": 0.25, "turns": 3, "note": "text"}, {"reward": 0.25, "turns": 3.0}),
        (
            {"reward": np.float64(0.5), "f1": np.float32(0.25), "bad": math.nan, "worse": math.inf},
            {"reward": 0.5, "f1": 0.25, "metrics_not_finite": 2.0},
        ),
    ],
)
async def test_a_score_is_a_number_or_a_dict_with_metrics(returned: Any, score: dict[str, float]) -> None:
    async def score_async(*given: Any) -> Any:
        return returned

    assert await scorer(lambda *given: returned).score(ROW, RECORD, []) == score
    assert await scorer(score_async).score(ROW, RECORD, []) == score
    assert await scorer(lambda *given: score_async(*given)).score(ROW, RECORD, []) == score


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "returned", [None, "1", math.nan, math.inf, 10**400, {}, {"reward": None}, [1.0], np.ones(2), Unshowable()]
)
async def test_anything_else_is_the_scorers_failure(returned: Any) -> None:
    with pytest.raises(
        ScorerError, match=r"score.py:score returned .*: return a finite number, or a dict with `reward`"
    ):
        await scorer(lambda *given: returned).score(ROW, RECORD, [])


@pytest.mark.parametrize(
    "error", [KeyError("x"), SystemExit(2), asyncio.CancelledError(), TimeoutError("its own"), StopIteration()]
)
async def test_an_exception_of_any_kind_is_the_scorers_failure(error: BaseException) -> None:
    def sync(*given: Any) -> Any:
        raise error

    async def asynchronous(*given: Any) -> Any:
        raise error

    for function in (sync, asynchronous):
        with pytest.raises(ScorerError, match=r"score.py:score raised"):
            await scorer(function, timeout_s=10).score(ROW, RECORD, [])


async def test_a_scorer_that_hangs_ends_at_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()

    async def hang(*given: Any) -> Any:
        await asyncio.Event().wait()

    async def fast(*given: Any) -> Any:
        return 1.0

    for function in (lambda *given: ended.wait(60), hang):
        with pytest.raises(ScorerError, match=r"took longer than 0.05 s$"):
            await scorer(function, timeout_s=0.05).score(ROW, RECORD, [])
    ended.set()
    assert await scorer(fast).score(ROW, RECORD, [])  # the loop of the scorers has had its turn since
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_scorer_whose_thread_or_number_fails_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __float__(self) -> float:
            raise KeyError("no number")

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.raises(ScorerError, match="raised KeyError: 'no number'"):
        await scorer(lambda *given: Broken()).score(ROW, RECORD, [])
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(ScorerError, match="raised RuntimeError: can't start new thread"):
        await scorer(lambda *given: 1.0).score(ROW, RECORD, [])


async def test_scorers_that_wait_for_one_that_blocks_their_loop_are_masked_at_their_deadlines() -> None:
    ended = threading.Event()

    async def block(*given: Any) -> Any:
        ended.wait(60)

    async def fast(*given: Any) -> Any:
        return 1.0

    def of_a_thread(*given: Any) -> Any:
        ended.wait(60)

    waiting = [
        with_score(rollout(reward=0.5), ROW, scorer(function, timeout_s=0.2))
        for function in (block, fast, fast, of_a_thread)
    ]
    *ended_late, in_a_thread = await asyncio.wait_for(asyncio.gather(*waiting), 10)
    assert str(in_a_thread.reason).endswith("took longer than 0.2 s")
    for done in ended_late:
        assert (done.reward, done.score, done.mask_reason, done.cause) == (None, None, "scorer", Cause.SCORER)
        assert "took longer than 0.2 s" in str(done.reason)
        assert "the async scorer score.py:score blocks the loop of all async scorers" in str(done.reason)
    ended.set()
    assert await scorer(fast).score(ROW, RECORD, []) == {"reward": 1.0}


async def test_a_scorer_that_changes_what_it_gets_changes_no_other_rollout() -> None:
    row = {"items": [{"n": 1}], "_reference": {"gold": "secret"}}
    record, messages = {"_answer": {"steps": [1]}}, [{"role": "user", "content": "x"}]
    given = copy.deepcopy((row, record, messages))

    def spoil(payload: Any, answer: Any, reference: Any, trajectory: Any) -> float:
        payload["items"][0].update(reference)
        answer["steps"].clear()
        reference.clear()
        trajectory[0].clear()
        return 1.0

    await scorer(spoil).score(row, record, messages)
    assert (row, record, messages) == given


async def test_the_loop_of_a_trainer_does_not_wait_for_the_copy_of_a_long_dialogue() -> None:
    copied_by: list[threading.Thread] = []

    class Message(dict[str, Any]):
        def __deepcopy__(self, memo: Any) -> Message:
            copied_by.append(threading.current_thread())
            return self

    await scorer(lambda *_: 1.0).score(ROW, RECORD, [Message(role="user")])
    assert [thread.name for thread in copied_by] == ["scorer"]


async def test_a_caller_that_is_cancelled_is_no_failure_of_the_scorer() -> None:
    ended = threading.Event()
    task = asyncio.create_task(scorer(lambda *given: ended.wait(60)).score(ROW, RECORD, []))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    ended.set()


def rollout(**more: Any) -> CollectedRollout:
    capture: Any = SimpleNamespace(dialogue=MESSAGES)
    given: dict[str, Any] = {"outcome": Outcome.OK, "record": RECORD, "capture": capture, **more}
    return CollectedRollout(session_id="s", input_id="i", index=0, **given)


async def test_scores_are_rewards_and_the_agents_own_become_metrics() -> None:
    own = Reward(value=0.5, metrics={"turns": 2.0})
    done = await with_score(
        rollout(reward=0.5, reward_detail=own), ROW, scorer(lambda p, a, r, t: {"reward": len(t), "x": 1})
    )
    assert (done.reward, done.mask_reason) == (2.0, None)
    assert done.reward_detail is not None
    assert done.reward_detail.metrics == {"turns": 2.0, "x": 1.0, "agent_reward": 0.5}


async def test_a_rollout_without_a_score_is_masked_and_has_the_scorer_as_its_cause() -> None:
    done = await with_score(rollout(reward=0.5), ROW, scorer(lambda *given: 1 / 0))
    assert (done.reward, done.score, done.mask_reason, done.cause) == (None, None, "scorer", Cause.SCORER)
    assert "ZeroDivisionError" in str(done.reason)
    assert "lambda *given: 1 / 0" in str(done.traceback)
    failed = rollout(outcome=Outcome.AGENT_ERROR, cause=Cause.POLICY, reward=0.0)
    assert await with_score(failed, ROW, scorer(lambda *given: 1 / 0)) is failed


def test_a_file_is_loaded_with_its_neighbors_and_leaves_no_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (library := tmp_path / "library").mkdir()
    (library / "points.py").write_text("MOST = 9\n")
    monkeypatch.setattr("sys.path", [*sys.path, str(library), str(tmp_path)])  # as an editable project is on the path
    (tmp_path / "points.py").write_text("MOST = 3\n")
    (tmp_path / "score.py").write_text(
        "import points\n\ndef score(p, a, r, t):\n    return points.MOST\n\nmark = score\n"
    )
    found = scorer_at(str(tmp_path / "score.py"))
    assert asyncio.run(found.score(ROW, RECORD, [])) == {"reward": 3.0}
    assert scorer_at(f"{tmp_path}/score.py:mark").name == "score.py:mark"
    assert scorer_files(f"{tmp_path}/score.py") == [tmp_path / "score.py"]
    assert not (tmp_path / "__pycache__").exists()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "score.cpython-311.pyc").touch()  # as pytest leaves it
    assert [path.name for path in scorer_files(f"{tmp_path}/score.py:mark")] == ["score.py", "score.cpython-311.pyc"]


def test_a_scorer_in_a_package_imports_as_an_agent_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (package := tmp_path / "src" / "scored_shop").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "points.py").write_text("MOST = 3\n")
    (package / "score.py").write_text("import scored_shop.points\nfrom .points import MOST\n\ndef score(*given): ...\n")
    assert scorer_at(f"{package}/score.py").file == package / "score.py"
    assert scorer_at("scored_shop.score").file == package / "score.py"


def test_a_file_is_loaded_once_whatever_its_deadline(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(
        "from pathlib import Path\n\nwith Path(__file__).with_name('loads').open('a') as f:\n    f.write('x')\n\n"
        "def score(p, a, r, t):\n    return 1\n\nother = score\n"
    )
    spec = checked_spec(f"{tmp_path}/score.py")
    assert spec == f"{tmp_path}/score.py:score"
    assert [scorer_at(spec, timeout_s).timeout_s for timeout_s in (120.0, 60.0)] == [120.0, 60.0]
    assert (tmp_path / "loads").read_text() == "x"


def test_a_module_is_hidden_as_a_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    (tmp_path / "own_rewards.py").write_text("def score(p, a, r, t):\n    return 1\n")
    assert scorer_files("own_rewards:score") == [tmp_path / "own_rewards.py"]
    assert scorer_at("own_rewards:score").name == "own_rewards:score"
    assert not (tmp_path / "__pycache__").exists()
    assert scorer_files(None) == []


@pytest.mark.parametrize(
    ("source", "spec", "why"),
    [
        (None, "none.py", "could not be loaded: FileNotFoundError"),
        ("x = ", "score.py", "could not be loaded: SyntaxError"),
        ("import nothing_of_this_name", "score.py", "No module named"),
        ("import sys\nsys.exit(0)", "score.py", "could not be loaded: SystemExit"),
        ("score = 1", "score.py", "has no function score"),
        ("def score(payload): ...", "score.py", r"must take \(payload, answer, reference, trajectory\)"),
        ("", "score.py:other", "has no function other"),
        ("", "no_such_module:score", "No module named"),
    ],
)
def test_a_scorer_that_cannot_be_used_is_named_before_anything_starts(
    tmp_path: Path, source: str | None, spec: str, why: str
) -> None:
    if source is not None:
        (tmp_path / "score.py").write_text(source)
    with pytest.raises(ConfigError, match=why):
        scorer_at(spec if ":" in spec and ".py" not in spec else str(tmp_path / spec))


def test_a_scorer_gives_no_rewards_of_turns(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("def score(*given): ...")
    with pytest.raises(ConfigError, match="credit `turn`"):
        CollectConfig(score=f"{tmp_path}/score.py:score", credit="turn")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("36", "36"),
        ({"result": "36"}, "36"),
        ({"result": {"role": "assistant", "content": [{"text": "3"}, {"text": "6"}]}}, "36"),
        ({"answer": 36}, "36"),
        ([{"event": {"contentBlockDelta": {"delta": {"text": "3"}}}}, {"data": "3"}, "Agent(...)"], "3"),
        (
            [
                {"event": {"messageStart": {"role": "assistant"}}},
                {"event": {"contentBlockDelta": {"delta": {"text": "I use the tool."}}}},
                {"event": {"messageStart": {"role": "assistant"}}},
                {"event": {"contentBlockDelta": {"delta": {"text": "36"}}}},
                {"event": {"messageStop": {"stopReason": "end_turn"}}},
            ],
            "36",
        ),
        ([{"type": "start"}, {"type": "text-delta", "delta": "3"}, {"type": "text-delta", "delta": "6"}], "36"),
        (["3", "6"], "36"),
        (None, ""),
        ({}, ""),
        ([], ""),
        (7, "7"),
    ],
)
def test_the_text_of_an_answer(answer: Any, text: str) -> None:
    assert answer_text(answer) == text
