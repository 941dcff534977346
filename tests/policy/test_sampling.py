"""What tokens are drawn, and which logprobs are told."""

from __future__ import annotations

import math

import pytest
import torch

from agentcore_rl_toolkit.policy.sampling import Sampled, Sampler, SamplingParams, seeded_generator

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]))


def draw(params: SamplingParams, n: int = 20_000) -> Sampled:
    sampler = Sampler([params] * n, [None] * n)
    return sampler.sample(LOGITS.expand(n, -1), torch.Generator().manual_seed(3))


def shares(sampled: Sampled) -> list[float]:
    return [sampled.ids_N.count(k) / len(sampled.ids_N) for k in range(5)]


def test_at_temperature_one_tokens_follow_the_distribution_and_their_logprobs_are_its_own() -> None:
    sampled = draw(SamplingParams())
    assert shares(sampled) == pytest.approx([0.5, 0.3, 0.15, 0.05, 0.0], abs=0.012)
    assert shares(sampled)[4] == 0.0
    for token, logprob in zip(sampled.ids_N[:50], sampled.logprobs_N, strict=False):
        assert logprob == pytest.approx(LOGITS[token].item(), abs=1e-6)


def test_temperature_changes_the_draw_but_not_the_logprobs_told() -> None:
    sampled = draw(SamplingParams(temperature=0.5))
    weights = [p**2 for p in (0.5, 0.3, 0.15, 0.05, 0.0)]
    assert shares(sampled) == pytest.approx([w / sum(weights) for w in weights], abs=0.012)
    assert sampled.logprobs_N[0] == pytest.approx(LOGITS[sampled.ids_N[0]].item(), abs=1e-6)


def test_temperature_zero_takes_the_likeliest() -> None:
    assert set(draw(SamplingParams(temperature=0.0), 50).ids_N) == {0}


def test_top_k_and_top_p_cut_and_renormalise() -> None:
    assert shares(draw(SamplingParams(top_k=2))) == pytest.approx([0.625, 0.375, 0, 0, 0], abs=0.012)
    assert shares(draw(SamplingParams(top_p=0.79))) == pytest.approx([0.625, 0.375, 0, 0, 0], abs=0.012)
    assert set(draw(SamplingParams(top_p=0.01), 100).ids_N) == {0}
    assert set(draw(SamplingParams(top_k=3, top_p=0.99, temperature=5.0), 500).ids_N) == {0, 1, 2}


def test_a_seeded_row_repeats_whatever_stands_beside_it() -> None:
    def series(rows: int, at: int) -> list[int]:
        seeded = [None] * rows
        own = [seeded_generator(11) if k == at else None for k in range(rows)]
        sampler = Sampler([SamplingParams()] * rows, own)
        assert seeded == [None] * rows
        shared = torch.Generator().manual_seed(rows)
        return [sampler.sample(LOGITS.expand(rows, -1), shared).ids_N[at] for _ in range(30)]

    assert series(1, 0) == series(5, 3) == series(9, 8)


def test_rows_keep_their_own_settings() -> None:
    rows = [SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(temperature=50.0)]
    sampler = Sampler(rows, [None] * 3)
    shared = torch.Generator().manual_seed(0)
    drawn = [sampler.sample(LOGITS.expand(3, -1), shared).ids_N for _ in range(200)]
    assert {d[0] for d in drawn} == {d[1] for d in drawn} == {0}
    assert len({d[2] for d in drawn}) == 4


def test_alternatives_are_told_only_to_who_asked() -> None:
    sampler = Sampler([SamplingParams(), SamplingParams(top_logprobs=2)], [None, None])
    sampled = sampler.sample(LOGITS.expand(2, -1), torch.Generator().manual_seed(0))
    assert sampled.tops_N is not None
    assert sampled.tops_N[0] == []
    assert [token for token, _ in sampled.tops_N[1]] == [0, 1]
    assert sampled.tops_N[1][1][1] == pytest.approx(math.log(0.3), abs=1e-6)
