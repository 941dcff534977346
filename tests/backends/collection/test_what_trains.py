"""Which rule of what trains holds for a rollout, and what a collection says of tokens sampled otherwise."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.backends import CollectConfig, GroupRequest, collect, summarize
from agentcore_rl_toolkit.backends.collection.judge import end_of_calls
from agentcore_rl_toolkit.backends.collection.samples import to_samples
from agentcore_rl_toolkit.backends.slime.convert import NOTE, to_slime
from agentcore_rl_toolkit.backends.training.loop import update
from agentcore_rl_toolkit.backends.trl.convert import SEQUENCE_KEY, to_trl
from agentcore_rl_toolkit.backends.verl.convert import to_verl
from agentcore_rl_toolkit.contract import Cause
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.trajectory import Turn

from ..recorded import Episode, Replay
from ..slime.stand_in import Sample
from ..training.test_loop import ScriptedClient, settings


def turn(index: int, prompt: list[int], completion: list[int], **more: Any) -> Turn:
    return Turn(
        turn_id=f"t{index}",
        index=index,
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[-0.5] * len(completion),
        finish_reason="stop",
        **more,
    )


TITLE = turn(0, [90, 91, 92, 93], [7, 8], tools=())
TASK = turn(1, [1, 2, 3, 4], [20, 21, 22], tools=("edit",), sampling={"top_p": 0.8})
HELPER = turn(2, [80, 81, 82, 83], [30], tools=("edit",))


def run(*records: dict[str, Any], turns: tuple[Turn, ...] = (TITLE, TASK, HELPER), **config: Any) -> Any:
    replay = Replay([Episode(input_id="a", turns=turns, record=record) for record in records])
    settings = CollectConfig(**config)
    request = GroupRequest(input_id="a", payload={}, n=len(records))
    (group,) = collect([request], client=replay.client, gateway=replay.gateway, config=settings)
    return group, replay


def trained(group: Any, place: int = 0) -> list[str]:
    found = group.rollouts[place].trajectory
    return [t for s in found.sequences if s.side_call is None for t in s.turn_ids]


def test_the_trainers_rule_wins_over_what_client_or_agent_said_and_that_over_the_default() -> None:
    plain, says = {"rewards": 1.0}, {"rewards": 1.0, "_agent": {"train": "main"}}
    group, replay = run(plain, says)
    assert trained(group, 0) == ["t1", "t2"]
    assert trained(group, 1) == ["t1"]
    assert [r.trajectory.report.train for r in group.rollouts] == ["task", "main"]
    assert all("train" not in payload["_rollout"] for payload in replay.invoked)
    group, replay = run(plain, says, train="all")
    assert trained(group, 0) == trained(group, 1) == ["t0", "t1", "t2"]
    assert all(payload["_rollout"]["train"] == "all" for payload in replay.invoked)
    with pytest.raises(ConfigError):
        CollectConfig(train="two words")


def test_advantages_are_over_episodes_however_many_calls_they_made() -> None:
    """The side calls of one episode change neither the group's mean nor the number of its members."""
    group, _ = run({"rewards": 1.0}, {"rewards": 0.0}, {"rewards": 0.0})
    samples = to_samples([group])
    places = {rollout.session_id: rollout.index for rollout in group.rollouts}
    found = {(places[s.session_id], round(s.advantage, 3)) for s in samples}
    assert found == {(0, 1.155), (1, -0.577), (2, -0.577)}
    assert [(s.sequence_index, s.sequences, s.weight) for s in samples] == [(0, 2, 0.75), (1, 2, 0.25)] * 3
    stats = summarize([group])
    assert stats.side_call_tokens == 6
    assert stats.trained_tokens == sum(r.trajectory.report.sampled_tokens for r in group.usable if r.trajectory) - 6


def test_what_trainers_compute_is_kept_at_its_sequence_also_where_the_first_one_does_not_train() -> None:
    group, _ = run({"rewards": 1.0}, {"rewards": 0.0})
    rollout = group.rollouts[0]
    turned = replace(rollout.trajectory, sequences=rollout.trajectory.sequences[::-1])
    assert [s.trained_tokens for s in turned.sequences] == [0, 1, 3]
    rollout = replace(rollout, trajectory=turned)
    group = replace(group, rollouts=[rollout, group.rollouts[1]])
    at: list[tuple[int, int]] = []  # which sequence, and how many of its tokens have a number

    class Kept:
        def trained(self, session_id: str, sequence: int, *, logprobs: Any, **_: Any) -> None:
            if session_id == rollout.session_id:
                assert len(logprobs) == len(turned.sequences[sequence].token_ids)
                at.append((sequence, sum(lp is not None for lp in logprobs)))

        def masked(self, groups: Any) -> None: ...
        def advantages(self, samples: Any, **_: Any) -> None: ...

    client = ScriptedClient(max_logprob_gap=None)
    asyncio.run(update(client, [group], settings(), 0, Kept()))  # type: ignore[arg-type]  # the calls on a recording
    assert sorted(at) == [(1, 1), (2, 3)]
    at.sort()
    made = to_slime(rollout, Sample(index=0))
    assert [(sample.metadata[NOTE]["branch"], sum(sample.loss_mask)) for sample in made] == at
    outputs = to_verl(rollout)
    assert [(o["extra_fields"]["agentcore_branch"], sum(o["response_mask"])) for o in outputs] == at
    assert to_trl([group], num_generations=2, filler_id=0)[0][SEQUENCE_KEY] == [2, 0]


def test_tokens_sampled_otherwise_are_said_and_refused_where_a_setting_demands_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        group, _ = run({"rewards": 1.0})
    assert summarize([group]).other_sampling == {"top_p 0.8": 3}
    assert "75% of the trained tokens were sampled at top_p 0.8: their ratios are wrong" in caplog.text
    group, _ = run({"rewards": 1.0}, refuse_other_sampling=True)
    assert group.rollouts[0].mask_reason == "other_sampling"
    cool = replace(TASK, sampling={"temperature": 0.5})
    group, replay = run({"rewards": 1.0}, turns=(cool,), sampling_params={"temperature": 0.5, "top_k": -1, "min_p": 0})
    assert group.rollouts[0].trajectory.report.other_sampling == {}
    assert replay.invoked[0]["_rollout"]["sampling_params"] == {"temperature": 0.5, "top_p": 1.0}


def test_calls_at_another_temperature_are_kept_counted_and_not_trained() -> None:
    cold = replace(HELPER, sampling={"temperature": 0.3})
    group, _ = run({"rewards": 1.0}, {"rewards": 0.0}, turns=(TASK, cold))
    assert trained(group) == ["t1"]
    assert {s.trained_tokens for s in to_samples([group])} == {3}
    stats = summarize([group])
    assert stats.other_sampling == {"top_p 0.8": 6, "temperature 0.3": 2}
    assert (stats.trained_tokens, stats.side_call_tokens) == (6, 0)
    # A call that names none has temperature 1, the default of the APIs, whatever the trainer's is.
    group, _ = run({"rewards": 1.0}, turns=(TASK, cold), sampling_params={"temperature": 0.3})
    assert trained(group) == ["t2"]
    group, _ = run({"rewards": 1.0}, turns=(cold,))
    assert group.rollouts[0].mask_reason == "no_tokens"
    assert "sampled at temperature 0.3, and the trainer computes at temperature 1" in str(group.rollouts[0].error)


def test_an_evaluation_takes_any_temperature() -> None:
    greedy = replace(TASK, sampling={"temperature": 0})
    config = CollectConfig(teacher_url="http://t", evaluation=True)
    replay = Replay([Episode(input_id="a", turns=(greedy,), record={"rewards": 1.0})])
    request = GroupRequest(input_id="a", payload={})
    (group,) = collect([request], client=replay.client, gateway=replay.gateway, config=config)
    assert group.rollouts[0].usable
    assert trained(group) == ["t1"]
    assert "sampling_params" not in replay.invoked[0]["_rollout"], "the agent samples as it is deployed"
    _, replay = run({"rewards": 1.0})
    assert replay.invoked[0]["_rollout"]["sampling_params"] == {"temperature": 1.0, "top_p": 1.0}


@pytest.mark.parametrize(
    ("last", "errors", "failure"),
    [
        ({"finish_reason": "length"}, [], "tokens"),
        ({"finish_reason": "length", "parse_status": "unparsed"}, [], "tokens"),
        ({"finish_reason": "length", "answered": False}, [], "answer"),
        ({"finish_reason": "length"}, [{"type": "turn_limit", "started_s": 10.0}], "turns"),
        ({"parse_status": "unparsed"}, [], "calls"),
        ({}, [{"type": "turn_limit", "started_s": 10.0}], "turns"),
        ({}, [{"type": "context_overflow", "started_s": 10.0}], "context"),
        ({}, [{"type": "turn_limit", "started_s": 1.0}], None),  # a turn came after it
        ({}, [{"type": "upstream", "started_s": 10.0}], None),
    ],
)
def test_the_sessions_last_call_decides_whose_failure_any_exception_is(
    last: dict[str, Any], errors: list[dict[str, Any]], failure: str | None
) -> None:
    """CrewAI raises a plain ValueError on a reply that was cut; no table of classes knows that."""
    capture = SimpleNamespace(turns=[replace(TASK, **{"started_s": 5.0, **last})], errors=errors)
    assert end_of_calls(capture) == (None, failure)


def test_an_answer_that_never_left_the_reasoning_is_the_policys_failure() -> None:
    blank = (TASK, replace(HELPER, answered=False))
    raised = {"status_code": 500, "stop_reason": "no answer", "_agent": {"cause": "agent", "policy_reward": -0.5}}
    silent = {"status_code": 500, "stop_reason": "no answer"}  # of an agent that declares no reward
    group, _ = run({"rewards": 0.25}, raised, silent, turns=blank)
    assert [r.failure for r in group.rollouts] == ["answer"] * 3
    assert [r.cause for r in group.rollouts] == [None, Cause.POLICY, Cause.POLICY]
    assert group.rewards == [0.25, -0.5, None]
    assert group.rollouts[2].mask_reason == "policy_failure"
    assert summarize([group]).policy_failures == {"answer": 3}
    group, _ = run(raised)
    assert group.rollouts[0].mask_reason == "outcome"  # there was an answer: it is the agent's own failure


def test_forced_answers_and_kept_histories_are_explained(caplog: pytest.LogCaptureFixture) -> None:
    held = replace(TASK, trainable=False, untrainable_reason="held_to_a_form")
    group, _ = run({"rewards": 1.0}, turns=(held,))
    assert "set forced_tools to wish" in str(group.rollouts[0].error or group.rollouts[0].reason)
    thinking = replace(TASK, free_tokens=1, unsampled=2)
    with caplog.at_level(logging.INFO):
        group, _ = run({"rewards": 1.0}, {"rewards": 0.0}, turns=(thinking,))
    assert "its first prompt has 2 answers that it never sampled" in caplog.text
    assert {sample.trained_tokens for sample in to_samples([group])} == {1}
    assert [sum(sequence.loss_mask) for sequence in group.rollouts[0].trajectory.sequences] == [1]
