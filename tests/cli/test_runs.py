"""`agentcore-rl runs`: what trainings left, in the terminal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.backends.collection.recording import input_key
from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.cli.models import model_folder
from agentcore_rl_toolkit.client.data import read_rows
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.runs import (
    Query,
    Rollout,
    RunWriter,
    TokenSequence,
    TokenTexts,
    messages_df,
    rollouts_df,
    steps_df,
)

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
                    reward_parts={"judge": {"score": 0.25, "reason": f"Lamp {n} is dark."}},
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
    assert output_of(work, monkeypatch, "list").split()[:6] == ["shop", "running", "8", "rollouts", "reward", "0.750"]
    assert output_of(work, monkeypatch, "ls") == output_of(work, monkeypatch, "list")
    [run] = json.loads(output_of(work, monkeypatch, "ls", "--json"))
    assert (run["reward"], run["rewards"]) == (0.75, [0.5, 0.75])


def test_the_worst_rollout_is_read_out_with_its_trained_tokens_and_the_least_likely(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert output_of(work, monkeypatch, "show", "--worst", "1").startswith(
        "#1  train 1  g  ok"
    )  # of the whole training
    assert output_of(work, monkeypatch, "show", "2").count("\n") == 4
    answer = output_of(work, monkeypatch, "show", "2", "--worst", "1")
    assert answer.startswith("#5  train 2  g  ok")
    assert "user  Q4" in answer
    assert "the judge gave 0.250: Lamp 4 is dark." in answer
    assert "\\e]0;title\\a" in answer  # a terminal is not to obey it
    assert "\x1b" not in answer
    assert "-6.000 at 3" in answer
    assert answer.count("«") == answer.count("»") == 1
    [rollout] = json.loads(output_of(work, monkeypatch, "show", "shop", "--rollout", "b3", "--json"))
    assert rollout["sequences"][0]["ids"] == [40, 41, 42, 43]


def test_the_rows_of_a_pass_rate_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": name} for name in ("never", "sometimes", "always", "not run")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with RunWriter(tmp_path / "runs" / "pilot") as run:
        for row, scores in zip(rows, ((0, 0), (0, 1, None), (1, 1)), strict=False):
            for n, score in enumerate(scores):
                ids: Any = {"session_id": f"{row['prompt']}{n}", "group": row["prompt"], "input_key": input_key(row)}
                run.rollout(Rollout(**ids, phase="eval", outcome="ok" if score is not None else "lost", score=score))
    words = ("export", "pilot", "--rows", "train.jsonl", "--pass-rate", "0.1:0.9")
    assert "1 of 4 rows written to rows.jsonl; 1 are below, 1 above, 1 were not run" in output_of(
        tmp_path, monkeypatch, *words
    )
    assert read_rows(tmp_path / "rows.jsonl") == [{"prompt": "sometimes"}]
    for wrong, why in (
        (["--rows", "train.jsonl"], "go together"),
        (["--rows", "train.jsonl", "--pass-rate", "half", "--force"], "is LOW:HIGH"),
        (["--rows", "train.jsonl", "--pass-rate", "0.6:0.7", "--force"], "3 rows were run"),
    ):
        with pytest.raises(ConfigError, match=why):
            CliRunner().invoke(cli, ["runs", "export", "pilot", *wrong], catch_exceptions=False, standalone_mode=False)


def test_the_best_of_a_group_that_failed_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs" / "failed", rewards={"good": (0.0, 1.0), "failed": (0.0, 0.0), "worse": (-1.0, -2.0)})
    words = ("export", "--min-reward", "-1", "--best-of-group")
    assert "1 sequences written" in output_of(tmp_path, monkeypatch, *words)
    [row] = read_rows(tmp_path / "sft.jsonl")
    assert (row["input_id"], row["reward"]) == ("good", 1.0)


def write_run(folder: Path, rewards: dict[str, tuple[float, ...]]) -> None:
    """Write a training of one step with these rewards by group."""
    with RunWriter(folder) as run:
        for group, values in rewards.items():
            for place, reward in enumerate(values):
                tokens = TokenSequence(ids=[1, 2, 3], mask=[0, 1, 1], logprobs=[None, -0.5, -0.5])
                facts: Any = {"session_id": f"{group}-{place}", "group": group, "place": place, "sequences": [tokens]}
                run.rollout(Rollout(**facts, phase="train", step=0, outcome="ok", reward=reward, score=reward))


def test_rollouts_and_messages_are_rows_for_a_notebook(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas, parquet = pytest.importorskip("pandas"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(work)
    frame = rollouts_df("shop")
    assert list(frame["reward"]) == [0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert list(frame["judge"]) == [0.25] * 8
    assert list(messages_df("shop", Query(number=2))["role"]) == ["user", "assistant"] * 4
    assert list(steps_df("shop")["groups_differ"]) == [1, 0]
    output_of(work, monkeypatch, "export", "shop", "--rows", "--out", "rows.parquet")
    table = parquet.read_table("rows.parquet")
    assert table.num_rows == 8
    assert table.schema.field("error").type == "string"  # no rollout has one
    assert isinstance(table.to_pandas(), pandas.DataFrame)


def test_good_rollouts_are_written_and_imitated(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = output_of(work, monkeypatch, "export", "shop", "--min-reward", "1")
    assert printed.splitlines() == [
        "shop: 6 of 8 rollouts are imitated; 8 of the training ended ok and are usable, 6 of these have a reward of 1 or more",
        "6 sequences written to sft.jsonl",
    ]
    rows = [json.loads(line) for line in (work / "sft.jsonl").read_text().splitlines()]
    assert rows[0]["input_ids"] == [40, 41, 42, 43]
    assert rows[0]["assistant_masks"] == [0, 0, 1, 1]
    assert {row["session_id"] for row in rows} == {"b1", "b3", "a4", "b5", "a6", "b7"}
    output_of(work, monkeypatch, "export", "shop", "--min-reward", "0", "--best-of-group", "--out", "best.jsonl")
    assert len((work / "best.jsonl").read_text().splitlines()) == 2  # a group of each step

    with (work / "best.jsonl").open("a") as file:  # a row without a token to predict is passed over
        file.write(json.dumps({"input_ids": [40] * 12, "assistant_masks": [1] + [0] * 11}) + "\n")

    words = [
        "sft",
        "--from",
        "shop",
        "--from",
        "best.jsonl",
        "--out",
        str(work / "runs" / "taught"),
    ]
    options = ["--set", "min_reward=1", "--set", "epochs=3", "--set", "batch_tokens=12", "--set", "learning_rate=3e-3"]
    done = CliRunner().invoke(cli, [*words, *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "imitating 9 sequences, 16 sampled tokens" in done.output
    steps = [json.loads(line) for line in (work / "runs" / "taught" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 9  # three sequences of four tokens each
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    assert model_folder(work / "runs" / "taught") == work / "runs" / "taught" / "policy"
    why = "runs/taught has no rollouts.sqlite: it is a run of `sft`, which has no rollouts, or no run"
    taught = next(line for line in output_of(work, monkeypatch, "list").splitlines() if line.startswith("taught"))
    assert taught.split(maxsplit=2)[1:] == ["finished", why]
    assert output_of(work, monkeypatch, "show").startswith("shop ")  # the newest run with rollouts
    (work / "rows.jsonl").write_text('{"messages": []}\n')
    for wrong, why in (
        (["train", "--from", "shop"], "--from is for `agentcore-rl sft`"),
        (["sft"], "--from RUN is missing"),
        (["sft", "--from", "rows.jsonl", "--model", str(WEIGHTS)], "rows.jsonl has rows without `input_ids`"),
        (["sft", "--from", "best.jsonl"], "--model is missing: a file does not contain the model"),
        (
            ["sft", "--from", "best.jsonl", "--model", str(WEIGHTS), "--set", "min_reward=1"],
            "all rows of a file",
        ),
        (
            ["runs", "export", "shop", "--min-reward", "nan", "--out", "nan.jsonl"],
            "the least reward to imitate is missing",
        ),
        (
            ["sft", "--from", "shop", "--set", "min_reward=2"],
            "0 of these have a reward of 2 or more",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            CliRunner().invoke(cli, wrong, catch_exceptions=False, standalone_mode=False)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in which only the rollouts named `good` are right to imitate."""
    work = tmp_path_factory.mktemp("mixed")
    calls = [{"turn_id": "t", "finish_reason": "stop", "parse_status": "parsed"}]
    kinds: dict[str, dict[str, Any]] = {
        "good": {},
        "half": {"reward": 0.5},
        "wrong": {"reward": 0.0},
        "before": {"phase": "before", "step": None},
        "after": {"phase": "after"},
        "eval": {"phase": "eval"},
        "rambled": {"outcome": "agent_error", "cause": "policy", "failure": "tokens"},  # with a declared reward of 1
        "stale": {"mask_reason": "stale"},
        "cut": {"calls": [*calls, {"turn_id": "u", "finish_reason": "length", "parse_status": "none"}]},
        "garbled": {"calls": [*calls, {"turn_id": "u", "finish_reason": "stop", "parse_status": "unparsed"}]},
        "aside": {
            "calls": [*calls, {"turn_id": "other", "finish_reason": "length"}]
        },  # nothing of that turn is trained
        "dropped": {"sequences": None},
    }
    with RunWriter(work / "runs" / "shop") as run:
        for n, (name, facts) in enumerate(kinds.items()):
            tokens = TokenSequence(ids=[n, 41, 42], mask=[0, 1, 1], turn_ids=["t", "u"])
            usual = {"phase": "train", "step": 0, "group": "g", "outcome": "ok", "reward": 1.0}
            facts = {**usual, "calls": calls, "sequences": [tokens], **facts}
            run.rollout(Rollout(session_id=name, **facts))
    return work


def test_only_good_rollouts_of_the_training_are_exported(
    mixed: Path, monkeypatch: pytest.MonkeyPatch, command_line: Any
) -> None:
    monkeypatch.chdir(mixed)
    refused = command_line("runs", "export", "shop")
    assert refused.returncode == 2
    assert "--min-reward" in refused.stderr
    assert "rewards from 0 to 1, most often 5 x 1, 1 x 0.5, 1 x 0" in refused.stderr
    done = command_line("runs", "export", "shop", "--min-reward", "1", "--out", "best.jsonl")
    assert done.stdout.splitlines()[0] == (
        "shop: 2 of 12 rollouts are imitated; 7 of the training ended ok and are usable, 5 of these have a reward of 1 or more"
    )
    rows = [json.loads(line) for line in (mixed / "best.jsonl").read_text().splitlines()]
    assert {row["session_id"] for row in rows} == {"good", "aside"}
    pytest.importorskip("pyarrow")
    command_line("runs", "export", "shop", "--min-reward", "1", "--best-of-group", "--out", "best.parquet")
    [best] = read_rows(mixed / "best.parquet")
    assert best["session_id"] in ("good", "aside")


def test_imitation_takes_the_same_rollouts_and_asks_for_the_least_reward(
    mixed: Path, monkeypatch: pytest.MonkeyPatch, command_line: Any
) -> None:
    monkeypatch.chdir(mixed)
    refused = command_line("train", "--method", "sft", "--from", "shop", "--out", "taught")
    assert refused.returncode == 2
    assert "min_reward" in refused.stderr
    assert "rewards from 0 to 1, most often 5 x 1, 1 x 0.5, 1 x 0" in refused.stderr
    assert not (mixed / "taught").exists()
    with RunWriter(mixed / "runs" / "evaluation") as run:
        run.rollout(Rollout(session_id="e", phase="eval", group="g", outcome="ok", reward=1.0))
    refused = command_line("runs", "export", "evaluation", "--min-reward", "1")
    assert refused.returncode == 2
    assert "eval --for-training" in refused.stderr


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["runs", "export", "shop", "--min-reward", "1"], "sft.jsonl"),
        (["runs", "export", "shop", "--min-reward", "1", "--out", "sft.parquet"], "sft.parquet"),
        (["view", "shop", "--export", "run.html"], "run.html"),
    ],
)
def test_an_existing_file_is_overwritten_with_force_only(
    mixed: Path, monkeypatch: pytest.MonkeyPatch, command_line: Any, words: list[str], file: str
) -> None:
    monkeypatch.chdir(mixed)
    (mixed / file).write_text("mine")
    refused = command_line(*words)
    assert refused.returncode == 2
    assert f"{file} already exists; --force overwrites it" in refused.stderr
    assert (mixed / file).read_text() == "mine"
    assert command_line(*words, "--force").returncode == 0
    assert (mixed / file).read_bytes() != b"mine"


def test_a_run_may_be_called_by_digits_and_its_json_has_no_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunWriter(tmp_path / "runs" / "20260101") as run:
        facts: Any = {"phase": "train", "step": 0, "group": "g", "outcome": "ok", "record": {"x": math.nan}}
        run.rollout(Rollout(session_id="s", **facts))
    (tmp_path / "runs" / "20260101" / "config.json").write_text('{"learning_rate": NaN}')
    for words in ((), ("--rollout", "1"), ("1",)):
        shown = output_of(tmp_path, monkeypatch, "show", "20260101", *words, "--json")
        assert "null" in json.dumps(json.loads(shown, parse_constant=pytest.fail))
