"""Reading samples against the engine's journal: the check itself, on journals made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from .sampled import turns_of

PROMPT, REPLY = [1, 2, 3], [7, 8, 9]
LOGPROBS = [-0.5, -0.25, -0.125]


def line(
    ids: list[int], finish: str, prompt: list[int] = PROMPT, logprobs: list[float] | None = None
) -> dict[str, Any]:
    return {"prompt": prompt, "ids": ids, "logprobs": logprobs or LOGPROBS[: len(ids)], "finish": finish}


def sample(response: list[int], mask: list[int], logprobs: list[float]) -> dict[str, Any]:
    tokens = PROMPT + response
    return {"tokens": tokens, "response_length": len(response), "loss_mask": mask, "logprobs": logprobs}


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_call_that_was_cut_off_is_not_taken_for_its_second_run(kept: int) -> None:
    """Same prompt, same first tokens, same logprobs: only the one that ended by itself makes up the sample."""
    cut, whole = line(REPLY[:kept], "abort"), line(REPLY, "stop")
    for journal in ([cut, whole], [whole, cut]):
        assert turns_of(sample(REPLY, [1, 1, 1], LOGPROBS), journal) == [whole]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_tokens_of_a_call_that_was_cut_off_are_refused(kept: int) -> None:
    journal = [line(REPLY[:kept], "abort"), line(REPLY, "stop")][: 2 if kept < 3 else 1]
    with pytest.raises(AssertionError, match="abort"):
        turns_of(sample(REPLY[:kept], [1] * kept, LOGPROBS[:kept]), journal)


def test_turns_follow_each_other_over_masked_tokens() -> None:
    first = line(REPLY, "stop")
    second = line([4, 9], "length", prompt=[*PROMPT, *REPLY, 5, 6], logprobs=[-1.0, -2.0])
    whole = sample([*REPLY, 5, 6, 4, 9], [1, 1, 1, 0, 0, 1, 1], [*LOGPROBS, 0.0, 0.0, -1.0, -2.0])
    assert turns_of(whole, [second, first]) == [first, second]


@pytest.mark.parametrize(
    ("response", "mask", "logprobs"),
    [
        ([7, 8], [1, 1], LOGPROBS[:2]),  # the end is missing
        ([7, 8, 9, 9], [1, 1, 1, 1], [*LOGPROBS, -0.1]),  # one token too many
        ([7, 8, 4], [1, 1, 1], LOGPROBS),  # another token
        ([7, 8, 9], [1, 1, 1], [-0.5, -0.25, -0.1250001]),  # another logprob
        ([7, 8, 9], [1, 0, 1], LOGPROBS),  # a sampled token that is not trained
        ([5, 7, 8, 9], [1, 1, 1, 1], [0.0, *LOGPROBS]),  # a token that nobody sampled
    ],
)
def test_what_the_engine_did_not_sample_is_refused(response: list[int], mask: list[int], logprobs: list[float]) -> None:
    with pytest.raises(AssertionError):
        turns_of(sample(response, mask, logprobs), [line(REPLY, "stop")])
