"""Groups -> TRL rows: one row per rollout, whatever happened to it."""

from __future__ import annotations

from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.collect import collect
from agentcore_rl_toolkit.backends.collection.groups import Group
from agentcore_rl_toolkit.backends.collection.settings import CollectConfig
from agentcore_rl_toolkit.backends.trl.convert import REWARD_KEY, SEQUENCE_KEY, SESSION_KEY, to_trl

from ..recorded import Replay, recorded_episodes, requests_for


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    episodes = recorded_episodes()
    replay = Replay(episodes)
    return collect(requests_for(episodes), client=replay.client, gateway=replay.gateway)


def test_forked_rollouts_train_their_longest_sequence(groups: list[Group]) -> None:
    _, stats = to_trl(groups, num_generations=8, filler_id=7)
    assert stats.forked == sum(r.usable and r.trajectory.report.sequences > 1 for g in groups for r in g.rollouts) > 0
    assert stats.dropped_sequences == sum(r.trajectory.report.sequences - 1 for g in groups for r in g.usable) > 0
    assert stats.dropped_tokens > 0
    assert stats.trained_tokens + stats.dropped_tokens == stats.sampled_tokens - unusable(groups)


def test_rows_that_are_too_long_are_masked(groups: list[Group]) -> None:
    groups = [group.within(30, sequences=1) for group in groups]
    output, stats = to_trl(groups, num_generations=8, filler_id=7)
    assert any(rollout.mask_reason == "too_long" for group in groups for rollout in group.rollouts)
    lengths = zip(output["prompt_ids"], output["completion_ids"], strict=True)
    assert max(len(p) + len(c) for p, c in lengths) <= 30
    assert stats.trained_tokens + stats.dropped_tokens == stats.sampled_tokens - unusable(groups)
    names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", REWARD_KEY)
    masked = [k for k, sequence in enumerate(output[SEQUENCE_KEY]) if sequence is None]
    assert {str([output[name][k] for name in names]) for k in masked} == {"[[7], [7], [None], [0], None]"}


def test_a_forked_rollout_is_masked_only_if_its_row_is_too_long(groups: list[Group]) -> None:
    """Its other sequences are dropped, so their lengths do not count."""

    def rows(groups: list[Group]) -> dict[str, int]:
        output, _ = to_trl(groups, num_generations=8, filler_id=7)
        lengths = [len(p) + len(c) for p, c in zip(output["prompt_ids"], output["completion_ids"], strict=True)]
        each = zip(output[SESSION_KEY], output[SEQUENCE_KEY], lengths, strict=True)
        return {session: length for session, sequence, length in each if sequence is not None}

    fitting = {session: length for session, length in rows(groups).items() if length <= 22}
    assert rows([group.within(22, sequences=1) for group in groups]) == fitting
    assert any(fitting.keys() - rows([group.within(22) for group in groups])), "a dropped sequence is longer"


def unusable(groups: list[Group]) -> int:
    """Tokens of turns with images."""
    turns = [t for g in groups for r in g.usable if r.capture is not None for t in r.capture.turns]
    return sum(len(t.completion_ids) for t in turns if t.why_untrainable())


def test_over_sampled_groups_give_their_usable_rollouts_first() -> None:
    episodes = recorded_episodes(12, per_group=12)
    (request,) = requests_for(episodes)
    wanted: Any = {"input_id": request.input_id, "payload": {}, "n": 8}
    replay = Replay(episodes)
    groups = collect(
        [type(request)(**wanted)],
        client=replay.client,
        gateway=replay.gateway,
        config=CollectConfig(extra_rollouts=4),
    )
    output, stats = to_trl(groups, num_generations=8, filler_id=7)
    assert stats.rows == 8
    assert stats.usable == len(groups[0].usable) == 8
    assert None not in output[REWARD_KEY]
