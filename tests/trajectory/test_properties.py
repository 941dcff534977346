"""Laws that hold for any session: made-up conversations that grow, fork, rewrite, retry, and arrive in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.trajectory import Turn, build_trajectory

# Few different tokens, so that accidental prefixes, and not only intended ones, occur.
TOKENS = st.integers(0, 3)
SOME = st.lists(TOKENS, min_size=1, max_size=4)


@st.composite
def sessions(draw: st.DrawFn) -> list[Turn]:
    turns: list[Turn] = []
    for index in range(draw(st.integers(0, 12))):
        how = draw(st.sampled_from(["extend", "extend", "extend", "fresh", "same", "cut", "edit"]))
        before = draw(st.sampled_from(turns)) if turns and how != "fresh" else None
        if before is None:
            prompt = draw(SOME)
        else:
            full = [*before.prompt_ids, *before.completion_ids]
            if how == "same":
                prompt = list(before.prompt_ids)
            elif how == "cut":
                prompt = full[: draw(st.integers(1, len(full)))] + draw(st.lists(TOKENS, max_size=2))
            elif how == "edit":
                at = draw(st.integers(0, len(full) - 1))
                prompt = [*full[:at], draw(TOKENS), *full[at + 1 :]]
            else:
                prompt = full + draw(st.lists(TOKENS, max_size=3))
        completion = draw(st.lists(TOKENS, max_size=4))
        trouble = draw(st.sampled_from([None] * 6 + ["abort", "blind"]))
        first = draw(st.integers(0, 2))
        # A logprob that names its token's place, so that a shifted or borrowed one is seen.
        logprobs = [-(index * 100 + i + 1) / 1000 for i in range(len(completion))]
        start = draw(st.floats(0, 10))
        turns.append(
            Turn(
                turn_id=f"t{index}",
                index=index,
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=[None] * len(completion) if trouble == "blind" else logprobs,
                finish_reason="abort" if trouble == "abort" else "stop",
                weight_version_first=first,
                weight_version_last=first + draw(st.integers(0, 1)),
                started_s=start,
                finished_s=start + draw(st.floats(0, 3)),
            )
        )
    return turns


@given(sessions())
def test_each_sampled_token_is_trained_exactly_once(turns: list[Turn]) -> None:
    result = build_trajectory("s", turns)
    trained = Counter(
        logprob for s in result.sequences for logprob, mask in zip(s.logprobs, s.loss_mask, strict=True) if mask
    )
    in_sequences = {turn_id for s in result.sequences for turn_id in s.turn_ids}
    wanted = Counter(logprob for t in turns if t.turn_id in in_sequences for logprob in t.logprobs)
    assert trained == wanted
    assert all(count == 1 for count in trained.values())


@given(sessions())
def test_every_usable_turn_is_trained_or_excluded(turns: list[Turn]) -> None:
    result = build_trajectory("s", turns)
    report = result.report
    placed = [turn_id for s in result.sequences for turn_id in s.turn_ids]
    assert len(placed) == len(set(placed))
    assert len(placed) + report.untrainable_turns == report.turns == len(turns)
    assert {t.turn_id for t in turns if t.why_untrainable()} & set(placed) == set()
    assert report.trained_tokens == sum(len(t.completion_ids) for t in turns if t.turn_id in placed)
    assert report.sampled_tokens == sum(len(t.completion_ids) for t in turns)


@given(sessions())
def test_masks_logprobs_and_versions_belong_to_their_tokens(turns: list[Turn]) -> None:
    by_id = {t.turn_id: t for t in turns}
    for s in build_trajectory("s", turns).sequences:
        assert len(s.token_ids) == len(s.loss_mask) == len(s.logprobs) == len(s.weight_versions)
        assert [m == 1 for m in s.loss_mask] == [p is not None for p in s.logprobs]
        assert [m == 1 for m in s.loss_mask] == [v is not None for v in s.weight_versions]
        assert s.loss_mask.index(1) == s.prompt_length
        for turn_id in s.turn_ids:
            t = by_id[turn_id]
            start, stop = len(t.prompt_ids), len(t.prompt_ids) + len(t.completion_ids)
            assert s.token_ids[:start] == list(t.prompt_ids)  # the model saw exactly this when it sampled
            assert s.token_ids[start:stop] == list(t.completion_ids)
            assert s.logprobs[start:stop] == list(t.logprobs)
            assert all(s.loss_mask[start:stop])
        for turn_id in s.context_turn_ids:
            t = by_id[turn_id]
            full = [*t.prompt_ids, *t.completion_ids]
            assert s.token_ids[: len(full)] == full


@given(sessions())
def test_weights_of_a_session_sum_to_one_by_tokens(turns: list[Turn]) -> None:
    result = build_trajectory("s", turns)
    if not result.sequences:
        return
    assert abs(sum(s.weight for s in result.sequences) - 1) < 1e-9
    for s in result.sequences:
        assert abs(s.weight - s.trained_tokens / result.report.trained_tokens) < 1e-9


@given(sessions(), st.randoms(use_true_random=False))
def test_order_of_arrival_and_repeated_records_change_nothing(turns: list[Turn], source) -> None:
    plain = build_trajectory("s", turns)
    repeated = turns + [replace(t, prompt_ids=list(t.prompt_ids)) for t in turns if source.random() < 0.3]
    source.shuffle(repeated)
    again = build_trajectory("s", repeated)
    assert again.sequences == plain.sequences
    assert again.report.duplicate_turns == len(repeated) - len(turns)
    assert replace(again.report, duplicate_turns=0) == plain.report


@given(sessions())
def test_no_sequence_could_be_merged_into_another(turns: list[Turn]) -> None:
    """A turn hangs under the longest earlier turn that its prompt continues, as a search through all pairs finds it."""
    usable = [t for t in turns if t.why_untrainable() is None]
    result = build_trajectory("s", turns)
    continued: set[str] = set()
    for i, t in enumerate(usable):
        fits = [
            len(o.prompt_ids) + len(o.completion_ids)
            for o in usable[:i]
            if list(t.prompt_ids[: len(o.prompt_ids) + len(o.completion_ids)]) == [*o.prompt_ids, *o.completion_ids]
        ]
        (home,) = [s for s in result.sequences if t.turn_id in s.turn_ids]
        order = home.context_turn_ids + home.turn_ids
        above = order[: order.index(t.turn_id)]
        by_id = {o.turn_id: o for o in usable}
        if fits:
            parent = by_id[above[-1]]
            assert len(parent.prompt_ids) + len(parent.completion_ids) == max(fits)
            continued.add(parent.turn_id)
        else:
            assert above == []
    assert len(result.sequences) == len(usable) - len(continued)


@given(sessions())
def test_every_sequence_but_the_first_is_a_branch_and_says_why(turns: list[Turn]) -> None:
    result = build_trajectory("s", turns)
    assert result.report.branches == max(0, len(result.sequences) - 1)
    reasons = [s.branch_reason for s in result.sequences]
    assert reasons[:1] in ([], [None])
    assert Counter(reasons[1:]) == result.report.branch_reasons
