"""Each run that cannot learn shows its cause first, with the number of the rollouts that its link lists."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.runs import Query, Rollout, RunReader, RunWriter, diagnose
from runs_that_cannot_learn import SENTENCES, STEPS, write

GROUPS_OR_NUMBERS = ("all_fail", "all_pass", "no_spread", "opposed")  # their sentences count no rollouts


@pytest.mark.parametrize(("kind", "sentence"), SENTENCES.items())
def test_a_run_that_cannot_learn_shows_its_cause_first(tmp_path: Path, kind: str, sentence: str) -> None:
    write(tmp_path / kind, kind)
    with RunReader(tmp_path / kind) as run:
        first = diagnose(run)[0]
        assert first.name == kind
        assert sentence in first.text
        if first.query and kind not in GROUPS_OR_NUMBERS:
            assert f"{run.count(Query(**first.query))} of " in first.text or "None of" in first.text


def test_a_run_that_learns_has_no_cause(tmp_path: Path) -> None:
    write(tmp_path, "healthy")
    with RunReader(tmp_path) as run:
        assert diagnose(run) == []


def test_equal_rewards_of_the_first_steps_are_no_cause_yet(tmp_path: Path) -> None:
    for steps, names in ((2, []), (3, ["all_fail"])):
        write(tmp_path / str(steps), "all_fail", steps=steps)
        with RunReader(tmp_path / str(steps)) as run:
            assert [finding.name for finding in diagnose(run)] == names


def test_a_policy_that_solves_its_inputs_has_no_reason_to_explore(tmp_path: Path) -> None:
    write(tmp_path, "all_pass")
    with RunWriter(tmp_path) as run:
        for step in range(STEPS):
            run.event("step", {"step": step, "entropy": 0.1 if step < 3 else 0.001})
    with RunReader(tmp_path) as run:
        assert [finding.name for finding in diagnose(run)] == ["all_pass"]


@pytest.mark.parametrize(("rollout_s", "names"), [(3.0, []), (19.0, ["waiting"])])
def test_a_trainer_that_waits_a_few_seconds_per_step_is_no_cause(
    tmp_path: Path, rollout_s: float, names: list[str]
) -> None:
    write(tmp_path, "healthy")
    with RunWriter(tmp_path) as run:
        for step in range(STEPS):
            run.event("step", {"step": step, "rollout_s": rollout_s, "train_s": rollout_s / 9})
    with RunReader(tmp_path) as run:
        assert [finding.name for finding in diagnose(run)] == names


@pytest.mark.parametrize(
    ("outcome", "cause", "advice"),
    [("agent_error", "agent", "repair the agent"), ("ok", "scorer", "repair the scorer"), ("lost", "cable", "policy")],
)
def test_all_failures_count_however_many_different_errors_there_are(
    tmp_path: Path, outcome: str, cause: str, advice: str
) -> None:
    facts: dict[str, Any] = {"phase": "train", "outcome": outcome, "cause": cause}
    with RunWriter(tmp_path) as run:
        for n in range(400):
            run.rollout(Rollout(session_id=str(n), step=n // 100, group=str(n // 4), error=f"KeyError: {n}", **facts))
    with RunReader(tmp_path) as run:
        finding = diagnose(run)[0]
    assert finding.text == "400 of 400 rollouts of the last 4 steps failed, for 100 or more different reasons."
    assert advice in finding.advice


def test_numbers_beyond_all_bounds_oppose_nothing(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        for n in range(40):
            facts: dict[str, Any] = {
                "metrics": {"a": 1e300 * (n % 3), "b": 1e308 * (n % 2)},
                "reward": n % 2,
                "score": n % 2,
            }
            run.rollout(Rollout(session_id=str(n), phase="train", step=0, group=str(n // 4), outcome="ok", **facts))
    with RunReader(tmp_path) as run:
        assert diagnose(run) == []


@pytest.mark.parametrize(
    ("rollouts", "unparsed", "cut", "names"), [(20, 2, 4, ["unparsed", "cut", "opposed"]), (19, 1, 3, [])]
)
def test_calls_and_numbers_are_causes_from_their_limits_on(
    tmp_path: Path, rollouts: int, unparsed: int, cut: int, names: list[str]
) -> None:
    with RunWriter(tmp_path) as run:
        for n in range(rollouts):
            call = {
                "parse_status": "unparsed" if n < unparsed else "ok",
                "finish_reason": "length" if n < cut else "stop",
            }
            facts: dict[str, Any] = {"metrics": {"a": n % 3 == 0, "b": n % 3 == 1}, "reward": float(n % 3 < 2)}
            facts |= {"session_id": str(n), "group": str(n // 4), "calls": [call]}
            run.rollout(Rollout(phase="train", step=0, outcome="ok", **facts))
    with RunReader(tmp_path) as reader:
        found = diagnose(reader)
    assert [finding.name for finding in found] == names
    if names:
        text = "4 of 20 rollouts (20%) of the last step contain a reply that was cut off at the limit of tokens."
        assert found[1].text == f"{text} Their mean reward is 0.75. That of the others is 0.69."


def groups_of(folder: Path, *rewards: tuple[float | None, ...]) -> Path:
    """A run of four steps with these groups. A reward of None is that of a failure, which is scored 0 and not trained."""
    with RunWriter(folder) as run:
        for step in range(4):
            for group, members in enumerate(rewards):
                for place, reward in enumerate(members):
                    failed: dict[str, Any] = {"outcome": "agent_error", "cause": "agent", "mask_reason": "outcome"}
                    facts: dict[str, Any] = {"step": step, "group": f"{step}-{group}", "reward": reward}
                    facts |= {"outcome": "ok"} if reward is not None else failed
                    name = f"{step}-{group}-{place}"
                    run.rollout(Rollout(session_id=name, phase="train", score=reward or 0.0, **facts))
    return folder


@pytest.mark.parametrize(
    ("rewards", "kinds", "count", "equal", "more"),
    [
        (
            [(-1, -1), (-1, -0.5)],
            (1, 1, 0),
            "4 of 8",
            "equal",
            " 4 of these groups have rewards of 0 or less, and 0 of 1 or more.",
        ),
        (
            [(5, 5), (-1, -1), (2, 8), (1, 3)],
            (2, 1, 1),
            "8 of 16",
            "equal",
            " 4 of these groups have rewards of 0 or less, and 4 of 1 or more.",
        ),
        ([(0, 0), (-1, -1), (-1, 0)], (1, 2, 0), "8 of 12", "0 or less", ""),
        ([(None, 1, 1, 1, 1, 1)], (0, 0, 1), "all 4", "1 or more", ""),
    ],
    ids=["negative", "large", "different constants", "failures"],
)
def test_a_group_teaches_if_the_rewards_of_its_trained_rollouts_differ(
    tmp_path: Path,
    rewards: list[tuple[float | None, ...]],
    kinds: tuple[int, int, int],
    count: str,
    equal: str,
    more: str,
) -> None:
    with RunReader(groups_of(tmp_path, *rewards)) as run:
        step = run.steps()[0]
        assert (step["groups_differ"], step["groups_failed"], step["groups_solved"]) == kinds
        assert sum(kinds) <= step["groups"]
        [finding] = diagnose(run)
        text = f"In {count} groups of the last 4 steps, all rewards are {equal}, so these groups teach nothing.{more}"
        assert finding.text == text


def test_a_group_that_differs_only_by_rollouts_that_are_left_out_teaches_nothing(tmp_path: Path) -> None:
    """With `policy_failures` mask, a failure has a reward and is not trained. An input that was replaced stays counted."""
    with RunWriter(tmp_path) as run:
        for step in range(4):
            for group, (masks, rewards) in enumerate(
                [(("policy_failure", None, None), (0, 1, 1)), (("no_spread", "no_spread", "too_long"), (0.5, 0.5, 0))]
            ):
                for place, (reason, reward) in enumerate(zip(masks, rewards, strict=True)):
                    facts: dict[str, Any] = {"reward": reward, "score": reward, "mask_reason": reason, "outcome": "ok"}
                    name = f"{step}-{group}"
                    run.rollout(Rollout(session_id=f"{name}-{place}", phase="train", step=step, group=name, **facts))
    with RunReader(tmp_path) as reader:
        step = reader.steps()[0]
        kinds = [step[f"groups{kind}"] for kind in ("", "_differ", "_failed", "_solved")]
        assert kinds == [2, 0, 0, 1]
        [finding] = diagnose(reader)
    assert finding.text.startswith("In all 8 groups of the last 4 steps, all rewards are equal")


def test_a_loss_that_is_no_number_is_a_cause_and_hides_no_other(tmp_path: Path) -> None:
    with RunWriter(groups_of(tmp_path, (0, 1))) as run:
        for step in range(4):
            run.event(
                "step", {"step": step, "loss": math.nan if step > 1 else 0.5, "kl_sampler": 0.5 if step else math.nan}
            )
    with RunReader(tmp_path) as run_:
        texts = [finding.text for finding in diagnose(run_)]
    assert (
        texts
        == [
            "In 2 of the last 4 steps, the loss or the gradient norm is not a finite number.",
            "The updates are too large. In the last steps, the KL divergence from the engine is 0.5.",  # others are not known
        ]
    )


def test_steps_that_a_resumed_run_repeats_are_no_cause(tmp_path: Path) -> None:
    with RunWriter(groups_of(tmp_path, (0, 1))) as run:
        for step in range(4):
            run.event("step", {"step": step, "kl_sampler": 0.001 if step < 2 else 9.0})
        run.forget(from_step=2)
        run.event("step", {"step": 2, "kl_sampler": 0.001})
    with RunReader(tmp_path) as reader:
        assert diagnose(reader) == []


@pytest.mark.parametrize(
    ("inputs", "solved", "names"),
    [(32, 12, []), (400, 160, ["held_out"]), (400, 240, [])],
    ids=["may be chance", "flat", "rises too"],
)
def test_held_out_rewards_of_each_trainer_are_compared_unless_chance_explains_them(
    tmp_path: Path, inputs: int, solved: int, names: list[str]
) -> None:
    """Rewards that rise from 0.4 to 0.6 in training. No event has the rewards, as after other trainers than the loop."""
    with RunWriter(tmp_path) as run:
        for phase, ones in (("before", inputs * 2 // 5), ("train", 0), ("after", solved)):
            for n in range(600 if phase == "train" else inputs):
                step = n // 100 if phase == "train" else None
                reward = float(n % 5 < (2 if n < 300 else 3)) if phase == "train" else float(n < ones)
                facts: dict[str, Any] = {
                    "phase": phase,
                    "step": step,
                    "outcome": "ok",
                    "reward": reward,
                    "score": reward,
                }
                group = n // 5 if phase == "train" else n
                run.rollout(Rollout(session_id=f"{phase}-{n}", group=f"{phase}-{group}", **facts))
    with RunReader(tmp_path) as reader:
        assert [finding.name for finding in diagnose(reader)] == names


def test_few_usable_rollouts_are_a_cause(tmp_path: Path) -> None:
    for usable, names in ((9, ["not_usable"]), (10, [])):
        with RunWriter(folder := tmp_path / str(usable)) as run:
            for n in range(100):
                facts: dict[str, Any] = {"mask_reason": None if n < usable else "stale", "reward": float(n % 2)}
                run.rollout(
                    Rollout(
                        session_id=str(n), phase="train", step=0, group=str(n // 4), outcome="ok", score=0.0, **facts
                    )
                )
        with RunReader(folder) as reader:
            findings = diagnose(reader)
        assert [finding.name for finding in findings] == names
        for finding in findings:
            assert finding.text == "Only 9 of the 100 rollouts of the last step can be used for training."


def test_an_error_of_two_outcomes_leads_to_the_rollouts_that_its_sentence_counts(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        for n in range(80):  # a quarter fails, and half of these with one outcome
            outcome = "timeout" if n < 10 else "agent_error" if n < 20 else "ok"
            error = None if outcome == "ok" else "TimeoutError: 30 s"
            facts: dict[str, Any] = {
                "outcome": outcome,
                "error": error,
                "cause": error and "agent",
                "score": float(n % 2),
            }
            run.rollout(Rollout(session_id=str(n), phase="train", step=0, group=str(n // 4), **facts))
    with RunReader(tmp_path) as reader:
        [finding] = [finding for finding in diagnose(reader) if finding.name == "one_error"]
        assert "20 of 80 rollouts of the last step failed, 10 of them with 'TimeoutError: 30 s'." in finding.text
        assert reader.count(Query(**finding.query)) == 10


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ({"staleness_mean": [3.0] * 8}, None),
        ({"staleness_mean": [3.1] * 8}, "stale"),
        ({"staleness_mean": [3.5] * 4 + [3.0] * 8}, None),  # repaired
        ({"logprob_gap": [0.01, 0.01, 0.5, 0.5, 0.01, 0.5]}, "gap"),
        ({"logprob_gap": [0.01, 0.01, 0.5, 0.5, 0.5, 0.01]}, None),
        ({"logprob_gap": [0.001] * 5 + [0.05]}, None),
        ({"logprob_gap": [0.001] * 5 + [0.051]}, "gap"),
        ({"logprob_gap": [0.1] * 5 + [1.0]}, None),
        ({"kl_sampler": [0.1] * 8}, None),
        ({"clip_fraction": [0.3] * 8}, None),
        ({"clip_fraction": [0.31] * 8}, "updates"),
        ({"ratio_max": [10.0] * 8}, None),
        ({"ratio_max": [1.5] * 7 + [40.0]}, None),  # one token far from its sampler
        ({"ratio_max": [12.0] * 8}, "updates"),
        ({"entropy": [1.2] * 3 + [0.29] * 3}, "entropy"),
        ({"entropy": [1.2] * 3 + [0.3] * 3}, None),
        ({"entropy": [0.4] * 3 + [0.11] * 3}, None),  # a quarter is left
        ({"entropy": [1.2] * 2 + [0.1] * 3}, None),  # too few steps
        ({"rollout_s": [80.0] * 4, "train_s": [20.0] * 4}, None),
        ({"rollout_s": [81.0] * 4, "train_s": [19.0] * 4}, "waiting"),
        ({"rollout_s": [10.0] * 4, "train_s": [1.0] * 4}, None),
    ],
    ids=str,
)
def test_the_numbers_of_updates_are_causes_beyond_their_limits(
    tmp_path: Path, numbers: dict[str, list[float]], name: str | None
) -> None:
    with RunWriter(groups_of(tmp_path, (0, 1))) as run:
        for step, values in enumerate(zip(*numbers.values(), strict=True)):
            run.event("step", {"step": step, **dict(zip(numbers, values, strict=True))})
    with RunReader(tmp_path) as reader:
        assert [finding.name for finding in diagnose(reader)] == ([] if name is None else [name])
