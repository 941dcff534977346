"""verl 0.9 itself on CPU: our manager on real Ray and TransferQueue.

Needs an environment with verl: this one, the one that VERL_PYTHON names, or `.venvs/verl`, which `make verl` builds. Where CI
is set the tests build it themselves, and fail if they cannot; elsewhere they skip without it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.advantages import grpo
from agentcore_rl_toolkit.backends.collection.collect import collect
from agentcore_rl_toolkit.backends.collection.groups import Group
from agentcore_rl_toolkit.backends.verl.convert import to_verl
from agentcore_rl_toolkit.policy.word_problems import problems
from serving import serving

from ..math_agent import math_agent as agent_in
from ..recorded import Replay, recorded_episodes, requests_for

ROOT = Path(__file__).parents[3]
HOME = ROOT / ".venvs/verl"
BUILD_S, RUN_S = 600, 900  # ten times what they take when nothing else runs
MOST_RUNS = 2  # a failed run is tried once more if pytest is told to repeat failures, not once more for every test
pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(BUILD_S + RUN_S + 200)]
_failures: list[str] = []


def test_verls_own_loss_has_the_gradient_of_the_documented_formula() -> None:
    done = subprocess.run(
        [verl_python(), str(Path(__file__).parent / "real_loss.py")],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("defaults") == [0.2, 0.2, 3.0, "token-mean"]
    assert found == pytest.approx({"plain": 0, "corrected": 0}, abs=1e-6)


def verl_python() -> str:
    """Python of an environment with verl. Skips or fails the test where there is none, as the module says."""
    if importlib.util.find_spec("verl"):
        return sys.executable
    if named := os.environ.get("VERL_PYTHON"):
        assert Path(named).exists(), f"VERL_PYTHON names no file: {named}"
        return named
    if os.environ.get("CI") and not os.environ.get("AGENTCORE_RL_NO_INSTALL"):
        if trouble := build():
            pytest.fail(trouble, pytrace=False)
    elif not (HOME / ".ready").exists():
        pytest.skip("no environment with verl 0.9.x: run `make verl` (2 GB), or name its Python in VERL_PYTHON")
    return str(HOME / "bin/python")


@cache  # built once and, if that fails, not again for every test
def build() -> str:
    """Make the environment unless it is there. Returns what went wrong, if anything did."""
    command = ["sh", str(ROOT / "tests/backends/environment.sh"), "verl"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_S, env={**os.environ, "BASE": sys.executable}
        )
        trouble = (done.stderr or done.stdout or f"exit code {done.returncode}")[-2000:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        trouble = f"not done after {BUILD_S} s"
    return trouble and (
        "the environment with verl could not be built. Where CI is set these tests need a package index; "
        f"AGENTCORE_RL_NO_INSTALL=1 skips what needs one, and `make verl` shows the build. It said:\n{trouble}"
    )


@contextmanager
def math_agent(folder: Path) -> Iterator[dict[str, Any]]:
    """The math agent on a local runtime, one rollout of each prompt fails once. Gives what real_rollouts.py has to know."""
    (folder / "marks").mkdir()
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": p.prompt, "answer": p.answer, "fail_marker": str(folder / "marks" / f"{i}.failed")})
            + "\n"
            for i, p in enumerate(problems("train", 2, seed=5))
        )
    )
    words = ("--agent", agent_in(folder), "--store", str(folder / "records"), "--writable", str(folder / "marks"))
    with serving(folder, "runtime", "serve", *words) as served:
        yield {
            "policy": str(ROOT / "src/agentcore_rl_toolkit/policy/weights"),
            "rows": str(rows),
            "agentcore": {
                "agent_runtime_arn": served["agents"]["math"],
                "s3_bucket": f"file://{folder / 'records'}",
                "exp_id": "real-verl",
                "endpoint_url": served["url"],
                "model_id": "policy",
                "gateway_host": "127.0.0.1",
                "gateway_port": 0,
                "reqs_per_sec": 200,
                "max_rollout_time": 300,
            },
        }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the cases of real_rollouts.py found: everything that needs verl, in one process of its environment."""
    python = verl_python()
    if len(_failures) >= MOST_RUNS:
        pytest.fail(_failures[-1], pytrace=False)
    folder = tmp_path_factory.mktemp("verl")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "disabled",
        # A machine with more to do than it can: Ray gives its own processes half a minute to appear, and gives up with them.
        "RAY_agent_register_timeout_ms": "180000",
        "RAY_worker_register_timeout_seconds": "180",
        "RAY_raylet_start_wait_time_s": "180",
        "RAY_worker_niceness": "0",  # its actors would have next to nothing beside other tests
        "AWS_ACCESS_KEY_ID": "local",
        "AWS_SECRET_ACCESS_KEY": "local",
    }
    with math_agent(folder) as place:
        (folder / "place.json").write_text(json.dumps(place))
        script = Path(__file__).with_name("real_rollouts.py")
        command = [python, "-W", "ignore", str(script), str(folder / "place.json"), str(folder)]
        done, answer = finished(command, folder / "run.log", environment)
    cases = {c: folder / f"{c}.json" for c in ("manager", "rollouts")}
    there = {c: json.loads(path.read_text()) for c, path in cases.items() if path.exists()}
    if done != 0 or len(there) < len(cases):
        _failures.append(f"verl's process ended with {done} after the cases {[*there]}; it said:\n{answer}")
        pytest.fail(_failures[-1], pytrace=False)
    return there


def finished(command: list[str], log: Path, environment: dict[str, str]) -> tuple[int | str, str]:
    """Run a command until it ends or its time is up. Returns its exit code, and the end of what it wrote."""
    with log.open("wb") as out:
        try:
            done: int | str = subprocess.run(
                command, stdout=out, stderr=out, timeout=RUN_S, env=environment, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            done = f"no end within {RUN_S} s"
    return done, log.read_text(errors="replace")[-5000:]


@pytest.fixture(scope="module")
def rollouts(found: dict[str, Any]) -> dict[str, Any]:
    """Two prompts of four rollouts each, for training and for validation; one rollout of each prompt failed."""
    rollouts: dict[str, Any] = found["rollouts"]
    return rollouts


def groups_of(n: int) -> list[Group]:
    episodes = recorded_episodes(n)
    replay = Replay(episodes)
    return collect(requests_for(episodes), client=replay.client, gateway=replay.gateway)


def test_the_v1_manager_writes_rows_and_final_tags_and_masked_rollouts_move_no_advantage(found: dict[str, Any]) -> None:
    result = found["manager"]
    assert result["returned_s"] < 5  # generate_sequences must not wait for rollouts
    # Of the third prompt nothing is usable, of the fourth one rollout, which verl could only compare with nothing.
    assert result["status"] == {"0": "finished", "1": "finished", "2": "finished", "3": "failure", "4": "failure"}
    assert "64 prompts gave no sample" in result["ended"]
    rows = result["rows"]
    seen = 0
    for g, group in enumerate(groups_of(24)):
        advantages_G = grpo(group.rewards)
        for rollout, advantage in zip(group.rollouts, advantages_G, strict=True):
            outputs = to_verl(rollout, prompt_length=256, response_length=256)
            found = [k for k in rows if k.startswith(f"{g}_{rollout.index}_")]
            assert len(found) == len(outputs)
            for index, output in enumerate(outputs):
                i = rows[f"{g}_{rollout.index}_{index}"]
                mask = output["response_mask"]
                assert result["input_ids"][i] == output["prompt_ids"] + output["response_ids"]
                assert result["response_mask"][i] == mask
                assert result["logprobs"][i] == pytest.approx(output["response_logprobs"], abs=1e-6)
                assert result["advantages"][i] == pytest.approx(advantage, abs=1e-4)
                tag = result["tags"][i]
                assert tag["seq_len"] == len(result["input_ids"][i])
                assert tag["min_global_steps"] == output["extra_fields"]["min_global_steps"]
                seen += 1
    assert seen == len(rows) == len(result["tags"])


def test_verl_takes_an_advantage_for_each_token(tmp_path: Path) -> None:
    out = tmp_path / "tokens.json"
    command = [verl_python(), "-W", "ignore", str(Path(__file__).parent / "real_tokens.py"), str(out)]
    subprocess.run(command, check=True, timeout=RUN_S, env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path)
    result = json.loads(out.read_text())
    # A rollout's longest sequence comes last with verl.
    wanted = sorted(result["wanted"], key=lambda row: (row[0], sum(map(bool, row[1]))))
    found = sorted(result["rows"], key=lambda row: (row[0], sum(map(bool, row[1]))))
    assert len(found) == len(wanted) > 8
    for (session, row), (_, advantages) in zip(found, wanted, strict=True):
        assert row[: len(advantages)] == pytest.approx(advantages, abs=1e-6), session
        assert not any(row[len(advantages) :])
    assert any(len({a for a in row if a}) > 1 for _, row in found)


def test_the_runs_folder_has_the_advantages_logprobs_and_entropy_of_verls_trainer(
    found: dict[str, Any], is_what_the_docs_say: Callable[[Path, str], None]
) -> None:
    recorded, compared = found["manager"]["recorded"]["rows"], 0
    for g, group in enumerate(groups_of(24)):
        rows = {int(name.rsplit("/", 1)[1]): row for name, row in recorded.items() if name.startswith(f"{g}-u{g}/")}
        assert len(rows) == len(group.rollouts)
        for rollout, advantage in zip(group.rollouts, grpo(group.rewards), strict=True):
            row = rows[rollout.index]
            if g == 2 or not to_verl(rollout, prompt_length=256, response_length=256):  # dropped untrained, or masked
                assert (row["advantage"], row["entropy"], row["gaps"]) == (None, None, [])  # absent is not zero
                assert row["mask_reason"] is not None
                continue
            assert row["advantage"] == pytest.approx(advantage, abs=1e-4)
            assert row["entropy"] == pytest.approx(1.5)
            assert [len(gaps) for gaps in row["gaps"]] == row["trained"]
            gap = 0.5 if g == 1 else 0.125
            assert all(found == pytest.approx(gap, abs=1e-5) for gaps in row["gaps"] for found in gaps)
            compared += 1
    assert compared > 8
    assert {row["mask_reason"] for name, row in recorded.items() if name.startswith("4-u4/")} == {"filtered", "outcome"}
    assert found["manager"]["recorded"]["complaints"] == []
    is_what_the_docs_say(Path(found["manager"]["recorded"]["folder"]), "verl")


def test_a_step_sampled_from_other_weights_than_verls_ends_the_run_and_its_numbers_are_kept(
    found: dict[str, Any],
) -> None:
    """The step before is within rounding; it has a row of older weights as well, which is not judged."""
    recorded = found["manager"]["recorded"]
    assert recorded["ended"].startswith("the weights did not arrive: ")
    assert "differ by 0.5 on average" in recorded["ended"]
    assert recorded["events"][1]["agentcore/logprob_gap_mean"] == pytest.approx(0.125)
    assert recorded["kept"] == sum(row["entropy"] is not None for row in recorded["rows"].values())


def test_the_runs_folder_has_what_verl_logs_of_a_step(found: dict[str, Any]) -> None:
    evaluated, step = found["manager"]["recorded"]["events"]
    assert evaluated == {"event": "evaluated", "step": 0, "val-core/math/reward": 0.5}
    assert (step["event"], step["step"], step["loss"], "note" in step) == ("step", 1, -0.5, False)
    assert (step["rollout_s"], step["train_s"]) == (3.0, 1.0)


def test_a_run_is_finished_when_verls_fit_returns(found: dict[str, Any]) -> None:
    assert found["manager"]["run"] == ["running", "finished"]


def test_without_a_gateway_the_first_prompts_fail_and_the_next_batch_says_why(found: dict[str, Any]) -> None:
    reply = found["manager"]["without_gateway"]
    assert set(reply["status"]) == {"failure"}
    assert reply["raised"] == "GatewayError"


@pytest.mark.parametrize("partition", ["train", "val"])
def test_every_row_is_what_verls_server_sampled(rollouts: dict[str, Any], partition: str) -> None:
    found, sampled = rollouts[partition], rollouts["sampled"]
    assert found["keys"]
    for tokens, mask, logprobs in zip(
        found["input_ids"], found["response_mask"], found["rollout_log_probs"], strict=True
    ):
        start = at = len(tokens) - len(mask)
        while at < len(tokens):
            if not mask[at - start]:
                at += 1
                continue
            here = [
                g
                for g in sampled
                if g["ids"] and g["prompt"] == tokens[:at] and g["ids"] == tokens[at : at + len(g["ids"])]
            ]
            assert any(logprobs[at - start :][: len(g["ids"])] == pytest.approx(g["logprobs"], abs=1e-6) for g in here)
            at += len(here[0]["ids"])


def test_rollouts_outlive_an_update_of_the_weights_and_say_so(rollouts: dict[str, Any]) -> None:
    train = rollouts["train"]
    assert train["cut"] >= 1
    spans = {(tag["min_global_steps"], tag["max_global_steps"]) for tag in train["tags"]}
    assert spans <= {(4, 4), (4, 5), (5, 5)}
    assert (4, 5) in spans
    assert all(tag["global_steps"] == 5 for tag in train["tags"])


def test_a_failed_rollout_has_no_row_and_its_prompt_still_finishes(rollouts: dict[str, Any]) -> None:
    train, val = rollouts["train"], rollouts["val"]
    assert set(train["status"].values()) == {"finished"}
    sessions = [{key.rsplit("_", 2)[1] for key in train["keys"] if key.startswith(uid)} for uid in train["status"]]
    assert [len(s) for s in sessions] == [3, 3]  # one of four failed
    assert len(val["keys"]) == 2  # val_kwargs.n is 1
    assert {tag["min_global_steps"] for tag in val["tags"]} == {5}


def test_verls_loss_takes_a_step_on_the_rows_and_finds_them_on_policy(rollouts: dict[str, Any]) -> None:
    loss = rollouts["loss"]
    assert loss["furthest"] < 1e-3  # the logprobs in the rows are those of the tokens they stand at
    assert abs(loss["kl"]) < 1e-3
    assert math.isfinite(loss["loss"])
    assert loss["gradient"] > 0


def test_a_tensor_that_never_reached_the_engine_ends_the_run_before_the_update(rollouts: dict[str, Any]) -> None:
    """Whichever it is. verl's own code begins the step; there is no folder of the run, which the check does not need."""
    arrival = rollouts["arrival"]
    assert arrival["same"]["said"] == ""
    assert arrival["same"]["training/rollout_probs_diff_mean"] < 1e-3  # verl's own word for it, which docs name
    assert len(arrival["first"]) == 24
    for tensor, entries in arrival["first"].items():
        found = re.match(r"the weights did not arrive: .* differ by ([\d.]+) on average", entries)
        assert found, tensor
        assert float(found[1]) > 0.5, tensor
