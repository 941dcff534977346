"""`agentcore-rl compare`, of evaluations that are there and of models that it evaluates first."""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.eval import command as evaluate
from agentcore_rl_toolkit.cli.production.compare import command
from agentcore_rl_toolkit.deploy.models.facts import read_model
from agentcore_rl_toolkit.gateway.testing import ScriptedModel
from agentcore_rl_toolkit.policy import WEIGHTS_DIR
from agentcore_rl_toolkit.runs import Rollout, RunWriter, write_config

from ...conftest import CommandLine


@pytest.fixture
def run(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    monkeypatch.setenv("AGENTCORE_RL_MODEL_API_KEY", "k")
    return functools.partial(command_line, "compare")


def evaluation(folder: Path, rewards: dict[str, list[float | None]], first: int = 0) -> str:
    """The folder of an evaluation with these rewards. None is a rollout that the infrastructure lost.

    The payload of an input is its place in the data, and ``first`` that of the first one.
    """
    folder.mkdir()
    write_config(folder, {"kind": "eval"})
    with RunWriter(folder) as writer:
        for number, (name, each) in enumerate(rewards.items(), first):
            for place, reward in enumerate(each):
                ended = {"outcome": "ok"} if reward is not None else {"outcome": "lost", "cause": "infrastructure"}
                made = Rollout(
                    session_id=f"{name}-{place}",
                    phase="eval",
                    group=name,
                    input_key=str(number),
                    place=place,
                    elapsed_s=2.0,
                    **ended,
                )
                made.reward = made.score = reward
                writer.rollout(lambda made=made: made)
    return str(folder)


def test_two_evaluations_are_compared_by_input(run: CommandLine, tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", {f"i{n:02}": [0.0, 0.0] if n < 12 else [1.0, 1.0] for n in range(20)})
    b = evaluation(tmp_path / "b", {f"i{n:02}": [1.0, None] if n < 10 else [0.5, 0.5] for n in range(21)})
    done = run(a, b)
    assert done.returncode == 0, done.stderr
    assert "B - A: +0.350 over 20 inputs" in done.stdout
    assert "B is better on 12 inputs, worse on 8, and equal on 0." in done.stdout
    assert "10 lost" in done.stdout
    assert "Better: i00 (0 to 1), i01 (0 to 1), i02 (0 to 1), i03 (0 to 1), i04 (0 to 1), and 7 more" in done.stdout
    facts = json.loads(run(a, b, "--json").stdout)
    assert (facts["difference"]["inputs"], facts["unpaired"]) == (20, 1)
    assert facts["sides"][0]["reward"] == pytest.approx(0.4)
    assert (facts["sides"][0]["seconds_median"], facts["sides"][0]["seconds_p90"]) == (2.0, 2.0)
    assert [each["input"] for each in facts["changed"]] == [f"i{n:02}" for n in range(20)]  # the largest changes first


def test_equal_means_of_other_rollouts_are_equal(run: CommandLine, tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", {f"i{n}": [0.3, 0.3] for n in range(4)})
    b = evaluation(tmp_path / "b", {f"i{n}": [0.2, 0.4] for n in range(4)})  # their sum is not 0.6 in binary numbers
    done = run(a, b)
    assert "B is better on 0 inputs, worse on 0, and equal on 4." in done.stdout
    assert "Better" not in done.stdout


@pytest.mark.parametrize(("least", "code"), [("-0.4", 0), ("0.1", 1)])
def test_a_difference_that_is_not_shown_is_an_exit_code(
    run: CommandLine, tmp_path: Path, least: str, code: int
) -> None:
    a = evaluation(tmp_path / "a", {f"i{n}": [float(n % 2)] for n in range(40)})
    done = run(a, a, "--at-least", least)
    assert done.returncode == code, done.stderr
    assert ("yes" if code == 0 else "not shown") in done.stderr


def test_inputs_that_a_side_lost_do_not_count_and_fail_the_gate(run: CommandLine, tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", {f"i{n}": [1.0 if n < 120 else 0.5] for n in range(240)})
    b = evaluation(tmp_path / "b", {f"i{n}": [1.0 if n < 120 else None] for n in range(240)})
    done = run(a, b, "--at-least", "-0.02")
    assert (done.returncode, "not shown" in done.stderr) == (1, True), done.stderr
    assert "Left out, because A or B has no reward for them: 120 inputs." in done.stdout
    facts = json.loads(run(a, b, "--json").stdout)
    assert (facts["unpaired"], [side["reward"] for side in facts["sides"]]) == (120, [1.0, 1.0])


def test_one_id_of_different_inputs_is_refused(run: CommandLine, tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", {f"line-{n}": [1.0] for n in range(9)})
    b = evaluation(tmp_path / "b", {f"line-{n}": [1.0] for n in range(8)}, first=1)
    done = run(a, b)
    assert (done.returncode, done.stdout) == (2, "")
    assert "line-0 has another payload in B than in A" in done.stderr


def test_models_are_evaluated_first(run: CommandLine, tmp_path: Path) -> None:
    agent = Path(__file__).parents[1] / "one_agent.py"  # rewards a text of odd length
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"number {n}"}) + "\n" for n in range(8)))
    with (
        ScriptedModel(lambda messages, _: "odd" if messages[-1]["content"] < "number 6" else "even") as even,
        ScriptedModel(lambda messages, _: "odd") as odd,
    ):
        sides = (f"{even.url}/v1#m", f"{odd.url}/v1#m")
        words = ("--agent", str(agent), "--data", str(data), "--limit", "7", "--out", str(tmp_path / "out"))
        done = run(*sides, *words)
        assert done.returncode == 0, done.stderr
        assert "B - A: +0.143 over 7 inputs" in done.stdout
        assert json.loads((tmp_path / "out" / "compare.json").read_text())["changed"] == [
            {"input": "line-000007", "a": 0.0, "b": 1.0}
        ]
        calls = len(odd.calls)
        refused = run(*sides, *words)
        assert (refused.returncode, "--resume" in refused.stderr) == (2, True)
        words = (*words, "--resume")
        other = run(sides[0], sides[0], *words)  # its results would be those of the other model
        assert (other.returncode, "choose another --out" in other.stderr) == (2, True)
        more = tuple(word for word in words if word not in ("--limit", "7"))
        summary = tmp_path / "out" / "b" / "summary.json"
        summary.write_text(json.dumps({**json.loads(summary.read_text()), "elapsed_s": 5000.0}))
        resumed = run(*sides, *more)  # all eight inputs
        assert "over 8 inputs" in resumed.stdout, resumed.stderr
        assert json.loads(summary.read_text())["elapsed_s"] > 5000.0  # of both parts
        assert len(odd.calls) == calls + 1  # nothing is run twice


def test_eval_gets_the_options_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def evaluated(**options: Any) -> None:
        given.update(options)
        os.environ["AWS_ACCESS_KEY_ID"] = "of a local service"
        raise SystemExit(3)

    monkeypatch.setattr(evaluate, "callback", evaluated)
    monkeypatch.setenv("HIDDEN", "of this shell")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of this shell")
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "x"}\n')
    words = ["--agent", "agent.py", "--data", str(data), "--out", str(tmp_path / "out"), "--policy-model", "*"]
    words += ["--session-env", "PATH=of sessions", "--session-env", "HIDDEN="]
    done = CliRunner().invoke(command, ["http://127.0.0.1:1/v1#a", "http://127.0.0.1:1/v1#b", *words])
    assert done.exit_code == 3, (done.output, done.exception)
    assert given["session_env"] == ("PATH=of sessions", "HIDDEN=")
    wanted = {"base_url": "http://127.0.0.1:1/v1", "model_id": "a", "policy_models": ("*",), "repeat": 1, "model": None}
    assert wanted.items() <= given.items()
    assert given["out"] == tmp_path / "out" / "a"
    assert os.environ["AWS_ACCESS_KEY_ID"] == "of this shell"


@pytest.mark.parametrize(("ends", "code"), [(True, 0), (False, 1)])
def test_failed_rollouts_are_a_result_and_a_broken_evaluation_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool, code: int
) -> None:
    def evaluated(**options: Any) -> None:
        if ends:
            evaluation(options["out"], {"line-000001": [0.0]})
            (options["out"] / "summary.json").write_text('{"rollouts": 1, "inputs": 1}')
            raise SystemExit(1)

    monkeypatch.setattr(evaluate, "callback", evaluated)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "x"}\n')
    words = ["--agent", "agent.py", "--data", str(data), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(command, ["http://127.0.0.1:1/v1#a", "http://127.0.0.1:1/v1#b", *words])
    assert (done.exit_code, "B - A: +0.000 over 1 input" in done.output) == (code, ends), (done.output, done.exception)


def test_two_evaluations_are_compared_in_a_folder_if_one_is_given(run: CommandLine, tmp_path: Path) -> None:
    a = evaluation(tmp_path / "a", {"i": [1.0]})
    assert run(a, a, "--out", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out" / "compare.json").exists()


def test_a_model_is_known_by_its_content(tmp_path: Path) -> None:
    shutil.copytree(WEIGHTS_DIR, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    one = read_model(tmp_path / "model").digest
    times, text = config.stat(), config.read_text()
    os.utime(config)
    assert read_model(tmp_path / "model").digest == one
    config.write_text(text.replace("0", "1"))
    os.utime(config, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert read_model(tmp_path / "model").digest != one


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1#m"), "lacks the name of the model"),
        (("nowhere", "nowhere-else"), "is not an evaluation, a model"),
        (("http://127.0.0.1:1/v1#m", "http://127.0.0.1:1/v1#n"), "--data is missing"),
    ],
)
def test_a_wrong_side_is_explained(run: CommandLine, words: tuple[str, ...], why: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr
