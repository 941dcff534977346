"""Merging turns, case by case; the general laws are in test_properties.py."""

from __future__ import annotations

import random
import re
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import CaptureError
from agentcore_rl_toolkit.trajectory import FidelityReport, Turn, build_trajectory

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def turn(index: int, prompt: list[int], completion: list[int], **more: Any) -> Turn:
    fields: dict[str, Any] = {
        "turn_id": f"t{index}",
        "index": index,
        "prompt_ids": prompt,
        "completion_ids": completion,
        "logprobs": [-0.01 * token for token in completion],
        "finish_reason": "stop",
        "weight_version_first": 3,
        "weight_version_last": 3,
    }
    return Turn(**{**fields, **more})


def test_turns_that_extend_each_other_become_one_sequence() -> None:
    first = turn(0, PROMPT, [20, 21])
    second = turn(1, [*PROMPT, 20, 21, 30, 31], [22])
    result = build_trajectory("s", [first, second])
    (sequence,) = result.sequences
    assert sequence.token_ids == [*PROMPT, 20, 21, 30, 31, 22]
    assert sequence.loss_mask == [0] * 8 + [1, 1, 0, 0, 1]
    assert sequence.logprobs == [None] * 8 + [-0.2, -0.21, None, None, -0.22]
    assert sequence.weight_versions == [None] * 8 + [3, 3, None, None, 3]
    assert sequence.prompt_length == 8
    assert sequence.turn_ids == ["t0", "t1"]
    assert sequence.weight == 1.0
    assert result.report.trained_token_share == 1.0
    assert result.report.branches == 0
    counts = {"turns": 2, "sequences": 1, "sampled_tokens": 3, "trained_tokens": 3, "sequence_tokens": 13}
    assert result.report == FidelityReport(**counts, weight_version_min=3, weight_version_max=3)


def test_the_documented_example_prints_what_the_document_shows(capsys: pytest.CaptureFixture[str]) -> None:
    document = (Path(__file__).parents[2] / "docs" / "trajectory.md").read_text("utf-8")
    found = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", document, re.DOTALL)
    assert found
    exec(found[1], {})
    assert capsys.readouterr().out == found[2]


def test_order_of_arrival_does_not_matter() -> None:
    turns = [turn(0, PROMPT, [20]), turn(1, [*PROMPT, 20, 30], [21]), turn(2, [*PROMPT, 20, 30, 21, 31], [22])]
    assert build_trajectory("s", turns[::-1]) == build_trajectory("s", turns)


def test_a_shared_turn_is_trained_in_one_branch_only() -> None:
    root = turn(0, PROMPT, [20, 21])
    left = turn(1, [*PROMPT, 20, 21, 30], [22, 23])
    right = turn(2, [*PROMPT, 20, 21, 31], [24])
    result = build_trajectory("s", [root, left, right])
    first, second = result.sequences
    assert first.turn_ids == ["t0", "t1"]
    assert first.context_turn_ids == []
    assert second.turn_ids == ["t2"]
    assert second.context_turn_ids == ["t0"]
    assert second.loss_mask == [0] * 11 + [1]
    assert second.prompt_length == 11
    assert (first.weight, second.weight) == (0.8, 0.2)
    assert result.report.branches == 1
    assert result.report.trained_tokens == result.report.sampled_tokens == 5


def test_untrainable_turns_are_counted_and_leave_context_only() -> None:
    partial = turn(0, PROMPT, [20, 21], finish_reason=None)
    aborted = turn(1, PROMPT, [20], finish_reason="abort")
    blind = turn(2, PROMPT, [25], logprobs=[None])
    marked = turn(3, PROMPT, [26], trainable=False, untrainable_reason="text_only")
    empty = turn(4, PROMPT, [])
    broken = turn(5, PROMPT, [27], logprobs=[float("nan")])
    good = turn(6, [*PROMPT, 20, 21, 30], [22])
    result = build_trajectory("s", [partial, aborted, blind, marked, empty, broken, good])
    (sequence,) = result.sequences
    assert sequence.turn_ids == ["t6"]
    assert sequence.trained_tokens == 1
    report = result.report
    assert report.untrainable_turns == 6
    assert report.untrainable_reasons == {
        "unfinished": 2,
        "missing_logprobs": 1,
        "text_only": 1,
        "empty": 1,
        "bad_logprobs": 1,
    }
    assert report.trained_token_share == pytest.approx(1 / 7)


def test_nothing_sampled_has_no_share() -> None:
    result = build_trajectory("s", [])
    assert result.sequences == []
    assert result.report == FidelityReport()
    assert result.report.trained_token_share is None


def test_the_same_record_twice_is_one_turn() -> None:
    result = build_trajectory("s", [turn(0, PROMPT, [20]), turn(0, list(PROMPT), [20])])
    assert len(result.sequences) == 1
    assert result.report.turns == 1
    assert result.report.duplicate_turns == 1


def test_two_different_turns_with_one_id_are_an_error_that_names_it() -> None:
    with pytest.raises(CaptureError, match="t0") as caught:
        build_trajectory("session-9", [turn(0, PROMPT, [20]), turn(0, PROMPT, [21])])
    assert caught.value.session_id == "session-9"


def test_an_answer_that_did_not_reach_the_agent_is_not_trained() -> None:
    lost = turn(0, PROMPT, [20, 21], delivered=False)
    again = turn(1, PROMPT, [22])
    result = build_trajectory("s", [lost, again])
    assert [s.turn_ids for s in result.sequences] == [["t1"]]
    assert result.report.untrainable_reasons == {"not_delivered": 1}
    assert (result.report.turns, result.report.sampled_tokens, result.report.trained_tokens) == (2, 3, 1)
    assert build_trajectory("s", [lost]).sequences == []


def test_an_answer_that_the_agent_went_on_from_did_reach_it() -> None:
    doubted = turn(0, PROMPT, [20], delivered=False)
    result = build_trajectory("s", [doubted, turn(1, [*PROMPT, 20, 30], [21])])
    assert [s.turn_ids for s in result.sequences] == [["t0", "t1"]]
    assert result.report.untrainable_turns == 0


def test_of_two_equal_answers_the_one_that_arrived_is_gone_on_from() -> None:
    turns = [turn(0, PROMPT, [20], delivered=False), turn(1, PROMPT, [20])]
    result = build_trajectory("s", [*turns, turn(2, [*PROMPT, 20, 30], [21], parent_turn="t0")])
    assert [s.turn_ids for s in result.sequences] == [["t1", "t2"]]
    assert result.report.untrainable_reasons == {"not_delivered": 1}


@pytest.mark.parametrize("parent", ["t0", "t1"])
def test_of_two_equal_answers_the_one_that_the_gateway_names_is_continued(parent: str) -> None:
    turns = [turn(0, PROMPT, [20]), turn(1, PROMPT, [20]), turn(2, [*PROMPT, 20, 30], [21], parent_turn=parent)]
    result = build_trajectory("s", turns)
    assert {s.turn_ids[0] for s in result.sequences if "t2" in s.turn_ids} == {parent}
    unnamed = build_trajectory("s", [*turns[:2], turn(2, [*PROMPT, 20, 30], [21])])
    assert [s.turn_ids for s in unnamed.sequences] == [["t0", "t2"], ["t1"]]


def test_a_parent_whose_only_continuation_was_lost_is_still_trained() -> None:
    turns = [turn(0, PROMPT, [20]), turn(1, [*PROMPT, 20, 30], [21], delivered=False), turn(2, [9, 9, 9, 9], [22])]
    result = build_trajectory("s", turns)
    assert [s.turn_ids for s in result.sequences] == [["t0"], ["t2"]]
    assert result.report.trained_tokens == 2


def cause(*turns: Turn, **options: Any) -> dict[str, int]:
    return build_trajectory("s", turns, **options).report.branch_reasons


def test_a_side_conversation_is_told_from_a_rewritten_history() -> None:
    main = turn(0, PROMPT, [20])
    side = turn(1, [1, 2, 3, 4, 5, 9, 9, 9], [40])
    back = turn(2, [*PROMPT, 20, 30], [21])
    assert cause(main, side) == {"history_rewritten": 1}
    assert cause(main, side, turn(2, [*side.prompt_ids, 40, 30], [41])) == {"history_rewritten": 1}
    assert cause(main, side, back) == {"sub_agent": 1}
    named = turn(1, side.prompt_ids, [40], branch_reason="history_rewritten")
    assert cause(main, named, back) == {"history_rewritten": 1}
    beside = turn(1, side.prompt_ids, [40], started_s=0.0, finished_s=2.0)
    assert cause(turn(0, PROMPT, [20], started_s=1.0, finished_s=3.0), beside, back) == {"parallel_calls": 1}


def test_tools_that_the_agent_loaded_are_told_from_a_sub_agent() -> None:
    first = turn(0, PROMPT, [20], tools=("read",), system="main")
    loaded = turn(1, [1, 90, *PROMPT[1:], 20, 30], [21], tools=("read", "fetch"), system="main")
    assert cause(first, loaded) == {"tools_changed": 1}
    assert cause(first, turn(1, loaded.prompt_ids, [21], tools=("read", "fetch"), system="sub")) == {"sub_agent": 1}


def test_calls_that_overlap_in_time_are_parallel() -> None:
    root = turn(0, PROMPT, [20])
    times = {"started_s": 1.0, "finished_s": 3.0}
    left = turn(1, [*PROMPT, 20, 30], [21], **times)
    right = turn(2, [*PROMPT, 20, 31], [22], started_s=2.0, finished_s=4.0)
    later = turn(2, [*PROMPT, 20, 31], [22], started_s=5.0, finished_s=6.0)
    assert cause(root, left, right) == {"parallel_calls": 1}
    assert cause(root, left, later) == {"history_rewritten": 1}
    beginning = turn(2, PROMPT[:5], [22], started_s=2.0, finished_s=4.0)  # it leaves no prompt that it does not begin
    assert cause(root, left, beginning) == {"history_rewritten": 1}


def test_the_gateways_own_reason_is_believed() -> None:
    known = turn(1, [1, 2, 3, 4, 5, 9, 9, 9], [40], branch_reason="sub_agent")
    assert cause(turn(0, PROMPT, [20]), known) == {"sub_agent": 1}


def test_other_tokens_for_the_same_words_are_a_retokenisation() -> None:
    answer = turn(0, PROMPT, [50, 51, 52, 99])
    drifted = turn(1, [*PROMPT, 50, 60, 61, 52, 99, 30], [21])
    rewritten = turn(1, [*PROMPT, 50, 70, 71, 72, 73, 74, 75], [21])
    assert cause(answer, drifted) == {"retokenized": 1}
    assert cause(answer, rewritten) == {"history_rewritten": 1}
    lone = turn(1, [*PROMPT, 60, 52, 70], [21])  # a lone token proves something only of an answer of two
    assert cause(turn(0, PROMPT, [51, 52]), lone) == {"retokenized": 1}
    assert cause(turn(0, PROMPT, [50, 51, 52]), lone) == {"history_rewritten": 1}
    for junk, why in ((12, "retokenized"), (13, "history_rewritten")):  # twice the answer and eight tokens are compared
        far = turn(1, [*PROMPT, *range(60, 60 + junk), 51, 52], [21])
        assert cause(turn(0, PROMPT, [50, 51, 52]), far) == {why: 1}


def test_calls_overlap_if_each_began_before_the_end_of_the_other() -> None:
    def at(index: int, started_s: float, finished_s: float) -> Turn:
        return turn(index, PROMPT, [50 + index], started_s=started_s, finished_s=finished_s)

    assert cause(at(0, 1.0, 2.0), at(1, 1.5, 3.0)) == {"parallel_calls": 1}
    assert cause(at(0, 1.0, 2.0), at(1, 2.0, 3.0)) == {"resampled": 1}
    assert cause(at(0, 2.0, 3.0), at(1, 1.0, 2.0)) == {"resampled": 1}


def test_weight_versions_are_per_token() -> None:
    spanning = turn(0, PROMPT, [20, 21, 22], weight_version_first=4, weight_version_last=6)
    exact = turn(1, [9], [20, 21, 22], token_weight_versions=[4, 5, 5], weight_version_last=5)
    untold = turn(2, [8], [20], weight_version_first=None, weight_version_last=None)
    result = build_trajectory("s", [spanning, exact, untold])
    assert [s.weight_versions[s.prompt_length :] for s in result.sequences] == [[4, 4, 6], [4, 5, 5], [None]]
    assert result.report.mixed_version_turns == 2
    assert (result.report.weight_version_min, result.report.weight_version_max) == (4, 6)
    known = {"weight_version_first": 5, "weight_version_last": 5}
    for versions, mixed in (([5, 6, 5], 1), ([5, 5, 5], 0), ([None, 5, 5], 0)):
        turns = [turn(0, PROMPT, [20, 21, 22], token_weight_versions=versions, **known)]
        assert build_trajectory("s", turns).report.mixed_version_turns == mixed


def test_expert_routing_is_carried_with_its_place() -> None:
    first = turn(0, PROMPT, [20], routed_experts=b"one")
    second = turn(1, [*PROMPT, 20, 30], [21], routed_experts=b"two")
    (sequence,) = build_trajectory("s", [first, second]).sequences
    assert [(e.turn_id, e.start, e.stop, e.data) for e in sequence.routed_experts] == [
        ("t0", 8, 9, b"one"),
        ("t1", 10, 11, b"two"),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": [-0.1, -0.2]},
        {"token_weight_versions": [1, 2]},
        {"branch_reason": "felt_like_it"},
    ],
)
def test_a_turn_that_does_not_fit_together_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CaptureError, match="t0"):
        turn(0, PROMPT, [20], **fields)


@pytest.mark.parametrize("bad", [-1, 2**32, "7", None, 1.5])
def test_a_token_id_that_is_none_is_refused(bad: Any) -> None:
    with pytest.raises(CaptureError, match="token ids"):
        build_trajectory("s", [turn(0, [1, bad], [20])])


def grown(turns: int, new_tokens: int, sampled: int) -> list[Turn]:
    """A session whose every turn extends the one before."""
    source = random.Random(0)
    history: list[int] = []
    made = []
    for index in range(turns):
        history = array("I", history).tolist()  # fresh objects, as a decoder makes them
        history += [source.randrange(300, 150_000) for _ in range(new_tokens - sampled)]
        completion = [source.randrange(300, 150_000) for _ in range(sampled)]
        made.append(turn(index, history, completion, logprobs=[-0.5] * sampled))
        history = history + completion
    return made


def test_a_thousand_turns_are_no_deeper_than_one() -> None:
    result = build_trajectory("s", grown(1_200, 4, 2))  # more than Python's recursion limit
    assert len(result.sequences) == 1
    assert result.report.trained_tokens == 2_400


def test_branches_that_grow_side_by_side_stay_apart() -> None:
    histories = [[100 + b] for b in range(5)]
    turns = []
    for index in range(400):
        history = histories[index % 5]
        turns.append(turn(index, [*history], [index % 7, index % 11]))
        history += [index % 7, index % 11, index % 13]
    result = build_trajectory("s", turns)
    assert [len(s.turn_ids) for s in result.sequences] == [80] * 5
    assert result.report.branches == 4


def test_thousands_of_unrelated_prompts_do_not_compare_with_each_other() -> None:
    shared = list(range(500))
    turns = [turn(i, [*shared, 10_000 + i], [20]) for i in range(3_000)]
    start = time.process_time()
    result = build_trajectory("s", turns)
    assert len(result.sequences) == 3_000
    # 1.5 M prompt tokens; comparing every prompt with every other would be 4.5 G.
    assert time.process_time() - start < 10


def test_more_tools_open_a_branch_only_in_a_conversation_that_has_grown() -> None:
    def at(index: int, prompt: list[int], *tools: str, system: str = "s") -> Turn:
        return turn(index, prompt, [50 + index], tools=tools, system=system)

    first, longer = at(0, PROMPT, "f"), [1, 2, 3, 9, *PROMPT]
    assert cause(first, at(1, longer, "f", "g")) == {"tools_changed": 1}
    assert "tools_changed" not in cause(first, at(1, longer, "f"))
    as_long = [1, 2, 3, 9, 5, 6, 7, 8]
    for other in (at(1, longer, "g"), at(1, as_long, "f", "g"), at(1, longer, "f", "g", system="t")):
        assert "tools_changed" not in cause(first, other)


def test_tokens_that_a_form_held_are_counted_in_what_trains() -> None:
    turns = [turn(place, [place], [50, 51, 52], free_tokens=free) for place, free in enumerate((1, 3, None))]
    report = build_trajectory("s", [*turns, turn(3, [3], [50, 51], free_tokens=0, tag="judge")]).report
    assert (report.held_tokens, report.trained_tokens, report.sampled_tokens) == (2, 7, 11)


def test_blank_answers_are_counted() -> None:
    turns = [turn(place, [place], [50], answered=place > 0) for place in range(3)]
    assert build_trajectory("s", turns).report.unanswered_turns == 1


@pytest.mark.parametrize(("shared", "reason"), [(3, "sub_agent"), (4, "history_rewritten")])
def test_a_prompt_that_shares_less_than_half_is_a_sub_agents(shared: int, reason: str) -> None:
    other = [*PROMPT[:shared], *range(60, 68 - shared)]
    assert cause(turn(0, PROMPT, [20]), turn(1, other, [21])) == {reason: 1}


@pytest.mark.parametrize(("rest", "left_out"), [([23, 24], 3), ([20, 23, 24], 2), ([], 5)])
def test_the_history_difference_is_the_share_of_tokens_that_a_template_left_out(rest: list[int], left_out: int) -> None:
    prompt = [*PROMPT, *rest, 30]
    first, second = turn(0, PROMPT, [20, 21, 22, 23, 24]), turn(1, prompt, [25], branch_reason="template")
    assert build_trajectory("s", [first, second]).report.history_difference == left_out / (len(PROMPT) + len(prompt))
    assert build_trajectory("s", [first, turn(1, prompt, [25])]).report.history_difference is None
