"""Samples and inputs of services as data: shifted by one, aligned, and fresh only where all agrees."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.samples import Sample
from agentcore_rl_toolkit.backends.training.batch import datum_of, to_data, to_datum

SAMPLE = Sample(
    session_id="s",
    input_id="i",
    group_index=0,
    sequence_index=0,
    sequences=1,
    prompt_ids=[1, 2],
    response_ids=[3, 4, 5, 6],
    response_mask=[1, 1, 0, 1],
    response_logprobs=[-0.1, -0.2, None, -0.4],
    weight_versions=[7, 7, None, 6],
    advantages=[0.5, 0.5, 0.0, 0.5],
    reward=1.0,
    weight=1.0,
    turns=2,
    truncated=False,
)


def test_a_sample_becomes_a_datum_in_which_each_position_predicts_the_next_token() -> None:
    datum = to_datum(SAMPLE)
    assert (datum.tokens, datum.target_tokens) == ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6])
    assert datum.logprobs == [0.0, -0.1, -0.2, 0.0, -0.4]
    assert (datum.advantages, datum.mask) == ([0.0, 0.5, 0.5, 0.0, 0.5], [0, 1, 1, 0, 1])
    assert (SAMPLE.advantage, SAMPLE.trained_tokens, SAMPLE.version_range) == (0.5, 3, (6, 7))
    assert replace(SAMPLE, weight_versions=[None] * 4).version_range is None


@pytest.mark.parametrize(
    ("how", "fresh"),
    [
        ({}, [1, 1, 0, 1]),
        ({"version": 7}, [1, 1, 0, 0]),
        ({"version": 6}, [0, 0, 0, 1]),
        ({"version": 7, "cut": True}, [0, 0, 0, 0]),
    ],
)
def test_fresh_tokens_are_those_of_calls_with_this_version_and_the_whole_distribution(
    how: dict[str, Any], fresh: list[int]
) -> None:
    assert to_datum(SAMPLE, **how).fresh == [False, *map(bool, fresh)]


def test_samples_without_an_advantage_are_left_out_unless_all_are_wanted() -> None:
    equal = replace(SAMPLE, session_id="equal", advantages=[0.0] * 4)
    report: Any = SimpleNamespace(other_sampling={"top_p 0.8": 3})
    rollouts = [SimpleNamespace(session_id="s", trajectory=SimpleNamespace(report=report))]
    rollouts.append(SimpleNamespace(session_id="equal", trajectory=None))
    groups: Any = [SimpleNamespace(usable=rollouts)]
    assert [sample.session_id for _, sample in to_data([SAMPLE, equal])] == ["s"]
    data = to_data([SAMPLE, equal], groups, equal=True)
    assert [any(datum.fresh) for datum, _ in data] == [False, True]


def test_inputs_of_services_have_one_value_per_token() -> None:
    datum = datum_of([1, 2], {"target_tokens": [2, 3]})
    assert (datum.target_tokens, datum.mask, datum.logprobs, datum.advantages) == ([2, 3], [1, 1], [0.0] * 2, [0.0] * 2)
    assert datum_of([1, 2], {"target_tokens": [2, 3], "weights": [0, 1], "logprobs": [0.0, -1.0]}).mask == [0, 1]
    assert not any(datum.fresh)
