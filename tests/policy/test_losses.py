"""The losses of tokens, computed by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.policy.losses import LOSSES, bounds_of, token_losses

CLIP = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}


def loss(name: str, logprob: float, sampled: float, advantage: float, options: Mapping[str, float] = CLIP) -> float:
    return loss_and_gradient(name, logprob, sampled, advantage, options)[0]


def loss_and_gradient(
    name: str, logprob: float, sampled: float, advantage: float, options: Mapping[str, float]
) -> tuple[float, float]:
    new, *others = (torch.tensor([value], requires_grad=value is logprob) for value in (logprob, sampled, advantage))
    found = token_losses(name, new, *others, options)
    return found.item(), torch.autograd.grad(found.sum(), new)[0].item()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("ratio", "advantage"), [(1.2, 2.0), (2.0, 2.0), (2.0, -2.0), (0.25, 2.0), (0.25, -2.0)])
def test_a_loss_is_its_formula(name: str, ratio: float, advantage: float) -> None:
    sampled = -1.0
    logprob = sampled + math.log(ratio)
    clipped = min(max(ratio, 0.5), 1.5)
    expected = {
        "cross_entropy": -logprob,
        "importance_sampling": -ratio * advantage,
        "ppo": -min(ratio * advantage, clipped * advantage),
        "cispo": -clipped * advantage * logprob,
    }
    # The clip takes the gradient of a token that has moved in the direction of its advantage.
    moved = -ratio * advantage if (ratio - clipped) * advantage <= 0 else 0.0
    gradient = {
        "cross_entropy": -1,
        "importance_sampling": -ratio * advantage,
        "ppo": moved,
        "cispo": -clipped * advantage,
    }
    found = loss_and_gradient(name, logprob, sampled, advantage, CLIP)
    assert found == pytest.approx((expected[name], gradient[name]), rel=1e-5)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected_ratio", "gradient"),
    [
        (1.0, 1.5, 1.28, 0.0),  # better and already much likelier: clipped above
        (1.0, 0.5, 0.5, -0.5),  # better but less likely: pulled up without limit
        (-1.0, 0.5, 0.8, 0.0),  # worse and already much less likely: clipped below
        (-1.0, 1.5, 1.5, 1.5),  # worse but likelier: pushed down without limit
    ],
)
def test_clipping_is_one_sided(advantage: float, ratio: float, expected_ratio: float, gradient: float) -> None:
    clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
    found = loss_and_gradient("ppo", math.log(ratio) - 1.0, -1.0, advantage, clip)
    assert found == pytest.approx((-expected_ratio * advantage, gradient), rel=1e-5)


def test_a_dual_clip_limits_only_tokens_with_a_negative_advantage() -> None:
    options = {**CLIP, "dual_clip": 3.0}
    far = math.log(10.0)
    assert loss_and_gradient("ppo", far, 0.0, -1.0, options) == pytest.approx((3.0, 0.0))
    assert loss("ppo", far, 0.0, -1.0) == pytest.approx(10.0)
    assert loss("ppo", -far, 0.0, 1.0, options) == loss("ppo", -far, 0.0, 1.0)
    assert loss("ppo", far, 0.0, 1.0, options) == pytest.approx(-1.5)
    assert loss_and_gradient("ppo", 0.0, 0.0, -1.0, options) == pytest.approx((1.0, 1.0))


def test_a_token_without_an_advantage_has_no_loss_however_far_its_logprobs_are() -> None:
    assert [loss_and_gradient(name, -1.0, -1000.0, 0.0, CLIP) for name in LOSSES[1:]] == [(0.0, 0.0)] * 3


def test_the_bounds_are_tinkers_unless_they_are_set() -> None:
    assert bounds_of({}) == (0.8, 1.2)
    assert bounds_of(CLIP) == (0.5, 1.5)


def test_an_unknown_loss_or_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss 'dro' is unknown"):
        loss("dro", 0.0, 0.0, 1.0)
    with pytest.raises(ConfigError, match="loss option 'clip_hihg_threshold' is unknown"):
        loss("ppo", 0.0, 0.0, 1.0, {"clip_hihg_threshold": 1.3})
