"""Stored calls become turns again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agentcore_rl_toolkit.gateway import SessionCapture
from agentcore_rl_toolkit.gateway.capture.record import (
    ERROR,
    NO_BASE,
    OK,
    REFUSED,
    UNTRAINABLE,
    Base,
    CallRecord,
    ChoiceRecord,
    pack_ids,
    pack_logprobs,
)
from agentcore_rl_toolkit.gateway.capture.turns import expand
from agentcore_rl_toolkit.trajectory import build_trajectory


def record(name: str, index: int, *, status: str = OK, logprobs: bytes | None, base: Base = NO_BASE) -> CallRecord:
    return CallRecord(
        call_id=name,
        index=index,
        status=status,
        dialect="chat",
        started_s=1.0 + index,
        finished_s=2.0 + index,
        prompt_base=base,
        prompt_ids=pack_ids([1, 2]),
        messages=b'[{"role":"user","content":"hello"}]',
        choices=[
            ChoiceRecord(
                index=0,
                ids=pack_ids([5, 6]),
                logprobs=logprobs,
                finish_reason="stop",
                parse_status="none",
                message=b'{"role":"assistant","content":"hi"}',
            )
        ],
    )


@pytest.mark.parametrize("status", [OK, UNTRAINABLE])
@pytest.mark.parametrize("logprobs", [None, b"", pack_logprobs([-0.5])])
def test_a_choice_without_its_logprobs_is_an_untrainable_turn_beside_the_others(
    status: str, logprobs: bytes | None
) -> None:
    after = Base("a", 0, 4)
    whole = expand(
        [
            record("a", 0, status=status, logprobs=logprobs),
            record("b", 1, logprobs=pack_logprobs([-0.5, -0.25]), base=after),
        ]
    )
    first, second = whole.turns
    assert (first.trainable, first.untrainable_reason) == (False, "missing_logprobs")
    assert (first.completion_ids, first.logprobs) == ([5, 6], [None, None])
    assert (second.prompt_ids, second.why_untrainable()) == ([1, 2, 5, 6, 1, 2], None)
    [sequence] = build_trajectory("s", whole.turns).sequences
    assert sequence.token_ids == [1, 2, 5, 6, 1, 2, 5, 6]
    assert sequence.loss_mask == [0] * 6 + [1, 1]
    report = build_trajectory("s", whole.turns).report
    assert (report.untrainable_turns, report.untrainable_reasons) == (1, {"missing_logprobs": 1})


def test_answers_that_the_session_never_sampled_are_counted_in_its_first_call() -> None:
    some, said = (
        pack_logprobs([-0.5, -0.5]),
        b'[{"role":"user"},{"role":"assistant","content":"an example"},{"role":"user"}]',
    )
    first, second = record("a", 0, logprobs=some), record("b", 1, logprobs=some)
    first.messages = second.messages = said
    assert [turn.unsampled for turn in expand([second, first]).turns] == [1, 0]  # in the order of their start


def test_the_dialogue_of_calls_that_continue_each_other_is_that_of_the_last_and_others_are_appended() -> None:
    calls = [record(name, place, logprobs=pack_logprobs([-0.5, -0.25])) for place, name in enumerate("abc")]
    user = b'{"role":"user","content":"hello"}'
    calls[1].messages = b"[%b]" % b",".join((user, b'{"role":"assistant","content":"edited"}', user))
    texts = [message["content"] for message in expand(calls[:2]).dialogue]
    assert texts == ["hello", "edited", "hello", "hi"]
    calls[2].messages = b'[{"role":"user","content":"another"}]'
    assert [message["content"] for message in expand(calls).dialogue] == [*texts, "another", "hi"]
    calls[0].choices[0].message = b'"text"'
    assert expand(calls[:1]).dialogue[1:] == [{"role": "assistant", "content": "text"}]


def test_what_is_printed_of_a_session_does_not_grow_with_its_tokens() -> None:
    def printed(tokens: int) -> list[int]:
        large = record("a", 0, logprobs=pack_logprobs([-0.5, -0.25]))
        large.prompt_ids = pack_ids(range(100, 100 + tokens))
        large.choices[0].ids = pack_ids(range(100, 100 + tokens))
        large.choices[0].logprobs = pack_logprobs([-0.5] * tokens)
        large.choices[0].routed_experts = bytes(tokens)
        large.messages = b'[{"role":"user","content":"%b"}]' % (b"x" * tokens)
        whole = expand([large])
        capture = SessionCapture(session_id="s", turns=whole.turns, dialogue=whole.dialogue, errors=[])
        trajectory = build_trajectory("s", whole.turns)
        return [len(repr(shown)) for shown in (whole.turns[0], capture, trajectory, trajectory.sequences[0])]

    assert max(b - a for a, b in zip(printed(10), printed(5000), strict=True)) < 20


def test_expanded_prompts_are_the_stored_ones_whatever_they_refer_to() -> None:
    some = pack_logprobs([-0.5, -0.5])
    bases = [
        NO_BASE,
        Base("r0", 0, 4),  # prompt and completion of the first
        Base("r0", -1, 1),  # a part of its prompt
        Base("r1", 0, 7),  # a part of a completion
        Base("r3", 0, 3),  # less than the prompt, though a choice is named
    ]
    records = [record(f"r{i}", i, logprobs=some, base=base) for i, base in enumerate(bases)]
    turns = expand(records).turns
    assert [len(t.prompt_ids) for t in turns] == [2, 6, 3, 9, 5]
    turns[1].prompt_ids.append(0)  # a list of its own: changing one prompt changes no other
    assert len(turns[3].prompt_ids) == 9


@pytest.mark.parametrize(
    ("spans", "versions"),
    [([0, 5, 1, 6], [5, 6]), ([0, 5, 2, 6], [5, 5]), ([1, 5, 1, 6], None), ([0, 5, 3, 6], None)],
)
def test_the_version_of_each_token_is_known_if_the_engines_spans_cover_all(
    spans: list[int], versions: list[int] | None
) -> None:
    one = record("a", 0, logprobs=pack_logprobs([-0.5, -0.25]))
    one.choices[0].weight_version_first, one.choices[0].weight_version_last = 5, 6
    one.choices[0].weight_spans = pack_ids(spans)
    [turn] = expand([one]).turns
    assert (turn.token_weight_versions, turn.weight_version_first, turn.weight_version_last) == (versions, 5, 6)


def test_published_versions_are_bounds_and_the_older_one_is_each_tokens() -> None:
    for first, last, each in ((3, 4, [3, 3]), (4, 3, [3, 3]), (4, 4, None), (None, 4, None)):
        one = record("a", 0, logprobs=pack_logprobs([-0.5, -0.25]))
        one.weight_version_first, one.weight_version_last = first, last
        [turn] = expand([one]).turns
        assert (turn.weight_version_first, turn.weight_version_last, turn.token_weight_versions) == (first, last, each)


def test_each_choice_of_a_call_is_a_turn_with_an_id_of_its_own() -> None:
    calls = [record(name, place, logprobs=pack_logprobs([-0.5, -0.25])) for place, name in enumerate("abc")]
    calls[1].choices *= 2
    calls[1].choices[1] = msgspec.structs.replace(calls[1].choices[1], index=1)
    turns = expand(calls).turns
    assert [(turn.turn_id, turn.choice_index, turn.index) for turn in turns] == [
        ("a", 0, 0),
        ("b.0", 0, 1),
        ("b.1", 1, 2),
        ("c", 0, 3),
    ]


@pytest.mark.parametrize(
    ("choice", "tools", "offered"),
    [
        (None, "fg", ("f", "g")),
        ("auto", "f", ("f",)),
        ("required", "fg", ("f", "g")),
        ("required", "f", ()),
        ({"type": "function", "function": {"name": "f"}}, "fg", ()),
        ({"type": "allowed_tools"}, "fg", ("f", "g")),
    ],
)
def test_a_tool_that_must_be_called_is_the_form_of_an_answer_and_not_offered(
    choice: Any, tools: str, offered: tuple[str, ...]
) -> None:
    one = record("a", 0, logprobs=pack_logprobs([-0.5, -0.25]))
    listed = [{"type": "function", "function": {"name": name}} for name in tools]
    one.request = msgspec.json.encode({"tools": [*listed, {"type": "web_search"}], "tool_choice": choice})
    [turn] = expand([one]).turns
    assert turn.tools == offered


def test_a_refusal_names_the_field_at_fault_and_other_failures_have_none() -> None:
    refused, failed, unnamed = (record(name, place, logprobs=None) for place, name in enumerate("abc"))
    refused.status, refused.error = REFUSED, "tools[0]: why: so"
    failed.status, failed.error = ERROR, "x: y"
    unnamed.status, unnamed.error = REFUSED, ": why"
    errors = expand([refused, failed, unnamed]).errors
    assert [(error["field"], error["message"]) for error in errors] == [
        ("tools[0]", "why: so"),
        (None, "x: y"),
        (None, "why"),
    ]
