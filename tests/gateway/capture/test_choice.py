"""Weight versions and tokens of a choice, piece by piece, and what a record makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from agentcore_rl_toolkit.gateway.capture.build import Texts, complete
from agentcore_rl_toolkit.gateway.capture.choice import ChoiceTokens, version_of
from agentcore_rl_toolkit.gateway.capture.record import CONSTRAINED, IMAGES, OK, CallRecord, Captured, ChoiceRecord

# Each piece: the version, the version of the choice's first token, and whether it has tokens.
PIECES: list[tuple[list[tuple[Any, Any, bool]], tuple[Any, Any, bool]]] = [
    ([(3, None, True), ("4", None, True)], (3, 4, False)),
    ([(3, None, False), (4, None, True), (5, None, True)], (4, 5, False)),
    ([(4, None, True), (5, None, False)], (4, 4, False)),
    ([(3, None, False), (4, None, False)], (3, 4, False)),
    ([(5, 2, True), (9, None, True)], (2, 5, True)),
    ([(3, None, True), (5, 0, True)], (0, 5, True)),
    ([(0, None, True), (None, None, True), ("default", 1, True)], (0, 0, False)),
]


@pytest.mark.parametrize(("pieces", "found"), PIECES)
def test_the_versions_of_tokens_count_before_those_of_other_events(pieces: list[Any], found: Any) -> None:
    tokens = ChoiceTokens()
    for version, first, sampled in pieces:
        tokens.add_version(version, first=first, tokens=sampled)
    assert (tokens.first, tokens.last, tokens.both_ends) == found


def test_a_version_is_a_number_of_64_bits() -> None:
    given: list[Any] = [None, "default", "", "0", "9" * 18, "9" * 19, "9" * 20]
    given += [2**63 - 1, 2**63, -(2**63), -(2**63) - 1]
    read = [None, None, None, 0, 10**18 - 1, None, None, 2**63 - 1, None, -(2**63), None]
    assert [version_of(value) for value in given] == read
    assert version_of("1" * 19) == int("1" * 19)
    for number in ("\N{SUPERSCRIPT TWO}", "9" * 5000, 10**30, -(10**30)):
        assert version_of(number) is None


@pytest.mark.parametrize(
    ("ids", "logprobs", "problem", "kept"),
    [
        ([5, 6], [-1.0, -2.0], None, True),
        ([5, 6], [-1.0], "choice 1 has 2 token ids and 1 logprobs", False),
        ([5, 6], None, "choice 1 has 2 token ids and no logprobs", False),
        (None, [-1.0], None, False),
        ([], [], None, True),
    ],
)
def test_a_choice_has_as_many_logprobs_as_token_ids(ids: Any, logprobs: Any, problem: str | None, kept: bool) -> None:
    tokens, captured = ChoiceTokens(), Captured(choices=[])
    tokens.add(ids, logprobs)
    record = tokens.record(captured, 1, finish_reason="stop", message=b"{}", parse_status="none")
    assert (captured.problem, captured.has_tokens, captured.complete) == (problem, ids is not None, True)
    assert ((record.logprobs is not None), len(record.ids)) == (kept, 4 * len(ids or ()))
    tokens.record(captured, 1, finish_reason="abort", message=b"{}", parse_status="none")
    assert not captured.complete


def choice(index: int = 0, versions: tuple[int, int] | tuple[None, None] = (None, None)) -> ChoiceRecord:
    made = ChoiceRecord(index, b"", None, "stop", "none", b"{}")
    made.weight_version_first, made.weight_version_last = versions
    return made


def completed(captured: Captured, texts: Texts, messages: bytes = b"", name: str = "c", **about: Any) -> CallRecord:
    record = CallRecord(call_id=name, index=0, status=OK, dialect="chat", started_s=0.0, finished_s=0.0)
    complete(record, captured, messages, texts, **{"published": (None, None), "stream": False, **about})
    return record


@pytest.mark.parametrize(
    ("named", "about", "whole", "firsts"),
    [
        ([(None, None)], {"published": (3, 5)}, (3, 5), [None]),
        ([(6, 6)], {"published": (3, 9)}, (3, 6), [3]),
        ([(6, 6)], {"published": (3, 9), "stream": True}, (6, 6), [6]),
        ([(6, 6)], {"published": (6, 9)}, (6, 6), [6]),
        ([(6, 6)], {"published": (7, 9)}, (6, 6), [6]),
        ([(6, 6)], {"published": (None, 9)}, (6, 6), [6]),
        ([(4, 5), (7, 8)], {"published": (3, 3)}, (3, 8), [3, 3]),
        ([(4, 5), (7, 8)], {"published": (5, 5)}, (4, 8), [4, 7]),
    ],
)
def test_a_call_has_the_versions_that_its_engine_names_and_those_that_were_published(
    named: list[Any], about: dict[str, Any], whole: Any, firsts: list[Any]
) -> None:
    captured = Captured([choice(place, versions) for place, versions in enumerate(named)])
    record = completed(captured, Texts(), **about)
    assert (record.weight_version_first, record.weight_version_last) == whole
    assert [each.weight_version_first for each in record.choices] == firsts


def test_messages_after_an_image_are_not_trained_either() -> None:
    texts, image = Texts(), b'[{"content":[{"type":"image_url","image_url":{"url":"x"}}]}]'
    reasons = []
    for messages, reason in ((b"[1]", None), (image, None), (image[:-1] + b",2]", CONSTRAINED), (image, "other")):
        captured = Captured([choice()], untrainable=reason)
        completed(captured, texts, messages)
        reasons.append(captured.choices[0].untrainable)
    assert reasons == [None, IMAGES, IMAGES, "other"]


def test_eight_branches_of_a_session_are_known_at_the_same_time() -> None:
    texts, bases = Texts(), []
    for number in (*range(8), 0, 8, 1, 0):
        record = completed(Captured([], prompt=b"[%d,7]" % number), texts, b"[%d]" % number, f"c{len(bases)}")
        bases.append((record.prompt_base.call_id, record.messages_base.call_id, record.prompt_base.length))
    assert bases[:8] == [(None, None, 0)] * 8
    assert bases[8:] == [("c0", "c0", 2), (None, None, 0), (None, None, 0), ("c8", "c8", 2)]
