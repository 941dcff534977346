"""What tokens are drawn, and which logprobs are told."""

from __future__ import annotations

import math

import pytest
import torch

from agentcore_rl_toolkit.policy.sampling import Sampled, Sampler, SamplingParams, seeded_generator

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]))


def draw(params: SamplingParams, n: int = 4_000, *, logits: torch.Tensor = LOGITS) -> Sampled:
    sampler = Sampler([params] * n, [None] * n)
    return sampler.sample(logits.expand(n, -1), torch.Generator().manual_seed(3))


def shares(sampled: Sampled) -> list[float]:
    return [sampled.ids_N.count(k) / len(sampled.ids_N) for k in range(5)]


def test_at_temperature_one_tokens_follow_the_distribution_and_their_logprobs_are_its_own() -> None:
    sampled = draw(SamplingParams())
    assert shares(sampled) == pytest.approx([0.5, 0.3, 0.15, 0.05, 0.0], abs=0.03)
    assert shares(sampled)[4] == 0.0
    for token, logprob in zip(sampled.ids_N[:50], sampled.logprobs_N, strict=False):
        assert logprob == pytest.approx(LOGITS[token].item(), abs=1e-6)


def test_top_k_and_top_p_cut_and_renormalize() -> None:
    assert shares(draw(SamplingParams(top_k=2))) == pytest.approx([0.625, 0.375, 0, 0, 0], abs=0.03)
    assert shares(draw(SamplingParams(top_p=0.79))) == pytest.approx([0.625, 0.375, 0, 0, 0], abs=0.03)
    assert set(draw(SamplingParams(top_p=0.01), 100).ids_N) == {0}
    assert set(draw(SamplingParams(top_k=3, top_p=0.99, temperature=5.0), 500).ids_N) == {0, 1, 2}


def test_a_cut_sees_what_the_cut_before_it_left() -> None:
    # The shares in which top_p adds up are those of the tokens that top_k left: 0.625 and 0.375.
    assert set(draw(SamplingParams(top_k=2, top_p=0.6), 500).ids_N) == {0}
    # Of 0.5 and 0.3, which min_p leaves, likewise.
    assert set(draw(SamplingParams(min_p=0.5, top_p=0.6), 500).ids_N) == {0}
    assert set(draw(SamplingParams(min_p=0.5, top_k=4), 500).ids_N) == {0, 1}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(min_p=0.3), [0.5, 0.3, 0.15, 0, 0]),  # 0.15 is exactly 0.3 of 0.5, and stays
        (SamplingParams(min_p=0.31), [0.5, 0.3, 0, 0, 0]),
        (SamplingParams(min_p=1.0), [1, 0, 0, 0, 0]),
        # At temperature 2 the weights are roots: 0.387 is more than half of 0.707, 0.224 is not.
        (SamplingParams(min_p=0.5, temperature=2.0), [0.5**0.5, 0.3**0.5, 0.15**0.5, 0, 0]),
    ],
)
def test_min_p_cuts_by_the_share_of_the_likeliest_after_the_temperature(
    params: SamplingParams, expected: list[float]
) -> None:
    assert shares(draw(params)) == pytest.approx([w / sum(expected) for w in expected], abs=0.03)


MIXED = torch.tensor([1.0, 2.0, 0.5, -1.0, -2.0])


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.7])
def test_logprobs_are_those_of_the_temperature(temperature: float) -> None:
    sampled = draw(SamplingParams(temperature=temperature), 50, logits=MIXED)
    logprobs = torch.log_softmax(MIXED / temperature, -1)
    assert sampled.logprobs_N == pytest.approx([logprobs[i].item() for i in sampled.ids_N], abs=1e-6)


def test_logprobs_of_a_cut_distribution_are_of_the_tokens_that_it_leaves() -> None:
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.79), SamplingParams(min_p=0.5)):
        sampled = draw(params, 50)
        expected = [math.log(0.625), math.log(0.375)]
        assert sampled.logprobs_N == pytest.approx([expected[i] for i in sampled.ids_N], abs=1e-6)
    rows = [SamplingParams(temperature=0.0, top_k=1, top_p=0.1), SamplingParams(top_k=2)]  # greedy beside a cut
    greedy = Sampler(rows, [None] * 2).sample(torch.zeros(2, 5), torch.Generator())
    assert (greedy.ids_N[0], greedy.logprobs_N[0]) == (0, pytest.approx(-math.log(5)))


def test_a_seeded_row_repeats_whatever_stands_beside_it() -> None:
    def series(rows: int, at: int) -> list[int]:
        own = [seeded_generator(11) if k == at else None for k in range(rows)]
        sampler = Sampler([SamplingParams()] * rows, own)
        shared = torch.Generator().manual_seed(rows)
        return [sampler.sample(LOGITS.expand(rows, -1), shared).ids_N[at] for _ in range(30)]

    assert series(1, 0) == series(5, 3) == series(9, 8)
