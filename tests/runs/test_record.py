"""A rollout's columns, computed from what was kept of it, and the numbers of steps and inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.runs import Query, Rollout, RunReader, RunWriter, TokenSequence
from agentcore_rl_toolkit.runs.record import numbers_of, tool_errors


def rollout(session_id: str = "s", **facts: Any) -> Rollout:
    return Rollout(session_id=session_id, **{"phase": "train", "step": 0, "group": "g", "outcome": "ok", **facts})


def calls(*reasons: str | None, **facts: Any) -> list[dict[str, Any]]:
    return [{"finish_reason": reason, **facts} for reason in reasons]


@pytest.mark.parametrize(
    ("facts", "column", "value"),
    [
        ({}, "stop", None),
        ({"calls": calls("stop")}, "stop", "stop"),
        ({"calls": calls("length", "tool_calls")}, "stop", "tool_calls"),
        ({"calls": calls("stop", "max_tokens")}, "stop", "length"),
        ({"failure": "tokens", "outcome": "agent_error"}, "stop", "length"),
        ({"failure": "turns", "outcome": "agent_error"}, "stop", "turns"),
        ({"failure": "answer", "calls": calls("stop")}, "stop", "answer"),
        ({"outcome": "timeout", "calls": calls("stop")}, "stop", "timeout"),
        ({}, "cut_calls", None),
        ({"calls": calls("length", "max_tokens", "stop")}, "cut_calls", 2),
        ({"calls": calls("stop", parse_status="unparsed")}, "unparsed_calls", 1),
        ({"calls": calls("stop", parse_status="ok")}, "unparsed_calls", 0),
        ({}, "place", 0),
        ({}, "error", None),
        ({"error": "x" * 501}, "error", "x" * 500),
        ({}, "input", None),
        ({"payload": {"prompt": "x" * 301}}, "input", "x" * 300),
        ({"payload": {"prompt": ["x"]}}, "input", '{"prompt": ["x"]}'),
        ({}, "tool_calls", None),
        ({"dialogue": []}, "tool_calls", 0),
        ({"dialogue": []}, "tools", None),
        ({}, "numbers", None),
        ({"metrics": {"a": 1, "b": float("nan")}}, "numbers", '{"a": 1.0}'),
        ({"reward_parts": {"judge": {"score": 0.5}}}, "numbers", '{"judge": 0.5}'),
        ({"reward_parts": [0.5]}, "numbers", None),
        ({"fidelity": {"turns": 3}}, "turns", 3),
        ({"fidelity": {"turns": 3}}, "branches", None),
    ],
)
def test_columns_are_computed_from_the_facts(facts: dict[str, Any], column: str, value: Any) -> None:
    assert rollout(**facts).columns()[column] == value


def sequence(**facts: Any) -> TokenSequence:
    facts = {"logprobs": [None, -1.0, -3.0, None], **facts}
    return TokenSequence(ids=[1, 2, 3, 4], mask=[0, 1, 1, 0], **facts)


@pytest.mark.parametrize(
    ("sequences", "numbers"),
    [
        (None, (None, None, None, None, None)),
        ([sequence()], (-3.0, -2.0, None, None, None)),
        ([sequence(logprobs=None)], (None, None, None, None, None)),
        ([sequence(logprobs=[-9.0, -1.0, None, -9.0])], (-1.0, -1.0, None, None, None)),
        ([sequence(trainer_logprobs=[0.0, -1.5, -2.0, 0.0])], (-3.0, -2.0, 1.0, 0.75, None)),
        ([sequence(trainer_logprobs=[0.0, -1.5, None, 0.0], updates=0)], (-3.0, -2.0, 0.5, 0.5, None)),
        ([sequence(trainer_logprobs=[0.0, -1.5, -2.0, 0.0], updates=1)], (-3.0, -2.0, None, None, None)),
        (
            [sequence(entropies=[9.0, 1.0, None, 9.0]), sequence(entropies=[9.0, 1.0, 4.0, 9.0])],
            (-3.0, -2.0, None, None, 2.0),
        ),
    ],
)
def test_numbers_are_of_trained_tokens_only(
    sequences: list[TokenSequence] | None, numbers: tuple[float | None, ...]
) -> None:
    found = numbers_of(sequences)
    names = ("logprob_min", "logprob_mean", "gap_max", "gap_mean", "entropy_mean")
    assert tuple(found[name] for name in names) == numbers


def call(name: str, call_id: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": call_id, "function": {"name": name, "arguments": "{}"}}]}


def result(text: str, call_id: str | None = None, **facts: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id, **facts}


@pytest.mark.parametrize(
    ("dialogue", "errors"),
    [
        ([call("a"), result("Error: no")], {"a": 1}),
        ([call("a"), result("42")], {"a": 0}),
        ([call("a"), result("42", is_error=True)], {"a": 1}),
        ([result("Error: no")], {}),
        ([call("a"), {"role": "user", "content": "error"}], {}),
        ([call("a", "1"), call("b", "2"), result(" error", "2"), result("ok", "1")], {"a": 0, "b": 1}),
        ([call("a"), call("b"), result("ok"), result("Traceback (most")], {"a": 0, "b": 1}),
        ([call("a", "1"), call("b"), result("exception", None), result("ok")], {"a": 1, "b": 0}),
    ],
)
def test_a_result_counts_for_its_call_or_the_oldest_open_one(
    dialogue: list[dict[str, Any]], errors: dict[str, int]
) -> None:
    assert dict(tool_errors(dialogue)) == errors


def test_tokens_come_back_with_what_is_absent() -> None:
    whole = sequence(
        versions=[None, 0, 3, None], entropies=[None, 0.0, 0.5, None], advantages=[0.0] * 4, turn_ids=("a",)
    )
    for given in (whole, sequence(versions=None, logprobs=None)):
        assert TokenSequence.decoded(json.loads(json.dumps(given.encoded()))) == given


def test_a_step_has_counts_spreads_and_quantiles_of_its_rollouts(tmp_path: Path) -> None:
    rewards = {"a": (0.0, 0.0), "b": (1.0, 2.0), "c": (1.0, 1.0), "d": (0.5, 0.5), "e": (-1.0, -1.0), "f": (3.0, None)}
    with RunWriter(tmp_path) as run:
        for group, pair in rewards.items():
            for place, reward in enumerate(pair):
                masked = "stale" if group == "f" else "no_spread" if group == "e" else None
                facts = {"reward": reward, "score": reward, "mask_reason": masked, "place": 1 - place}
                facts |= {"ended_s": 100.0 + place, "elapsed_s": 7.0 if reward else None, "staleness": place}
                run.rollout(rollout(f"{group}{place}", group=group, calls=calls("length", parse_status="ok"), **facts))
        run.rollout(rollout("later", step=1, ended_s=None))
    with RunReader(tmp_path) as reader:
        step, later = reader.steps()
        names = ("groups", "groups_differ", "groups_failed", "groups_solved", "rollouts", "scored", "score", "usable")
        assert [step[name] for name in names] == [5, 1, 2, 1, 12, 11, 7.0, 8]
        assert (step["quantiles"], step["reward"], step["cut"], step["unparsed"]) == ([-1.0, 0.5, 2.0], 5 / 6, 12, 0)
        assert (step["first_s"], step["last_s"], step["staleness"], step["staleness_max"]) == (93.0, 101.0, 0.5, 1)
        assert (step["sampled_tokens"], step["usable_tokens"], step["number"], step["at"]) == (None, None, 1, "train 1")
        absent = ("quantiles", "interval", "reward_spread", "reward", "first_s")
        assert [later[name] for name in absent] == [None] * 5
        assert reader.group(1) == [2, 1]
        assert reader.solved() == {"never": 3, "sometimes": 0, "always": 3}
        inputs = reader.inputs(Query(step=0))
        assert [(i["rollouts"], i["reward"], i["rate"]) for i in inputs.values()][:4] == [
            *((2, 0.0, 0.0), (2, 1.5, 1.0), (2, 1.0, 1.0), (2, 0.5, 0.0)),
        ]
        assert [row["session_id"] for row in reader.rollouts(offset=1, limit=2)] == ["a1", "b0"]
        assert len(reader.rows(list(range(1, 14)) * 80)) == 1040
