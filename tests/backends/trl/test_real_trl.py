"""A real TRL GRPOTrainer on CPU over the recorded episodes: what it was given, what it leaves out, what it publishes."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from operator import mul
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.advantages import grpo
from agentcore_rl_toolkit.backends.collection.collect import collect
from agentcore_rl_toolkit.backends.collection.samples import rollout_samples
from agentcore_rl_toolkit.runs import Query, RunReader
from agentcore_rl_toolkit.runs.folder import status

from ..recorded import Replay, recorded_episodes, requests_for

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def result(trl_python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process with TRL found in all cases."""
    out = tmp_path_factory.mktemp("trl") / "result.json"
    done = subprocess.run(
        [trl_python, "-W", "ignore", str(Path(__file__).parent / "real_runs.py"), str(out)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    loaded: dict[str, Any] = json.loads(out.read_text())
    return loaded


@pytest.fixture(scope="module")
def plain(result: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = result["plain"]
    return found


@pytest.fixture(scope="module")
def rollouts() -> list[Any]:
    """The same 64 episodes as the run saw, in the same order."""
    episodes = recorded_episodes()
    replay = Replay(episodes)
    groups = collect(requests_for(episodes), client=replay.client, gateway=replay.gateway)
    return [r for g in groups for r in g.rollouts]


def test_trl_trains_exactly_the_tokens_that_were_sampled(plain: dict[str, Any], rollouts: list[Any]) -> None:
    out = plain["output"]
    assert len(out["completion_ids"]) == 64
    for i, rollout in enumerate(rollouts):
        samples = rollout_samples(rollout)
        mask = [m * t for m, t in zip(out["completion_mask"][i], out["tool_mask"][i], strict=True)]
        if not samples:
            assert sum(mask) == 0
            continue
        best = max(samples, key=lambda s: s.trained_tokens)
        prompt = [t for t, m in zip(out["prompt_ids"][i], out["prompt_mask"][i], strict=True) if m]
        length = len(best.response_ids)
        assert prompt == best.prompt_ids
        assert out["completion_ids"][i][:length] == best.response_ids
        assert mask[:length] == best.response_mask
        assert sum(mask[length:]) == 0
        used = [lp for lp, m in zip(out["old_per_token_logps"][i], mask, strict=True) if m]
        assert used == pytest.approx([lp for lp in best.response_logprobs if lp is not None], abs=1e-6)


def test_trls_own_loss_has_the_gradient_of_the_documented_formula(result: dict[str, Any]) -> None:
    assert result["objective"] == pytest.approx({"default": 0, "clip_higher": 0}, abs=1e-6)


def test_group_statistics_ignore_masked_rollouts(plain: dict[str, Any], rollouts: list[Any]) -> None:
    for start in range(0, 64, 8):
        rewards_G = [r.reward if r.usable else None for r in rollouts[start : start + 8]]
        expected = [0.0 if a is None else a for a in grpo(rewards_G, epsilon=1e-4)]  # TRL's own epsilon
        assert plain["output"]["advantages"][start : start + 8] == pytest.approx(expected, abs=1e-5)


def has_the_wanted_advantages(tokens: dict[str, Any]) -> None:
    for row, (_, wanted) in zip(tokens["output"]["advantages"], tokens["wanted"], strict=True):
        assert row[: len(wanted)] == pytest.approx(wanted, abs=1e-6)
        assert not any(row[len(wanted) :])


def test_only_the_length_of_its_row_masks_a_forked_rollout(result: dict[str, Any]) -> None:
    short = result["short_rows"]
    masks = zip(short["output"]["prompt_mask"], short["output"]["completion_mask"], strict=True)
    assert max(sum(prompt) + sum(completion) for prompt, completion in masks) <= 28
    assert short["longer"] > 0, "rollouts with a dropped sequence of more tokens are trained"


def test_trls_loss_gets_an_advantage_for_each_token(result: dict[str, Any]) -> None:
    tokens = result["tokens"]
    has_the_wanted_advantages(tokens)
    assert any(len({a for a in wanted if a}) > 1 for _, wanted in tokens["wanted"])
    assert tokens["moved"] > 0
    assert any("agentcore/turns_against_episode" in entry for entry in tokens["log"])
    with RunReader(Path(tokens["run"])) as run:
        found = {row["session_id"]: row["advantage"] for row in run.rollouts(Query(usable=True))}
        left_out = {row["session_id"]: row["mask_reason"] for row in run.rollouts(Query(usable=False))}
    assert set(found) == {session for session, wanted in tokens["wanted"] if wanted}
    assert None not in found.values()
    assert left_out == {session: "too_long" for session, wanted in tokens["wanted"] if not wanted} != {}
    assert tokens["log"][0]["agentcore/too_long"] == len(left_out)


def test_a_script_of_ones_own_leaves_a_run(
    plain: dict[str, Any], is_what_the_docs_say: Callable[[Path, str], None]
) -> None:
    is_what_the_docs_say(Path(plain["run"]), "TRL")
    assert status(Path(plain["run"])) == "finished"
    with RunReader(Path(plain["run"])) as run:
        [step] = run.metrics()
        usable = run.rollouts(Query(usable=True))
    found = {row["session_id"]: row["advantage"] for row in usable}
    assert (step["event"], step["step"], step["loss"]) == ("step", 0, plain["log"][0]["loss"])
    sessions = [session for group in plain["sessions"] for session in group]
    advantages = dict(zip(sessions, plain["output"]["advantages"], strict=True))
    assert found == {session: pytest.approx(advantages[session], abs=1e-6) for session in found}
    assert len(found) > 8
    # Of a forked rollout, TRL trains one sequence.
    masks = (plain["output"][name] for name in ("completion_mask", "tool_mask", "advantages"))
    tokens = [sum(map(mul, *each)) * (A != 0) for *each, A in zip(*masks, strict=True)]
    assert sum(row["gradient_tokens"] for row in usable) == sum(tokens) < sum(row["trained_tokens"] for row in usable)


def test_what_a_forked_rollout_loses_is_counted_and_logged(plain: dict[str, Any], rollouts: list[Any]) -> None:
    forked = [r for r in rollouts if r.usable and r.trajectory.report.sequences > 1]
    lost = sum(sum(s.trained_tokens for s in r.trajectory.sequences) for r in forked) - sum(
        max(s.trained_tokens for s in r.trajectory.sequences) for r in forked
    )
    stats = plain["stats"]
    assert (stats["forked"], stats["dropped_tokens"], stats["rows"] - stats["usable"]) == (
        len(forked),
        lost,
        sum(not r.usable for r in rollouts),
    )
    log = next(entry for entry in plain["log"] if "agentcore/forked" in entry)
    assert log["agentcore/dropped_tokens"] == lost
    assert log["agentcore/trained_token_share"] == pytest.approx(stats["trained_tokens"] / stats["sampled_tokens"])
    assert log["agentcore/outcome/lost"] == sum(r.outcome == "lost" for r in rollouts) > 0


def test_weights_are_published_before_the_first_batch_and_after_the_last_step(plain: dict[str, Any]) -> None:
    assert plain["versions"] == [0, 1]
    assert plain["gateway_version"] == 1
    assert plain["moved"] > 0
    assert plain["in_sync"] == 0.0
    assert "lm_head.weight" not in plain["names"][0]  # tied to the embedding, stored once


def test_lora_weights_are_published_merged_under_the_models_own_names(result: dict[str, Any]) -> None:
    lora = result["lora"]
    assert lora["names_are_the_models_own"]
    assert lora["changed"] == ["q_proj", "v_proj"]
    assert lora["trained"] == ["lora_A", "lora_B"]
    assert lora["versions"] == [0, 1, 2, 3]
    assert lora["proved"] == 3, "the change since an earlier version arrived"
    assert lora["moved"] > 1e-4
    assert lora["merge_gap"] < 1e-6


def test_the_loops_adapters_are_published_merged_proved_and_saved_as_a_plain_model(result: dict[str, Any]) -> None:
    found = result["loop_lora"]
    assert found["versions"] == [0, 1]
    assert found["trained_tokens"] > 100
    assert found["moved"] > 1e-4
    assert found["saved"] == found["given"]
    assert found["saved_gap"] < 1e-6


def test_trl_and_the_built_in_engine_agree_at_temperature_07(result: dict[str, Any]) -> None:
    found = result["cool"]
    assert found["trained_tokens"] == 512
    assert found["gaps"]
    assert max(*found["gaps"], found["published"]) < 1e-4
    shares = [event["clip_fraction"] for event in found["events"] if event["event"] == "step"]
    assert shares == found["clipped"], "under the name that all runs have"


def test_a_resumed_run_has_each_step_once(result: dict[str, Any]) -> None:
    assert result["resumed"]["rollouts"] == [64, 64, 64]


def test_publishing_adapters_leaves_the_base_as_it_is_and_a_checkpoint_leaves_it_out(result: dict[str, Any]) -> None:
    found = result["adapters"]
    assert found["scales"] == {"None": [2.0], "4": [1.0]}
    assert found["trl_alpha"] == 8
    assert "would be lost: the model ties both to one matrix" in found["tied"]
    assert found["kept"] == ["lora_A", "lora_B"]
    assert found["left_out"] > 20
    assert (found["base_changed"], found["files_differ"], found["merged_differently"]) == ([], [], [])
    assert found["moved"] > 1e-3


@pytest.fixture(scope="module")
def vllm(result: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = result["vllm"]
    return found


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_vllm_server_has_the_weights_of_a_version_before_the_gateway_announces_it(
    vllm: dict[str, Any], kind: str
) -> None:
    found = vllm[kind]
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
    batches = ["version 0", "rollouts"], ["version 1", "rollouts"], ["version 2"]
    assert found["order"] == ["/init_weight_transfer_engine", *(step for b in batches for step in [*update, *b])]
    assert found["names_are_the_models_own"]
    assert found["moved"] > 1e-4
    assert found["last_gap"] < 1e-6  # the final weights, after the last step


def test_with_vllm_the_importance_correction_is_trls_own_over_the_recorded_logprobs(vllm: dict[str, Any]) -> None:
    found = vllm["full"]
    assert found["ratio_gap"] < 1e-4  # exp(recomputed - recorded), capped, on exactly the trained tokens
    assert found["trained_tokens"] > 100
    assert all(math.isfinite(loss) for loss in found["losses"])


def test_a_vllm_server_without_the_flag_is_refused_at_another_temperature(vllm: dict[str, Any]) -> None:
    assert "training.temperature is 0.7: start vLLM with --logprobs-mode processed_logprobs" in vllm["reports_at_1"]


def test_a_vllm_server_that_keeps_its_first_weights_ends_the_run_at_the_batch_after_the_first_step(
    vllm: dict[str, Any],
) -> None:
    found = vllm["keeps_its_first"]
    assert found["error"].startswith("the weights did not arrive: ")
    assert "the trainer's own of version 1 differ by" in found["error"]
    assert found["order"][-2:] == ["version 1", "rollouts"]
    assert len(found["gaps"]) == 1  # of the batch before, by the same weights
    assert found["gaps"][0] < 1e-5


def test_a_first_batch_without_a_usable_rollout_ends_the_run_with_the_most_frequent_reason(
    result: dict[str, Any],
) -> None:
    error = result["never_works"]["error"]
    assert error.startswith("RolloutError: none of the first 16 rollouts can be used; ")
    assert any(reason in error.splitlines()[0] for reason in ("lost", "agent_error", "no sampled token"))


def test_an_engine_that_keeps_one_tensor_ends_the_run(result: dict[str, Any]) -> None:
    assert result["keeps_a_tensor"]["error"].startswith(
        "WeightsError: the weights did not arrive: after version 1 was published"
    )
