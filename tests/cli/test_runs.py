"""`agentcore-rl runs`: what trainings left, in the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.runs import Rollout, RunWriter, TokenSequence, TokenTexts

WEIGHTS = Path(__file__).parents[2] / "src" / "agentcore_rl_toolkit" / "policy" / "weights"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("work")
    texts = TokenTexts(WEIGHTS)
    assert texts.of([1])  # the built-in policy's tokenizer is read
    with RunWriter(work / "runs" / "shop", texts=texts) as run:
        for n in range(8):
            tokens = TokenSequence(ids=[40, 41, 42, 43], mask=[0, 0, 1, 1], logprobs=[None, None, -0.5, -2.0 - n])
            good = n % 2 == 1
            message = [{"role": "user", "content": f"Q{n}"}, {"role": "assistant", "content": f"A{n} \x1b]0;title\x07"}]
            run.rollout(
                Rollout(
                    session_id=f"{'ab'[good]}{n}",
                    phase="train",
                    step=n // 4,
                    group="g",
                    input_key=f"k{n % 4}",
                    place=n,
                    outcome="ok",
                    reward=float(good or n >= 4),
                    score=float(good or (n >= 4 and n != 4)),
                    dialogue=message,
                    payload={"prompt": f"Count the lamps\nof shop {n % 4}."},
                    sequences=[tokens],
                )
            )
    return work


def output_of(work: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.chdir(work)
    done = CliRunner().invoke(cli, ["runs", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_runs_are_listed_with_their_curve(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert output_of(work, monkeypatch, "ls").split()[:5] == ["shop", "8", "rollouts", "reward", "0.750"]
    [run] = json.loads(output_of(work, monkeypatch, "ls", "--json"))
    assert [s["reward"] for s in run["steps"]] == [0.5, 0.75]


def test_the_worst_rollout_is_read_out_with_its_trained_tokens_and_the_least_likely(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = output_of(work, monkeypatch, "show", "--worst", "1")
    assert answer.startswith("#5  train 2  g  ok")
    assert "user  Q4" in answer
    assert "\\e]0;title\\a" in answer  # a terminal is not to obey it
    assert "\x1b" not in answer
    assert "-6.000 at 3" in answer
    assert answer.count("«") == answer.count("»") == 1
    [rollout] = json.loads(output_of(work, monkeypatch, "show", "shop", "--rollout", "b3", "--json"))
    assert rollout["sequences"][0]["ids"] == [40, 41, 42, 43]
